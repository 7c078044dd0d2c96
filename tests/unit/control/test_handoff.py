"""The leader's watch over a move: retries, abort, rollback, and no timeout for a catch-up."""

from __future__ import annotations

import pytest

from parti.control import claims, handoff
from parti.control.handoff import (
    Changed,
    Finished,
    Handoff,
    HandoffResult,
    HandoffStage,
    HandoffTerms,
    Nudge,
    Propose,
    Slow,
    StageDone,
    Tick,
)
from parti.errors import ConfigError
from parti.model import Claim, ClaimState, Member, PartitionId, WorkerId

P = PartitionId("orders.7")
A = Member(WorkerId("worker-0"), "a")
B = Member(WorkerId("worker-1"), "b")
TERMS = HandoffTerms(prepare_timeout=2.0, prepare_retries=3, commit_timeout=1.0, commit_retries=5, backoff=2.0)

STABLE = claims.accept(claims.assign(Claim(P), A, term=1), A, target=0)
PREPARE = claims.prepare(STABLE, B, term=1)
READY = claims.ready(PREPARE, B, target=80)
COMMIT = claims.release(READY, A, cursor=70)
TAKEN = claims.accept(COMMIT, B, target=80)


def tick(now: float, *, owner: bool = True, pending: bool = True, previous: bool = True) -> Tick:
    return Tick(now, 1, owner, pending, previous)


def until(state: Handoff, kind: type[Propose], **health: bool) -> tuple[float, Propose, list[Nudge]]:
    """Tick every tenth of a second until something is proposed."""
    nudges: list[Nudge] = []
    now = state.stage_since
    for _ in range(2000):
        now = round(now + 0.1, 1)
        state, effects = handoff.step(state, tick(now, **health))
        nudges += [e for e in effects if isinstance(e, Nudge)]
        for effect in effects:
            if isinstance(effect, kind):
                return now, effect, nudges
    raise AssertionError("nothing was proposed")


def test_a_move_that_goes_well_needs_nothing_from_the_leader_and_is_measured() -> None:
    state = handoff.begin(PREPARE, 0.0, TERMS)
    seen: list[object] = []
    for now, claim in ((0.1, READY), (0.3, COMMIT), (0.4, TAKEN), (0.9, claims.caught_up(TAKEN, B, cursor=80))):
        state, effects = handoff.step(state, Changed(now, claim))
        seen += effects
    assert seen == [
        StageDone(HandoffStage.PREPARE, pytest.approx(0.3)),  # type: ignore[arg-type]
        StageDone(HandoffStage.COMMIT, pytest.approx(0.1)),  # type: ignore[arg-type]
        StageDone(HandoffStage.CATCH_UP, pytest.approx(0.5)),  # type: ignore[arg-type]
        Finished(P, HandoffResult.SUCCESS, pytest.approx(0.9)),  # type: ignore[arg-type]
    ]


def test_a_prepare_that_hangs_is_nudged_three_times_and_then_aborted_towards_a_healthy_owner() -> None:
    now, proposed, nudges = until(handoff.begin(PREPARE, 0.0, TERMS), Propose)
    assert now == pytest.approx(8.0)
    assert [n.member for n in nudges] == [B, A] * 3
    assert (proposed.claim.owner, proposed.claim.state) == (A, ClaimState.STABLE)


def test_an_abort_is_counted_when_it_is_seen_and_not_when_it_is_proposed() -> None:
    state = handoff.begin(PREPARE, 0.0, TERMS)
    state, effects = handoff.step(state, tick(0.1, pending=False))
    (proposal,) = effects
    assert isinstance(proposal, Propose)
    _, effects = handoff.step(state, Changed(0.2, proposal.claim))
    assert Finished(P, HandoffResult.ABORT, pytest.approx(0.2)) in effects  # type: ignore[arg-type]


def test_an_abort_that_lost_its_race_counts_as_the_success_it_became() -> None:
    state = handoff.begin(READY, 0.0, TERMS)
    state, _ = handoff.step(state, tick(0.1, pending=False))
    state, _ = handoff.step(state, Changed(0.2, COMMIT))
    _, effects = handoff.step(state, Changed(0.3, claims.accept(COMMIT, B, target=70)))
    assert Finished(P, HandoffResult.SUCCESS, pytest.approx(0.3)) in effects  # type: ignore[arg-type]


def test_a_silent_owner_that_may_still_act_is_waited_for() -> None:
    state = handoff.begin(READY, 0.0, TERMS)
    for now in range(1, 100):
        state, effects = handoff.step(state, tick(float(now), owner=False))
        assert not any(isinstance(e, Propose) for e in effects)


def test_a_dead_next_owner_aborts_at_once_and_is_not_proposed_again_before_the_answer() -> None:
    state = handoff.begin(PREPARE, 0.0, TERMS)
    state, effects = handoff.step(state, tick(0.1, pending=False))
    assert isinstance(effects[0], Propose)
    state, effects = handoff.step(state, tick(0.2, pending=False))
    assert effects == ()
    state, effects = handoff.step(state, tick(1.2, pending=False))
    assert isinstance(effects[0], Propose)


def test_a_commit_nobody_accepts_is_retried_with_backoff_and_rolled_back() -> None:
    now, proposed, nudges = until(handoff.begin(COMMIT, 0.0, TERMS), Propose)
    assert now == pytest.approx(1 + 2 + 4 + 8 + 16 + 32)
    assert [n.member for n in nudges] == [B] * 5
    assert (proposed.claim.owner, proposed.claim.cursor) == (A, 70)


def test_a_commit_without_anybody_to_give_it_back_to_becomes_unassigned() -> None:
    _, proposed, _ = until(handoff.begin(COMMIT, 0.0, TERMS), Propose, previous=False)
    assert proposed.claim.state is ClaimState.UNASSIGNED


def test_a_dead_new_owner_that_never_accepted_is_undone_without_waiting() -> None:
    now, proposed, nudges = until(handoff.begin(COMMIT, 0.0, TERMS), Propose, owner=False)
    assert (now, nudges, proposed.claim.owner) == (0.1, [], A)


def test_a_catch_up_may_take_as_long_as_it_takes() -> None:
    state = handoff.begin(TAKEN, 0.0, TERMS)
    said: list[handoff.Effect] = []
    for now in range(1, 1000):
        state, effects = handoff.step(state, tick(float(now)))
        said += effects
    assert not [effect for effect in said if isinstance(effect, Propose)]


def test_a_slow_catch_up_is_reported_and_read_again_in_case_its_end_was_missed() -> None:
    state = handoff.begin(TAKEN, 0.0, TERMS)
    found: list[tuple[float, tuple[handoff.Effect, ...]]] = []
    for now in range(1, 25):
        state, effects = handoff.step(state, tick(float(now)))
        found += [(float(now), effects)] if effects else []
    assert found == [(10.0 * n, (Slow(TAKEN, 10.0 * n), Nudge(B, P))) for n in (1, 2)]


def test_terms_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError):
        HandoffTerms(prepare_timeout=0)
