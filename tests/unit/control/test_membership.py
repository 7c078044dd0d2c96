"""Live members: known by identity, and dead only when that is certain."""

from __future__ import annotations

from dataclasses import replace

from parti.control import membership
from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lease import LeaseTerms
from parti.control.membership import (
    Confirm,
    Died,
    Effect,
    Joined,
    LeaseSeen,
    Leaving,
    Left,
    Membership,
    Restarted,
    Tick,
)
from parti.model import Member, WorkerId

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)
W0, W1 = WorkerId("worker-0"), WorkerId("worker-1")
A, A2, B = Member(W0, "a"), Member(W0, "a2"), Member(W1, "b")


class View:
    def __init__(self) -> None:
        self.state = Membership(TERMS, started=0.0)
        self.revision = 0

    def feed(self, event: membership.Event) -> list[Effect]:
        self.state, effects = membership.step(self.state, event)
        return list(effects)

    def sees(self, now: float, member: Member, **more: object) -> list[Effect]:
        self.revision += 1
        record: LeaseRecord = replace(LeaseRecord(member), **more)  # type: ignore[arg-type]
        return self.feed(LeaseSeen(now, member.worker, record, self.revision))

    def confirms(self, now: float, member: Member) -> list[Effect]:
        seat = self.state.seats[member.worker]
        return self.feed(LeaseSeen(now, member.worker, seat.record, seat.sighting.revision, asked=now))


def test_a_member_that_renews_is_alive_and_changes_nothing() -> None:
    view = View()
    assert view.sees(0.0, A) == [Joined(A)]
    for now in range(2, 40, 2):
        assert view.sees(float(now), A) == []
        assert view.feed(Tick(float(now))) == []
    assert view.state.active() == {W0: A}


def test_a_silent_member_is_asked_about_and_dies_only_when_the_read_confirms_it() -> None:
    view = View()
    view.sees(0.0, A)
    assert view.feed(Tick(6.2)) == []
    assert view.feed(Tick(6.4)) == [Confirm(W0)]
    assert view.feed(Tick(6.5)) == [], "asked already"
    assert not view.state.gone(A, 6.5)
    assert view.confirms(6.6, A) == [Died(A)]
    assert view.state.gone(A, 6.6)
    assert view.state.active() == {}
    assert view.confirms(6.7, A) == []


def test_a_blind_watch_kills_nobody() -> None:
    """The simulator's seed 62: the watch lost renewals during an outage, and a healthy owner was taken over."""
    view = View()
    view.sees(0.0, A)
    assert view.feed(Tick(60.0)) == [Confirm(W0)]
    assert view.sees(60.1, A) == []
    assert not view.state.gone(A, 60.2)
    assert view.state.healthy(A)


def test_one_dies_while_another_joins_and_both_are_noticed() -> None:
    """docs/evidence/go-library.md#w11: a crash was judged by the number of members."""
    view = View()
    view.sees(0.0, A)
    view.feed(Tick(6.4))
    assert view.sees(6.5, B) == [Joined(B)]
    assert view.confirms(6.6, A) == [Died(A)]


def test_a_graceful_leave_is_not_a_crash() -> None:
    view = View()
    view.sees(0.0, A)
    assert view.sees(1.0, A, status=LeaseStatus.LEAVING) == [Leaving(A)]
    assert view.state.healthy(A)
    assert view.state.keeping() == frozenset()
    assert view.sees(2.0, A, status=LeaseStatus.LEFT) == [Left(A)]
    assert view.state.gone(A, 2.0)
    assert view.feed(Tick(60.0)) == []


def test_a_resting_member_keeps_its_partitions_for_one_ttl() -> None:
    view = View()
    view.sees(0.0, A)
    view.sees(1.0, A, status=LeaseStatus.RESTING)
    assert view.state.keeping() == frozenset({W0})
    assert view.state.active() == {}
    assert view.state.gone(A, 1.0), "it stopped by itself: its partitions may be taken by its successor at once"
    assert view.sees(2.0, A2) == [Restarted(A, A2)]
    assert view.state.active() == {W0: A2}
    assert view.state.gone(A, 2.0)


def test_a_process_that_was_replaced_uncleanly_is_gone_only_after_lease_and_margin() -> None:
    view = View()
    view.sees(0.0, A)
    assert view.sees(1.0, A2, clean=False) == [Restarted(A, A2)]
    assert not view.state.gone(A, 7.2)
    assert view.state.gone(A, 7.4)


def test_a_member_we_never_saw_is_gone_one_lease_after_what_we_saw_in_its_place() -> None:
    view = View()
    view.sees(10.0, A2, clean=False)
    assert not view.state.gone(A, 16.2)
    assert view.state.gone(A, 16.4)
    assert not view.state.gone(B, 6.2), "nobody holds its id: it counts from our first full read"
    assert view.state.gone(B, 6.4)


def test_a_member_we_never_saw_is_gone_at_once_when_the_one_in_its_place_knows_so_and_is_there() -> None:
    view = View()
    view.sees(10.0, A2, clean=True)
    assert view.state.gone(A, 10.0)
    view.sees(11.0, A2, status=LeaseStatus.LEFT, clean=True)
    assert not view.state.gone(A, 11.0), "the id is free: a later holder that we have not seen yet may be meant"


def test_a_key_that_the_server_expired_proves_the_end_and_one_deleted_by_hand_does_not() -> None:
    view = View()
    view.sees(0.0, A)
    view.sees(0.0, B)
    assert view.feed(LeaseSeen(5.0, W0, None, 10, expired=True)) == [Left(A)]
    assert view.state.gone(A, 5.0)
    assert view.feed(LeaseSeen(5.0, W1, None, 11)) == [], "its holder may write it again"
    assert not view.state.gone(B, 11.4), "only a read that still finds nothing proves it"
    assert view.feed(Tick(11.4)) == [Confirm(W1)]
    assert view.feed(LeaseSeen(11.5, W1, None, 0, asked=11.4)) == [Died(B)]
    assert view.state.gone(B, 11.5)
    assert view.feed(LeaseSeen(12.0, W1, None, 30)) == []
    assert view.state.gone(B, 12.0), "what was proven stays proven"


def test_a_resting_member_whose_record_was_removed_will_not_be_back() -> None:
    view = View()
    view.sees(0.0, A)
    view.sees(1.0, A, status=LeaseStatus.RESTING)
    assert view.feed(LeaseSeen(2.0, W0, None, 0, asked=0.5)) == [], "asked before it said that it rests"
    assert view.feed(LeaseSeen(2.0, W0, None, 0, asked=1.5)) == [Left(A)], "purged without a trace"
    assert view.state.gone(A, 2.0)
    assert W0 not in view.state.keeping()


def test_a_record_that_its_holder_writes_again_is_no_news() -> None:
    view = View()
    view.sees(0.0, A)
    assert view.feed(LeaseSeen(1.0, W0, None, 20)) == []
    assert view.state.healthy(A)
    assert not view.state.know(0, 10.0), "a member whose record is missing says nothing"
    assert view.feed(LeaseSeen(1.1, W0, LeaseRecord(A, seen=20), 21)) == []
    assert view.feed(LeaseSeen(2.0, W0, None, 0, asked=1.0)) == [], "asked before it was seen again: out of date"
    assert view.state.know(20, 10.0)
    assert not view.state.know(21, 10.0)


def test_an_old_revision_changes_nothing() -> None:
    view = View()
    view.sees(0.0, A)
    view.sees(1.0, A2)
    before = view.state
    assert view.feed(LeaseSeen(2.0, W0, LeaseRecord(A), 1)) == []
    assert view.state == before


def test_the_past_is_forgotten_in_the_end() -> None:
    view = View()
    for n in range(1200):
        view.sees(float(n), Member(W0, str(n)))
    assert len(view.state.ended) <= 1000
