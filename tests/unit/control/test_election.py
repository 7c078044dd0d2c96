"""One leader at a time, with a term that only increases."""

from __future__ import annotations

from parti.control import election
from parti.control.election import (
    Deposed,
    Effect,
    Elected,
    LeaderRecord,
    LeaderSeen,
    NotWritten,
    ReadLeader,
    Resign,
    Tick,
    WriteLeader,
    Written,
)
from parti.control.lease import LeaseTerms
from parti.model import Member, WorkerId

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)
A, B = Member(WorkerId("worker-0"), "a"), Member(WorkerId("worker-1"), "b")


class Candidate:
    def __init__(self, me: Member = A) -> None:
        self.state = election.candidate(me, terms=TERMS)

    def feed(self, event: election.Event) -> list[Effect]:
        self.state, effects = election.step(self.state, event)
        return list(effects)


def leader() -> Candidate:
    candidate = Candidate()
    candidate.feed(LeaderSeen(0.0, None, 0))
    (write,) = candidate.feed(Tick(0.0))
    assert write == WriteLeader(LeaderRecord(1, A, 1), 0)
    assert candidate.feed(Written(0.1, LeaderRecord(1, A, 1), 4)) == [Elected(1)]
    return candidate


def test_nobody_campaigns_against_a_record_it_has_not_read() -> None:
    assert Candidate().feed(Tick(0.0)) == [ReadLeader()]


def test_the_first_to_create_the_record_leads() -> None:
    candidate = leader()
    assert candidate.state.may_lead(5.6)
    assert not candidate.state.may_lead(5.8)


def test_the_loser_of_a_race_follows() -> None:
    loser = Candidate(B)
    loser.feed(LeaderSeen(0.0, None, 0))
    loser.feed(Tick(0.0))
    assert loser.feed(NotWritten(0.1)) == [ReadLeader()]
    assert loser.feed(LeaderSeen(0.2, LeaderRecord(1, A, 1), 4)) == []
    assert loser.feed(Tick(3.0)) == []
    assert (loser.state.leading, loser.state.leader, loser.state.term) == (False, A, 1)


def test_a_silent_leader_is_replaced_after_lease_and_margin_with_a_higher_term() -> None:
    follower = Candidate(B)
    follower.feed(LeaderSeen(0.0, LeaderRecord(7, A, 3), 4))
    assert follower.feed(Tick(6.2)) == []
    assert follower.feed(Tick(6.4)) == [WriteLeader(LeaderRecord(8, B, 1), 4)]


def test_a_leader_that_sees_another_one_steps_down() -> None:
    candidate = leader()
    (deposed,) = candidate.feed(LeaderSeen(1.0, LeaderRecord(2, B, 1), 9))
    assert isinstance(deposed, Deposed)
    assert not candidate.state.may_lead(1.0)


def test_a_leader_frozen_past_its_lease_steps_down_before_anything_else() -> None:
    candidate = leader()
    effects = candidate.feed(Written(50.0, LeaderRecord(1, A, 1), 4))
    assert isinstance(effects[0], Deposed)
    assert not candidate.state.leading


def test_a_resigning_leader_leaves_its_term_behind_and_the_next_begins_at_once() -> None:
    candidate = leader()
    write, deposed = candidate.feed(Resign(1.0))
    assert write == WriteLeader(LeaderRecord(1, None, 2), 4)
    assert isinstance(deposed, Deposed)
    assert candidate.feed(Written(1.1, LeaderRecord(1, None, 2), 5)) == []
    assert not candidate.state.leading
    follower = Candidate(B)
    follower.feed(LeaderSeen(1.2, LeaderRecord(1, None, 2), 5))
    assert follower.feed(Tick(1.2)) == [WriteLeader(LeaderRecord(2, B, 1), 5)]


def test_terms_do_not_restart_with_a_recreated_bucket() -> None:
    """Versions that went back were ignored for ever; the term of any other record is the floor.

    See docs/evidence/go-library.md#w7.
    """
    candidate = Candidate()
    candidate.feed(LeaderSeen(0.0, None, 0, floor=41))
    assert candidate.feed(Tick(0.0)) == [WriteLeader(LeaderRecord(42, A, 1), 0)]


def test_a_lost_answer_is_found_by_reading() -> None:
    candidate = Candidate()
    candidate.feed(LeaderSeen(0.0, None, 0))
    candidate.feed(Tick(0.0))
    candidate.feed(NotWritten(0.5))
    assert candidate.feed(LeaderSeen(0.6, LeaderRecord(1, A, 1), 4)) == [Elected(1)]


def test_our_own_record_of_a_lapsed_term_is_replaced_without_waiting() -> None:
    candidate = leader()
    candidate.feed(Tick(10.0))
    assert not candidate.state.leading
    effects = candidate.feed(Tick(10.5))
    assert effects == [] or isinstance(effects[0], WriteLeader)
    writes = [e for now in range(11, 20) for e in candidate.feed(Tick(float(now))) if isinstance(e, WriteLeader)]
    assert all(w.record.term == 2 for w in writes)
