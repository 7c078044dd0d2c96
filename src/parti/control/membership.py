"""Who is here: members judged by identity, never by count.

A member is *gone* only when it has certainly stopped by itself: one TTL and a margin after its last renewal was seen,
confirmed by a read that still finds no later one; or when its record says that it stopped cleanly. Only then may its
partitions be taken without its consent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, assert_never

from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lease import NEVER, LeaseTerms, Sighting
from parti.model import Member, WorkerId

_REMEMBERED: Final = 1000  # members of the past whose end is known exactly; a forgotten one only waits one TTL again


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker id and who holds it now."""

    record: LeaseRecord
    sighting: Sighting
    first_seen: float
    """When this member, not just this revision, was first seen."""
    asked_at: float = NEVER
    """When a confirming read was last asked for."""
    dead: bool = False
    missing: bool = False
    """Its record was removed or damaged. Its holder may write it again, so that only a confirmed silence ends it."""


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

    def takers(self) -> dict[WorkerId, int]:
        """Ids that can be assigned partitions, each with how many at most (0: any number): kept ones that are well."""
        return {
            worker: self.seats[worker].record.capacity for worker in self.keeping() if self.seats[worker].record.well
        }

    def healthy(self, member: Member) -> bool:
        """Whether this very process still holds its id, as far as we know."""
        seat = self.seats.get(member.worker)
        return seat is not None and not seat.dead and seat.record.member == member and not seat.record.status.stopped

    def know(self, revision: int, now: float) -> bool:
        """Every process that may still act has said that it knows all up to this revision, and that it holds nothing
        whose claim was lost up to there."""
        latest = self.terms.ttl + self.terms.margin
        if now < self.started + latest:
            return False  # somebody may act whose record was gone before we came
        if any(now < until for until in self.ended.values()):
            return False
        acting = [s for s in self.seats.values() if not s.dead and not s.record.status.stopped]
        return all(not seat.missing and seat.record.seen >= revision for seat in acting)

    def gone(self, member: Member, now: float) -> bool:
        """True only when this process has certainly stopped acting; the licence for a takeover."""
        seat = self.seats.get(member.worker)
        if seat is not None and seat.record.member == member:
            return seat.record.status.stopped or seat.sighting.expired(self.terms)
        # Its id is another's, or nobody's: it can renew no more, and what it had runs out. If we never saw it hold the
        # id, its last renewal came before whatever we saw first in its place; and whoever holds the id may know more,
        # so that a fleet that was stopped cleanly goes on at once when it is started again.
        if member not in self.ended and seat is not None and seat.record.clean and self.healthy(seat.record.member):
            return True
        first = seat.first_seen if seat is not None else self.started
        return now >= self.ended.get(member, first + self.terms.ttl + self.terms.margin)


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """The record under a worker id, from a watch or a list; None when the key is gone."""

    now: float
    worker: WorkerId
    record: LeaseRecord | None
    revision: int
    asked: float | None = None
    """When the read from the bucket's leader that brought this was sent; None for a watch, which proves nothing."""
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


@dataclass(frozen=True, slots=True)
class Ailing:
    """Says that it is not well: it gets nothing, and what it has goes to others while it still can hand it over."""

    member: Member


@dataclass(frozen=True, slots=True)
class Recovered:
    """Is well again, or can carry another number of partitions."""

    member: Member


Change = Joined | Restarted | Leaving | Left | Died | Ailing | Recovered


@dataclass(frozen=True, slots=True)
class Confirm:
    """Read this lease from the bucket's leader, and answer with `LeaseSeen(asked=...)`."""

    worker: WorkerId


Effect = Change | Confirm


def step(state: Membership, event: Event) -> tuple[Membership, tuple[Effect, ...]]:
    """The next view, what changed, and what has to be read. A stale sighting changes nothing."""
    match event:
        case LeaseSeen():
            return _seen(state, event)
        case Tick(now):
            return _ask(state, now)
        case _:
            assert_never(event)


def _ask(state: Membership, now: float) -> tuple[Membership, tuple[Effect, ...]]:
    """Nothing was heard of them for too long: find out whether that is true."""
    again = state.terms.renew_every / 2
    silent = [
        worker
        for worker, seat in state.seats.items()
        if not seat.dead
        and seat.record.status is not LeaseStatus.LEFT
        and seat.sighting.overdue(now, state.terms)
        and now >= seat.asked_at + again
    ]
    if not silent:
        return state, ()
    seats = {**state.seats, **{w: replace(state.seats[w], asked_at=now) for w in silent}}
    return replace(state, seats=MappingProxyType(seats)), tuple(Confirm(w) for w in sorted(silent))


def _confirmed(state: Membership, seat: Seat, event: LeaseSeen) -> tuple[Membership, tuple[Effect, ...]]:
    """The revision that we know, once more."""
    sighting = seat.sighting.seen_again(event.asked)
    if sighting is seat.sighting:
        return state, ()
    died = not seat.dead and seat.record.status is not LeaseStatus.LEFT and sighting.expired(state.terms)
    again = replace(seat, sighting=sighting, dead=seat.dead or died)
    seats = MappingProxyType({**state.seats, event.worker: again})
    return replace(state, seats=seats), (Died(seat.record.member),) if died else ()


def _seen(state: Membership, event: LeaseSeen) -> tuple[Membership, tuple[Effect, ...]]:
    worker, record, now = event.worker, event.record, event.now
    seat = state.seats.get(worker)
    if seat is not None and record is None and not (event.expired or seat.record.status.stopped):
        return _missing(state, seat, event)
    if seat is not None and event.revision <= seat.sighting.revision:
        return _confirmed(state, seat, event) if event.revision == seat.sighting.revision else (state, ())
    # Renewals may have happened that this observer never saw: only a proof shortens the wait from now.
    latest = now + state.terms.ttl + state.terms.margin
    if record is None:
        if seat is None:
            return state, ()
        proven = event.expired or seat.record.status.stopped
        ended = _ended(state, seat.record.member, now if proven else latest)
        seats = {w: s for w, s in state.seats.items() if w != worker}
        left: tuple[Effect, ...] = () if seat.dead or seat.record.status.stopped else (Left(seat.record.member),)
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
    if before is not None and seat is not None and not changes:
        if seat.record.well and not record.well:
            changes.append(Ailing(record.member))
        elif (seat.record.well, seat.record.capacity) != (record.well, record.capacity):
            changes.append(Recovered(record.member))
    first_seen = seat.first_seen if seat is not None and seat.record.member == record.member else now
    seats = {**state.seats, worker: Seat(record, Sighting(event.revision, now), first_seen)}
    return replace(state, seats=MappingProxyType(seats), ended=ended), tuple(changes)


def _missing(state: Membership, seat: Seat, event: LeaseSeen) -> tuple[Membership, tuple[Effect, ...]]:
    """Somebody removed or damaged the record: that says nothing about its holder, who writes it again or is silent."""
    known = seat.sighting
    if seat.dead:
        return state, ()
    if seat.missing:
        return _confirmed(state, seat, event) if event.revision in (0, known.revision) else (state, ())
    stale = event.revision < known.revision if event.asked is None else event.asked < known.since
    if stale:
        return state, ()
    lost = replace(seat, missing=True, sighting=Sighting(max(event.revision, known.revision), event.now))
    return replace(state, seats=MappingProxyType({**state.seats, event.worker: lost})), ()


def _ended(state: Membership, member: Member, at: float) -> Mapping[Member, float]:
    recent = dict(list(state.ended.items())[-(_REMEMBERED - 1) :])
    return MappingProxyType({**recent, member: at})
