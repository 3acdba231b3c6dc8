"""Everything that can be wrong with a request, as values with a stable code.

A :class:`Problem` is raised anywhere and turned into an answer in one place, :mod:`kata_resmgr.api`. Codes, statuses
and which of them may be retried are the contract of API.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DETAIL_LIMIT = 256
"""Characters of one ``detail`` or condition message: one line, so that logs and terminals stay readable."""


class Code(Enum):
    """The closed list of codes: HTTP status, title, and whether the same request may be repeated."""

    INVALID_BODY = ("invalid_body", 400, "The body is not what this call takes", False)
    INVALID_ID = ("invalid_id", 400, "The id is malformed", False)
    INVALID_QUERY = ("invalid_query", 400, "The query is malformed", False)
    FORBIDDEN = ("forbidden", 403, "The caller may not use this socket", False)
    NOT_FOUND = ("not_found", 404, "There is no such thing", False)
    METHOD_NOT_ALLOWED = ("method_not_allowed", 405, "The path does not take this method", False)
    TIMEOUT = ("timeout", 408, "The request arrived too slowly", True)
    CONFLICT = ("conflict", 409, "The request contradicts what is there", False)
    MEMORY_LIMIT_EXCEEDED = ("memory_limit_exceeded", 409, "The memory would pass the maximum", False)
    VCPU_LIMIT_EXCEEDED = ("vcpu_limit_exceeded", 409, "The vCPUs would pass the maximum", False)
    MEMORY_SLOTS_EXHAUSTED = ("memory_slots_exhausted", 409, "No slot for memory is left", False)
    NO_MEMORY = ("no_memory", 409, "The sandbox would have no memory", False)
    SHRINK_PENDING = ("shrink_pending", 409, "A removal holds the slots that are needed", True)
    HELD = ("held", 409, "The sandbox is held", True)
    MONITOR_BUSY = ("monitor_busy", 409, "The monitor serves somebody else", True)
    NOT_SUPPORTED = ("not_supported", 409, "This machine cannot do it", False)
    NOT_SUPPORTED_LIVE = ("not_supported_live", 409, "Not while it is in use", False)
    GONE = ("gone", 410, "It is no longer kept", False)
    TOO_LARGE = ("too_large", 413, "The body is too large", False)
    UNSUPPORTED_TYPE = ("unsupported_type", 415, "The body is not JSON", False)
    INVALID_RESOURCES = ("invalid_resources", 422, "The resources cannot be understood", False)
    INVALID_ANNOTATION = ("invalid_annotation", 422, "An annotation cannot be understood", False)
    INVALID_CONFIG = ("invalid_config", 422, "The configuration cannot serve this", False)
    INVALID_PATH = ("invalid_path", 422, "The path cannot be used", False)
    TOO_MANY = ("too_many", 429, "Too many at once", True)
    HEADERS_TOO_LARGE = ("headers_too_large", 431, "The headers are too large", False)
    INTERNAL = ("internal", 500, "A defect of this daemon", False)
    HYPERVISOR_REFUSED = ("hypervisor_refused", 502, "The hypervisor refused", False)
    HYPERVISOR_UNREACHABLE = ("hypervisor_unreachable", 503, "The hypervisor cannot be reached", True)
    SHUTTING_DOWN = ("shutting_down", 503, "The daemon is stopping", True)
    STATE_UNAVAILABLE = ("state_unavailable", 503, "The state cannot be written", True)
    HYPERVISOR_TIMEOUT = ("hypervisor_timeout", 504, "Not reached in time", True)

    def __init__(self, text: str, status: int, title: str, retryable: bool) -> None:
        self.text = text
        self.status = status
        self.title = title
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class At:
    """Where in the body a fault lies: a JSON pointer, and what is wrong there."""

    pointer: str
    detail: str


class Problem(Exception):
    """A request that cannot be met.

    *detail* is one line with the offending value, the bound and the next step. *retry_after* is in whole seconds.
    *retryable* overrides what the code says by itself.
    """

    def __init__(
        self,
        code: Code,
        detail: str,
        *,
        at: tuple[At, ...] = (),
        retry_after: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = one_line(detail)
        self.at = at
        self.retry_after = retry_after
        self.retryable = code.retryable if retryable is None else retryable

    def below(self, pointer: str) -> Problem:
        """The same, found in a body that has at *pointer* what was looked at."""
        at = tuple(At(pointer + at.pointer, at.detail) for at in self.at)
        return Problem(self.code, self.detail, at=at, retry_after=self.retry_after, retryable=self.retryable)


def one_line(text: str) -> str:
    """*text* as one line of at most :data:`DETAIL_LIMIT` characters; what is cut is shown by an ellipsis."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * DETAIL_LIMIT]).split())
    return line if len(line) <= DETAIL_LIMIT else line[: DETAIL_LIMIT - 1] + "…"
