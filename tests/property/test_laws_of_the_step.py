"""Laws of carrying it out: a VM with a capricious guest, driven by nothing but the next step (SPEC 7)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hypothesis import given, settings
from hypothesis import strategies as st

from hypervisors.base import Plugged, Vcpu
from kata_resmgr.aim import Grace
from kata_resmgr.removal import Removal, pause
from kata_resmgr.step import AddVcpus, Idle, RemoveVcpus, Situation, next_step, surplus_reason

BOOT, MAXIMUM, DELAY = 2, 6, 5.0

TARGETS = st.integers(BOOT, MAXIMUM)
SECONDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.5, 5.0, 8.0, 100.0])


class Guest(Enum):
    """What the guest does with a removal that reaches it."""

    GIVES = "gives the vCPU back at once"
    LATER = "gives it back when it next has time"
    REFUSES = "says no"
    SILENT = "does nothing, ever"


class Stroke(Enum):
    """What befalls the VM from outside."""

    NONE = "nothing"
    RESET = "the guest is reset: what it had latched is forgotten"
    FOREIGN = "somebody else plugs a vCPU"


@dataclass(frozen=True)
class Season:
    """A part of a VM's life."""

    guest: Guest
    stroke: Stroke
    target: int
    lasts: float


LIVES = st.lists(
    st.builds(Season, st.sampled_from(Guest), st.sampled_from([*Stroke, Stroke.NONE]), TARGETS, SECONDS),
    min_size=2,
    max_size=12,
)


class _Vm:
    """A VM, its guest and the loop around the next step, on a clock of its own. Every step is checked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.desired = BOOT
        self.vcpus = [Vcpu(f"foreign{number}", ours=False) for number in range(1, BOOT + 1)]
        self.foreign = BOOT
        self.pending: dict[str, Removal] = {}
        self.guest = Guest.GIVES
        self._latched: list[str] = []
        self._plugs = 0
        self._grace = Grace()
        self._falls: list[tuple[float, int]] = []  # when a target ended, and what it was

    def live(self, season: Season) -> None:
        self.guest = season.guest
        if season.stroke is Stroke.RESET:
            self._latched.clear()
            self.pending = {vcpu: removal.hurried() for vcpu, removal in self.pending.items()}
        elif season.stroke is Stroke.FOREIGN and len(self.vcpus) < MAXIMUM:
            self.foreign += 1
            self.vcpus.insert(self.foreign - 1, Vcpu(f"foreign{self.foreign}", ours=False))
        self._falls.append((self.now, self.desired))
        self._grace.note(self.desired, season.target, self.now + DELAY)
        self.desired = season.target
        self._pass_time(self.now + season.lasts)

    def cooperate(self) -> None:
        """From now on the guest does as it is asked, and everything that is to happen happens."""
        self.guest = Guest.GIVES
        while (until := self._run().until) is not None:
            self._pass_time(until)

    def _pass_time(self, end: float) -> None:
        """Time goes on; the loop wakes whenever it wanted to."""
        while (until := self._run().until) is not None and until <= end:
            assert until > self.now  # else it would spin
            self.now = until
        self.now = end
        for vcpu in self._latched:
            self._leave(vcpu)
        self._latched.clear()

    def _run(self) -> Idle:
        """Steps until there is nothing to do now."""
        for _ in range(2 * MAXIMUM):
            situation = self._situation()
            self._check_reason(situation)
            step = next_step(self.now, situation)
            if isinstance(step, Idle):
                return step
            if isinstance(step, AddVcpus):
                self._add(step.count)
            else:
                assert isinstance(step, RemoveVcpus)
                self._ask_to_leave(step)
        raise AssertionError("it does not come to rest")

    def _situation(self) -> Situation:
        return Situation(
            desired=self.desired,
            plugged=Plugged(tuple(self.vcpus), memory=0),
            max_vcpus=MAXIMUM,
            pending=dict(self.pending),
            keep=self._grace.highest(self.now),
            keep_until=self._grace.ends(),
            grow_from=0.0,
            removable=True,
            growable=True,
        )

    def _add(self, count: int) -> None:
        assert count > 0
        assert len(self.vcpus) + count <= MAXIMUM
        assert len(self.vcpus) - len(self.pending) + count <= self.desired
        for _ in range(count):
            self._plugs += 1
            self.vcpus.append(Vcpu(f"ours{self._plugs}", ours=True))

    def _ask_to_leave(self, step: RemoveVcpus) -> None:
        assert len(set(step.ids)) == len(step.ids)
        assert set(step.ids) <= {vcpu.id for vcpu in self.vcpus if vcpu.ours}
        for vcpu in step.ids:
            known = self.pending.get(vcpu)
            assert known is None or known.urgent or self.now >= known.last + pause(known.attempts)
            self.pending[vcpu] = Removal(self.now, self.now) if known is None else known.again(self.now)
            if known is None:
                assert len(self.vcpus) - len(self.pending) >= self._lately_desired()
        for vcpu in step.ids:
            match self.guest:
                case Guest.GIVES:
                    self._leave(vcpu)
                case Guest.LATER:
                    self._latched.append(vcpu)
                case Guest.REFUSES:
                    self.pending[vcpu] = self.pending[vcpu].told_no("busy")
                case Guest.SILENT:
                    pass

    def _leave(self, vcpu: str) -> None:
        self.vcpus = [present for present in self.vcpus if present.id != vcpu]
        self.pending.pop(vcpu, None)

    def _lately_desired(self) -> int:
        """The largest target that is, or has been within the delay."""
        return max([self.desired, *(target for ended, target in self._falls if self.now < ended + DELAY)])

    def _check_reason(self, situation: Situation) -> None:
        reason = surplus_reason(self.now, situation)
        if len(self.vcpus) <= self.desired:
            assert reason is None
        elif reason == "grace":
            assert not self.pending
            assert self._lately_desired() > self.desired
        elif reason == "boot-floor":
            assert not any(vcpu.ours for vcpu in self.vcpus)
        elif reason is not None:
            assert any(removal.attempts > 1 or removal.refusal for removal in self.pending.values())


@settings(max_examples=500)
@given(LIVES)
def test_a_life_ends_with_what_is_desired_once_the_guest_cooperates(life: list[Season]) -> None:
    vm = _Vm()
    for season in life:
        vm.live(season)
        assert vm.pending.keys() <= {vcpu.id for vcpu in vm.vcpus}
    vm.cooperate()
    assert not vm.pending
    assert len(vm.vcpus) == max(vm.desired, vm.foreign)
    assert sum(not vcpu.ours for vcpu in vm.vcpus) == vm.foreign


@settings(max_examples=500)
@given(st.lists(st.tuples(SECONDS, TARGETS), max_size=25), SECONDS)
def test_grace_keeps_the_largest_target_of_the_delay(changes: list[tuple[float, int]], last: float) -> None:
    grace, now, desired = Grace(), 0.0, BOOT
    ended: list[tuple[float, int]] = []
    for seconds, target in [*changes, (last, None)]:
        now += seconds
        lately = [before for at, before in ended if now < at + DELAY]
        assert max(desired, grace.highest(now)) == max([desired, *lately])
        if lately and max(lately) > desired:
            assert grace.ends() == max(at + DELAY for at, before in ended if before == max(lately))
        if target is not None:
            grace.note(desired, target, now + DELAY)
            ended.append((now, desired))
            desired = target


@given(st.integers(1, 12))
def test_however_silent_the_guest_a_removal_is_repeated_in_its_rhythm(repetitions: int) -> None:
    removal = Removal(first=0.0, last=0.0)
    for _ in range(repetitions):
        removal = removal.again(removal.due)
    assert removal.last == sum([1.0, 2.0, 5.0, 15.0][:repetitions]) + 60.0 * max(repetitions - 4, 0)
