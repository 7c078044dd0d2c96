"""Everything a leader knows, and how a new leader adopts the stored state.

A new leader takes the stored assignment and every claim as they are, resumes moves in progress, and leaves healthy
claims alone. A claim that is missing although there is a trace of it was lost: the partition is not new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from parti.control import handoff
from parti.control.assign import Sticky, Strategy
from parti.control.handoff import Handoff, HandoffTerms
from parti.control.leader_signals import Gone, Trace
from parti.control.membership import Membership
from parti.control.pacing import Pacing, PacingTerms, RebalanceReason
from parti.errors import ConfigError
from parti.model import Assignment, Claim, ClaimState, Member, Partition, PartitionId


@dataclass(frozen=True, slots=True)
class LeaderRules:
    """The settings of this namespace."""

    windows: PacingTerms = field(default_factory=PacingTerms)
    handoff: HandoffTerms = field(default_factory=HandoffTerms)
    parallel: int = 256  # concurrent moves; KV takes 17-22k writes/s, a move needs five
    retry: float = 0.5  # seconds before a lost or refused write is decided again

    def __post_init__(self) -> None:
        if self.parallel < 1 or self.retry <= 0:
            raise ConfigError("parallel must be at least 1 and retry positive")


@dataclass(frozen=True, slots=True)
class Missing:
    """A claim that does not exist although it did, or should."""

    gone: Gone
    since: float
    known: Claim
    """The last known content, from any source."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Everything a leader knows. Exists for one term."""

    term: int
    membership: Membership
    rules: LeaderRules = field(default_factory=LeaderRules)
    strategy: Strategy = field(default_factory=Sticky)
    partitions: Mapping[PartitionId, Partition] = field(default_factory=lambda: MappingProxyType({}))
    assignment: Assignment = field(default_factory=Assignment)
    assignment_revision: int = 0
    assignment_sent: Assignment | None = None
    """The last one written. An earlier one that got no answer may be stored after it was given up."""
    assignment_lost: bool = False
    """The record was deleted or damaged: it is rewritten even when nothing changed."""
    claims: Mapping[PartitionId, tuple[Claim, int]] = field(default_factory=lambda: MappingProxyType({}))
    lost: Mapping[PartitionId, Missing] = field(default_factory=lambda: MappingProxyType({}))
    """Claims that were deleted or damaged, and not rewritten yet."""
    moving: Mapping[PartitionId, Handoff] = field(default_factory=lambda: MappingProxyType({}))
    pacing: Pacing = field(default_factory=Pacing)
    busy: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Key or request in flight -> when to stop waiting for its answer."""
    open: Mapping[PartitionId, None] | None = None
    """Partitions that are not with their assigned owner; only these are checked. None: all must be checked."""

    @property
    def unassigned(self) -> tuple[PartitionId, ...]:
        """Partitions without an owner: no worker has room for them, or none is healthy."""
        if not self.membership.takers():
            kept = self.membership.keeping()
            return tuple(sorted(p for p in self.partitions if self.assignment.owners.get(p) not in kept))
        if self.assignment.term != self.term or len(self.assignment.owners) == len(self.partitions):
            return ()  # not decided yet, or all assigned
        return tuple(sorted(self.partitions.keys() - self.assignment.owners.keys()))

    @property
    def converged(self) -> bool:
        """Every partition is stable at the worker that the assignment names."""
        return len(self.assignment.owners) == len(self.partitions) and at_rest(
            self.assignment, self.claims, self.membership
        )


def at_rest(assignment: Assignment, claims: Mapping[PartitionId, tuple[Claim, int]], membership: Membership) -> bool:
    """Every partition is caught up at the process that now runs under the worker id that the assignment names.

    An earlier process of that id with leftover claims does not count: its successor must take them over first.
    """
    for partition, worker in assignment.owners.items():
        claim, _ = claims.get(partition, (Claim(partition), 0))
        if claim.state is not ClaimState.STABLE or claim.owner is None:
            return False
        if claim.owner.worker != worker or not membership.healthy(claim.owner):
            return False
    return True


@dataclass(frozen=True, slots=True)
class Found:
    """The stored state that a new leader finds."""

    stored: Assignment | None = None
    revision: int = 0
    """Revision of the stored assignment; 0 when there is none."""
    claims: Mapping[PartitionId, tuple[Claim, int]] = field(default_factory=dict)
    """Each with its revision."""
    lost: Mapping[PartitionId, Gone] = field(default_factory=dict)
    """Claims that were deleted or damaged."""
    remembered: Mapping[PartitionId, tuple[Claim, int]] = field(default_factory=dict)
    """Claims that this member saw, each with its revision. Some changed after `claims` was read: reading takes time,
    and a replica may lag. A leader with the older one would wait for ever for a change that has happened."""
    traces: Mapping[PartitionId, Trace] = field(default_factory=dict)
    """What the stored positions of any worker say."""


def elect(
    term: int,
    now: float,
    membership: Membership,
    partitions: tuple[Partition, ...],
    found: Found,
    *,
    rules: LeaderRules | None = None,
    strategy: Strategy | None = None,
) -> Leader:
    """Adopt the stored state (crash recovery by scan): claims that are moving are supervised from their current stage.

    A partition that is remembered, or named by positions or by the stored assignment, is not new: if its claim is
    missing, it was lost.
    """
    rules = rules or LeaderRules()
    stored, claims = found.stored, dict(found.claims)
    for partition, (claim, revision) in found.remembered.items():
        gone_at = found.lost[partition].revision if partition in found.lost else 0
        if revision > max(gone_at, claims.get(partition, (claim, 0))[1]) > 0:
            claims[partition] = claim, revision
    recalled = {
        p: Claim(p, ClaimState.STABLE, trace.epoch, trace.by, cursor=trace.cursor) for p, trace in found.traces.items()
    } | {p: claim for p, (claim, _) in found.remembered.items()}
    # If only the assignment names it, its worker is known: on an interest stream that worker's filter retains messages.
    named = {p: Claim(p, previous=Member(w, "")) for p, w in stored.owners.items()} if stored is not None else {}
    recalled = named | recalled
    gone = dict.fromkeys(recalled, Gone(0, 0))
    missing = {
        p: Missing(at, now, recalled.get(p, Claim(p))) for p, at in {**gone, **found.lost}.items() if p not in claims
    }
    if stored is None and claims:  # the assignment was lost as well: every owner keeps its partitions
        owners = {p: c.owner.worker for p, (c, _) in claims.items() if c.owner is not None}
        stored = Assignment(owners=MappingProxyType(owners)) if owners else None
    moving = {p: handoff.begin(c, now, rules.handoff) for p, (c, _) in claims.items() if c.moving}
    return Leader(
        term=term,
        membership=membership,
        rules=rules,
        strategy=strategy or Sticky(),
        partitions=MappingProxyType({p.id: p for p in partitions}),
        assignment=stored or Assignment(),
        assignment_revision=found.revision,
        claims=MappingProxyType(claims),
        lost=MappingProxyType(missing),
        moving=MappingProxyType(moving),
        pacing=Pacing(rules.windows).ask(now, RebalanceReason.COLD_START if stored is None else RebalanceReason.ADOPT),
    )
