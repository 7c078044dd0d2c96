"""The leader's supervision of one moving partition: timeouts, retries, abort, rollback (docs/requirements.md#r-111).

The workers advance a claim themselves; the leader acts only when they do not. A timeout never takes a partition from a
member that may still be acting: it nudges, aborts in favour of the owner, or undoes an unaccepted COMMIT. A catch-up
may take any time, so an accepted COMMIT has no timeout: the leader only looks again, and reports it as slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

from parti import defaults
from parti.control import claims
from parti.errors import ConfigError
from parti.model import Claim, ClaimState, Member, PartitionId

_LOOK_AGAIN = 10  # commit timeouts between two looks at a catch-up


@dataclass(frozen=True, slots=True)
class HandoffTerms:
    """The leader's timeouts."""

    prepare_timeout: float = defaults.PREPARE_TIMEOUT
    prepare_retries: int = defaults.PREPARE_RETRIES
    commit_timeout: float = defaults.COMMIT_TIMEOUT
    commit_retries: int = defaults.COMMIT_RETRIES
    backoff: float = 1.5  # each commit retry waits this much longer

    def __post_init__(self) -> None:
        if min(self.prepare_timeout, self.commit_timeout) <= 0 or self.backoff < 1:
            raise ConfigError("handoff timeouts must be positive and backoff at least 1")


class HandoffResult(StrEnum):
    """How a handoff ended: the label of `parti_handoff_total`."""

    SUCCESS = "success"
    TIMEOUT = "timeout"
    ABORT = "abort"
    ROLLBACK = "rollback"


class HandoffStage(StrEnum):
    """What the leader is waiting for."""

    PREPARE = "prepare"
    COMMIT = "commit"
    CATCH_UP = "catch_up"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Handoff:
    """One supervised move; the claim itself stays in the bucket."""

    claim: Claim
    started: float
    stage_since: float
    due: float
    attempts: int = 0
    proposed: Claim | None = None
    """The proposed abort or rollback; in force only if its CAS succeeded."""
    result: HandoffResult = HandoffResult.SUCCESS
    counted: bool = True
    """False for a first assignment, or one that never left its worker: nothing was handed over."""
    terms: HandoffTerms = field(default_factory=HandoffTerms)

    @property
    def stage(self) -> HandoffStage:
        return stage_of(self.claim)


def stage_of(claim: Claim) -> HandoffStage:
    if claim.state is ClaimState.PREPARE:
        return HandoffStage.PREPARE
    if claim.state is ClaimState.COMMIT:
        return HandoffStage.CATCH_UP if claim.accepted else HandoffStage.COMMIT
    return HandoffStage.DONE


def begin(claim: Claim, now: float, terms: HandoffTerms | None = None) -> Handoff:
    """Supervise a moving claim, also one that an earlier leader started (crash recovery by scan)."""
    terms = terms or HandoffTerms()
    giver, taker = claim.previous, claim.owner
    moved = giver is not None and taker is not None and giver.worker != taker.worker
    counted = moved or claim.state is ClaimState.PREPARE
    return Handoff(claim, now, now, _due(claim, now, 0, terms), counted=counted, terms=terms)


@dataclass(frozen=True, slots=True)
class Changed:
    """A newer revision of the claim was seen."""

    now: float
    claim: Claim


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. The health flags are about exactly the members named in the claim."""

    now: float
    term: int
    owner_healthy: bool
    pending_healthy: bool = True
    previous_healthy: bool = False


Event = Changed | Tick


@dataclass(frozen=True, slots=True)
class Propose:
    """Write this claim by CAS on the revision that the decision was based on."""

    claim: Claim
    reason: str


@dataclass(frozen=True, slots=True)
class Nudge:
    """Ask a member to read this claim again, and read it as leader: either watch may have missed a change."""

    member: Member
    partition: PartitionId


@dataclass(frozen=True, slots=True)
class Slow:
    """The new owner has been catching up for so many seconds; until it is done, the partition cannot move on."""

    claim: Claim
    seconds: float


@dataclass(frozen=True, slots=True)
class StageDone:
    """`parti_handoff_phase_duration_seconds`."""

    stage: HandoffStage
    seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """`parti_handoff_total` and `parti_handoff_duration_seconds`."""

    partition: PartitionId
    result: HandoffResult
    seconds: float


Effect = Propose | Nudge | Slow | StageDone | Finished


def step(state: Handoff, event: Event) -> tuple[Handoff, tuple[Effect, ...]]:
    """The next state and the effects to perform."""
    match event:
        case Changed(now, claim):
            return _changed(state, now, claim)
        case Tick():
            return _tick(state, event)
        case _:
            assert_never(event)


def _changed(state: Handoff, now: float, claim: Claim) -> tuple[Handoff, tuple[Effect, ...]]:
    before, after = state.stage, stage_of(claim)
    progressed = claim.cursor > state.claim.cursor or claim.target != state.claim.target
    if before is after and claim.epoch == state.claim.epoch:
        due = _due(claim, now, 0, state.terms) if progressed else state.due
        return replace(state, claim=claim, due=due, attempts=0 if progressed else state.attempts), ()
    ours = state.proposed is not None and (claim.epoch, claim.owner) == (state.proposed.epoch, state.proposed.owner)
    result = state.result if ours or state.proposed is None else HandoffResult.SUCCESS
    effects: list[Effect] = [StageDone(before, now - state.stage_since)]
    if after is HandoffStage.DONE:
        effects.append(Finished(claim.partition, result, now - state.started))
    if not state.counted:
        effects = []
    due = _due(claim, now, 0, state.terms)
    moved = replace(state, claim=claim, stage_since=now, due=due, attempts=0, proposed=None, result=result)
    return moved, tuple(effects)


def _tick(state: Handoff, event: Tick) -> tuple[Handoff, tuple[Effect, ...]]:
    claim, now = state.claim, event.now
    if state.proposed is not None and now < state.due:
        return state, ()
    match state.stage:
        case HandoffStage.PREPARE:
            if claim.pending is not None and not event.pending_healthy:
                return _end(
                    state, now, claims.abort(claim, term=event.term), HandoffResult.ABORT, "the next owner is gone"
                )
            if now < state.due:
                return state, ()
            if state.attempts < state.terms.prepare_retries:
                return _retry(state, now)
            if event.owner_healthy:
                return _end(
                    state, now, claims.abort(claim, term=event.term), HandoffResult.TIMEOUT, "no release in time"
                )
        case HandoffStage.COMMIT:
            if event.owner_healthy and now < state.due:
                return state, ()
            if event.owner_healthy and state.attempts < state.terms.commit_retries:
                return _retry(state, now)
            if event.previous_healthy:
                undone = claims.roll_back(claim, term=event.term)
                return _end(state, now, undone, HandoffResult.ROLLBACK, "not accepted in time")
            undone = claims.redirect(claim, None, term=event.term)
            return _end(state, now, undone, HandoffResult.TIMEOUT, "not accepted, and no former owner to return it to")
        case HandoffStage.CATCH_UP:
            if now >= state.due:
                asked, nudges = _retry(state, now)
                return asked, (Slow(claim, now - state.stage_since), *nudges)
        case HandoffStage.DONE:
            pass
    # The leader can only wait for an owner that is silent but not certainly gone; reconcile takes over when it is gone.
    return state, ()


def _retry(state: Handoff, now: float) -> tuple[Handoff, tuple[Effect, ...]]:
    attempts = state.attempts + 1
    claim = state.claim
    asked = dict.fromkeys(m for m in (claim.pending if claim.target is None else None, claim.owner) if m is not None)
    retried = replace(state, attempts=attempts, due=_due(claim, now, attempts, state.terms))
    return retried, tuple(Nudge(member, claim.partition) for member in asked)


def _end(
    state: Handoff, now: float, claim: Claim, result: HandoffResult, reason: str
) -> tuple[Handoff, tuple[Effect, ...]]:
    """Propose the abort or rollback, and do not propose again before an answer can have arrived."""
    waiting = replace(state, due=now + state.terms.commit_timeout, proposed=claim, result=result)
    return waiting, (Propose(claim, reason),)


def _due(claim: Claim, now: float, attempts: int, terms: HandoffTerms) -> float:
    match stage_of(claim):
        case HandoffStage.PREPARE:
            return now + terms.prepare_timeout
        case HandoffStage.COMMIT:
            return now + terms.commit_timeout * terms.backoff**attempts
        case HandoffStage.CATCH_UP:
            return now + _LOOK_AGAIN * terms.commit_timeout
        case HandoffStage.DONE:
            return float("inf")
