"""Who is here: members judged by identity, never by count.

A member is *gone* only when it has certainly stopped by itself: one TTL and a margin after its last renewal was seen,
or when its record says that it stopped cleanly. Only then may its partitions be taken without its consent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, assert_never

from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lease import LeaseTerms, Sighting
from parti.model import Member, WorkerId

_REMEMBERED: Final = 1000  # members of the past whose end is known exactly; a forgotten one only waits one TTL again


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker id and who holds it now."""

    record: LeaseRecord
    sighting: Sighting
    first_seen: float
    """When this member, not just this revision, was first seen."""
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Membership:
    """One observer's view; every worker keeps one, so that a new leader already knows who is alive."""

    terms: LeaseTerms
    started: float
    """When this observer had read the whole bucket once."""
    seats: Mapping[WorkerId, Seat] = field(default_factory=lambda: MappingProxyType({}))
    ended: Mapping[Member, float] = field(default_factory=lambda: MappingProxyType({}))
    """Members that no longer hold their id -> when they have certainly stopped."""

    def active(self) -> dict[WorkerId, Member]:
        """Members that can be given work."""
        return {
            worker: seat.record.member
            for worker, seat in self.seats.items()
            if not seat.dead and seat.record.status is LeaseStatus.ACTIVE
        }

    def keeping(self) -> frozenset[WorkerId]:
        """Ids whose partitions stay with them: active ones, and those that rest for a restart."""
        return frozenset(
            worker
            for worker, seat in self.seats.items()
            if not seat.dead and seat.record.status in (LeaseStatus.ACTIVE, LeaseStatus.RESTING)
        )

    def healthy(self, member: Member) -> bool:
        """Whether this very process still holds its id, as far as we know."""
        seat = self.seats.get(member.worker)
        return seat is not None and not seat.dead and seat.record.member == member and not seat.record.status.stopped

    def gone(self, member: Member, now: float) -> bool:
        """True only when this process has certainly stopped acting; the licence for a takeover."""
        return now >= self.gone_at(member)

    def gone_at(self, member: Member) -> float:
        """When `gone` becomes true if nothing more is heard; the past when it already is."""
        wait = self.terms.ttl + self.terms.margin
        seat = self.seats.get(member.worker)
        if seat is not None and seat.record.member == member:
            return seat.sighting.since if seat.record.status.stopped else seat.sighting.since + wait
        ended = self.ended.get(member)
        if ended is not None:
            return ended
        # We never saw it hold the id. Its last renewal came before whatever we saw first in its place.
        return (seat.first_seen if seat is not None else self.started) + wait


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """The record under a worker id, from a watch or a list; None when the key is gone."""

    now: float
    worker: WorkerId
    record: LeaseRecord | None
    revision: int
    expired: bool = False
    """The server removed the key by its own TTL, which proves that its holder's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


Event = LeaseSeen | Tick


@dataclass(frozen=True, slots=True)
class Joined:
    member: Member


@dataclass(frozen=True, slots=True)
class Restarted:
    """The id has a new process: its partitions stay, but under a new epoch."""

    old: Member
    new: Member


@dataclass(frozen=True, slots=True)
class Leaving:
    """Asks to be relieved of its partitions; still works on them meanwhile."""

    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    """Gave its id back."""

    member: Member


@dataclass(frozen=True, slots=True)
class Died:
    """Not heard of for a TTL and a margin."""

    member: Member


Change = Joined | Restarted | Leaving | Left | Died


def step(state: Membership, event: Event) -> tuple[Membership, tuple[Change, ...]]:
    """The next view and what changed. A stale or repeated sighting changes nothing."""
    match event:
        case LeaseSeen():
            return _seen(state, event)
        case Tick(now):
            dead = [
                w
                for w, seat in state.seats.items()
                if not seat.dead
                and seat.record.status is not LeaseStatus.LEFT
                and seat.sighting.expired(now, state.terms)
            ]
            if not dead:
                return state, ()
            seats = {**state.seats, **{w: replace(state.seats[w], dead=True) for w in dead}}
            changes = tuple(Died(state.seats[w].record.member) for w in sorted(dead))
            return replace(state, seats=MappingProxyType(seats)), changes
        case _:
            assert_never(event)


def _seen(state: Membership, event: LeaseSeen) -> tuple[Membership, tuple[Change, ...]]:
    worker, record, now = event.worker, event.record, event.now
    seat = state.seats.get(worker)
    if seat is not None and event.revision <= seat.sighting.revision:
        return state, ()
    # Renewals may have happened that this observer never saw: only a proof shortens the wait from now.
    latest = now + state.terms.ttl + state.terms.margin
    if record is None:
        if seat is None:
            return state, ()
        proven = event.expired or seat.record.status.stopped
        ended = _ended(state, seat.record.member, now if proven else latest)
        seats = {w: s for w, s in state.seats.items() if w != worker}
        left: tuple[Change, ...] = () if seat.dead or seat.record.status.stopped else (Left(seat.record.member),)
        return replace(state, seats=MappingProxyType(seats), ended=ended), left
    ended = state.ended
    changes: list[Change] = []
    if seat is None or (seat.dead and seat.record.member == record.member):
        changes = [Joined(record.member)]
    elif seat.record.member != record.member:
        old = seat.record.member
        ended = _ended(state, old, now if record.clean or seat.record.status.stopped else latest)
        changes = [Restarted(old, record.member)]
    before = seat.record.status if seat is not None and seat.record.member == record.member else None
    if record.status is not before:
        if record.status is LeaseStatus.LEAVING:
            changes.append(Leaving(record.member))
        elif record.status is LeaseStatus.LEFT:
            changes = [Left(record.member)]
    first_seen = seat.first_seen if seat is not None and seat.record.member == record.member else now
    seats = {**state.seats, worker: Seat(record, Sighting(event.revision, now), first_seen)}
    return replace(state, seats=MappingProxyType(seats), ended=ended), tuple(changes)


def _ended(state: Membership, member: Member, at: float) -> Mapping[Member, float]:
    recent = dict(list(state.ended.items())[-(_REMEMBERED - 1) :])
    return MappingProxyType({**recent, member: at})
