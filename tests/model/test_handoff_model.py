"""Any order of events: hypothesis plays the network, the scheduler and the leader against the per-worker protocol.

There is no time and no simulator: any event in flight may happen next, much later, or never. Always true: effects
are in stream order, one owner per epoch, nothing is skipped; and at the end nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from parti.control import claims, per_worker_partition, signals
from parti.control.claims import IllegalTransition
from parti.control.per_worker_partition import PerWorkerPartition
from parti.model import Claim, ClaimState, Member, PartitionId, Retention, WorkerId

P = PartitionId("p")
MEMBERS = tuple(Member(WorkerId(f"worker-{n}"), f"n{n}") for n in range(3))


class Worker:
    """A worker reduced to what a plane has of it: a filter, what came by it, and an exact position."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.state = PerWorkerPartition(P, me, retention=Retention.LIMITS)
        self.filtered = False
        self.received: set[int] = set()
        self.at = 0
        self.target = 0
        self.stopped = True
        self.noted = 0
        self.dead = False

    @property
    def next(self) -> int | None:
        """The message that it can do now: read by range up to T, delivered above."""
        ready = self.at + 1 <= self.target or self.at + 1 in self.received
        return self.at + 1 if ready and not self.stopped and self.state.lease is not None and not self.dead else None


class HandoffMachine(RuleBasedStateMachine):
    """One partition, three workers, a leader that does anything it is allowed to."""

    @initialize()
    def begin(self) -> None:
        self.last = 0
        self.effects: list[int] = []
        self.owner_of_epoch: dict[int, Member] = {}
        self.repeat_allowed_from = 0
        self.claim, self.revision = claims.assign(Claim(P), MEMBERS[0], term=1), 1
        self.workers = [Worker(m) for m in MEMBERS]
        self.flying: list[Callable[[], None]] = []
        self._tell()
        self.catch_breath()
        assert self.claim.state is ClaimState.STABLE

    # -- the world --------------------------------------------------------------------------------------------------

    @rule()
    def publish(self) -> None:
        self.last += 1
        for worker in self.workers:
            if worker.filtered:
                worker.received.add(self.last)

    @rule(count=st.integers(1, 4))
    def publish_more(self, count: int) -> None:
        for _ in range(count):
            self.publish()

    @rule(n=st.integers(0, 2), count=st.integers(1, 3))
    def handle(self, n: int, count: int) -> None:
        worker = self.workers[n]
        while (seq := worker.next) is not None and count:
            self._effect(worker, seq)
            worker.at = seq
            count -= 1

    @rule(n=st.integers(0, 2))
    def note_position(self, n: int) -> None:
        self.workers[n].noted = self.workers[n].at

    @rule(n=st.integers(0, 2))
    def look(self, n: int) -> None:
        """The plane tells that T is reached."""
        worker = self.workers[n]
        state = worker.state
        if (
            state.phase is per_worker_partition.Phase.CATCHING_UP
            and state.target is not None
            and worker.at >= state.target
        ):
            self._feed(worker, signals.ReadUpTo(state.target, state.ticket))

    @rule(indexes=st.lists(st.integers(0, 50), min_size=1, max_size=6))
    def happen(self, indexes: list[int]) -> None:
        """Some of what is in flight arrives, in any order."""
        for index in indexes:
            if self.flying:
                self.flying.pop(index % len(self.flying))()

    @rule(count=st.integers(1, 8))
    def happen_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.flying))):
            self.flying.pop(0)()

    @rule()
    def catch_breath(self) -> None:
        """Everything in flight arrives, and everybody hears the latest."""
        self._tell()
        while self.flying:
            self.flying.pop(0)()

    # -- the leader -------------------------------------------------------------------------------------------------

    @rule(n=st.integers(0, 2))
    def prepare(self, n: int) -> None:
        if not self.workers[n].dead:
            self._leader(lambda c: claims.prepare(c, MEMBERS[n], term=1))

    @rule()
    def abort(self) -> None:
        self._leader(lambda c: claims.abort(c, term=1))

    @rule()
    def roll_back(self) -> None:
        if self.claim.previous is not None and not self._worker(self.claim.previous).dead:
            self._leader(lambda c: claims.roll_back(c, term=1))

    @rule(n=st.integers(0, 2))
    def redirect(self, n: int) -> None:
        if not self.workers[n].dead:
            self._leader(lambda c: claims.redirect(c, MEMBERS[n], term=1))

    @precondition(lambda self: sum(w.dead for w in self.workers) < 2)
    @rule(n=st.integers(0, 2), to=st.integers(0, 2))
    def crash(self, n: int, to: int) -> None:
        """The process is gone; after its lease somebody else goes on from where it certainly was."""
        worker, heir = self.workers[n], self.workers[to]
        if worker.dead or heir.dead or n == to:
            return
        worker.dead = True
        if self.claim.pending == worker.me:
            self._leader(lambda c: claims.abort(c, term=1))
        if self.claim.owner == worker.me:
            self.repeat_allowed_from = len(self.effects)
            if self.claim.state is ClaimState.COMMIT and not self.claim.accepted:
                self._leader(lambda c: claims.redirect(c, heir.me, term=1))
            else:
                start = max(self.claim.cursor, worker.noted)
                self._leader(lambda c: claims.take_over(c, heir.me, start=start, term=1))

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def at_most_one_member_may_act(self) -> None:
        if hasattr(self, "workers"):
            acting = [w.me for w in self.workers if w.state.lease is not None and not w.dead]
            assert len(acting) <= 1, acting

    @invariant()
    def the_cursor_claims_only_what_is_done(self) -> None:
        if hasattr(self, "workers"):
            assert self.claim.cursor <= max(self.effects, default=0)

    def teardown(self) -> None:
        """Let everything that is in flight arrive, and the living finish: nothing may be missing."""
        if not hasattr(self, "workers"):
            return
        for _ in range(400):
            self._tell()
            while self.flying:
                self.flying.pop(0)()
            for n in range(len(self.workers)):
                self.handle(n, self.last)
                self.look(n)
            if self.claim.pending is not None and self._worker(self.claim.pending).dead:
                self.abort()
            if self.claim.state is ClaimState.STABLE and len(set(self.effects)) == self.last:
                break
        assert set(self.effects) == set(range(1, self.last + 1)), (self.claim, self.effects, self.workers[0].state)

    # -- how it works -----------------------------------------------------------------------------------------------

    def _worker(self, member: Member) -> Worker:
        return self.workers[MEMBERS.index(member)]

    def _effect(self, worker: Worker, seq: int) -> None:
        assert worker.state.lease is not None
        epoch = worker.state.lease.epoch
        assert self.owner_of_epoch.setdefault(epoch, worker.me) == worker.me, "two owners in one epoch"
        assert epoch == max(self.owner_of_epoch), "a stale owner acted"
        since = self.effects[self.repeat_allowed_from :]
        assert seq not in since, f"{seq} was done twice without a crash"
        assert not since or seq == since[-1] + 1, f"{seq} after {since[-1]}"
        assert seq <= max(self.effects, default=0) + 1, f"{seq} skips what was never done"
        self.effects.append(seq)

    def _leader(self, change: Callable[[Claim], Claim]) -> None:
        try:
            self.claim = change(self.claim)
        except IllegalTransition:
            return
        self.revision += 1
        self._tell()

    def _tell(self) -> None:
        """The watch is slow and unordered: each worker hears of this revision some time later."""
        claim, revision = self.claim, self.revision
        for worker in self.workers:
            self.flying.append(lambda w=worker: self._feed(w, signals.ClaimSeen(claim, revision)))  # type: ignore[misc]

    def _feed(self, worker: Worker, event: per_worker_partition.Event) -> None:
        if worker.dead:
            return
        worker.state, effects = per_worker_partition.step(worker.state, event)
        for effect in effects:
            self._perform(worker, effect)

    def _perform(self, worker: Worker, effect: per_worker_partition.Effect) -> None:
        match effect:
            case signals.AddFilter(_, ticket):
                self.flying.append(lambda: self._add_filter(worker, ticket))
            case signals.DropFilter():
                self.flying.append(lambda: self._drop_filter(worker))
            case signals.ReadLast(_, ticket):
                self.flying.append(lambda: self._feed(worker, signals.LastRead(self.last, ticket)))
            case signals.Granted() | signals.CatchUp():
                self._engage(worker)
            case signals.StopLane():
                worker.stopped = True
                self.flying.append(lambda: self._stopped(worker))
            case signals.WriteClaim(claim, expected):
                self.flying.append(lambda: self._cas(worker, claim, expected))
            case _:
                pass

    def _add_filter(self, worker: Worker, ticket: int) -> None:
        if worker.dead:
            return
        if not worker.filtered:
            worker.filtered, worker.received = True, set()  # it never goes back for older messages
        self.flying.append(lambda last=self.last: self._feed(worker, signals.FilterAdded(last, ticket)))  # type: ignore[misc]

    def _drop_filter(self, worker: Worker) -> None:
        # The agent applies filter changes in order: an add that came later has the last word.
        if not worker.dead and not worker.state.filtered:
            worker.filtered = False
            self._feed(worker, signals.FilterDropped())

    def _stopped(self, worker: Worker) -> None:
        self._feed(worker, signals.LaneStopped(worker.at, worker.at + 1))
        self._feed(worker, signals.MessageDone(worker.at))

    def _engage(self, worker: Worker) -> None:
        """As the plane does: begin at the claim's position, or go on from our own."""
        state = worker.state
        if (
            state.lease is None
            or state.phase is per_worker_partition.Phase.ADDING
            or state.phase is per_worker_partition.Phase.STOPPING
        ):
            return
        if worker.stopped:
            worker.at, worker.stopped = state.queued, False
        worker.target = max(worker.target, state.target or 0)

    def _cas(self, worker: Worker, claim: Claim, expected: int) -> None:
        if worker.dead:
            return
        if expected != self.revision:
            self._feed(worker, signals.WriteFailed())
            self._feed(worker, signals.ClaimSeen(self.claim, self.revision))
            return
        self.claim, self.revision = claim, self.revision + 1
        self._tell()


TestHandoffModel = pytest.mark.slow(HandoffMachine.TestCase)
TestHandoffModel.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_move_that_begins_before_the_new_owner_heard_of_its_own_acceptance_ends() -> None:
    machine = HandoffMachine()
    machine.begin()
    machine.prepare(n=1)
    machine.happen(indexes=[0] * 14 + [1])  # worker-1 has accepted, and has not heard that it did
    assert machine.claim.state is ClaimState.STABLE
    assert machine.workers[1].state.phase is per_worker_partition.Phase.ACCEPTING
    machine.publish()
    machine.prepare(n=0)
    machine.happen(indexes=[0, 28])
    machine.teardown()
    assert machine.claim.owner == MEMBERS[0]


def test_the_model_notices_a_t_that_was_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    original = per_worker_partition.step

    def step(state: PerWorkerPartition, event: per_worker_partition.Event) -> per_worker_partition.Step:
        if isinstance(event, signals.FilterAdded):
            event = replace(event, last=max(0, event.last - 2))
        return original(state, event)

    monkeypatch.setattr(per_worker_partition, "step", step)
    hunt = settings(TestHandoffModel.settings, max_examples=400, phases=[Phase.generate], database=None)
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(HandoffMachine, settings=hunt)
