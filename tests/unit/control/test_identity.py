"""Stable ids and the fence: one process per id, which stops by its own clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.control.identity import (
    Identity,
    IdFenced,
    IdGranted,
    IdPool,
    LeaseRecord,
    LeaseStatus,
    Leave,
    NotWritten,
    OwnRead,
    Phase,
    PoolRead,
    ReadOwn,
    ReadPool,
    Stop,
    Tick,
    WriteLease,
    Written,
    seeking,
    step,
)
from parti.control.lease import NEVER, HeldLease, LeaseTerms, Sighting
from parti.errors import ConfigError
from parti.model import Claim, ClaimState, Member, PartitionId, WorkerId

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)
W0, W1 = WorkerId("worker-0"), WorkerId("worker-1")


def record(worker: WorkerId, nonce: str, **more: object) -> LeaseRecord:
    return replace(LeaseRecord(Member(worker, nonce), beat=1), **more)  # type: ignore[arg-type]


def held(now: float = 0.0, nonce: str = "me") -> Identity:
    """A process that took worker-0 with a write sent at `now`, confirmed at revision 5."""
    state = seeking(nonce, terms=TERMS)
    state, effects = step(state, PoolRead(now, now, {}))
    assert effects == (WriteLease(W0, LeaseRecord(Member(W0, nonce), beat=1, clean=False), 0),)
    state, effects = step(state, Written(now + 0.1, 1, 5))
    assert effects == (IdGranted(Member(W0, nonce)),)
    return state


def test_the_first_tick_asks_for_the_pool_and_the_lowest_free_id_is_taken() -> None:
    state = seeking("me", terms=TERMS)
    state, effects = step(state, Tick(0.0))
    assert effects == (ReadPool(),)
    _, effects = step(state, PoolRead(0.1, 0.0, {W0: (record(W0, "other"), 3)}))
    (write,) = effects
    assert isinstance(write, WriteLease)
    assert (write.worker, write.expected) == (W1, 0)


def test_the_deadline_counts_from_before_the_renewal_was_sent_and_ends_a_margin_early() -> None:
    state = held(now=100.0)
    assert state.hold.fence.deadline == pytest.approx(100.0 + 6.0 - 0.3)
    assert state.may_act(105.6)
    assert not state.may_act(105.8)


def test_a_process_frozen_past_its_lease_is_fenced_by_its_own_clock_whatever_event_comes_first() -> None:
    for event in (Tick(200.0), Written(200.0, 2, 9), NotWritten(200.0), OwnRead(200.0, record(W0, "me"), 5)):
        state, effects = step(held(), event)
        assert isinstance(effects[0], IdFenced)
        assert state.phase is Phase.STOPPED
        assert step(state, Tick(201.0)) == (state, ()), "this nonce never acts again"


def test_a_renewal_is_a_cas_on_the_own_revision() -> None:
    state, effects = step(held(), Tick(2.0))
    (write,) = effects
    assert isinstance(write, WriteLease)
    assert (write.expected, write.record.beat) == (5, 2)
    state, _ = step(state, Written(2.1, 2, 8))
    assert state.hold.revision == 8
    assert state.hold.fence.deadline == pytest.approx(2.0 + 5.7)


def test_a_lost_answer_is_recognised_by_its_beat_and_counts_from_that_write_not_from_a_later_one() -> None:
    state, _ = step(held(), Tick(2.0))
    state, effects = step(state, NotWritten(3.0))
    assert effects == (ReadOwn(W0),)
    state, _ = step(state, Tick(4.0))
    assert state.hold.beat == 3
    state, _ = step(state, NotWritten(4.5))
    state, effects = step(state, OwnRead(4.6, record(W0, "me", beat=2), 8))
    assert effects == ()
    assert state.hold.fence.deadline == pytest.approx(2.0 + 5.7)


def test_whoever_finds_another_nonce_under_its_id_stops_at_once() -> None:
    _, effects = step(held(), OwnRead(1.0, record(W0, "thief"), 9))
    assert effects == (IdFenced(Member(W0, "me"), "another process holds the id"),)


def test_a_refused_claim_never_writes_blindly() -> None:
    """docs/evidence/go-library.md#w6: a plain put after a failed read gave two processes the same id."""
    state = seeking("me", terms=TERMS)
    state, _ = step(state, PoolRead(0.0, 0.0, {}))
    state, effects = step(state, NotWritten(0.1))
    assert effects == (ReadOwn(W0),)
    state, effects = step(state, OwnRead(0.2, record(W0, "faster"), 7))
    assert effects == (ReadPool(),)
    _, effects = step(state, PoolRead(0.3, 0.3, {W0: (record(W0, "faster"), 7)}))
    assert isinstance(effects[0], WriteLease)
    assert effects[0].worker != W0
    assert effects[0].expected == 0


def test_a_crowd_that_wants_the_same_id_spreads_over_the_pool_after_the_first_refusal() -> None:
    taken = {W0: (record(W0, "faster"), 7)}
    tried: list[WorkerId] = []
    for n in range(50):
        state, _ = step(seeking(f"nonce-{n}", terms=TERMS), PoolRead(0.0, 0.0, {}))
        state, _ = step(state, NotWritten(0.1))
        state, _ = step(state, OwnRead(0.2, *taken[W0]))
        _, effects = step(state, PoolRead(0.3, 0.3, taken))
        assert isinstance(effects[0], WriteLease)
        tried.append(effects[0].worker)
    assert W0 not in tried
    assert len(set(tried)) > 25, "one after the other would have been one id for all of them"


def test_a_process_that_was_fenced_by_an_outage_takes_its_id_back_cleanly_at_once() -> None:
    leases = {W0: (record(W0, "other"), 3), W1: (record(W1, "before"), 4)}
    _, effects = step(seeking("me", terms=TERMS, former={Member(W1, "before"): NEVER}), PoolRead(0.0, 0.0, leases))
    (write,) = effects
    assert isinstance(write, WriteLease)
    assert (write.worker, write.expected, write.record.clean) == (W1, 4, True)


def test_an_effect_that_was_interrupted_keeps_the_id_unclean_until_it_must_have_ended() -> None:
    clean = replace(held(nonce="before"), clean=True)
    leases = {W0: (record(W0, "before"), 3)}
    for now, expected in ((19.9, False), (20.0, True)):
        state = seeking("me", terms=TERMS, former=clean.afterlife(quiet_at=20.0))
        _, effects = step(state, PoolRead(now, now, leases))
        (write,) = effects
        assert isinstance(write, WriteLease)
        assert write.record.clean is expected


def test_an_id_that_the_former_nonce_had_taken_uncleanly_is_clean_only_when_those_before_it_have_stopped() -> None:
    first = held(now=0.0, nonce="before")
    leases = {W0: (record(W0, "before", clean=False), 3)}
    for now, clean in ((6.3, False), (6.5, True)):
        _, effects = step(seeking("me", terms=TERMS, former=first.afterlife()), PoolRead(now, now, leases))
        (write,) = effects
        assert isinstance(write, WriteLease)
        assert (write.worker, write.record.clean) == (W0, clean)


def test_a_claim_whose_answer_was_lost_is_found_by_reading() -> None:
    state = seeking("me", terms=TERMS)
    state, _ = step(state, PoolRead(0.0, 0.0, {}))
    state, _ = step(state, NotWritten(0.1))
    state, effects = step(state, OwnRead(0.2, record(W0, "me", beat=1), 7))
    assert effects == (IdGranted(Member(W0, "me")),)
    assert state.hold.revision == 7


@pytest.mark.parametrize("late", [None, record(W0, "faster"), record(W0, "me", beat=1)])
def test_a_late_look_at_one_id_does_not_disturb_the_claim_of_another(late: LeaseRecord | None) -> None:
    """Ten workers that started at once did this: the answer for the second id found no id at all, and ended one."""
    state = seeking("me", terms=TERMS)
    state, _ = step(state, PoolRead(0.0, 0.0, {}))
    state, _ = step(state, NotWritten(0.1))  # worker-0 is refused, and read again
    state, _ = step(state, PoolRead(1.2, 1.1, {W0: (record(W0, "faster"), 7)}))  # which takes longer than the pool
    state, effects = step(state, OwnRead(1.3, late, 7))
    assert effects == ()
    state, effects = step(state, Written(1.4, 2, 8))
    assert effects == (IdGranted(Member(W1, "me")),)


def test_a_record_of_ours_under_another_id_does_not_grant_this_one() -> None:
    state = seeking("me", terms=TERMS)
    state, _ = step(state, PoolRead(0.0, 0.0, {W0: (record(W0, "other"), 3)}))
    state, _ = step(state, NotWritten(0.1))  # worker-1 is being read again
    _, effects = step(state, OwnRead(0.2, record(W0, "me", beat=1), 7))
    assert effects == ()


def test_an_answer_that_came_after_the_lease_had_run_out_grants_nothing() -> None:
    state = seeking("me", terms=TERMS)
    state, _ = step(state, PoolRead(0.0, 0.0, {}))
    _, effects = step(state, Written(20.0, 1, 7))
    assert isinstance(effects[0], IdFenced)


def full(nonce: str = "other", **more: object) -> dict[WorkerId, tuple[LeaseRecord, int]]:
    return {w: (record(w, f"{nonce}{i}", **more), i + 1) for i, w in enumerate(IdPool(last=1).ids())}


def test_a_full_pool_is_waited_for_and_an_expired_id_is_taken_only_after_lease_and_margin() -> None:
    state = seeking("me", terms=TERMS, pool=IdPool(last=1))
    state, effects = step(state, PoolRead(0.0, 0.0, full()))
    assert effects == ()
    state, effects = step(state, PoolRead(6.29, 6.2, full()))
    assert effects == ()
    state, effects = step(state, PoolRead(6.4, 6.31, full()))
    (write,) = effects
    assert isinstance(write, WriteLease)
    assert (write.worker, write.expected, write.record.clean) == (W0, 1, True)


def test_the_wait_starts_again_with_every_renewal() -> None:
    state = seeking("me", terms=TERMS, pool=IdPool(last=0))
    for now in range(0, 60, 2):
        state, effects = step(state, PoolRead(float(now), float(now), {W0: (record(W0, "busy"), now + 1)}))
        assert effects == ()


def test_a_resting_id_is_taken_at_once_so_that_a_restart_moves_nothing() -> None:
    leases = {W1: (record(W1, "gone", status=LeaseStatus.RESTING), 4), W0: (record(W0, "busy"), 3)}
    _, effects = step(seeking("me", terms=TERMS), PoolRead(0.0, 0.0, leases))
    (write,) = effects
    assert isinstance(write, WriteLease)
    assert (write.worker, write.expected, write.record.clean) == (W1, 4, True)


def test_an_instance_takes_its_own_id_back_at_once_but_says_that_the_one_before_may_still_run() -> None:
    leases = {W0: (record(W0, "other"), 3), W1: (record(W1, "before", instance="pod-1"), 4)}
    _, effects = step(seeking("me", terms=TERMS, instance="pod-1"), PoolRead(0.0, 0.0, leases))
    (write,) = effects
    assert isinstance(write, WriteLease)
    assert (write.worker, write.record.clean) == (W1, False)


def test_who_took_an_id_from_somebody_that_may_still_run_says_so_for_one_lease_and_hands_that_on() -> None:
    state, _ = step(seeking("me", terms=TERMS), PoolRead(0.0, 0.0, {}))
    state, _ = step(state, Written(0.0, 1, 1))
    _, effects = step(state, Stop(1.0))
    assert isinstance(effects[0], WriteLease)
    assert not effects[0].record.clean
    left = {W0: (effects[0].record, 2)}
    _, effects = step(seeking("next", terms=TERMS), PoolRead(1.0, 1.0, left))
    assert isinstance(effects[0], WriteLease)
    assert not effects[0].record.clean
    for now in (2.0, 4.0, 6.0):
        state, effects = step(state, Tick(now))
        assert isinstance(effects[0], WriteLease)
        assert not effects[0].record.clean
        state, _ = step(state, Written(now, effects[0].record.beat, int(now)))
    state, effects = step(state, Tick(8.0))
    assert isinstance(effects[0], WriteLease)
    assert effects[0].record.clean


def test_a_leaving_member_says_so_goes_on_and_stops_with_its_last_record() -> None:
    state, effects = step(held(), Leave(1.0))
    assert isinstance(effects[0], WriteLease)
    assert effects[0].record.status is LeaseStatus.LEAVING
    state, _ = step(state, Written(1.1, 2, 6))
    assert state.may_act(2.0)
    state, effects = step(state, Stop(2.0))
    assert isinstance(effects[0], WriteLease)
    assert effects[0].record.status is LeaseStatus.LEFT
    assert not state.may_act(2.1)


def test_a_returning_member_rests() -> None:
    _, effects = step(held(), Stop(1.0, returning=True))
    assert isinstance(effects[0], WriteLease)
    assert effects[0].record.status is LeaseStatus.RESTING


def test_a_pool_of_one_id_is_valid_and_a_senseless_one_is_refused() -> None:
    """docs/evidence/go-library.md#w18: min = max = 0 silently became 99."""
    assert IdPool(first=0, last=0).ids() == (W0,)
    with pytest.raises(ConfigError):
        IdPool(first=3, last=2)
    with pytest.raises(ConfigError):
        IdPool(prefix="a.b")


@pytest.mark.parametrize("wrong", [{"ttl": 3.0}, {"renew_every": 0.0}, {"margin": 2.0}, {"margin": -1.0}])
def test_lease_terms_that_cannot_be_kept_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LeaseTerms(**wrong)


def test_silence_alone_never_proves_that_a_lease_is_over() -> None:
    seen = Sighting(7, since=0.0)
    assert seen.overdue(100.0, TERMS)
    assert not seen.expired(TERMS)
    assert not seen.seen_again(None).expired(TERMS)
    assert not seen.seen_again(6.2).expired(TERMS)
    assert seen.seen_again(6.31).expired(TERMS)


def test_writes_of_unknown_fate_are_remembered_but_not_for_ever() -> None:
    hold = HeldLease(TERMS)
    for now in range(100):
        hold = hold.sending(float(now))
    assert len(hold.sent) <= 8


def test_the_agent_is_told_when_to_tick_next() -> None:
    assert held().next_tick == pytest.approx(2.0)
    assert seeking("me", terms=TERMS).next_tick < 0


def test_a_holder_whose_record_was_removed_writes_it_again_unless_somebody_took_the_id() -> None:
    state = held()
    state, effects = step(state, OwnRead(1.0, None, 44))
    (write,) = [effect for effect in effects if isinstance(effect, WriteLease)]
    assert (write.expected, write.record.member.nonce) == (44, "me")
    state, effects = step(state, Written(1.1, write.record.beat, 45))
    assert effects == ()
    assert state.may_act(1.2)


def test_a_lower_revision_is_another_bucket() -> None:
    state = replace(held(), highest=1000)
    state, effects = step(state, OwnRead(1.0, None, 0))
    (write,) = [effect for effect in effects if isinstance(effect, WriteLease)]
    _, effects = step(state, Written(1.1, write.record.beat, 3))
    assert [type(effect) for effect in effects] == [IdFenced]


def test_whoever_had_an_id_before_need_not_be_waited_for_when_no_claim_names_it() -> None:
    state = replace(held(), clean=False)
    member = state.member
    assert member is not None
    partition = PartitionId("p0")
    before = Member(member.worker, "before")
    assert state.undisputed([Claim(partition), Claim(partition, ClaimState.STABLE, 1, member)]).clean
    assert not state.undisputed([Claim(partition, ClaimState.STABLE, 1, before)]).clean
    assert not state.undisputed([Claim(partition, lost=True)]).clean
