"""The leader's loop: bring claims in line with the assignment, and the assignment in line with who is here.

A new leader adopts the stored assignment and every claim as it stands, resumes what is moving, and repairs only what is
broken. Nothing is taken from a member without its consent before that member is certainly gone. Every write is a CAS on
the revision the decision was based on, so a deposed leader's decision cannot land on top of a newer one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import assert_never

from parti.control import claims, handoff
from parti.control.assign import Sticky, Strategy, owners_of
from parti.control.handoff import Finished, Handoff, HandoffTerms, Nudge, StageDone
from parti.control.membership import Change, Died, Leaving, Left, Membership
from parti.control.windows import Pacing, Reason, Windows
from parti.errors import ConfigError
from parti.model import Assignment, Claim, ClaimState, Layout, Member, Partition, PartitionId, Retention, WorkerId


@dataclass(frozen=True, slots=True)
class Rules:
    """How this namespace is run."""

    layout: Layout = Layout.PER_WORKER
    retention: Retention = Retention.LIMITS
    windows: Windows = field(default_factory=Windows)
    handoff: HandoffTerms = field(default_factory=HandoffTerms)
    parallel: int = 256  # moves under way at once; KV takes 17-22k writes/s, a move needs five
    retry: float = 0.5  # seconds before a lost or refused write is decided anew

    def __post_init__(self) -> None:
        if self.parallel < 1 or self.retry <= 0:
            raise ConfigError("parallel must be at least 1 and retry positive")


@dataclass(frozen=True, slots=True)
class Leader:
    """All that a leader knows. Lives as long as one term."""

    term: int
    membership: Membership
    rules: Rules = field(default_factory=Rules)
    strategy: Strategy = field(default_factory=Sticky)
    partitions: Mapping[PartitionId, Partition] = field(default_factory=lambda: MappingProxyType({}))
    assignment: Assignment = field(default_factory=Assignment)
    assignment_revision: int = 0
    claims: Mapping[PartitionId, tuple[Claim, int]] = field(default_factory=lambda: MappingProxyType({}))
    moving: Mapping[PartitionId, Handoff] = field(default_factory=lambda: MappingProxyType({}))
    pacing: Pacing = field(default_factory=Pacing)
    busy: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Key or question in flight -> when to stop waiting for its answer."""
    open: Mapping[PartitionId, None] | None = None
    """Partitions that are not where they belong, the only ones to look at; None after a change that concerns all."""

    @property
    def converged(self) -> bool:
        """Every partition there is rests with the worker that the assignment names."""
        return len(self.assignment.owners) == len(self.partitions) and at_rest(
            self.assignment, self.claims, self.membership
        )


def at_rest(assignment: Assignment, claims: Mapping[PartitionId, tuple[Claim, int]], membership: Membership) -> bool:
    """Every partition is, caught up, with the process that now runs under the id the assignment names.

    Not with one before it that left its claims behind: its successor has to take them over first.
    """
    for partition, worker in assignment.owners.items():
        claim, _ = claims.get(partition, (Claim(partition), 0))
        if claim.state is not ClaimState.STABLE or claim.owner is None:
            return False
        if claim.owner.worker != worker or not membership.healthy(claim.owner):
            return False
    return True


def elect(
    term: int,
    now: float,
    membership: Membership,
    *,
    partitions: tuple[Partition, ...],
    stored: Assignment | None,
    stored_revision: int,
    claims: Mapping[PartitionId, tuple[Claim, int]],
    rules: Rules | None = None,
    strategy: Strategy | None = None,
) -> Leader:
    """Adopt what is stored (crash recovery by scan): claims that are moving are watched on from where they are."""
    rules = rules or Rules()
    moving = {p: handoff.begin(c, now, rules.handoff) for p, (c, _) in claims.items() if c.moving}
    return Leader(
        term=term,
        membership=membership,
        rules=rules,
        strategy=strategy or Sticky(),
        partitions=MappingProxyType({p.id: p for p in partitions}),
        assignment=stored or Assignment(),
        assignment_revision=stored_revision,
        claims=MappingProxyType(dict(claims)),
        moving=MappingProxyType(moving),
        pacing=Pacing(rules.windows).ask(now, Reason.COLD_START if stored is None else Reason.ADOPT),
    )


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


@dataclass(frozen=True, slots=True)
class MembersChanged:
    now: float
    membership: Membership
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class PartitionsChanged:
    now: float
    partitions: tuple[Partition, ...]
    refresh: bool = False


@dataclass(frozen=True, slots=True)
class ClaimsSeen:
    """Newer revisions of claims, batched: the watch delivers thousands at a time."""

    now: float
    claims: tuple[tuple[Claim, int], ...]


@dataclass(frozen=True, slots=True)
class AssignmentSeen:
    now: float
    assignment: Assignment
    revision: int


@dataclass(frozen=True, slots=True)
class PositionsRead:
    """How far a gone member got: its checkpoint, and the ack floor by partition (0 where it is unknown).

    Read from the leader of the bucket and of the stream, after the member was gone.
    """

    now: float
    member: Member
    checkpoint: Mapping[PartitionId, int]
    floor: Mapping[PartitionId, int]


Event = Tick | MembersChanged | PartitionsChanged | ClaimsSeen | AssignmentSeen | PositionsRead


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    assignment: Assignment
    expected: int


@dataclass(frozen=True, slots=True)
class WriteClaim:
    """CAS: create when `expected` is 0. Confirmed or refused, the agent feeds back what the bucket holds."""

    claim: Claim
    expected: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReadPositions:
    member: Member
    partitions: tuple[PartitionId, ...]
    floors: bool
    """False on a work queue: what is left there is what is to be done, and no floor is needed."""


Effect = WriteAssignment | WriteClaim | ReadPositions | Nudge | StageDone | Finished
Step = tuple[Leader, tuple[Effect, ...]]


def step(state: Leader, event: Event) -> Step:
    """The next state and what to do. Call `Tick` at least every `rules.retry` seconds."""
    match event:
        case Tick(now):
            return _act(state, now)
        case MembersChanged(now, membership, changes):
            pacing = state.pacing
            for change in changes:
                pacing = pacing.ask(now, _reason(change))
            seen = replace(state, membership=membership, pacing=pacing, open=None if changes else state.open)
            return _act(seen, now) if changes else (seen, ())  # renewals are the rule, and change no decision
        case PartitionsChanged(now, partitions, refresh):
            known = MappingProxyType({p.id: p for p in partitions})
            if known == state.partitions and not refresh:
                return state, ()
            pacing = state.pacing.ask(now, Reason.REFRESH if known == state.partitions else Reason.PARTITIONS)
            return _act(replace(state, partitions=known, pacing=pacing), now)
        case ClaimsSeen(now, batch):
            return _claims_seen(state, now, batch)
        case AssignmentSeen(now, assignment, revision):
            if revision <= state.assignment_revision:
                return state, ()
            pacing = state.pacing.applied(now) if assignment.term == state.term else state.pacing.failed(now)
            busy = _without(state.busy, "assignment")
            seen_state = replace(
                state, assignment=assignment, assignment_revision=revision, pacing=pacing, busy=busy, open=None
            )
            return _act(seen_state, now)
        case PositionsRead():
            return _take_over(state, event)
        case _:
            assert_never(event)


def _reason(change: Change) -> Reason:
    if isinstance(change, Died):
        return Reason.EMERGENCY
    return Reason.LEAVE if isinstance(change, Leaving | Left) else Reason.PLANNED_SCALE


def _claims_seen(state: Leader, now: float, seen: tuple[tuple[Claim, int], ...]) -> Step:
    known = dict(state.claims)
    moving = dict(state.moving)
    busy = dict(state.busy)
    touched: dict[PartitionId, None] = {}
    effects: list[Effect] = []
    for claim, revision in seen:
        partition = claim.partition
        if partition in known and revision <= known[partition][1]:
            continue
        known[partition] = (claim, revision)
        busy.pop(partition, None)
        touched[partition] = None
        watched = moving.get(partition)
        if watched is None:
            if claim.moving:
                moving[partition] = handoff.begin(claim, now, state.rules.handoff)
            continue
        after, said = handoff.step(watched, handoff.Changed(now, claim))
        effects += [e for e in said if isinstance(e, StageDone | Finished)]
        if claim.moving:
            moving[partition] = after
        else:
            del moving[partition]
    updated = replace(
        state,
        claims=MappingProxyType(known),
        moving=MappingProxyType(moving),
        busy=MappingProxyType(busy),
        open=None if state.open is None else MappingProxyType({**state.open, **touched}),
    )
    later, more = _act(updated, now)
    return later, (*effects, *more)


def _act(state: Leader, now: float) -> Step:
    """Write the assignment when it is due, then move claims towards the one that is stored."""
    if any(until <= now for until in state.busy.values()):
        state = replace(state, busy=MappingProxyType({k: until for k, until in state.busy.items() if until > now}))
    state, effects = _assign(state, now)
    state, more = _watch(state, now)
    state, yet_more = _repair(state, now)
    return state, (*effects, *more, *yet_more)


def _assign(state: Leader, now: float) -> Step:
    workers = sorted(state.membership.keeping())
    if "assignment" in state.busy:
        return state, ()
    if state.pacing.writing is not None:
        state = replace(state, pacing=state.pacing.failed(now))
    if not state.pacing.due(now, moving=bool(state.moving)) or not workers:
        return state, ()
    if state.assignment.term > state.term:
        return state, ()  # there is a newer leader: whatever we think, it is out of date
    partitions = [state.partitions[p] for p in sorted(state.partitions)]
    owners = owners_of(state.strategy.assign(workers, partitions, state.assignment.owners))
    weights = {p.id: p.weight for p in partitions if p.weight != 1}
    reason = state.pacing.reason or Reason.REFRESH
    same = (owners, weights) == (dict(state.assignment.owners), dict(state.assignment.weights))
    state = replace(state, pacing=state.pacing.sent())
    if same and state.assignment.term == state.term:
        return replace(state, pacing=state.pacing.applied(now)), ()
    desired = Assignment(
        term=state.term,
        version=state.assignment.version + 1,
        reason=str(reason),
        owners=MappingProxyType(owners),
        weights=MappingProxyType(weights),
    )
    return _busy(state, now, "assignment"), (WriteAssignment(desired, state.assignment_revision),)


def _watch(state: Leader, now: float) -> Step:
    """Timeouts of what is moving."""
    if not state.moving:
        return state, ()
    effects: list[Effect] = []
    written: list[str] = []
    moving = dict(state.moving)
    members = state.membership
    for partition, watched in state.moving.items():
        claim, revision = state.claims[partition]
        if partition in state.busy:
            continue
        tick = handoff.Tick(
            now,
            state.term,
            owner_healthy=claim.owner is not None and members.healthy(claim.owner),
            pending_healthy=claim.pending is None or members.healthy(claim.pending),
            previous_healthy=claim.previous not in (None, claim.owner) and members.healthy(claim.previous),
        )
        after, said = handoff.step(watched, tick)
        moving[partition] = after
        for effect in said:
            if isinstance(effect, handoff.Propose):
                effects.append(WriteClaim(effect.claim, revision, effect.reason))
                written.append(partition)
            else:
                effects.append(effect)
    return _busy(replace(state, moving=MappingProxyType(moving)), now, *written), tuple(effects)


def _repair(state: Leader, now: float) -> Step:
    """Give every partition to the member that the stored assignment names, as far as its claim allows."""
    if state.assignment.term != state.term:
        return state, ()  # our own assignment is not stored yet: nothing is decided
    active = state.membership.active()
    members = state.membership
    effects: list[Effect] = []
    written: list[str] = []
    still: dict[PartitionId, None] = {}
    orphans: dict[Member, list[PartitionId]] = {}
    in_flight = sum(1 for key in state.busy if key in state.claims and key not in state.moving)
    room = state.rules.parallel - len(state.moving) - in_flight
    for partition in {**state.assignment.owners, **state.claims} if state.open is None else state.open:
        worker = state.assignment.owners.get(partition)
        to = active.get(worker) if worker is not None else None
        claim, revision = state.claims.get(partition, (Claim(partition), 0))
        owner = claim.owner
        healthy = owner is not None and members.healthy(owner)
        if claim.state is ClaimState.STABLE and healthy and owner == to:
            continue
        if claim.state is ClaimState.UNASSIGNED and worker is None:
            continue
        still[partition] = None
        if partition in state.busy or (claim.state is ClaimState.COMMIT and not claim.accepted):
            continue  # decided already, or supervised until it is accepted, rolled back or unassigned
        if owner is not None and not healthy:
            if members.gone(owner, now) and (to is not None or not _awaited(state, worker)):
                orphans.setdefault(owner, []).append(partition)
        elif claim.state is ClaimState.UNASSIGNED:
            if to is not None:
                effects.append(WriteClaim(claims.assign(claim, to, term=state.term), revision, "assigned"))
                written.append(partition)
        elif claim.state is ClaimState.STABLE and room > 0 and (to is not None or worker is None):
            effects.append(WriteClaim(claims.prepare(claim, to, term=state.term), revision, "moved"))
            written.append(partition)
            room -= 1
    state = replace(state, open=MappingProxyType(still))
    floors = state.rules.retention is not Retention.WORKQUEUE
    for member, lost in orphans.items():
        question = f"positions {member}"
        if question not in state.busy:
            effects.append(ReadPositions(member, tuple(lost), floors))
            written.append(question)
    return _busy(state, now, *written), tuple(effects)


def _awaited(state: Leader, worker: WorkerId | None) -> bool:
    """A worker that rests for a restart keeps its partitions until its time is up."""
    return worker is not None and worker in state.membership.keeping()


def _take_over(state: Leader, event: PositionsRead) -> Step:
    """The owner is gone for certain, and we know how far it got."""
    now, member = event.now, event.member
    state = replace(state, busy=_without(state.busy, f"positions {member}"))
    if not state.membership.gone(member, now) or state.assignment.term != state.term:
        return state, ()
    active = state.membership.active()
    effects: list[Effect] = []
    written: list[str] = []
    for partition in sorted(event.checkpoint.keys() | event.floor.keys()):
        claim, revision = state.claims.get(partition, (Claim(partition), 0))
        undecided = claim.state is ClaimState.COMMIT and not claim.accepted
        if claim.owner != member or undecided or partition in state.busy:
            continue
        worker = state.assignment.owners.get(partition)
        to = active.get(worker) if worker is not None else None
        if claim.pending is not None and state.membership.healthy(claim.pending):
            to = claim.pending
        if to is None and _awaited(state, worker):
            continue
        start = claims.takeover_start(
            claim,
            checkpoint=event.checkpoint.get(partition, 0),
            floor=event.floor.get(partition, 0),
            layout=state.rules.layout,
        )
        taken = claims.take_over(claim, to, start=start, term=state.term)
        effects.append(WriteClaim(taken, revision, "taken over"))
        written.append(partition)
    return _busy(state, now, *written), tuple(effects)


def _busy(state: Leader, now: float, *keys: str) -> Leader:
    until = now + state.rules.retry
    return replace(state, busy=MappingProxyType({**state.busy, **dict.fromkeys(keys, until)})) if keys else state


def _without(busy: Mapping[str, float], key: str) -> Mapping[str, float]:
    return MappingProxyType({k: until for k, until in busy.items() if k != key})
