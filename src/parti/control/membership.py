"""The current members, identified by process and never only counted.

A member is *gone* only when it has certainly stopped by itself: one TTL and a margin after its last renewal was seen,
confirmed by a read that finds no later one; or when its record says that it stopped cleanly. Only then may its
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

_REMEMBERED: Final = 1000  # past members whose end is known exactly; a forgotten one only waits one TTL again


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker id and its current holder."""

    record: LeaseRecord
    sighting: Sighting
    first_seen: float
    """When this member, not just this revision, was first seen."""
    asked_at: float = NEVER
    """When a confirming read was last requested."""
    dead: bool = False
    missing: bool = False
    """Its record was deleted or damaged. Its holder may rewrite it, so only confirmed silence ends it."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One observer's view; every worker keeps one, so that a new leader already knows which members are alive."""

    terms: LeaseTerms
    started: float
    """When this observer had read the whole bucket for the first time."""
    seats: Mapping[WorkerId, Seat] = field(default_factory=lambda: MappingProxyType({}))
    ended: Mapping[Member, float] = field(default_factory=lambda: MappingProxyType({}))
    """Members that no longer hold their id -> when they have certainly stopped."""

    def active(self) -> dict[WorkerId, Member]:
        """Members that can be given partitions."""
        return {
            worker: seat.record.member
            for worker, seat in self.seats.items()
            if not seat.dead and seat.record.status is LeaseStatus.ACTIVE
        }

    def keeping(self) -> frozenset[WorkerId]:
        """Ids that keep their partitions: active ones, and those that rest for a restart."""
        return frozenset(
            worker
            for worker, seat in self.seats.items()
            if not seat.dead and seat.record.status in (LeaseStatus.ACTIVE, LeaseStatus.RESTING)
        )

    def takers(self) -> dict[WorkerId, int]:
        """Ids that can be assigned partitions, with the maximum number (0: no limit): kept ones that report `well`."""
        return {
            worker: self.seats[worker].record.capacity for worker in self.keeping() if self.seats[worker].record.well
        }

    def healthy(self, member: Member) -> bool:
        """Whether exactly this process still holds its id, as far as we know."""
        seat = self.seats.get(member.worker)
        return seat is not None and not seat.dead and seat.record.member == member and not seat.record.status.stopped

    def know(self, revision: int, now: float) -> bool:
        """Every process that may still act has reported that it read everything up to this revision, and that it holds
        nothing whose claim was lost up to there."""
        latest = self.terms.ttl + self.terms.margin
        if now < self.started + latest:
            return False  # a process may still act whose record was gone before this observer started
        if any(now < until for until in self.ended.values()):
            return False
        acting = [s for s in self.seats.values() if not s.dead and not s.record.status.stopped]
        return all(not seat.missing and seat.record.seen >= revision for seat in acting)

    def gone(self, member: Member, now: float) -> bool:
        """True only when this process has certainly stopped acting; required before a takeover."""
        seat = self.seats.get(member.worker)
        if seat is not None and seat.record.member == member:
            return seat.record.status.stopped or seat.sighting.expired(self.terms)
        # Its id has another holder or none: it cannot renew, and its lease runs out. If we never saw it hold the id,
        # its last renewal came before the first record we saw there. The current holder may know more: so a fleet that
        # was stopped cleanly continues at once when it is started again.
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
    """When the read from the bucket's leader that returned this was sent; None for a watch, which proves nothing."""
    expired: bool = False
    """The server deleted the key by its own TTL, which proves that its holder's deadline has passed."""


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
    """Asks to move its partitions away; still processes them meanwhile."""

    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    """Released its id."""

    member: Member


@dataclass(frozen=True, slots=True)
class Died:
    """No renewal was seen for a TTL and a margin."""

    member: Member


@dataclass(frozen=True, slots=True)
class Ailing:
    """Reports itself unhealthy: it gets nothing, and its partitions move away while it can still hand them over."""

    member: Member


@dataclass(frozen=True, slots=True)
class Recovered:
    """Is healthy again, or has changed its capacity."""

    member: Member


Change = Joined | Restarted | Leaving | Left | Died | Ailing | Recovered


@dataclass(frozen=True, slots=True)
class Confirm:
    """Read this lease from the bucket's leader, and answer with `LeaseSeen(asked=...)`."""

    worker: WorkerId


Effect = Change | Confirm


def step(state: Membership, event: Event) -> tuple[Membership, tuple[Effect, ...]]:
    """The next view, the changes, and the reads to perform. An outdated sighting changes nothing."""
    match event:
        case LeaseSeen():
            return _seen(state, event)
        case Tick(now):
            return _ask(state, now)
        case _:
            assert_never(event)


def _ask(state: Membership, now: float) -> tuple[Membership, tuple[Effect, ...]]:
    """No renewal was seen for too long: request reads that confirm it."""
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
    """The known revision was seen again."""
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
    if record is None:
        return _removed(state, seat, event) if seat is not None else (state, ())
    if seat is not None and event.revision <= seat.sighting.revision:
        return _confirmed(state, seat, event) if event.revision == seat.sighting.revision else (state, ())
    # This observer may have missed renewals: only a proof shortens the wait that starts now.
    latest = now + state.terms.ttl + state.terms.margin
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


def _removed(state: Membership, seat: Seat, event: LeaseSeen) -> tuple[Membership, tuple[Effect, ...]]:
    """The record is gone. By the server's TTL, or after its holder had stopped, that ends the member. A deletion or
    damage by another party proves nothing about its holder, which rewrites it or stays silent."""
    known = seat.sighting
    if seat.missing and not event.expired:
        return _confirmed(state, seat, event) if event.revision in (0, known.revision) else (state, ())
    if event.revision < known.revision if event.asked is None else event.asked < known.since:
        return state, ()  # outdated
    if event.expired or seat.record.status.stopped:
        seats = MappingProxyType({w: s for w, s in state.seats.items() if w != event.worker})
        ended = _ended(state, seat.record.member, event.now)
        over = seat.dead or seat.record.status is LeaseStatus.LEFT
        return replace(state, seats=seats, ended=ended), () if over else (Left(seat.record.member),)
    if seat.dead:
        return state, ()
    lost = replace(seat, missing=True, sighting=Sighting(max(event.revision, known.revision), event.now))
    return replace(state, seats=MappingProxyType({**state.seats, event.worker: lost})), ()


def _ended(state: Membership, member: Member, at: float) -> Mapping[Member, float]:
    recent = dict(list(state.ended.items())[-(_REMEMBERED - 1) :])
    return MappingProxyType({**recent, member: at})
