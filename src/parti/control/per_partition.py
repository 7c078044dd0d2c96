"""What a worker does with one partition in the per-partition layout: the durable keeps the position, RESET moves it.

    stop -> drain -> double ack -> release(cursor)   |   accept -> RESET to cursor + 1 -> pull

The first delivery after a reset has consumer sequence 1 and each further one is exactly +1; anything else is a gap, and
a gap means a new inbox and another reset before anything is processed (docs/evidence/cluster.md#c3). A reset goes to
what is *done*, never to what is only queued: it moves the ack floor, and the next owner trusts the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import lt
from typing import assert_never

from parti.control import claims
from parti.control.signals import (
    ClaimLost,
    ClaimSeen,
    DeliveryVerdict,
    Discard,
    Fenced,
    Gap,
    Granted,
    LaneStopped,
    MessageDone,
    ResetConsumer,
    ResetDone,
    Revoked,
    Settle,
    Settled,
    StopLane,
    WriteClaim,
    WriteFailed,
)
from parti.model import Claim, ClaimState, Lease, Member, PartitionId


class Phase(StrEnum):
    """What this worker is to the partition."""

    IDLE = "idle"
    ACCEPTING = "accepting"
    RESETTING = "resetting"
    """We own it; the reset is not answered yet, so nothing is pulled."""
    LIVE = "live"
    STOPPING = "stopping"
    """The lane is asked to start nothing more."""
    DRAINING = "draining"
    SETTLING = "settling"
    """Drained; waiting for the answer to the double ack."""
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True)
class PerPartition:
    """One partition, with a durable of its own, as one worker sees it."""

    partition: PartitionId
    me: Member
    phase: Phase = Phase.IDLE
    claim: Claim | None = None
    revision: int = 0
    queued: int = 0
    tail: int = 0
    done: int = 0
    expected: int = 1
    """The consumer sequence that the next delivery must carry."""
    ticket: int = 0
    """Number of the last question; also names the inbox, so that deliveries to an older one are not ours."""
    lease: Lease | None = None
    writing: bool = False
    lost: ClaimLost | None = None
    """As `Holding.lost`."""

    @property
    def cursor(self) -> int:
        """Everything up to here is done."""
        return self.queued if self.done >= self.tail else self.done

    @property
    def drained(self) -> bool:
        return self.done >= self.tail

    @property
    def steady(self) -> bool:
        """Nothing is asked of anybody when a message is done: `MessageDone` moves the cursor, and can wait until that
        matters.

        Whatever a claim asks for was begun when it was seen, and ended this phase; one that got lost is written again.
        """
        return self.phase is Phase.LIVE and self.lost is None

    @property
    def unreleased(self) -> tuple[int, int] | None:
        """As `Holding.unreleased`."""
        stopped = self.phase in (Phase.SETTLING, Phase.RELEASING)
        if not stopped or self.claim is None or self.claim.owner != self.me:
            return None
        return self.claim.epoch, self.cursor

    @property
    def unspoken(self) -> int | None:
        """As `Holding.unspoken`."""
        return self.lost.revision if self.lost is not None and (self.lease or self.unreleased) else None

    def __repr__(self) -> str:
        epoch = self.lease.epoch if self.lease else None
        return f"<PerPartition {self.partition} {self.phase} epoch={epoch} cursor={self.cursor}>"


Event = ClaimSeen | ClaimLost | WriteFailed | ResetDone | Settled | MessageDone | LaneStopped | Gap | Fenced
Effect = ResetConsumer | Settle | StopLane | Discard | WriteClaim | Granted | Revoked
Step = tuple[PerPartition, tuple[Effect, ...]]


def deliver(
    state: PerPartition, seq: int, consumer_seq: int, inbox: int
) -> tuple[PerPartition, DeliveryVerdict, tuple[Effect, ...]]:
    """Judge one delivery; a gap asks for a reset instead."""
    if inbox != state.ticket or state.phase is not Phase.LIVE:
        return state, DeliveryVerdict.IGNORE, ()
    if consumer_seq != state.expected:
        after, effects = _reset(state)
        return after, DeliveryVerdict.IGNORE, effects
    state = replace(state, expected=consumer_seq + 1)
    if seq <= state.cursor:
        return state, DeliveryVerdict.ACK, ()
    if seq <= state.queued:
        return state, DeliveryVerdict.ACK_WHEN_DONE, ()
    # `done` is brought up first, so that the cursor never goes back.
    return replace(state, queued=seq, tail=seq, done=state.cursor), DeliveryVerdict.PROCESS, ()


def deliver_new(
    state: PerPartition, seqs: Sequence[int], consumer_seq: int, inbox: int, done: int | None = None
) -> PerPartition | None:
    """As `deliver` for each of these, when all are to be processed; None when they have to be judged one by one.

    `consumer_seq` is that of the first, and they have no gap between them. `done`: as by `MessageDone` before.
    """
    if inbox != state.ticket or state.phase is not Phase.LIVE or consumer_seq != state.expected:
        return None
    if seqs[0] <= state.queued or (len(seqs) > 1 and not all(map(lt, seqs, seqs[1:]))):
        return None
    reached = state.done if done is None else max(state.done, done)
    cursor = state.queued if reached >= state.tail else reached
    return replace(state, expected=consumer_seq + len(seqs), queued=seqs[-1], tail=seqs[-1], done=cursor)


def step(state: PerPartition, event: Event) -> Step:
    """The next state and what to do."""
    match event:
        case ClaimSeen(claim, revision):
            if revision < state.revision:
                return state, ()
            writing = state.writing and revision == state.revision
            if claim.lost and (state.lease is not None or (state.unreleased or (0, 0))[1] > claim.cursor):
                return step(state, ClaimLost(revision, revision, claim.epoch))
            return _follow(replace(state, claim=claim, revision=revision, writing=writing, lost=None))
        case ClaimLost(revision):
            if revision < state.revision:
                return state, ()
            writing = state.writing and event == state.lost
            return _follow(replace(state, revision=revision, writing=writing, lost=event))
        case WriteFailed():
            return replace(state, writing=False), ()
        case ResetDone(ticket):
            if state.phase is not Phase.RESETTING or ticket != state.ticket:
                return state, ()
            return _follow(replace(state, phase=Phase.LIVE, expected=1))
        case Settled(ticket):
            if state.phase is not Phase.SETTLING or ticket != state.ticket:
                return state, ()
            return _follow(replace(state, phase=Phase.RELEASING))
        case MessageDone(seq):
            return _follow(replace(state, done=max(state.done, seq)))
        case LaneStopped(last_started, dropped_from):
            # A second one while it drains: what had to be finished took too long, and was dropped as well.
            if state.phase not in (Phase.STOPPING, Phase.DRAINING):
                return state, ()
            stopped = replace(state, phase=Phase.DRAINING)
            if dropped_from is not None:
                stopped = replace(stopped, queued=dropped_from - 1, tail=last_started)
            return _follow(stopped)
        case Gap():
            return _reset(state) if state.phase in (Phase.LIVE, Phase.RESETTING) else (state, ())
        case Fenced():
            return _let_go(state)
        case _:
            assert_never(event)


def _follow(state: PerPartition) -> Step:
    claim = state.claim
    if claim is None:
        return state, ()
    if state.lost is not None:
        return _write_again(state, claim, state.lost)
    if claim.owner != state.me:
        return _let_go(state) if state.phase is not Phase.IDLE else (state, ())
    if claim.state is ClaimState.PREPARE:
        return _stop(state, claim)
    if claim.state is ClaimState.COMMIT and not claim.accepted:
        # The durable has seen everything since it was created: there is nothing to catch up with.
        return _write(replace(state, phase=Phase.ACCEPTING), claims.accept(claim, state.me, target=claim.cursor))
    return _own(state, claim)


def _write_again(state: PerPartition, claim: Claim, lost: ClaimLost) -> Step:
    """As in `holding`."""
    if claim.owner != state.me or state.writing:
        return state, ()
    if state.lease is not None:
        again = claims.reclaim(claim, state.me, cursor=state.cursor, epoch=lost.epoch)
        return replace(state, writing=True), (WriteClaim(again, lost.expected, exact=True),)
    if state.unreleased is not None:
        again = claims.mislaid(claim, cursor=state.cursor, epoch=lost.epoch, term=claim.term)
        return replace(state, writing=True), (WriteClaim(again, lost.expected),)
    return state, ()


def _own(state: PerPartition, claim: Claim) -> Step:
    if state.phase is Phase.IDLE:
        return _write(state, claims.retake(claim, state.me))
    if state.phase is Phase.ACCEPTING:
        start = max(claim.cursor, state.cursor)
        begun = replace(state, queued=start, tail=start, done=start, lease=claim.lease())
        after, effects = _reset(begun)
        return after, (Granted(claim.lease()), *effects)
    if state.phase in (Phase.DRAINING, Phase.SETTLING, Phase.RELEASING):
        after, effects = _reset(replace(state, lease=claim.lease()))
        return after, (Granted(claim.lease()), *effects)
    if state.lease is not None and state.lease != claim.lease():
        return replace(state, lease=claim.lease()), (Granted(claim.lease()),)
    return state, ()


def _stop(state: PerPartition, claim: Claim) -> Step:
    effects: list[Effect] = []
    if state.phase in (Phase.LIVE, Phase.RESETTING):
        return replace(state, phase=Phase.STOPPING), (StopLane(state.partition),)
    if state.phase is Phase.DRAINING and state.drained:
        assert state.lease is not None
        effects.append(Revoked(state.lease))
        state = replace(state, phase=Phase.SETTLING, lease=None, ticket=state.ticket + 1)
        return state, (*effects, Settle(state.partition, state.ticket))
    if state.phase is Phase.RELEASING:
        return _write(state, claims.release(claim, state.me, cursor=state.cursor))
    return state, tuple(effects)


def _reset(state: PerPartition) -> Step:
    resetting = replace(state, phase=Phase.RESETTING, ticket=state.ticket + 1, expected=1)
    return resetting, (ResetConsumer(state.partition, state.cursor + 1, resetting.ticket),)


def _let_go(state: PerPartition) -> Step:
    cursor = state.cursor
    idle = replace(
        state, phase=Phase.IDLE, lease=None, queued=cursor, tail=cursor, done=cursor, ticket=state.ticket + 1
    )
    revoked = (Revoked(state.lease),) if state.lease is not None else ()
    return idle, (*revoked, Discard(state.partition))


def _write(state: PerPartition, claim: Claim) -> Step:
    if state.writing:
        return state, ()
    return replace(state, writing=True), (WriteClaim(claim, state.revision),)
