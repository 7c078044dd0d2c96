"""Rules of the shipped code, each broken on purpose: a simulator that misses one of them proves nothing.

Every entry changes code that production runs, and names the cluster in which that must show within `SEEDS` seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from parti.control import handoff, held_partition, per_worker_partition, reconcile
from parti.control.handoff import Handoff, HandoffStage
from parti.control.identity import Identity
from parti.control.leader import Found, Leader
from parti.control.lease import Fence, HeldLease, Sighting
from parti.control.membership import Membership
from parti.control.per_partition import PerPartition
from parti.manager import positions
from parti.model import Claim, Layout, Retention, WorkerId
from parti.testing.sim import ClusterShape, FaultPlan, SimOutcome, simulate
from parti.wire.acks import ACK_FRAME
from parti.wire.pull import LivePull
from parti.worker.catchup import CatchUpReader
from parti.worker.durable import Durable
from parti.worker.inbox import Inbox
from parti.worker.lanes import Lane, LanePool
from parti.worker.ledger import PartitionState
from parti.worker.mending import Mender
from parti.worker.message import Message

SEEDS: Final = 100

LIMITS = ClusterShape(Layout.PER_WORKER, Retention.LIMITS)
KEYS = replace(LIMITS, lanes="key", failing=0.15)
INTEREST = ClusterShape(Layout.PER_WORKER, Retention.INTEREST)
INTEREST_NARROW = replace(INTEREST, workers=4, max_ack_pending=12, failing=0.15)
WORKQUEUE = ClusterShape(Layout.PER_WORKER, Retention.WORKQUEUE)
SLOTS = ClusterShape(Layout.PER_PARTITION, Retention.LIMITS)
SLOTS_KEYS = replace(SLOTS, lanes="key", failing=0.15)
MEDDLING = FaultPlan(crashes=False, weather=False, events=14)

Patch = Callable[[object, str, object], None]


_INHERITED = object()  # the name is defined by a base class


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that is broken on purpose."""

    name: str
    shape: ClusterShape
    apply: Callable[[Patch], None]
    plan: FaultPlan | None = None
    """None: the seed decides."""

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """The rule is broken in this process while the context is entered."""
        before: list[tuple[object, str, object]] = []

        def patch(owner: object, name: str, value: object) -> None:
            assert hasattr(owner, name), f"{owner} has no {name} any more"
            before.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, value)

        try:
            self.apply(patch)
            yield
        finally:
            for owner, name, value in reversed(before):
                if value is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, value)

    def found(self, first: int = 0, seeds: int = SEEDS) -> SimOutcome | None:
        """The first run from this seed on that breaks a promise with the rule broken, and none with the rule intact."""
        for seed in range(first, first + seeds):
            with self.broken():
                outcome = simulate(seed, shape=self.shape, plan=self.plan)
            if not outcome.ok and simulate(seed, shape=self.shape, plan=self.plan).ok:
                return outcome
        return None


def _no_gap_rule(patch: Patch) -> None:
    patch(LivePull, "_in_sequence", lambda *_: True)


def _acks_what_is_aside(patch: Patch) -> None:
    original = Inbox._not_new

    def not_new(inbox: Inbox, state: PartitionState, sequence: int, reply: bytes) -> bytes | None:
        answer = original(inbox, state, sequence, reply)
        return ACK_FRAME % reply if answer == b"" and sequence not in state.open else answer

    patch(Inbox, "_not_new", not_new)


def _does_not_hold(patch: Patch) -> None:
    def hold(inbox: Inbox, state: PartitionState, message: Message, answers: list[bytes]) -> None:
        del answers
        state.received_through = max(state.received_through, message.sequence)
        inbox._pool.push(message)

    patch(Inbox, "_hold", hold)


def _t_is_read_early(patch: Patch) -> None:
    original = Durable.last_sequence

    async def last_sequence(durable: Durable) -> int:
        return max(0, await original(durable) - 8)

    patch(Durable, "last_sequence", last_sequence)


def _releases_what_is_queued(patch: Patch) -> None:
    patch(PartitionState, "cursor", lambda state, verified: max(state.received_through, verified))


def _slot_releases_what_is_queued(patch: Patch) -> None:
    patch(PerPartition, "cursor", property(lambda slot: slot.queued))


def _lease_from_the_answer(patch: Patch) -> None:
    original = HeldLease.confirmed

    def confirmed(hold: HeldLease, beat: int, revision: int) -> HeldLease:
        after = original(hold, beat, revision)
        return replace(after, fence=Fence(after.fence.deadline + 0.6))

    patch(HeldLease, "confirmed", confirmed)


def _early_takeover(patch: Patch) -> None:
    patch(Sighting, "overdue", lambda sighting, now, _terms: now >= sighting.since + 0.6)
    patch(Sighting, "expired", lambda sighting, _terms: sighting.confirmed >= sighting.since + 0.6)
    patch(Membership, "gone", lambda members, member, _now: not members.healthy(member))


def _forgets_what_was(patch: Patch) -> None:
    original = reconcile.elect

    def elect(*args: Any, **known: Any) -> Leader:
        return replace(original(*args, **known), lost={})

    patch(reconcile, "elect", elect)


def _misses_what_changed_while_it_read(patch: Patch) -> None:
    original, tick = reconcile.elect, handoff._tick

    def elect(term: int, now: float, members: Membership, partitions: Any, found: Found, **known: Any) -> Leader:
        remembered = {partition: (claim, 0) for partition, (claim, _) in found.remembered.items()}
        return original(term, now, members, partitions, replace(found, remembered=remembered), **known)

    def never_looks_again(state: Handoff, event: handoff.Tick) -> tuple[Handoff, tuple[handoff.Effect, ...]]:
        return (state, ()) if state.stage is HandoffStage.CATCH_UP else tick(state, event)

    patch(reconcile, "elect", elect)
    patch(handoff, "_tick", never_looks_again)


def _no_rewind(patch: Patch) -> None:
    async def rewind(_mender: Mender) -> None:
        """Do nothing."""

    patch(Mender, "rewind", rewind)


def _not_drained(patch: Patch) -> None:
    async def drained(_pool: LanePool, _state: PartitionState, _within: float) -> None:
        """Wait for nothing."""

    patch(LanePool, "drained", drained)


def _forgets_what_is_ahead(patch: Patch) -> None:
    def look_ahead(state: PartitionState) -> None:
        state.ahead = None

    patch(PartitionState, "look_ahead", look_ahead)


def _retry_lets_its_lane_go_on(patch: Patch) -> None:
    def wait(pool: LanePool, lane: Lane, delay: float) -> None:
        pool._later(delay, pool._again, lane.queue.popleft())
        pool._leave(lane)

    patch(LanePool, "_wait", wait)


def _gives_back_as_done(patch: Patch) -> None:
    patch(Inbox, "give_back", lambda inbox, state: inbox.drop(state))


def _reads_half(patch: Patch) -> None:
    original = CatchUpReader._read

    async def read(catch_up: CatchUpReader, after: int, to: int, *rest: Any, **options: Any) -> int:
        return await original(catch_up, after, (after + to) // 2, *rest, **options)

    patch(CatchUpReader, "_read", read)


def _clogged(patch: Patch) -> None:
    patch(Inbox, "clogged", False)


def _forgets_the_former(patch: Patch) -> None:
    def is_former(claim: Claim | None, worker: WorkerId) -> bool:
        return claim is None or (claim.owner is not None and claim.owner.worker == worker)

    patch(positions, "is_former", is_former)


BROKEN: Final = (
    Broken("no gap rule, per worker", LIMITS, _no_gap_rule),
    Broken("no gap rule, per partition", SLOTS, _no_gap_rule),
    Broken("a delivery of a partition that is aside is acked", WORKQUEUE, _acks_what_is_aside),
    Broken("does not hold what arrives early", LIMITS, _does_not_hold),
    Broken("T read before the filter", LIMITS, _t_is_read_early),
    Broken("releases what is only queued", LIMITS, _releases_what_is_queued),
    Broken("a slot is reset to what is only queued", SLOTS, _slot_releases_what_is_queued),
    Broken("a stop does not wait for the handlers", LIMITS, _not_drained),
    Broken("what is done ahead is not told", KEYS, _forgets_what_is_ahead),
    Broken("what is done ahead is not told, per partition", SLOTS_KEYS, _forgets_what_is_ahead),
    Broken("what was told to be done ahead is done again", KEYS, lambda p: p(Inbox, "_was_done", lambda *_: False)),
    Broken("a retry lets its lane go on", KEYS, _retry_lets_its_lane_go_on),
    Broken("what is given back counts as received", WORKQUEUE, _gives_back_as_done),
    Broken("half of a range read passes for all of it", LIMITS, _reads_half),
    Broken("filters are added above the ack floor of a work queue", WORKQUEUE, _no_rewind),
    Broken(
        "the filter is dropped at once on an interest stream",
        INTEREST,
        lambda p: p(per_worker_partition, "_keeps_filter", lambda *_: False),
    ),
    Broken(
        "a lost claim is not written again by who holds it",
        LIMITS,
        lambda p: p(held_partition, "write_again", lambda state, *_: (state, ())),
    ),
    Broken(
        "a lost claim is given away before all have spoken",
        LIMITS,
        lambda p: p(Membership, "know", lambda *_: True),
    ),
    Broken("a claim that a new leader does not find is a new partition", SLOTS, _forgets_what_was),
    Broken("a new leader misses what changed while it read", INTEREST, _misses_what_changed_while_it_read),
    Broken("a position of a former process goes with its claim", LIMITS, _forgets_the_former, MEDDLING),
    Broken(
        "a lost claim forgets what is done ahead",
        KEYS,
        lambda p: p(reconcile, "further", lambda *_: None),
        MEDDLING,
    ),
    Broken("deliveries that are not ours fill the consumer", INTEREST_NARROW, _clogged),
    Broken("no fence", LIMITS, lambda p: p(Identity, "may_act", lambda *_: True)),
    Broken("a handler goes on after the lease", LIMITS, lambda p: p(LanePool, "_stale", lambda *_: None)),
    Broken("lease counted from the answer", LIMITS, _lease_from_the_answer),
    Broken("takeover before the lease is out", LIMITS, _early_takeover),
)
