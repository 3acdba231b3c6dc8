"""Problems: stable codes, and details that fit on a line."""

from __future__ import annotations

import pytest

from kata_resmgr.problem import Code, Problem, one_line


def test_every_code_has_a_text_of_its_own_and_a_status_that_fits() -> None:
    assert len({code.text for code in Code}) == len(Code)
    assert {code.text for code in Code} == {code.name.lower() for code in Code}
    assert all(400 <= code.status < 600 for code in Code)


def test_only_what_may_be_repeated_as_it_is_is_retryable() -> None:
    assert {code.text for code in Code if code.retryable} == {
        "timeout",
        "shrink_pending",
        "held",
        "monitor_busy",
        "too_many",
        "hypervisor_unreachable",
        "shutting_down",
        "state_unavailable",
        "hypervisor_timeout",
    }
    assert not Problem(Code.HELD, "", retryable=False).retryable
    assert Problem(Code.CONFLICT, "", retryable=True).retryable
    assert Problem(Code.HELD, "").retryable


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("as it is", "as it is"),
        ("  two\n\tlines \r\n", "two lines"),
        ("a\x00b\x1b[31mc\u2028d", "a b [31mc d"),
        ("é" * 256, "é" * 256),
        ("é" * 257, "é" * 255 + "…"),
        ("x" * 1_000_000, "x" * 255 + "…"),
        (" " * 2000 + "x", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert Problem(Code.CONFLICT, text).detail == line
