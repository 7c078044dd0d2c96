"""One leader at a time, with a term that only grows.

The leader's record is never deleted: a leader that resigns leaves its term in it. A single failed renewal has no effect
(docs/evidence/go-library.md#w14); leadership ends when another leader is seen or the fence says so. For a moment two
members may still believe that they lead, so every write of a leader is a CAS that carries its term.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from parti.control.lease import HeldLease, LeaseTerms, Sighting
from parti.model import Member


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """The value under the leader key; `leader` is None after a resignation."""

    term: int
    leader: Member | None
    beat: int = 0


@dataclass(frozen=True, slots=True)
class Election:
    """One member's view of the leadership."""

    me: Member
    hold: HeldLease
    former: frozenset[Member] = frozenset()
    """Earlier members of this same process; none of them leads any more."""
    leading: bool = False
    term: int = 0
    """The highest term seen, or our own when we lead."""
    known: LeaderRecord | None = None
    sighting: Sighting | None = None
    """None until the key was read once: no member campaigns against a record it has not read."""

    def may_lead(self, now: float) -> bool:
        """Checked before every decision of the leader."""
        return self.leading and self.hold.fence.allows(now)

    @property
    def leader(self) -> Member | None:
        return self.known.leader if self.known is not None else None

    @property
    def vacant(self) -> bool:
        """Certainly nobody leads: there is no record, its leader resigned, or it was this process under a former id."""
        return self.leader is None or self.leader in self.former

    @property
    def next_tick(self) -> float:
        """The latest time at which `Tick` must be sent."""
        if self.leading:
            return min(self.hold.renew_at, self.hold.fence.deadline)
        if self.sighting is None or self.vacant:
            return self.hold.renew_at
        return max(self.hold.renew_at, self.sighting.since + self.hold.terms.ttl + self.hold.terms.margin)


def candidate(me: Member, *, terms: LeaseTerms | None = None, former: Iterable[Member] = ()) -> Election:
    """A member that knows nothing about the leader yet."""
    return Election(me=me, hold=HeldLease(terms or LeaseTerms()), former=frozenset(former))


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """The record under the leader key, from a watch or a read; None with revision 0 when it does not exist."""

    now: float
    record: LeaderRecord | None
    revision: int
    floor: int = 0
    """The highest term found in any other record: a recreated bucket must not restart the terms."""


@dataclass(frozen=True, slots=True)
class Written:
    """Our record is stored in the bucket."""

    now: float
    record: LeaderRecord
    revision: int


@dataclass(frozen=True, slots=True)
class NotWritten:
    """Refused by CAS, or the outcome is unknown."""

    now: float


@dataclass(frozen=True, slots=True)
class Resign:
    now: float


Event = Tick | LeaderSeen | Written | NotWritten | Resign


@dataclass(frozen=True, slots=True)
class ReadLeader:
    pass


@dataclass(frozen=True, slots=True)
class WriteLeader:
    """CAS: create when `expected` is 0."""

    record: LeaderRecord
    expected: int


@dataclass(frozen=True, slots=True)
class Elected:
    term: int


@dataclass(frozen=True, slots=True)
class Deposed:
    term: int
    reason: str


Effect = ReadLeader | WriteLeader | Elected | Deposed
Step = tuple[Election, tuple[Effect, ...]]


def step(state: Election, event: Event) -> Step:
    """The next state and the effects to perform."""
    if state.leading and not state.hold.fence.allows(event.now):
        follower, effects = _deposed(state, "the leader's lease ran out by our own clock")
        later, more = step(follower, event)
        return later, (*effects, *more)
    match event:
        case Tick(now):
            return _tick(state, now)
        case LeaderSeen(now, record, revision, floor):
            if (
                state.leading and floor > state.term
            ):  # the record of the terms before ours was lost: start with a higher one
                follower, effects = _deposed(state, f"term {floor} was known already")
                behind = replace(follower, term=floor, hold=state.hold.failed(now))
                later, more = _seen(behind, now, record, revision)
                return later, (*effects, *more)
            return _seen(replace(state, term=max(state.term, floor)), now, record, revision)
        case Written(now, record, revision):
            return _won(state, now, record, revision) if record.leader == state.me else (state, ())
        case NotWritten(now):
            return replace(state, hold=state.hold.failed(now + state.hold.terms.renew_every / 4)), (ReadLeader(),)
        case Resign(now):
            if not state.leading:
                return state, ()
            hold = state.hold.sending(now)
            resigned = LeaderRecord(state.term, None, hold.beat)
            return (
                replace(state, leading=False, hold=replace(hold, waiting=False, renew_at=now + hold.terms.ttl)),
                (WriteLeader(resigned, hold.revision), Deposed(state.term, "resigned")),
            )
        case _:
            assert_never(event)


def _tick(state: Election, now: float) -> Step:
    if not state.hold.due(now):
        return state, ()
    if state.leading:
        return _write(state, state.term, now)
    if state.sighting is None:
        return replace(state, hold=state.hold.failed(now + state.hold.terms.renew_every)), (ReadLeader(),)
    if not state.vacant and state.leader != state.me and not state.sighting.overdue(now, state.hold.terms):
        return state, ()
    return _write(replace(state, hold=replace(state.hold, revision=state.sighting.revision)), state.term + 1, now)


def _write(state: Election, term: int, now: float) -> Step:
    hold = state.hold.sending(now)
    return replace(state, hold=hold), (WriteLeader(LeaderRecord(term, state.me, hold.beat), hold.revision),)


def _seen(state: Election, now: float, record: LeaderRecord | None, revision: int) -> Step:
    vanished = record is None and revision == 0  # read from the bucket's leader: there is no record, whatever was there
    if state.sighting is not None and revision < state.sighting.revision and not vanished:
        return state, ()
    if state.sighting is None or revision > state.sighting.revision or (vanished and state.known is not None):
        ours = state.leader == state.me
        state = replace(state, sighting=Sighting(revision, now), known=record)
        if state.vacant and not ours and not state.hold.waiting:
            state = replace(state, hold=state.hold.failed(now))  # nobody leads: campaign at the next tick
    if record is None:
        # The record was deleted or damaged. A leader rewrites it by CAS; if another member is faster, that one leads.
        lost = replace(state.hold, revision=revision, renew_at=now) if state.leading else state.hold
        return replace(state, hold=lost), ()
    if record.leader == state.me:
        return _won(state, now, record, revision)
    state = replace(state, term=max(state.term, record.term))
    if state.leading:
        return _deposed(state, f"{record.leader} leads with term {record.term}")
    return state, ()


def _won(state: Election, now: float, record: LeaderRecord, revision: int) -> Step:
    hold = state.hold.confirmed(record.beat, revision)
    if not hold.fence.allows(now) or record.term < state.term:
        return replace(state, hold=hold), ()
    led = replace(state, hold=hold, leading=True, term=record.term, known=record, sighting=Sighting(revision, now))
    return led, () if state.leading and state.term == record.term else (Elected(record.term),)


def _deposed(state: Election, reason: str) -> Step:
    return replace(state, leading=False), (Deposed(state.term, reason),)
