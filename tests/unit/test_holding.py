"""One partition at one worker in the per-worker layout: hold, catch up, process, stop, let go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.control import claims, holding
from parti.control.holding import Holding, Phase, deliver, step
from parti.control.signals import (
    AddFilter,
    CatchUp,
    ClaimSeen,
    Discard,
    Done,
    DropFilter,
    Fenced,
    FilterAdded,
    FilterDropped,
    Gap,
    Granted,
    LaneStopped,
    LastRead,
    Offer,
    Read,
    ReadLast,
    ReadUpTo,
    Revoked,
    StopLane,
    Verdict,
    WriteClaim,
    WriteFailed,
)
from parti.model import Claim, ClaimState, Member, PartitionId, Retention, WorkerId

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

    def deliver(self, seq: int) -> Verdict:
        self.state, verdict = deliver(self.state, seq)
        return verdict


def live_owner(retention: Retention = Retention.LIMITS) -> Desk:
    """A at cursor 10, live since T = 10."""
    desk = Desk(A, retention)
    offered = replace(claims.assign(Claim(P, cursor=10), A, term=1), epoch=1)
    assert desk.claim(offered) == [AddFilter(P, 1)]
    (write,) = desk.feed(FilterAdded(10, 1))
    assert isinstance(write, WriteClaim)
    assert desk.claim(write.claim) == [Granted(write.claim.lease()), Offer(P)]
    assert desk.state.phase is Phase.LIVE
    return desk


def test_the_next_owner_filters_first_holds_what_arrives_and_reports_t() -> None:
    desk = Desk(B)
    assert desk.claim(PREPARE) == [AddFilter(P, 1)]
    assert desk.deliver(75) is Verdict.HOLD
    assert desk.feed(FilterAdded(80, 1)) == [WriteClaim(READY, 1)]
    assert desk.deliver(79) is Verdict.ACK_WHEN_DONE
    assert desk.deliver(81) is Verdict.HOLD


def test_after_the_commit_the_gap_is_read_then_what_was_held_comes_then_live_messages() -> None:
    desk = Desk(B)
    desk.claim(PREPARE)
    desk.feed(FilterAdded(80, 1))
    assert desk.claim(COMMIT) == [WriteClaim(TAKEN, 2)]
    assert desk.state.lease is None, "nothing may start before the accept is confirmed"
    assert desk.claim(TAKEN) == [Granted(TAKEN.lease()), CatchUp(P, 70, 80, 2)]
    assert desk.deliver(81) is Verdict.HOLD
    desk.feed(Read(72, 2))
    desk.feed(Read(79, 2))
    assert desk.feed(ReadUpTo(80, 2)) == [Offer(P)]
    assert desk.deliver(81) is Verdict.PROCESS
    assert desk.deliver(79) is Verdict.ACK_WHEN_DONE
    assert desk.feed(Done(72)) == []
    assert desk.state.cursor == 72
    assert desk.feed(Done(79)) == []
    (write,) = desk.feed(Done(81))
    assert isinstance(write, WriteClaim)
    assert (write.claim.state, write.claim.cursor) == (ClaimState.STABLE, 81)
    assert desk.deliver(79) is Verdict.ACK


def test_the_owner_goes_on_until_the_next_one_is_ready_then_stops_drains_and_releases_exactly() -> None:
    desk = live_owner()
    assert desk.deliver(12) is Verdict.PROCESS
    assert desk.deliver(14) is Verdict.PROCESS
    assert desk.deliver(17) is Verdict.PROCESS
    assert desk.claim(PREPARE) == []
    assert desk.deliver(18) is Verdict.PROCESS
    assert desk.claim(READY) == [StopLane(P)]
    assert desk.deliver(20) is Verdict.IGNORE
    assert desk.feed(LaneStopped(last_started=12, dropped_from=14)) == []
    effects = desk.feed(Done(12))
    assert effects[0] == Revoked(desk_lease(1))
    assert isinstance(effects[1], WriteClaim)
    assert (effects[1].claim.owner, effects[1].claim.cursor) == (B, 13)
    assert desk.state.unreleased == (READY.epoch, 13), "until the claim says it, our positions do (seed 103447)"
    assert desk.claim(COMMIT) == [Discard(P), DropFilter(P)]
    assert desk.state.unreleased is None
    assert desk.deliver(20) is Verdict.ACK, "on a limits stream a leftover is mere bookkeeping"


def desk_lease(epoch: int) -> object:
    return replace(STABLE, epoch=epoch).lease()


def test_an_owner_with_an_idle_lane_releases_at_once() -> None:
    desk = live_owner()
    desk.deliver(12)
    desk.feed(Done(12))
    desk.claim(READY)
    effects = desk.feed(LaneStopped(last_started=12, dropped_from=None))
    assert isinstance(effects[-1], WriteClaim)
    assert effects[-1].claim.cursor == 12


def test_an_aborted_move_resumes_where_the_owner_stopped_and_reads_what_it_ignored() -> None:
    desk = live_owner()
    desk.claim(READY)
    desk.feed(LaneStopped(0, None))
    assert desk.deliver(20) is Verdict.IGNORE
    aborted = claims.abort(READY, term=2)
    assert desk.claim(aborted) == [Granted(aborted.lease()), ReadLast(P, 2)]
    assert desk.feed(LastRead(25, 2)) == [CatchUp(P, 10, 25, 3)]


def test_an_abort_before_the_owner_stopped_only_changes_the_epoch() -> None:
    desk = live_owner()
    desk.claim(PREPARE)
    aborted = claims.abort(PREPARE, term=2)
    assert desk.claim(aborted) == [Granted(aborted.lease())]
    assert desk.deliver(20) is Verdict.PROCESS


def test_a_gap_stops_everything_until_a_new_t_is_read() -> None:
    desk = live_owner()
    desk.deliver(12)
    assert desk.feed(Gap()) == [ReadLast(P, 2)]
    assert desk.deliver(30) is Verdict.HOLD
    assert desk.feed(LastRead(31, 2)) == [CatchUp(P, 12, 31, 3)]
    assert desk.deliver(30) is Verdict.ACK_WHEN_DONE
    assert desk.feed(ReadUpTo(31, 3)) == [Offer(P)]


@pytest.mark.parametrize("late", [FilterAdded(5, 0), LastRead(5, 1), Read(500, 1), ReadUpTo(900, 1)])
def test_an_answer_to_an_older_question_changes_nothing(late: holding.Event) -> None:
    desk = live_owner()
    desk.feed(Gap())
    before = desk.state
    assert desk.feed(late) == []
    assert desk.state == before


def test_a_t_that_was_read_before_a_gap_is_asked_for_again() -> None:
    desk = Desk(B)
    desk.claim(PREPARE)
    assert desk.feed(Gap()) == [AddFilter(P, 2)]
    assert desk.feed(FilterAdded(80, 1)) == []
    assert desk.feed(FilterAdded(95, 2)) == [WriteClaim(claims.ready(PREPARE, B, target=95), 1)]


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
    desk.deliver(12)
    assert desk.feed(Fenced()) == [Revoked(desk_lease(1)), Discard(P)]
    assert (desk.state.lease, desk.state.cursor) == (None, 10)


def test_a_partition_taken_over_our_head_is_given_up_at_once() -> None:
    desk = live_owner()
    desk.deliver(12)
    taken = claims.take_over(STABLE, B, start=10, term=3)
    assert desk.claim(taken) == [Revoked(desk_lease(1)), Discard(P), DropFilter(P)]
    assert desk.state.lease is None


def test_on_a_work_queue_the_filter_goes_before_the_release_and_a_leftover_is_never_acked() -> None:
    desk = live_owner(Retention.WORKQUEUE)
    assert desk.claim(PREPARE) == [StopLane(P)]
    effects = desk.feed(LaneStopped(0, None))
    assert effects == [Revoked(desk_lease(1)), DropFilter(P)]
    (write,) = desk.feed(FilterDropped())
    assert isinstance(write, WriteClaim)
    desk.claim(write.claim)
    assert desk.deliver(20) is Verdict.IGNORE
    assert desk.deliver(9) is Verdict.ACK, "what we did ourselves is done"


def test_on_a_work_queue_the_next_owner_filters_only_after_the_commit() -> None:
    desk = Desk(B, Retention.WORKQUEUE)
    assert desk.claim(PREPARE) == []
    assert desk.claim(COMMIT) == [AddFilter(P, 1)]


def test_on_an_interest_stream_the_filter_stays_and_nothing_is_acked_until_the_next_owner_has_processed_up_to_t() -> (
    None
):
    desk = live_owner(Retention.INTEREST)
    desk.claim(READY)
    desk.feed(LaneStopped(0, None))
    assert desk.claim(COMMIT) == [Discard(P)]
    assert desk.deliver(20) is Verdict.IGNORE
    assert desk.claim(TAKEN) == []
    assert desk.state.filtered
    assert desk.claim(claims.caught_up(TAKEN, B, cursor=80)) == [DropFilter(P)]
    desk.feed(FilterDropped())
    assert desk.deliver(20) is Verdict.ACK


def test_a_new_process_keeps_the_filter_and_acks_nothing_of_what_the_one_before_it_owned() -> None:
    reborn = Desk(replace(A, nonce="a2"))
    assert reborn.deliver(20) is Verdict.IGNORE, "before the claims were read nothing is known"
    reborn.claim(STABLE)
    assert reborn.state.filtered
    assert reborn.deliver(20) is Verdict.IGNORE


def test_a_retired_partition_is_drained_without_a_next_owner() -> None:
    desk = live_owner()
    assert desk.claim(claims.prepare(STABLE, None, term=2)) == [StopLane(P)]


def test_it_says_what_it_is_doing() -> None:
    assert repr(live_owner().state) == "<Holding orders.7 live epoch=1 cursor=10 T=10>"
