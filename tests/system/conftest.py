"""One VM for all tests here: each finds the daemon stopped, without a configuration, and with nothing known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kata_resmgr.guest.machine import LinuxGuest, accelerator_for
from tests.system import debian

BOOT_SECONDS = 300.0
"""Under TCG it takes 25, where nothing else runs."""
SECONDS = 240.0
"""For one command in the VM, in which Python takes seconds to start."""

_FRESH = """
systemctl stop kata-resmgr.socket
systemctl kill --signal=KILL kata-resmgr.service 'vmm-*.service' 2>/dev/null
systemctl stop kata-resmgr.service 'vmm-*.service'
rm -rf /run/kata-resmgr /run/vc /etc/kata-resmgr
systemctl reset-failed
systemctl daemon-reload
systemd-tmpfiles --create kata-resmgr.conf
mkdir -p /etc/kata-resmgr /run/vc/vm
journalctl --quiet --lines=0 --show-cursor | sed 's/^-- cursor: //' >/run/since
"""


class Host:
    """The VM, seen as the host that the daemon manages."""

    def __init__(self, guest: LinuxGuest) -> None:
        self._guest = guest

    def run(self, command: str) -> str:
        """What *command* prints; its status must be 0."""
        return self._guest.run(command, SECONDS)

    def configure(self, text: str) -> None:
        self.run(f"cat >/etc/kata-resmgr/config.toml <<'END'\n{text}\nEND")

    def show(self, *names: str) -> tuple[str, ...]:
        """What systemd says of the service."""
        told = self.run(f"systemctl show kata-resmgr.service --property={','.join(names)}")
        values = dict(line.split("=", 1) for line in told.splitlines())
        return tuple(values[name] for name in names)

    def send(self, signal: str) -> None:
        """Send the main process *signal*."""
        self.run(f"systemctl kill --kill-who=main --signal={signal} kata-resmgr")

    def until(self, condition: str) -> None:
        """Look again and again until the shell finds *condition* true."""
        self.run(f"for _ in $(seq 1000); do {condition} && exit; sleep 0.2; done; systemctl status kata-resmgr; exit 1")

    def ask(self, method: str, target: str, body: object = None) -> tuple[int, Any]:
        """A call of the daemon's API by root."""
        text = "" if body is None else f" '{json.dumps(body)}'"
        status, _, answer = self.run(f"ask {method} '{target}'{text}").partition(" ")
        return int(status), json.loads(answer) if answer else None

    def journal(self) -> list[dict[str, Any]]:
        """What the journal has of the service since the test began."""
        lines = self.run("journalctl --quiet --output=json --cursor-file=/run/since --unit=kata-resmgr.service")
        return [json.loads(line) for line in lines.splitlines()]


@pytest.fixture(scope="session")
def _vm() -> Iterator[Host]:
    def say(line: str) -> None:
        print(f"kata-resmgr: {line}", file=sys.stderr, flush=True)

    with debian.initrd(say) as initrd, debian.Debian(initrd, accelerator_for(LinuxGuest)) as guest:
        guest.ready(BOOT_SECONDS)
        yield Host(guest)


@pytest.fixture
def host(_vm: Host) -> Host:
    """The VM, as good as new."""
    _vm.run(_FRESH)
    return _vm
