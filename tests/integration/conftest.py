"""Pods on real QEMU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kata_resmgr.guest.machine import MACHINE
from tests.conftest import StartFirmware
from tests.daemon import Daemon
from tests.integration.pod import MakePod, Pod

CONFIG = """
[resmgr]
host_cpus = {host_cpus}
[hypervisor.qemu]
default_memory = 64
default_maxvcpus = {maximum}
{hypervisor}
"""


@pytest.fixture
def pod(short_tmp: Path, minifw_guest: StartFirmware) -> Iterator[MakePod]:
    """Makes one pod, of a VM with the given maximum of vCPUs; *hypervisor* are further lines of its table."""
    with ExitStack() as daemons:

        def make(
            maximum: int,
            *,
            host_cpus: int = 8,
            arguments: Sequence[str] = (),
            machine: str = MACHINE,
            hypervisor: str = "",
        ) -> Pod:
            config = CONFIG.format(host_cpus=host_cpus, maximum=maximum, hypervisor=hypervisor)
            daemon = daemons.enter_context(Daemon(short_tmp, config))
            return Pod(daemon, minifw_guest, arguments=arguments, machine=machine)

        yield make
