"""One partition at one worker in the per-worker layout: hold, catch up, process, stop, let go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.control import claims, holding
from parti.control.holding import Holding, Phase, step
from parti.control.signals import (
    AddFilter,
    CatchUp,
    ClaimSeen,
    Done,
    DropFilter,
    Fenced,
    FilterAdded,
    FilterDropped,
    Granted,
    LaneStopped,
    LastRead,
    ReadLast,
    ReadUpTo,
    Revoked,
    StopLane,
    WriteClaim,
    WriteFailed,
)
from parti.model import Claim, ClaimState, Lease, Member, PartitionId, Retention, WorkerId

P = PartitionId("orders.7")
A = Member(WorkerId("worker-0"), "a")
B = Member(WorkerId("worker-1"), "b")

STABLE = replace(claims.accept(claims.assign(Claim(P), A, term=1), A, target=0), cursor=10)
PREPARE = claims.prepare(STABLE, B, term=1)
READY = claims.ready(PREPARE, B, target=80)
COMMIT = claims.release(READY, A, cursor=70)
TAKEN = claims.accept(COMMIT, B, target=80)


class Desk:
    """Feeds one holding and remembers what it asked for."""

    def __init__(self, me: Member, retention: Retention = Retention.LIMITS) -> None:
        self.state = Holding(P, me, retention)
        self.revision = 0

    def feed(self, event: holding.Event) -> list[object]:
        self.state, effects = step(self.state, event)
        return list(effects)

    def claim(self, claim: Claim) -> list[object]:
        self.revision += 1
        return self.feed(ClaimSeen(claim, self.revision))


def live_owner(retention: Retention = Retention.LIMITS) -> Desk:
    """A at cursor 10, live since T = 10."""
    desk = Desk(A, retention)
    offered = replace(claims.assign(Claim(P, cursor=10), A, term=1), epoch=1)
    assert desk.claim(offered) == [AddFilter(P, 1)]
    (write,) = desk.feed(FilterAdded(10, 1))
    assert isinstance(write, WriteClaim)
    assert desk.claim(write.claim) == [Granted(write.claim.lease()), CatchUp(P, 10, 10, 2)]
    assert desk.state.phase is Phase.LIVE
    return desk


def test_the_next_owner_filters_first_and_reports_t() -> None:
    desk = Desk(B)
    assert desk.claim(PREPARE) == [AddFilter(P, 1)]
    assert desk.feed(FilterAdded(80, 1)) == [WriteClaim(READY, 1)]


def test_after_the_commit_the_gap_is_read_and_the_claim_is_stable_when_all_up_to_t_is_processed() -> None:
    desk = Desk(B)
    desk.claim(PREPARE)
    desk.feed(FilterAdded(80, 1))
    assert desk.claim(COMMIT) == [WriteClaim(TAKEN, 2)]
    assert desk.state.lease is None, "nothing may start before the accept is confirmed"
    assert desk.claim(TAKEN) == [Granted(TAKEN.lease()), CatchUp(P, 70, 80, 2)]
    assert desk.state.cursor == 70
    (write,) = desk.feed(ReadUpTo(80, 2))
    assert isinstance(write, WriteClaim)
    assert (write.claim.state, write.claim.cursor) == (ClaimState.STABLE, 80)


def test_the_owner_goes_on_until_the_next_one_is_ready_then_stops_drains_and_releases_exactly() -> None:
    desk = live_owner()
    assert desk.claim(PREPARE) == []
    assert desk.claim(READY) == [StopLane(P)]
    assert desk.feed(LaneStopped(last_started=13, dropped_from=14)) == []
    effects = desk.feed(Done(13))
    assert effects[0] == Revoked(desk_lease(1))
    assert isinstance(effects[1], WriteClaim)
    assert (effects[1].claim.owner, effects[1].claim.cursor) == (B, 13)
    assert desk.state.unreleased == (READY.epoch, 13), "until the claim says it, our positions do (seed 103447)"
    assert desk.claim(COMMIT) == [DropFilter(P)]
    assert desk.state.unreleased is None


def desk_lease(epoch: int) -> Lease:
    return replace(STABLE, epoch=epoch).lease()


def test_an_owner_with_an_idle_lane_releases_at_once() -> None:
    desk = live_owner()
    desk.claim(READY)
    effects = desk.feed(LaneStopped(last_started=10, dropped_from=None))
    assert isinstance(effects[-1], WriteClaim)
    assert effects[-1].claim.cursor == 10


def test_an_aborted_move_resumes_where_the_owner_stopped_and_reads_what_it_ignored() -> None:
    desk = live_owner()
    desk.claim(READY)
    desk.feed(LaneStopped(0, None))
    aborted = claims.abort(READY, term=2)
    assert desk.claim(aborted) == [Granted(aborted.lease()), ReadLast(P, 3)]
    assert desk.feed(LastRead(25, 3)) == [CatchUp(P, 10, 25, 4)]


def test_an_abort_before_the_owner_stopped_only_changes_the_epoch() -> None:
    desk = live_owner()
    desk.claim(PREPARE)
    aborted = claims.abort(PREPARE, term=2)
    assert desk.claim(aborted) == [Granted(aborted.lease())]
    assert desk.state.phase is Phase.LIVE


@pytest.mark.parametrize("late", [FilterAdded(5, 0), LastRead(5, 1), ReadUpTo(900, 1)])
def test_an_answer_to_an_older_question_changes_nothing(late: holding.Event) -> None:
    desk = live_owner()
    desk.claim(READY)
    desk.feed(LaneStopped(0, None))
    desk.claim(claims.abort(READY, term=2))
    before = desk.state
    assert desk.feed(late) == []
    assert desk.state == before


def test_a_refused_write_is_repeated_when_the_claim_is_seen_again() -> None:
    desk = Desk(B)
    desk.claim(PREPARE)
    desk.feed(FilterAdded(80, 1))
    assert desk.feed(ClaimSeen(PREPARE, 1)) == [], "the first write is still under way"
    desk.feed(WriteFailed())
    assert desk.feed(ClaimSeen(PREPARE, 1)) == [WriteClaim(READY, 1)]


def test_a_stale_read_of_the_claim_changes_nothing() -> None:
    desk = live_owner()
    before = desk.state
    assert desk.feed(ClaimSeen(COMMIT, desk.revision - 1)) == []
    assert desk.state == before


def test_a_fenced_worker_holds_nothing() -> None:
    desk = live_owner()
    assert desk.feed(Fenced()) == [Revoked(desk_lease(1))]
    assert (desk.state.lease, desk.state.cursor) == (None, 10)


def test_a_partition_taken_over_our_head_is_given_up_at_once() -> None:
    desk = live_owner()
    taken = claims.take_over(STABLE, B, start=10, term=3)
    assert desk.claim(taken) == [Revoked(desk_lease(1)), DropFilter(P)]
    assert desk.state.lease is None


def test_on_a_work_queue_the_filter_goes_before_the_release() -> None:
    desk = live_owner(Retention.WORKQUEUE)
    assert desk.claim(PREPARE) == [StopLane(P)]
    effects = desk.feed(LaneStopped(0, None))
    assert effects == [Revoked(desk_lease(1)), DropFilter(P)]
    (write,) = desk.feed(FilterDropped())
    assert isinstance(write, WriteClaim)
    assert write.claim.owner == B


def test_on_a_work_queue_the_next_owner_filters_only_after_the_commit() -> None:
    desk = Desk(B, Retention.WORKQUEUE)
    assert desk.claim(PREPARE) == []
    assert desk.claim(COMMIT) == [AddFilter(P, 1)]


def test_on_an_interest_stream_the_filter_stays_until_the_next_owner_has_processed_up_to_t() -> None:
    desk = live_owner(Retention.INTEREST)
    desk.claim(READY)
    desk.feed(LaneStopped(0, None))
    assert desk.claim(COMMIT) == []
    assert desk.claim(TAKEN) == []
    assert desk.state.filtered
    assert desk.claim(claims.caught_up(TAKEN, B, cursor=80)) == [DropFilter(P)]


def test_a_new_process_keeps_the_filter_of_what_the_one_before_it_owned() -> None:
    reborn = Desk(replace(A, nonce="a2"))
    reborn.claim(STABLE)
    assert reborn.state.filtered


def test_a_retired_partition_is_drained_without_a_next_owner() -> None:
    desk = live_owner()
    assert desk.claim(claims.prepare(STABLE, None, term=2)) == [StopLane(P)]


def test_it_says_what_it_is_doing() -> None:
    assert repr(live_owner().state) == "<Holding orders.7 live epoch=1 cursor=10 T=10>"
