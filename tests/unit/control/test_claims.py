"""The transitions of a claim: what each one may and may not do, and where a takeover starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from parti.control import claims
from parti.control.claims import IllegalTransition
from parti.model import Claim, ClaimState, Member, PartitionId, WorkerId

P = PartitionId("orders.7")
A = Member(WorkerId("worker-0"), "a")
B = Member(WorkerId("worker-1"), "b")
C = Member(WorkerId("worker-2"), "c")

UNASSIGNED = Claim(P, cursor=10)
OFFERED = claims.assign(UNASSIGNED, A, term=1)
BEHIND = claims.accept(OFFERED, A, target=50)
STABLE = claims.caught_up(BEHIND, A, cursor=55)
PREPARE = claims.prepare(STABLE, B, term=1)
READY = claims.ready(PREPARE, B, target=80)
COMMIT = claims.release(READY, A, cursor=70)
TAKEN = claims.accept(COMMIT, B, target=80)
EVERY = (UNASSIGNED, OFFERED, BEHIND, STABLE, PREPARE, READY, COMMIT, TAKEN)


def test_a_planned_move_goes_through_every_state_and_raises_the_epoch_with_each_change_of_who_may_act() -> None:
    assert [(c.state, c.epoch, c.owner) for c in (*EVERY, claims.caught_up(TAKEN, B, cursor=80))] == [
        (ClaimState.UNASSIGNED, 0, None),
        (ClaimState.COMMIT, 1, A),
        (ClaimState.COMMIT, 1, A),
        (ClaimState.STABLE, 1, A),
        (ClaimState.PREPARE, 2, A),
        (ClaimState.PREPARE, 2, A),
        (ClaimState.COMMIT, 3, B),
        (ClaimState.COMMIT, 3, B),
        (ClaimState.STABLE, 3, B),
    ]


def test_the_release_carries_the_exact_cursor_and_the_next_owners_t() -> None:
    assert (COMMIT.cursor, COMMIT.target, COMMIT.previous, COMMIT.accepted) == (70, 80, A, False)


def test_accepting_with_nothing_to_catch_up_is_stable_at_once() -> None:
    assert claims.accept(COMMIT, B, target=70).state is ClaimState.STABLE


def test_being_caught_up_needs_the_target_to_be_processed() -> None:
    with pytest.raises(IllegalTransition, match="79"):
        claims.caught_up(TAKEN, B, cursor=79)


def test_an_aborted_move_leaves_the_owner_acting_under_a_new_epoch_that_nobody_may_undo() -> None:
    aborted = claims.abort(READY, term=2)
    assert (aborted.state, aborted.owner, aborted.epoch, aborted.pending) == (ClaimState.STABLE, A, 3, None)
    with pytest.raises(IllegalTransition):
        claims.redirect(aborted, C, term=2)
    with pytest.raises(IllegalTransition):
        claims.release(aborted, A, cursor=99)


def test_an_unaccepted_commit_can_be_rolled_back_or_redirected_and_an_accepted_one_cannot() -> None:
    back = claims.roll_back(COMMIT, term=2)
    assert (back.owner, back.epoch, back.cursor, back.accepted) == (A, 4, 70, False)
    assert claims.redirect(COMMIT, C, term=2).owner == C
    assert claims.redirect(COMMIT, None, term=2).state is ClaimState.UNASSIGNED
    for undo in (claims.roll_back, lambda c, term: claims.redirect(c, C, term=term)):
        with pytest.raises(IllegalTransition):
            undo(TAKEN, term=2)


def test_only_the_member_it_is_meant_for_can_move_a_claim_on() -> None:
    stranger: tuple[Callable[[], Claim], ...] = (
        lambda: claims.ready(PREPARE, C, target=1),
        lambda: claims.release(READY, B, cursor=1),
        lambda: claims.accept(COMMIT, A, target=1),
        lambda: claims.caught_up(TAKEN, A, cursor=99),
        lambda: claims.accept(COMMIT, replace(B, nonce="another process"), target=1),
    )
    for attempt in stranger:
        with pytest.raises(IllegalTransition):
            attempt()


def test_every_transition_refuses_every_state_it_is_not_meant_for() -> None:
    allowed: dict[str, tuple[Callable[[Claim], Claim], tuple[Claim, ...]]] = {
        "assign": (lambda c: claims.assign(c, C, term=1), (UNASSIGNED,)),
        "prepare": (lambda c: claims.prepare(c, C, term=1), (STABLE,)),
        "abort": (lambda c: claims.abort(c, term=1), (PREPARE, READY)),
        "roll_back": (lambda c: claims.roll_back(c, term=1), (COMMIT,)),
        "redirect": (lambda c: claims.redirect(c, C, term=1), (OFFERED, COMMIT)),
        "take_over": (lambda c: claims.take_over(c, C, start=0, term=1), (BEHIND, STABLE, PREPARE, READY, TAKEN)),
    }
    for name, (transition, fits) in allowed.items():
        for claim in EVERY:
            if claim in fits:
                assert transition(claim).epoch == claim.epoch + 1, name
            else:
                with pytest.raises(IllegalTransition):
                    transition(claim)


def test_a_retired_partition_keeps_its_cursor_for_the_day_it_comes_back() -> None:
    retired = claims.release(claims.prepare(STABLE, None, term=1), A, cursor=60)
    assert (retired.state, retired.owner, retired.cursor) == (ClaimState.UNASSIGNED, None, 60)


def test_a_cursor_never_goes_back() -> None:
    assert claims.release(READY, A, cursor=3).cursor == READY.cursor
    assert claims.take_over(STABLE, B, start=3, term=1).cursor == STABLE.cursor


def test_a_takeover_before_the_catch_up_was_done_remembers_whose_filter_keeps_the_messages() -> None:
    assert claims.take_over(TAKEN, C, start=0, term=1).previous == A
    assert claims.take_over(STABLE, C, start=0, term=1).previous == A


def test_a_claim_says_from_whom_it_was_taken_until_it_moves_by_its_owners_word() -> None:
    taken = claims.take_over(BEHIND, B, start=20, term=2)
    nobodys = claims.take_over(BEHIND, None, start=20, term=2)
    for claim in (taken, claims.redirect(taken, C, term=2), claims.redirect(taken, None, term=2), nobodys):
        assert claim.taken_from == A
    stable = claims.caught_up(claims.accept(claims.assign(nobodys, B, term=2), B, target=90), B, cursor=90)
    assert stable.taken_from == A
    assert claims.prepare(stable, C, term=2).taken_from is None
    assert claims.take_over(stable, C, start=90, term=2).taken_from == B
    assert COMMIT.taken_from is None


def test_the_member_that_had_prepared_keeps_its_t_when_the_owner_dies() -> None:
    taken = claims.take_over(READY, B, start=75, term=1)
    assert (taken.owner, taken.cursor, taken.target) == (B, 75, 80)
    assert claims.take_over(READY, C, start=75, term=1).target is None


def test_a_claim_tells_its_story_in_one_line() -> None:
    assert str(READY) == "orders.7 prepare+ worker-0#a->worker-1#b epoch=2 cursor=55 T=80"
