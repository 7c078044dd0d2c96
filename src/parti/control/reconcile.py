"""The leader's loop: brings claims in line with the assignment, and the assignment in line with the members.

A new leader adopts the stored assignment and every claim as they are, resumes moves in progress, and repairs only what
is broken. No partition is taken from a member without its consent before that member is certainly gone. Every write is
a CAS on the revision the decision was based on, so a deposed leader cannot overwrite a newer decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from parti.control import claims, handoff
from parti.control.assign import owners_of
from parti.control.assign.capacity import fit
from parti.control.handoff import Finished, StageDone
from parti.control.leader import Found, Leader, LeaderRules, Missing, at_rest, elect
from parti.control.leader_signals import (
    AssignmentLost,
    AssignmentSeen,
    ClaimsLost,
    ClaimsSeen,
    Effect,
    Event,
    Gone,
    MembersChanged,
    PartitionsChanged,
    PositionsRead,
    ReadPositions,
    ReadTraces,
    Tick,
    Trace,
    TracesRead,
    WriteAssignment,
    WriteClaim,
    further,
)
from parti.control.membership import Ailing, Change, Died, Leaving, Left
from parti.control.pacing import RebalanceReason
from parti.model import Assignment, Claim, ClaimState, Member, PartitionId, WorkerId

__all__ = [
    "AssignmentLost",
    "AssignmentSeen",
    "ClaimsLost",
    "ClaimsSeen",
    "Effect",
    "Event",
    "Found",
    "Gone",
    "Leader",
    "LeaderRules",
    "MembersChanged",
    "Missing",
    "PartitionsChanged",
    "PositionsRead",
    "ReadPositions",
    "ReadTraces",
    "Step",
    "Tick",
    "Trace",
    "TracesRead",
    "WriteAssignment",
    "WriteClaim",
    "at_rest",
    "elect",
    "step",
]


Step = tuple[Leader, tuple[Effect, ...]]


def step(state: Leader, event: Event) -> Step:
    """The next state and the effects to perform. Send `Tick` at least every `rules.retry` seconds."""
    match event:
        case Tick(now):
            return _act(state, now)
        case MembersChanged(now, membership, changes):
            pacing = state.pacing
            for change in changes:
                # A member that can take unassigned partitions gets them without a waiting window.
                pacing = pacing.ask(now, RebalanceReason.PARTITIONS if state.unassigned else _reason(change))
            seen = replace(state, membership=membership, pacing=pacing, open=None if changes else state.open)
            return _act(seen, now) if changes else (seen, ())  # most events are renewals, which change no decision
        case PartitionsChanged(now, partitions, refresh):
            known = MappingProxyType({p.id: p for p in partitions})
            if known == state.partitions and not refresh:
                return state, ()
            pacing = state.pacing.ask(
                now, RebalanceReason.REFRESH if known == state.partitions else RebalanceReason.PARTITIONS
            )
            return _act(replace(state, partitions=known, pacing=pacing), now)
        case ClaimsSeen(now, batch):
            return _claims_seen(state, now, batch)
        case ClaimsLost(now, lost):
            return _claims_lost(state, now, lost)
        case AssignmentLost(now, expected):
            busy = _without(state.busy, "assignment")
            unwritten = replace(state, assignment_revision=expected, assignment_lost=True, busy=busy)
            return _act(replace(unwritten, pacing=state.pacing.ask(now, RebalanceReason.ADOPT)), now)
        case AssignmentSeen(now, assignment, revision):
            if revision <= state.assignment_revision:
                return state, ()
            ours = assignment == state.assignment_sent
            pacing = state.pacing.applied(now) if ours else state.pacing.failed(now).ask(now, RebalanceReason.ADOPT)
            busy = _without(state.busy, "assignment")
            seen_state = replace(
                state,
                assignment=assignment,
                assignment_revision=revision,
                assignment_lost=False,
                pacing=pacing,
                busy=busy,
                open=None,
            )
            return _act(seen_state, now)
        case PositionsRead():
            return _take_over(state, event)
        case TracesRead():
            return _find(state, event)
        case _:
            assert_never(event)


def _reason(change: Change) -> RebalanceReason:
    if isinstance(change, Died):
        return RebalanceReason.EMERGENCY
    return RebalanceReason.LEAVE if isinstance(change, Leaving | Left | Ailing) else RebalanceReason.PLANNED_SCALE


def _claims_seen(state: Leader, now: float, seen: tuple[tuple[Claim, int], ...]) -> Step:
    known = dict(state.claims)
    lost = dict(state.lost)
    moving = dict(state.moving)
    busy = dict(state.busy)
    touched: dict[PartitionId, None] = {}
    effects: list[Effect] = []
    for claim, revision in seen:
        partition = claim.partition
        if partition in known and revision <= known[partition][1]:
            continue
        if partition in lost and revision <= lost[partition].gone.revision:
            continue
        lost.pop(partition, None)
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
        lost=MappingProxyType(lost),
        moving=MappingProxyType(moving),
        busy=MappingProxyType(busy),
        open=None if state.open is None else MappingProxyType({**state.open, **touched}),
    )
    later, more = _act(updated, now)
    return later, (*effects, *more)


def _claims_lost(state: Leader, now: float, gone: Mapping[PartitionId, Gone]) -> Step:
    """The members that hold them rewrite them, and get time to do so."""
    known, moving, lost = dict(state.claims), dict(state.moving), dict(state.lost)
    for partition, at in gone.items():
        claim, revision = known.get(partition, (Claim(partition), 0))
        before = lost.get(partition)
        if before is not None and (not at.expected or at.expected > before.gone.expected):
            lost[partition] = replace(before, gone=at)  # lost again, in another way
        if at.revision < revision or before is not None:
            continue
        known.pop(partition, None)
        moving.pop(partition, None)
        lost[partition] = Missing(at, now, claim)
    seen = replace(
        state,
        claims=MappingProxyType(known),
        moving=MappingProxyType(moving),
        lost=MappingProxyType(lost),
        open=None if state.open is None else MappingProxyType({**state.open, **dict.fromkeys(lost)}),
    )
    return _act(seen, now)


def _act(state: Leader, now: float) -> Step:
    """Write the assignment when it is due, then move claims towards the stored one."""
    if any(until <= now for until in state.busy.values()):
        state = replace(state, busy=MappingProxyType({k: until for k, until in state.busy.items() if until > now}))
    state, effects = _assign(state, now)
    state, more = _watch(state, now)
    state, yet_more = _repair(state, now)
    return state, (*effects, *more, *yet_more)


def _assign(state: Leader, now: float) -> Step:
    capacities = state.membership.takers()
    workers = sorted(capacities)
    if "assignment" in state.busy:
        return state, ()
    if state.pacing.writing is not None:
        state = replace(state, pacing=state.pacing.failed(now))
    if not state.pacing.due(now, moving=bool(state.moving)) or not workers:
        return state, ()
    if state.assignment.term > state.term:
        return state, ()  # there is a newer leader: our view is outdated
    partitions = [state.partitions[p] for p in sorted(state.partitions)]
    wanted = owners_of(state.strategy.assign(workers, partitions, state.assignment.owners))
    owners, _ = fit(wanted, capacities, workers, state.assignment.owners)
    weights = {p.id: p.weight for p in partitions if p.weight != 1}
    reason = state.pacing.reason or RebalanceReason.REFRESH
    same = (owners, weights) == (dict(state.assignment.owners), dict(state.assignment.weights))
    state = replace(state, pacing=state.pacing.sent())
    if same and state.assignment.term == state.term and not state.assignment_lost:
        return replace(state, pacing=state.pacing.applied(now), assignment_sent=None), ()
    desired = Assignment(
        term=state.term,
        version=state.assignment.version + 1,
        reason=str(reason),
        owners=MappingProxyType(owners),
        weights=MappingProxyType(weights),
    )
    state = replace(state, assignment_sent=desired)
    return _busy(state, now, "assignment"), (WriteAssignment(desired, state.assignment_revision),)


def _watch(state: Leader, now: float) -> Step:
    """Check the timeouts of moves in progress."""
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
        return state, ()  # our own assignment is not stored yet: decide nothing
    active = state.membership.active()
    members = state.membership
    effects: list[Effect] = []
    written: list[str] = []
    still: dict[PartitionId, None] = {}
    orphans: dict[Member, list[PartitionId]] = {}
    mislaid: list[PartitionId] = []
    in_flight = sum(1 for key in state.busy if key in state.claims and key not in state.moving)
    room = state.rules.parallel - len(state.moving) - in_flight
    for partition in {**state.assignment.owners, **state.claims, **state.lost} if state.open is None else state.open:
        if (missing := state.lost.get(partition)) is not None:
            if partition not in state.assignment.owners and missing.known.owner is None:
                continue  # retired and without an owner: its claim may have been deleted on purpose
            still[partition] = None
            if partition not in state.busy and now >= missing.since + state.rules.retry:
                placed = claims.mislaid(missing.known, cursor=0, term=state.term)
                effects.append(WriteClaim(placed, missing.gone.expected, "lost"))
                written.append(partition)
            continue
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
            continue  # already decided, or supervised until it is accepted, rolled back or unassigned
        if owner is not None and not healthy:
            if members.gone(owner, now) and (to is not None or not _awaited(state, worker)):
                orphans.setdefault(owner, []).append(partition)
        elif claim.lost:
            if to is not None and members.know(revision, now):
                mislaid.append(partition)
        elif claim.state is ClaimState.UNASSIGNED:
            if to is not None:
                # Every epoch ever granted cost a revision: one above our revision was granted to no one, not even
                # before all records of the partition were deleted.
                above = 0 if revision else state.assignment_revision
                given = claims.assign(claim, to, term=state.term, above=above)
                effects.append(WriteClaim(given, revision, "assigned", fresh=revision == 0))
                written.append(partition)
        elif claim.state is ClaimState.STABLE and room > 0 and (to is not None or worker is None):
            effects.append(WriteClaim(claims.prepare(claim, to, term=state.term), revision, "moved"))
            written.append(partition)
            room -= 1
    state = replace(state, open=MappingProxyType(still))
    for member, lost in orphans.items():
        question = f"positions {member}"
        if question not in state.busy:
            effects.append(ReadPositions(member, tuple(lost)))
            written.append(question)
    if mislaid and "traces" not in state.busy:
        effects.append(ReadTraces(tuple(mislaid)))
        written.append("traces")
    return _busy(state, now, *written), tuple(effects)


def _find(state: Leader, event: TracesRead) -> Step:
    """Certainly no member holds these partitions, and their highest recorded positions are known."""
    now = event.now
    state = replace(state, busy=_without(state.busy, "traces"))
    active = state.membership.active()
    effects: list[Effect] = []
    written: list[str] = []
    for partition in event.partitions:
        claim, revision = state.claims.get(partition, (Claim(partition), 0))
        to = active.get(state.assignment.owners.get(partition, WorkerId("")))
        if not claim.lost or to is None or partition in state.busy or not state.membership.know(revision, now):
            continue
        trace = event.traces.get(partition)
        start, epoch, by = (trace.cursor, trace.epoch, trace.by) if trace is not None else (0, 0, None)
        # As in `_repair`: the revision is above every epoch ever granted.
        found = claims.find(claim, to, start=start, epoch=max(epoch, revision), previous=by, term=state.term)
        found = replace(found, ahead=further(claim.ahead, trace.ahead if trace is not None else None))
        fresh = trace is None and claim.epoch <= 1 and not claim.cursor
        effects.append(WriteClaim(found, revision, "found", fresh=fresh))
        written.append(partition)
    return _busy(state, now, *written), tuple(effects)


def _awaited(state: Leader, worker: WorkerId | None) -> bool:
    """A worker that rests for a restart keeps its partitions until its time is up."""
    return worker is not None and worker in state.membership.keeping()


def _take_over(state: Leader, event: PositionsRead) -> Step:
    """The owner is certainly gone, and its progress is known."""
    now, member = event.now, event.member
    state = replace(state, busy=_without(state.busy, f"positions {member}"))
    if not state.membership.gone(member, now) or state.assignment.term != state.term:
        return state, ()
    active = state.membership.active()
    effects: list[Effect] = []
    written: list[str] = []
    for partition in sorted(event.checkpoint):
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
        taken = claims.take_over(claim, to, start=event.checkpoint[partition], term=state.term)
        taken = replace(taken, ahead=event.ahead.get(partition, claim.ahead))
        effects.append(WriteClaim(taken, revision, "taken over"))
        written.append(partition)
    return _busy(state, now, *written), tuple(effects)


def _busy(state: Leader, now: float, *keys: str) -> Leader:
    until = now + state.rules.retry
    return replace(state, busy=MappingProxyType({**state.busy, **dict.fromkeys(keys, until)})) if keys else state


def _without(busy: Mapping[str, float], key: str) -> Mapping[str, float]:
    return MappingProxyType({k: until for k, until in busy.items() if k != key})
