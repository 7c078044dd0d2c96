"""A vacant leadership is taken at the next tick, not one renewal later."""

from __future__ import annotations

from parti.control import election
from parti.control.election import LeaderRecord
from parti.control.lease import LeaseTerms
from parti.model import Member, WorkerId

ME = Member(WorkerId("worker-1"), "a")
OTHER = Member(WorkerId("worker-2"), "b")
TERMS = LeaseTerms(ttl=20.0, renew_every=4.0)


def campaigns(state: election.Election, now: float) -> bool:
    _, effects = election.step(state, election.Tick(now))
    return any(isinstance(effect, election.WriteLeader) for effect in effects)


def test_a_member_that_finds_no_leader_campaigns_at_its_next_tick() -> None:
    state, effects = election.step(election.candidate(ME, terms=TERMS), election.Tick(100.0))
    assert effects == (election.ReadLeader(),)
    state, _ = election.step(state, election.LeaderSeen(100.1, None, 0))
    assert campaigns(state, 100.15)


def test_a_member_that_sees_a_resignation_campaigns_at_its_next_tick() -> None:
    state, _ = election.step(
        election.candidate(ME, terms=TERMS), election.LeaderSeen(100.0, LeaderRecord(3, OTHER, 1), 5)
    )
    assert not campaigns(state, 100.1)
    state, _ = election.step(state, election.LeaderSeen(101.0, LeaderRecord(3, None, 2), 6))
    assert campaigns(state, 101.1)


def test_a_leader_that_resigned_does_not_campaign_against_its_own_resignation() -> None:
    state, _ = election.step(election.candidate(ME, terms=TERMS), election.LeaderSeen(100.0, None, 0))
    state, effects = election.step(state, election.Tick(100.1))
    (write,) = [effect for effect in effects if isinstance(effect, election.WriteLeader)]
    state, _ = election.step(state, election.Written(100.2, write.record, 7))
    assert state.leading
    state, effects = election.step(state, election.Resign(101.0))
    (resigned,) = [effect for effect in effects if isinstance(effect, election.WriteLeader)]
    state, _ = election.step(state, election.LeaderSeen(101.1, resigned.record, 8))
    assert not campaigns(state, 101.2)


def test_a_member_whose_former_self_led_campaigns_at_once_and_any_other_waits_for_the_lease() -> None:
    seen = election.LeaderSeen(100.0, LeaderRecord(3, OTHER, 1), 5)
    back, _ = election.step(election.candidate(ME, terms=TERMS, former=[OTHER]), seen)
    other, _ = election.step(election.candidate(ME, terms=TERMS), seen)
    assert campaigns(back, 100.05)
    assert not campaigns(other, 100.05)
