"""Problems on the wire: ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import msgspec

from kata_resmgr.problem import Problem, one_line

_ERRORS_SHOWN = 16
_POINTER_LIMIT = 256


class Fault(msgspec.Struct, frozen=True):
    """One place of the body that is at fault."""

    pointer: str
    detail: str


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """What API.md calls a problem."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    errors: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> ProblemBody:
        return cls(
            type=f"urn:kata-resmgr:error:{problem.code.text}",
            title=problem.code.title,
            status=problem.code.status,
            detail=problem.detail,
            code=problem.code.text,
            retryable=problem.retryable,
            errors=tuple(Fault(at.pointer[:_POINTER_LIMIT], one_line(at.detail)) for at in problem.at[:_ERRORS_SHOWN]),
        )
