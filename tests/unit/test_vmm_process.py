"""A VMM's process and its vCPUs, by real processes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hypervisors.vmm_process import VmmProcess
from tests.fakes.threads import join, name_this_thread

NAMES = ("vcpu10", "vcpu2", "vcpu0", "vcpu", "vcpu01", "vcpu1x", "xvcpu1", "http-server", "vcpu100000")


def test_threads_are_counted_by_their_names() -> None:
    process = VmmProcess(os.getpid())
    stop = threading.Event()
    named = threading.Barrier(len(NAMES) + 1)

    def run(name: str) -> None:
        name_this_thread(name)
        named.wait()
        stop.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    named.wait()
    found = process.vcpus()
    stop.set()
    for thread in threads:
        join(thread)

    assert list(found) == [0, 2, 10]
    assert found == {0: threads[2].native_id, 2: threads[1].native_id, 10: threads[0].native_id}
    assert process.vcpus() == {}
    process.close()


def test_a_process_that_has_ended_is_not_believed() -> None:
    """Its pid may be somebody else's by now: the pidfd tells."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = VmmProcess(child.pid)
        assert process.alive()
        assert process.vcpus() == {}
        child.kill()
        while process.alive():
            os.sched_yield()
        with pytest.raises(ProcessLookupError, match="has ended"):
            process.vcpus()  # not yet reaped: /proc still has it
    with pytest.raises(OSError, match="No such"):
        process.vcpus()
    process.close()
    process.close()


def test_no_such_process() -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    with pytest.raises(ProcessLookupError):
        VmmProcess(most)
