"""A stable worker id: at most one process acts under it at any time, and a restarted process gets it back.

`step(identity, event) -> (identity, effects)`. The agent performs the effects, feeds back the results, and sends `Tick`
when `next_tick` says so. Losing the id is decided here, by the holder's own clock: `IdFenced` comes at the deadline
even when NATS is unreachable.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, assert_never

from parti.control.lease import NEVER, HeldLease, LeaseTerms, Sighting
from parti.errors import ConfigError
from parti.model import Claim, Member, WorkerId
from parti.subjects import validate_token

_REMEMBERED_LIVES: Final = 16  # older lives are forgotten: their records are waited out like any other


class LeaseStatus(StrEnum):
    """What the holder of an id requests from the other members."""

    ACTIVE = "active"
    LEAVING = "leaving"
    """Move my partitions away, then I stop: no crash, no waiting window."""
    RESTING = "resting"
    """I have stopped cleanly and will return: keep my partitions for one TTL. Any process may take the id over."""
    LEFT = "left"
    """I have stopped cleanly and will not return; the id is free. Written, not deleted: markers confuse watchers."""

    @property
    def stopped(self) -> bool:
        """The member no longer acts, whatever its lease says."""
        return self in (LeaseStatus.RESTING, LeaseStatus.LEFT)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The value under one worker id."""

    member: Member
    status: LeaseStatus = LeaseStatus.ACTIVE
    beat: int = 0
    instance: str = ""
    """A name that survives restarts (a pod of a StatefulSet); its next process may take the id over at once."""
    clean: bool = True
    """The previous holder of the id has certainly stopped."""
    seen: int = 0
    """The member has read everything in the bucket up to this revision, and holds nothing whose claim was lost by then.
    Workers of an older parti do not set it (0)."""
    capacity: int = 0
    """Maximum number of partitions; 0 means no limit."""
    well: bool = True
    """False: give me no partitions, and move mine away."""


@dataclass(frozen=True, slots=True)
class IdPool:
    """All available ids: `<prefix>-<first>` to `<prefix>-<last>`, inclusive. One id is a valid pool.

    See docs/evidence/go-library.md#w18.
    """

    prefix: str = "worker"
    first: int = 0
    last: int = 99

    def __post_init__(self) -> None:
        validate_token(self.prefix, what="worker id prefix")
        if not 0 <= self.first <= self.last:
            raise ConfigError(f"worker ids from {self.first} to {self.last}: first must be >= 0 and <= last")

    def ids(self) -> tuple[WorkerId, ...]:
        return tuple(WorkerId(f"{self.prefix}-{n}") for n in range(self.first, self.last + 1))


class Phase(StrEnum):
    """The state of this process with respect to its id."""

    SEEKING = "seeking"
    HELD = "held"
    STOPPED = "stopped"
    """Lost, rested or released: this nonce never acts again."""


@dataclass(frozen=True, slots=True)
class Identity:
    """State of one process while it seeks an id, and while it holds it."""

    nonce: str
    """Fresh and random for each process."""
    hold: HeldLease
    pool: IdPool = field(default_factory=IdPool)
    instance: str = ""
    former: Mapping[Member, float] = field(default_factory=lambda: MappingProxyType({}))
    """Earlier members of this same process: fenced, and they will not act any more. Each with the time on our clock
    from which its last effects, and any previous holder of its id, have certainly ended."""
    crowded: bool = False
    """Another process got the id that we wanted."""
    phase: Phase = Phase.SEEKING
    worker: WorkerId | None = None
    status: LeaseStatus = LeaseStatus.ACTIVE
    clean: bool = True
    clean_at: float = NEVER
    """When previous holders have stopped at the latest, if they had not when we took the id."""
    seen: int = 0
    capacity: int = 0
    well: bool = True
    """The value for the next record; see `LeaseRecord`."""
    highest: int = 0
    """The highest revision of any record of ours in the bucket: a lower one means another bucket."""
    sightings: Mapping[WorkerId, Sighting] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def member(self) -> Member | None:
        return Member(self.worker, self.nonce) if self.worker is not None and self.phase is Phase.HELD else None

    def afterlife(self, quiet_at: float = NEVER) -> dict[Member, float]:
        """`former` for the next identity of this process. Call it only when nothing runs under this nonce any more.

        `quiet_at`: from then on no effect started under it can still be in flight.
        """
        if self.worker is None:
            return dict(self.former)
        before = NEVER if self.clean else self.clean_at if self.clean_at > NEVER else float("inf")
        lives = {**self.former, Member(self.worker, self.nonce): max(before, quiet_at)}
        return dict(list(lives.items())[-_REMEMBERED_LIVES:])

    def undisputed(self, claims: Iterable[Claim]) -> Identity:
        """No claim names an earlier process of our id: such a process owns nothing and need not be waited for.

        Only with the complete set of claims, none of them lost. Without this, a fleet that is stopped within the first
        TTL of its life waits one TTL when it is started again.
        """
        mine = self.member
        if mine is None:
            return self
        for claim in claims:
            owner = claim.owner
            if claim.lost or (owner is not None and owner.worker == mine.worker and owner != mine):
                return self
        return replace(self, clean=True)

    def may_act(self, now: float) -> bool:
        """Checked before every pull, effect and position write."""
        return self.phase is Phase.HELD and self.hold.fence.allows(now)

    @property
    def next_tick(self) -> float:
        """The latest time at which `Tick` must be sent."""
        return min(self.hold.renew_at, self.hold.fence.deadline) if self.phase is Phase.HELD else self.hold.renew_at


def seeking(
    nonce: str,
    *,
    terms: LeaseTerms | None = None,
    pool: IdPool | None = None,
    instance: str = "",
    capacity: int = 0,
    former: Mapping[Member, float] | None = None,
) -> Identity:
    """A process that wants an id."""
    return Identity(
        nonce=nonce,
        hold=HeldLease(terms or LeaseTerms()),
        pool=pool or IdPool(),
        instance=instance,
        capacity=capacity,
        former=MappingProxyType(dict(former or {})),
    )


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class PoolRead:
    """The whole bucket as read from its leader: id -> (record, revision). Absent ids are free."""

    now: float
    asked: float
    """When the read was sent."""
    leases: Mapping[WorkerId, tuple[LeaseRecord | None, int]]
    """None for an unreadable record: it has a holder, which rewrites it if it is still alive."""


@dataclass(frozen=True, slots=True)
class OwnRead:
    """The record under our own id, read from the leader after a refusal or an unknown outcome."""

    now: float
    record: LeaseRecord | None
    revision: int


@dataclass(frozen=True, slots=True)
class Written:
    now: float
    beat: int
    revision: int


@dataclass(frozen=True, slots=True)
class NotWritten:
    """Refused by CAS, or the outcome is unknown: the bucket's content decides, never a guess.

    See docs/evidence/go-library.md#w6.
    """

    now: float


@dataclass(frozen=True, slots=True)
class Leave:
    """Ask the other members to take our partitions; continue until they have."""

    now: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Everything is drained and its cursors are stored. A member that will return keeps its partitions for one TTL."""

    now: float
    returning: bool = False


Event = Tick | PoolRead | OwnRead | Written | NotWritten | Leave | Stop


@dataclass(frozen=True, slots=True)
class ReadPool:
    pass


@dataclass(frozen=True, slots=True)
class ReadOwn:
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class WriteLease:
    """CAS: create when `expected` is 0."""

    worker: WorkerId
    record: LeaseRecord
    expected: int


@dataclass(frozen=True, slots=True)
class IdGranted:
    member: Member


@dataclass(frozen=True, slots=True)
class IdFenced:
    """Stop everything now: no effect, no ack, no position write. Then seek a new id with a new nonce."""

    member: Member
    reason: str


Effect = ReadPool | ReadOwn | WriteLease | IdGranted | IdFenced
Step = tuple[Identity, tuple[Effect, ...]]


def step(state: Identity, event: Event) -> Step:
    """The next state and the effects to perform. After `IdFenced` no later event of this nonce causes a write."""
    if state.phase is Phase.STOPPED:
        return state, ()
    if state.phase is Phase.HELD and not state.hold.fence.allows(event.now):
        return _fenced(state, "the lease ran out by our own clock")
    match event:
        case Tick(now):
            if not state.hold.due(now):
                return state, ()
            if state.phase is Phase.HELD:
                return _write(state, now)
            return replace(state, hold=state.hold.failed(now + state.hold.terms.renew_every / 2)), (ReadPool(),)
        case PoolRead():
            return _seek(state, event)
        case OwnRead(now, record, revision):
            return _own_read(state, now, record, revision)
        case Written(now, beat, revision):
            if state.phase is Phase.HELD and revision < state.highest:
                return _fenced(state, "the bucket was recreated")
            hold = state.hold.confirmed(beat, revision)
            state = replace(state, highest=revision)
            if state.phase is Phase.HELD:
                return replace(state, hold=hold), ()
            if not hold.fence.allows(now):
                return _fenced(state, "the answer to our claim came after its lease had run out")
            clean_at = now + hold.terms.ttl + hold.terms.margin
            held = replace(state, hold=hold, phase=Phase.HELD, clean_at=clean_at, sightings=MappingProxyType({}))
            assert held.member is not None
            return held, (IdGranted(held.member),)
        case NotWritten(now):
            waiting = replace(state, hold=state.hold.failed(now + state.hold.terms.renew_every / 2))
            return waiting, (ReadOwn(state.worker),) if state.worker is not None else (ReadPool(),)
        case Leave(now):
            return _write(replace(state, status=LeaseStatus.LEAVING), now) if state.phase is Phase.HELD else (state, ())
        case Stop(now, returning):
            if state.phase is not Phase.HELD:
                return replace(state, phase=Phase.STOPPED), ()
            status = LeaseStatus.RESTING if returning else LeaseStatus.LEFT
            stopped, effects = _write(replace(state, status=status), now)
            return replace(stopped, phase=Phase.STOPPED), effects
        case _:
            assert_never(event)


def _write(state: Identity, now: float) -> Step:
    assert state.worker is not None
    hold = state.hold.sending(now)
    clean = state.clean or (state.phase is Phase.HELD and now >= state.clean_at)
    record = LeaseRecord(
        Member(state.worker, state.nonce),
        state.status,
        hold.beat,
        state.instance,
        clean,
        state.seen,
        state.capacity,
        state.well,
    )
    return replace(state, hold=hold), (WriteLease(state.worker, record, hold.revision),)


def _seek(state: Identity, event: PoolRead) -> Step:
    """Try the best id: our own from before, then one that rests, then the lowest free or expired one.

    After an outage the record still names our former nonce. No other process can know that it has stopped, but we do:
    it was this process. So the record we write is clean, and the partitions return to us without waiting for a TTL.
    """
    if state.phase is not Phase.SEEKING or state.hold.waiting:
        return state, ()
    now, terms = event.now, state.hold.terms
    sightings: dict[WorkerId, Sighting] = {}
    found: list[tuple[int, WorkerId, int, bool]] = []
    for worker in state.pool.ids():
        record, revision = event.leases.get(worker, (None, 0))
        seen = state.sightings.get(worker)
        if revision:
            known = seen is not None and seen.revision == revision
            sightings[worker] = seen.seen_again(event.asked) if known and seen else Sighting(revision, now)
        expired = not revision or sightings[worker].expired(terms)
        if record is not None and record.member in state.former:
            rank, clean = 0, expired or now >= state.former[record.member]
        elif record is not None and state.instance and record.instance == state.instance:
            rank, clean = 0, expired or (record.status.stopped and record.clean)
        elif record is not None and record.status is LeaseStatus.RESTING:
            rank, clean = 1, record.clean
        elif record is None:
            if not expired:
                continue
            rank, clean = 2, False  # we never saw the previous holder; its claims wait one TTL, if there are any
        elif expired or record.status is LeaseStatus.LEFT:
            rank, clean = 2, expired or record.clean
        else:
            continue
        found.append((rank, worker, revision, clean))
    state = replace(state, sightings=MappingProxyType(sightings))
    if not found:
        return replace(state, worker=None, hold=state.hold.failed(now + terms.renew_every / 2)), ()
    best = min(rank for rank, *_ in found)
    alike = [candidate for candidate in found if candidate[0] == best]
    # When many start at once only one can get the lowest id: a process that lost picks another by its nonce.
    _, worker, revision, clean = alike[zlib.crc32(state.nonce.encode()) % len(alike) if state.crowded else 0]
    hold = replace(state.hold, revision=revision)
    return _write(replace(state, worker=worker, hold=hold, clean=clean), now)


def _own_read(state: Identity, now: float, record: LeaseRecord | None, revision: int) -> Step:
    ours = record is not None and record.member.nonce == state.nonce
    if state.phase is Phase.SEEKING:
        # An outdated answer: we already try another id, and the answer to that write decides.
        if state.hold.waiting or (record is not None and ours and record.member.worker != state.worker):
            return state, ()
        if ours and record is not None:
            return step(state, Written(now, record.beat, revision))
        return replace(state, worker=None, crowded=True, hold=state.hold.failed(now)), (ReadPool(),)
    if record is None:
        # It was deleted or damaged. No other process took the id, or its record would be here: by CAS it is still ours.
        if state.hold.waiting:
            return state, ()
        return _write(replace(state, hold=replace(state.hold, revision=revision)), now)
    if not ours:
        return _fenced(state, "another process holds the id")
    return replace(state, hold=state.hold.confirmed(record.beat, revision)), ()


def _fenced(state: Identity, reason: str) -> Step:
    assert state.worker is not None
    return replace(state, phase=Phase.STOPPED), (IdFenced(Member(state.worker, state.nonce), reason),)
