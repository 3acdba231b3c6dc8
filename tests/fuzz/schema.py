"""Requests made from ``/openapi.json``, as it says and as it does not: ``python -m tests.fuzz.schema [--requests N]``.

schemathesis makes them, half valid and half not. Every answer must be one that the document gives for its operation,
in status, type and shape, and none a 500; what was refused must have left the state as it was; the daemon must be as
large as before. Ends with 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, uses_netloc, uses_relative

import requests_unixsocket
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from requests import ReadTimeout
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.daemon import Daemon
from tests.fuzz.raw import GROWTH, present, resident, state

CHECKS: Final = [status_code_conformance, content_type_conformance, response_schema_conformance]
KNOWN: Final = {"id": "s1", "cid": "c1", "did": "d1", "nid": "n1"}
"""What is named in the first half of the requests; in the other it is anything."""
PATIENCE: Final = 20.0
"""Seconds for one answer."""
ENDLESS: Final = "/v1/events"
"""Whose answer may not end."""


def main() -> int:
    options = argparse.ArgumentParser(prog="tests.fuzz.schema", description="requests made from the OpenAPI document")
    options.add_argument("--requests", type=int, default=20_000)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="kr-", dir="/tmp") as name, Daemon(Path(name)) as daemon:
        failures = ask(daemon, chosen.requests)
    for line in failures:
        print(line)
    return 1 if failures else 0


def ask(daemon: Daemon, requests: int) -> list[str]:
    """Ask, print what came, and return what should not have."""
    caller = daemon.caller()
    document = caller.ok("GET", "/openapi.json")
    schema = schemathesis.openapi.from_dict(document)
    for known_schemes in (uses_relative, uses_netloc):  # so that paths are joined to it
        known_schemes.append("http+unix")
    base = f"http+unix://{quote(str(daemon.socket), safe='')}"
    session = requests_unixsocket.Session()
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    operations = [operation for operation in found if operation.path != ENDLESS]
    counts: collections.Counter[int] = collections.Counter()
    failures: list[str] = []
    smallest = 0

    def check(case: Case[Any]) -> None:
        present(caller)
        before = state(caller)
        waits = "wait" in (case.query or {})
        try:
            response = case.call(base_url=base, session=session, timeout=1 if waits else PATIENCE)
        except ReadTimeout:
            if not waits:  # up to an hour, as it was asked to
                failures.append(f"{case.as_curl_command()[:1000]}: no answer within {PATIENCE:g} s")
            return
        counts[response.status_code] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except (Failure, FailureGroup) as error:
            failures.append(f"{case.method} {case.formatted_path}: {' '.join(str(error).split())[:400]}")
        if response.status_code == 500:
            failures.append(f"{case.as_curl_command()[:1000]}: {response.text[:300]}; {daemon.log.read_text()[-2000:]}")
        if response.status_code >= 400 and state(caller) != before:
            failures.append(f"{case.method} {case.formatted_path}: {response.status_code}, and the state changed")

    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    each = max(1, requests // (2 * len(modes) * len(operations)))
    for known in (KNOWN, None):
        for mode in modes:
            for operation in operations:
                names = {parameter.name for parameter in operation.path_parameters}
                path = None if known is None else {name: value for name, value in known.items() if name in names}
                made = operation.as_strategy(generation_mode=mode, path_parameters=path)
                run = settings(
                    max_examples=each,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )(given(case=made)(check))
                with suppress(Unsatisfiable):  # there is nothing that this operation does not take
                    run()
            smallest = smallest or resident(daemon)
    growth = resident(daemon) - smallest
    print(f"{sum(counts.values())} requests from the OpenAPI document, answered: {dict(sorted(counts.items()))}")
    print(f"the daemon grew by {growth >> 10} KiB since the first quarter (at most {GROWTH >> 10})")
    if growth > GROWTH:
        failures.append(f"the daemon grew by {growth} bytes, at most {GROWTH}")
    session.close()
    return list(dict.fromkeys(failures))[:50]


if __name__ == "__main__":
    sys.exit(main())
