"""A daemon out of room or of descriptors, for real: refused is told, what was there is served, and it passes."""

from __future__ import annotations

import resource
from pathlib import Path

from tests.daemon import Caller, Daemon

SANDBOX = "/v1/sandboxes/s1"
CONTAINERS = f"{SANDBOX}/containers"


def limit(daemon: Daemon, what: int, value: int) -> tuple[int, int]:
    """From now on; what was allowed before."""
    hard = resource.prlimit(daemon.process.pid, what)[1]
    return resource.prlimit(daemon.process.pid, what, (value, hard))


def put(caller: Caller, name: str, size: int) -> tuple[int, object]:
    status, answer = caller.call("PUT", f"{CONTAINERS}/{name}", {"resources": {"note": "x" * size}})
    return status, answer.get("code")


def test_a_full_state_directory_refuses_changes_and_keeps_what_was_answered(short_tmp: Path) -> None:
    with Daemon(short_tmp) as daemon:
        caller = daemon.caller()
        caller.ok("PUT", SANDBOX, {})
        assert put(caller, "before", 10) == (201, None)
        room = max(file.stat().st_size for file in short_tmp.glob("state.db*")) + 20_000
        before = limit(daemon, resource.RLIMIT_FSIZE, room)
        answers = [put(caller, f"c{number}", 10_000) for number in range(20)]
        kept = {f"c{number}" for number, answer in enumerate(answers) if answer == (201, None)}
        assert set(answers) == {(201, None), (503, "state_unavailable")}
        assert caller.ok("GET", f"{SANDBOX}?view=full")["containers"].keys() == kept | {"before"}
        assert caller.ok("GET", "/healthz")["ok"]
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, before)
        assert put(caller, "after", 10_000) == (201, None)
        daemon.kill()
        daemon.start_again()
        found = daemon.caller().ok("GET", f"{SANDBOX}?view=full")["containers"]
        assert found.keys() == kept | {"before", "after"}


def test_without_descriptors_who_is_connected_is_served_and_others_wait(short_tmp: Path) -> None:
    with Daemon(short_tmp) as daemon:
        caller = daemon.caller()
        caller.ok("PUT", SANDBOX, {})
        descriptors = Path(f"/proc/{daemon.process.pid}/fd")
        before = limit(daemon, resource.RLIMIT_NOFILE, max(int(each.name) for each in descriptors.iterdir()) + 1)
        late = [Caller(daemon.socket, timeout=20) for _ in range(20)]
        for one in late:
            one.connect()
        for number in range(20):
            assert put(caller, f"c{number}", 10) == (201, None)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, before)
        for one in late:
            one.close()
        after = daemon.caller()
        assert after.ok("GET", SANDBOX)["counts"]["containers"] == 20
        assert daemon.process.poll() is None
