"""A worker's steps for one partition in the per-partition layout: the durable keeps the position, RESET moves it.

    stop -> drain -> double ack -> release(cursor)   |   accept -> RESET to cursor + 1 -> pull

The first delivery after a reset has consumer sequence 1 and each further one is exactly +1; anything else is a gap. A
gap requires a new inbox and another reset before anything is processed (docs/evidence/cluster.md#c3). A reset goes to
what is *done*, never to what is only queued: it moves the ack floor, and the next owner trusts the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import lt
from typing import assert_never

from parti.control import claims, held_partition
from parti.control.held_partition import HeldPartition
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
from parti.model import Claim, ClaimState


class Phase(StrEnum):
    """This worker's role for the partition."""

    IDLE = "idle"
    ACCEPTING = "accepting"
    RESETTING = "resetting"
    """We own it; the reset is not answered yet, so nothing is pulled."""
    LIVE = "live"
    STOPPING = "stopping"
    """The lane was asked to start nothing more."""
    DRAINING = "draining"
    SETTLING = "settling"
    """Drained; waiting for the answer to the double ack."""
    RELEASING = "releasing"


@dataclass(frozen=True, slots=True, repr=False)
class PerPartition(HeldPartition[Phase]):
    """One partition with its own durable, as one worker sees it. The ticket also names the inbox: deliveries to an
    older inbox are ignored."""

    phase: Phase = Phase.IDLE
    expected: int = 1
    """The consumer sequence that the next delivery must carry."""

    @property
    def steady(self) -> bool:
        """A done message triggers nothing: `MessageDone` only moves the cursor, and can wait until the cursor is
        needed.

        Any request of a claim was started when the claim was seen, and ended this phase; a lost claim is rewritten.
        """
        return self.phase is Phase.LIVE and self.lost is None

    @property
    def handed_over(self) -> bool:
        return self.phase in (Phase.SETTLING, Phase.RELEASING)


Event = ClaimSeen | ClaimLost | WriteFailed | ResetDone | Settled | MessageDone | LaneStopped | Gap | Fenced
Effect = ResetConsumer | Settle | StopLane | Discard | WriteClaim | Granted | Revoked
Step = tuple[PerPartition, tuple[Effect, ...]]


def deliver(
    state: PerPartition, seq: int, consumer_seq: int, inbox: int
) -> tuple[PerPartition, DeliveryVerdict, tuple[Effect, ...]]:
    """Decide about one delivery; a gap triggers a reset instead."""
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
    # `done` is updated first, so that the cursor never goes back.
    return replace(state, queued=seq, tail=seq, done=state.cursor), DeliveryVerdict.PROCESS, ()


def deliver_new(
    state: PerPartition, seqs: Sequence[int], consumer_seq: int, inbox: int, done: int | None = None
) -> PerPartition | None:
    """Like `deliver` for each of these, if all are to be processed; None if they must be judged one by one.

    `consumer_seq` is that of the first, and there is no gap between them. `done`: as a preceding `MessageDone`.
    """
    if inbox != state.ticket or state.phase is not Phase.LIVE or consumer_seq != state.expected:
        return None
    if seqs[0] <= state.queued or (len(seqs) > 1 and not all(map(lt, seqs, seqs[1:]))):
        return None
    reached = state.done if done is None else max(state.done, done)
    cursor = state.queued if reached >= state.tail else reached
    return replace(state, expected=consumer_seq + len(seqs), queued=seqs[-1], tail=seqs[-1], done=cursor)


def step(state: PerPartition, event: Event) -> Step:
    """The next state and the effects to perform."""
    match event:
        case ClaimSeen() | ClaimLost() | WriteFailed() | MessageDone():
            return held_partition.heard(state, event, _follow)
        case ResetDone(ticket):
            if state.phase is not Phase.RESETTING or ticket != state.ticket:
                return state, ()
            return _follow(replace(state, phase=Phase.LIVE, expected=1))
        case Settled(ticket):
            if state.phase is not Phase.SETTLING or ticket != state.ticket:
                return state, ()
            return _follow(replace(state, phase=Phase.RELEASING))
        case LaneStopped():
            # A second one while draining: what had to be finished took too long, and was dropped as well.
            if state.phase not in (Phase.STOPPING, Phase.DRAINING):
                return state, ()
            return _follow(held_partition.stopped(replace(state, phase=Phase.DRAINING), event))
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
        return held_partition.write_again(state, claim, state.lost)
    if claim.owner != state.me:
        return _let_go(state) if state.phase is not Phase.IDLE else (state, ())
    if claim.state is ClaimState.PREPARE:
        accepting = state.phase is Phase.ACCEPTING
        return held_partition.begin_and_stop(state, claim, _own, _stop) if accepting else _stop(state, claim)
    if claim.state is ClaimState.COMMIT and not claim.accepted:
        # The durable has seen everything since it was created: there is nothing to catch up on.
        return held_partition.write(
            replace(state, phase=Phase.ACCEPTING), claims.accept(claim, state.me, target=claim.cursor)
        )
    return _own(state, claim)


def _own(state: PerPartition, claim: Claim) -> Step:
    if state.phase is Phase.IDLE:
        return held_partition.write(state, claims.retake(claim, state.me))
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
        return held_partition.write(state, claims.release(claim, state.me, cursor=state.cursor))
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
