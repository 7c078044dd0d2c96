"""A worker's state of one partition and the claims it writes, common to both layouts. Pure.

The cursor never covers more than what is done; a claim is written by compare-and-set, one write at a time; and a lost
record is rewritten by the member that knows the partition's state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, assert_never

from parti.control import claims
from parti.control.signals import ClaimLost, ClaimSeen, LaneStopped, MessageDone, WriteClaim, WriteFailed
from parti.model import Claim, Lease, Member, PartitionId

PhaseT = TypeVar("PhaseT")


@dataclass(frozen=True, slots=True, repr=False)
class HeldPartition(Generic[PhaseT]):
    """One partition as one worker sees it; a layout adds its phases and its requests to the server."""

    partition: PartitionId
    me: Member
    phase: PhaseT
    claim: Claim | None = None
    revision: int = 0
    queued: int = 0
    """Every message up to here was passed to the lanes, as far as was reported."""
    tail: int = 0
    """The last message actually passed to the lanes."""
    done: int = 0
    """The last message that was finished."""
    lease: Lease | None = None
    """Set while effects are allowed."""
    writing: bool = False
    lost: ClaimLost | None = None
    """The record is lost; `claim` is our last knowledge of it."""
    ticket: int = 0
    """Number of the last request; answers to earlier ones are ignored."""

    @property
    def cursor(self) -> int:
        """Everything up to here is done."""
        return self.queued if self.done >= self.tail else self.done

    @property
    def drained(self) -> bool:
        return self.done >= self.tail

    @property
    def handed_over(self) -> bool:
        """Whether the layout has stopped the partition and its release is not written yet."""
        raise NotImplementedError

    @property
    def unreleased(self) -> tuple[int, int] | None:
        """(epoch, cursor) of a partition that we gave away, while its claim lacks our final cursor.

        A member that takes over before that finds it among our positions, or else repeats all since the claim's cursor.
        """
        if not self.handed_over or self.claim is None or self.claim.owner != self.me:
            return None
        return self.claim.epoch, self.cursor

    @property
    def unspoken(self) -> int | None:
        """The revision at which the record was lost, while we must rewrite it and have not done so yet."""
        return self.lost.revision if self.lost is not None and (self.lease or self.unreleased) else None

    def __repr__(self) -> str:
        epoch = self.lease.epoch if self.lease else None
        return f"<{type(self).__name__} {self.partition} {self.phase} epoch={epoch} cursor={self.cursor}>"


S = TypeVar("S", bound=HeldPartition[Any])
E = TypeVar("E")


def heard(
    state: S,
    event: ClaimSeen | ClaimLost | WriteFailed | MessageDone,
    follow: Callable[[S], tuple[S, tuple[E, ...]]],
) -> tuple[S, tuple[E, ...]]:
    """Handles the events that both layouts share; `follow` acts on what the claim says about us."""
    match event:
        case ClaimSeen(claim, revision):
            if revision < state.revision:
                return state, ()
            writing = state.writing and revision == state.revision
            if claim.lost and (state.lease is not None or (state.unreleased or (0, 0))[1] > claim.cursor):
                return heard(state, ClaimLost(revision, revision, claim.epoch), follow)
            return follow(replace(state, claim=claim, revision=revision, writing=writing, lost=None))
        case ClaimLost(revision):
            if revision < state.revision:
                return state, ()
            writing = state.writing and event == state.lost
            return follow(replace(state, revision=revision, writing=writing, lost=event))
        case WriteFailed():
            return replace(state, writing=False), ()
        case MessageDone(seq):
            return follow(replace(state, done=max(state.done, seq)))
        case _:
            assert_never(event)


def stopped(state: S, event: LaneStopped) -> S:
    """The lane starts nothing more: messages it dropped count as never queued."""
    if event.dropped_from is None:
        return state
    return replace(state, queued=event.dropped_from - 1, tail=event.last_started)


def begin_and_stop(
    state: S,
    claim: Claim,
    own: Callable[[S, Claim], tuple[S, tuple[E, ...]]],
    stop: Callable[[S, Claim], tuple[S, tuple[E, ...]]],
) -> tuple[S, tuple[E, ...]]:
    """The next move began before we heard that our own acceptance was written: begin, so that the move can stop us."""
    begun, effects = own(state, claim)
    stopping, more = stop(begun, claim)
    return stopping, (*effects, *more)


def write(state: S, claim: Claim) -> tuple[S, tuple[WriteClaim, ...]]:
    """Write this claim, unless a write is already in flight."""
    if state.writing:
        return state, ()
    return replace(state, writing=True), (WriteClaim(claim, state.revision),)


def write_again(state: S, claim: Claim, lost: ClaimLost) -> tuple[S, tuple[WriteClaim, ...]]:
    """The record is lost: reclaim it if we hold the partition; if we gave it away, write how far it was done."""
    if claim.owner != state.me or state.writing:
        return state, ()
    if state.lease is not None:
        again = claims.reclaim(claim, state.me, cursor=state.cursor, epoch=lost.epoch)
        return replace(state, writing=True), (WriteClaim(again, lost.expected, exact=True),)
    if state.unreleased is not None:
        again = claims.mislaid(claim, cursor=state.cursor, epoch=lost.epoch, term=claim.term)
        return replace(state, writing=True), (WriteClaim(again, lost.expected),)
    return state, ()
