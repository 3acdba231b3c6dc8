"""Laws of memory: machines of each kind with a capricious guest, driven by nothing but the next step (SPEC 5, 7)."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hypervisors.base import Dimm, MemoryMethod, Plugged
from kata_resmgr import memory_step
from kata_resmgr.aim import Aim
from kata_resmgr.memory_step import WHOLE, MemorySituation, ShrinkMemory

G = 128 << 20
BOOT, MAXIMUM, DELAY = 2 * G, 60 * G, 5.0


@dataclass(frozen=True)
class Season:
    """A part of a VM's life: what is wanted, whether the guest does as it is asked, and how long it lasts."""

    target: int
    willing: bool
    lasts: float
    foreign: bool = False


LIVES = st.lists(
    st.builds(
        Season,
        st.integers(2, 60).map(lambda pieces: pieces * G),
        st.booleans(),
        st.sampled_from([0.0, 0.5, 1.0, 4.5, 5.0, 100.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


class _Vm:
    """A machine and the loop around the next step, on a clock of its own. Every step is checked."""

    def __init__(self, method: MemoryMethod) -> None:
        self.method = method
        self.now = 0.0
        self.aim = Aim()
        self.aim.desired = BOOT
        self.dimms: list[Dimm] = []
        self.moving = self.requested = 0
        self._seen = 0

    @property
    def plugged(self) -> Plugged:
        memory = BOOT + self.moving + sum(dimm.size for dimm in self.dimms)
        asked = memory - self.moving + self.requested
        return Plugged((), memory, None if asked == memory else asked, tuple(self.dimms), memory_floor=BOOT)

    @property
    def situation(self) -> MemorySituation:
        plugged, aim = self.plugged, self.aim
        keep = aim.keep(self.now, plugged.memory)
        return MemorySituation(
            aim.desired, plugged, self.method, G, MAXIMUM, aim.pending, keep, aim.keep_until, aim.grow_from
        )

    def live(self, season: Season) -> None:
        self.aim.move(season.target, self.now + DELAY)
        if season.foreign and self.method is MemoryMethod.DIMM and self.situation.room:
            self._seen += 1
            self.dimms.insert(0, Dimm(f"foreign{self._seen}", G, ours=False))
        end = self.now + season.lasts
        while (until := self._run(season.willing)) is not None and until <= end:
            assert until > self.now  # else it would spin
            self.now = until
        self.now = end

    def settle(self) -> None:
        for _ in range(100):
            until = self._run(willing=True)
            if until is None:
                return
            self.now = until
        raise AssertionError("it does not come to rest")

    def _run(self, willing: bool) -> float | None:
        for _ in range(200):
            before = self.situation
            if (up := memory_step.grow(self.now, before)) is not None:
                self._grow(before, up.to, willing)
            elif (down := memory_step.shrink(self.now, before)) is not None:
                self._shrink(before, down, willing)
            else:
                return min(memory_step.times(before), default=None)
        raise AssertionError("it spins")

    def _grow(self, before: MemorySituation, to: int, willing: bool) -> None:
        assert to <= MAXIMUM
        assert to % G == 0
        self.aim.try_again()
        match self.method:
            case MemoryMethod.VIRTIO_MEM:
                assert to >= before.asked
                self.requested = to - BOOT
                if willing:
                    self._come()
                if self.plugged.memory < to:
                    self.aim.failed()
                    self.aim.pause(self.now)
            case MemoryMethod.ACPI:
                self.moving = self.requested = to - BOOT
            case _:
                assert 0 < to - before.plugged.memory <= memory_step.GROWTH_MAX * before.plugged.memory
                self._seen += 1
                self.dimms.append(Dimm(f"ours{self._seen}", to - before.plugged.memory, ours=True))

    def _shrink(self, before: MemorySituation, step: ShrinkMemory, willing: bool) -> None:
        assert self.method is not MemoryMethod.ACPI
        fresh = [unit for unit in step.units if unit not in self.aim.pending]
        if fresh:
            assert step.to >= max(before.desired, before.keep, BOOT)
        self.aim.pending = self.aim.pending_with(step.units, self.now)
        if self.method is MemoryMethod.DIMM:
            ours = [dimm.id for dimm in reversed(self.dimms) if dimm.ours]
            assert set(step.units) <= set(ours)
            assert fresh == sorted(fresh, key=ours.index)  # the last first
            if willing:
                self.dimms = [dimm for dimm in self.dimms if dimm.id not in self.aim.pending]
                self.aim.pending = {}
        else:
            self.requested = step.to - BOOT
            if willing:
                self._come()

    def _come(self) -> None:
        self.moving = self.requested
        self.aim.pending.pop(WHOLE, None)


@settings(max_examples=200)
@given(st.sampled_from([MemoryMethod.DIMM, MemoryMethod.VIRTIO_MEM, MemoryMethod.ACPI]), LIVES)
def test_a_life_ends_with_what_is_desired_once_the_guest_cooperates(method: MemoryMethod, life: list[Season]) -> None:
    vm = _Vm(method)
    for season in life:
        vm.live(season)
        assert vm.plugged.memory <= MAXIMUM
    vm.settle()
    memory, surplus = vm.plugged.memory, vm.plugged.memory - vm.aim.desired
    match method:
        case MemoryMethod.VIRTIO_MEM:
            assert memory == vm.aim.desired
        case MemoryMethod.ACPI:
            assert memory == max([vm.aim.desired, *(season.target for season in life)])
        case _:
            assert surplus >= 0 or vm.situation.room == 0
            assert all(dimm.size > surplus for dimm in vm.dimms if dimm.ours)
    assert not vm.aim.pending
    assert not memory_step.leavable(vm.situation)
