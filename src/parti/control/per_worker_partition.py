"""A worker's steps for one partition in the per-worker layout: hold, catch up to T, process, stop, release.

This module decides who may act, from which position, and which filter is set. The worker decides about single messages
(`parti.worker.ledger`, `parti.worker.inbox`): range reads bring everything up to T, its consumer everything above it;
early messages are held, and gaps are read again. So no event here is about a single message: the worker reports its
exact position when the partition has reached T (`ReadUpTo`) and when it has stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from parti.control import claims, held_partition
from parti.control.held_partition import HeldPartition
from parti.control.signals import (
    AddFilter,
    CatchUp,
    ClaimLost,
    ClaimSeen,
    DropFilter,
    Fenced,
    FilterAdded,
    FilterDropped,
    Granted,
    LaneStopped,
    LastRead,
    MessageDone,
    ReadLast,
    ReadUpTo,
    Revoked,
    StopLane,
    WriteClaim,
    WriteFailed,
)
from parti.model import Claim, ClaimState, Retention


class Phase(StrEnum):
    """This worker's role for the partition."""

    IDLE = "idle"
    ADDING = "adding"
    """The filter update, and the read of T that follows it, are in flight."""
    READY = "ready"
    """The filter is set and T is known; incoming messages are held. Not the owner yet."""
    ACCEPTING = "accepting"
    """Our CAS on the claim is in flight; nothing may start before it is confirmed."""
    CATCHING_UP = "catching_up"
    LIVE = "live"
    STOPPING = "stopping"
    """The lane was asked to start nothing more."""
    DRAINING = "draining"
    """Messages in flight are being finished."""
    RELEASING = "releasing"
    RELEASED = "released"
    """Another worker owns it, but our filter is still set."""


@dataclass(frozen=True, slots=True, repr=False)
class PerWorkerPartition(HeldPartition[Phase]):
    """One partition as one worker sees it."""

    phase: Phase = Phase.IDLE
    retention: Retention = Retention.LIMITS
    filtered: bool = False
    """Our consumer filters the partition, or is about to."""
    target: int | None = None
    """T; None while it is being read."""

    @property
    def handed_over(self) -> bool:
        return self.phase is Phase.RELEASING

    def __repr__(self) -> str:
        return f"{HeldPartition.__repr__(self)[:-1]} T={self.target}>"


Event = (
    ClaimSeen
    | ClaimLost
    | WriteFailed
    | FilterAdded
    | FilterDropped
    | LastRead
    | ReadUpTo
    | MessageDone
    | LaneStopped
    | Fenced
)
Effect = AddFilter | DropFilter | ReadLast | CatchUp | StopLane | WriteClaim | Granted | Revoked
Step = tuple[PerWorkerPartition, tuple[Effect, ...]]


def step(state: PerWorkerPartition, event: Event) -> Step:
    """The next state and the effects to perform."""
    match event:
        case ClaimSeen() | ClaimLost() | WriteFailed() | MessageDone():
            return held_partition.heard(state, event, _follow)
        case FilterAdded(last, ticket):
            if state.phase is not Phase.ADDING or ticket != state.ticket:
                return state, ()
            return _follow(replace(state, phase=Phase.READY, target=last))
        case FilterDropped():
            if state.filtered:  # it was assigned again in the meantime
                return state, ()
            if state.phase is Phase.RELEASED:
                return replace(state, phase=Phase.IDLE), ()
            return _follow(state)
        case LastRead(last, ticket):
            if ticket != state.ticket or state.target is not None:
                return state, ()
            resumed = replace(state, target=last)
            return _catch_up(resumed) if state.phase is Phase.CATCHING_UP else _follow(resumed)
        case ReadUpTo(seq, ticket):
            if ticket != state.ticket or state.phase is not Phase.CATCHING_UP or seq < (state.target or 0):
                return state, ()
            return _follow(replace(state, phase=Phase.LIVE, queued=max(state.queued, seq)))
        case LaneStopped():
            if state.phase is not Phase.STOPPING:
                return state, ()
            return _follow(held_partition.stopped(replace(state, phase=Phase.DRAINING), event))
        case Fenced():
            return _let_go(state)
        case _:
            assert_never(event)


def _follow(state: PerWorkerPartition) -> Step:
    """Act on what the claim says about us."""
    claim = state.claim
    if claim is None:
        return state, ()
    if state.lost is not None:
        return held_partition.write_again(state, claim, state.lost)
    if claim.owner == state.me:
        if claim.state is ClaimState.PREPARE:
            accepting = state.phase is Phase.ACCEPTING
            return held_partition.begin_and_stop(state, claim, _own, _stop) if accepting else _stop(state, claim)
        if claim.state is ClaimState.COMMIT and not claim.accepted:
            return _take(state, claim)
        return _own(state, claim)
    if claim.pending == state.me and state.retention.overlap:
        return _make_ready(state, claim)
    if state.lease is not None or state.phase is not Phase.RELEASED:
        return _pass_on(state, claim)
    return _drop(state, claim)


def _make_ready(state: PerWorkerPartition, claim: Claim) -> Step:
    if state.phase in (Phase.IDLE, Phase.RELEASED):
        return _add(state)
    if state.phase is Phase.READY and state.target is not None and claim.target is None:
        return held_partition.write(state, claims.ready(claim, state.me, target=state.target))
    return state, ()


def _take(state: PerWorkerPartition, claim: Claim) -> Step:
    """A COMMIT for us: filter first, then T, then accept. Nothing starts before the accept is confirmed."""
    if state.phase not in (Phase.ADDING, Phase.READY, Phase.ACCEPTING):
        return _add(state)
    if state.phase is Phase.ADDING or state.target is None:
        return state, ()
    return held_partition.write(
        replace(state, phase=Phase.ACCEPTING), claims.accept(claim, state.me, target=state.target)
    )


def _own(state: PerWorkerPartition, claim: Claim) -> Step:
    """We certainly own it: start if we just accepted, continue under the epoch of an aborted move, report progress."""
    assert claim.owner == state.me
    if state.phase in (Phase.IDLE, Phase.RELEASED):
        return held_partition.write(state, claims.retake(claim, state.me))
    if state.phase is Phase.ACCEPTING:
        start = max(claim.cursor, state.cursor)
        begun = replace(state, phase=Phase.CATCHING_UP, queued=start, tail=start, done=start, lease=claim.lease())
        after, effects = _catch_up(begun)
        return after, (Granted(claim.lease()), *effects)
    if state.phase in (Phase.DRAINING, Phase.RELEASING):
        # The move was aborted after we had stopped: messages ignored since then are read again up to a new T.
        resumed = replace(state, phase=Phase.CATCHING_UP, lease=claim.lease())
        after, effects = _ask_last(resumed) if state.filtered else _add(resumed)
        return after, (Granted(claim.lease()), *effects)
    if state.phase is Phase.READY and state.lease is not None:
        return _catch_up(replace(state, phase=Phase.CATCHING_UP))
    effects_before: tuple[Effect, ...] = ()
    if state.lease is not None and state.lease != claim.lease():
        state, effects_before = replace(state, lease=claim.lease()), (Granted(claim.lease()),)
    if claim.state is ClaimState.COMMIT and claim.target is not None and state.cursor >= claim.target:
        written, effects = held_partition.write(state, claims.caught_up(claim, state.me, cursor=state.cursor))
        return written, (*effects_before, *effects)
    return state, effects_before


def _catch_up(state: PerWorkerPartition) -> Step:
    """Continue from our position: catch up to T, or go live at once when there is nothing in between."""
    if state.target is None:
        return state, ()
    asked = replace(state, ticket=state.ticket + 1)
    begin = CatchUp(state.partition, state.queued, state.target, asked.ticket)
    if state.queued < state.target:
        return asked, (begin,)
    live, effects = _follow(replace(asked, phase=Phase.LIVE))
    return live, (begin, *effects)


def _stop(state: PerWorkerPartition, claim: Claim) -> Step:
    """Continue until the next owner is ready, then stop, drain, and release with the exact cursor."""
    effects: list[Effect] = []
    if state.retention.overlap and claim.pending is not None and claim.target is None:
        resumed = state.phase is Phase.READY and state.lease is not None
        return _catch_up(replace(state, phase=Phase.CATCHING_UP)) if resumed else (state, ())
    if state.lease is not None and state.phase not in (Phase.STOPPING, Phase.DRAINING):
        return replace(state, phase=Phase.STOPPING), (StopLane(state.partition),)
    if state.phase is Phase.DRAINING and state.drained:
        assert state.lease is not None
        effects.append(Revoked(state.lease))
        # It may have stopped before T; `queued` never covers more than what was passed to the lane.
        state = replace(state, phase=Phase.RELEASING, lease=None)
        if not state.retention.overlap:  # a work queue refuses the next owner's filter while ours is set (10100)
            return replace(state, filtered=False), (*effects, DropFilter(state.partition))
    if state.phase is Phase.RELEASING and (state.retention.overlap or not state.filtered):
        state, written = held_partition.write(state, claims.release(claim, state.me, cursor=state.cursor))
        effects += written
    return state, tuple(effects)


def _pass_on(state: PerWorkerPartition, claim: Claim) -> Step:
    """Another worker owns it now: by our release, by an abort of a move to us, or without our consent."""
    if state.phase is Phase.IDLE and not _keeps_filter(state, claim):
        return state, ()
    gone, effects = _let_go(state)
    after, more = _drop(replace(gone, phase=Phase.RELEASED), claim)
    return after, (*effects, *more)


def _drop(state: PerWorkerPartition, claim: Claim) -> Step:
    """Remove the filter, unless something still depends on it."""
    if _keeps_filter(state, claim):
        return replace(state, filtered=True), ()
    if state.filtered:
        return replace(state, filtered=False), (DropFilter(state.partition),)
    return state, ()


def _keeps_filter(state: PerWorkerPartition, claim: Claim) -> bool:
    """Whether our durable must keep filtering a partition that we do not own.

    The previous process of our id may own it: its durable is ours now, and on an interest stream only that filter
    retains the messages until another worker takes over. The same holds for a partition that we gave away, until the
    next owner has *processed* up to T (docs/evidence/cluster.md#c17).
    """
    if claim.owner is not None and claim.owner.worker == state.me.worker:
        return True
    if claim.lost and state.filtered and state.retention is Retention.INTEREST:
        return True
    if state.retention is not Retention.INTEREST or claim.state not in (ClaimState.COMMIT, ClaimState.UNASSIGNED):
        return False
    # The previous owner is unknown: then a filter that is set may be the last one.
    return state.filtered if claim.previous is None else claim.previous.worker == state.me.worker


def _let_go(state: PerWorkerPartition) -> Step:
    cursor = state.cursor
    idle = replace(state, phase=Phase.IDLE, target=None, lease=None, queued=cursor, tail=cursor, done=cursor)
    return idle, (Revoked(state.lease),) if state.lease is not None else ()


def _add(state: PerWorkerPartition) -> Step:
    adding = replace(state, phase=Phase.ADDING, target=None, filtered=True, ticket=state.ticket + 1)
    return adding, (AddFilter(state.partition, adding.ticket),)


def _ask_last(state: PerWorkerPartition) -> Step:
    asked = replace(state, target=None, ticket=state.ticket + 1)
    return asked, (ReadLast(state.partition, asked.ticket),)
