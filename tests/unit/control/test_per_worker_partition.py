"""One partition at one worker in the per-worker layout: hold, catch up, process, stop, release."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.control import claims, per_worker_partition, signals
from parti.control.per_worker_partition import PerWorkerPartition, Phase, step
from parti.model import Claim, ClaimState, Lease, Member, PartitionId, Retention, WorkerId

P = PartitionId("orders.7")
A = Member(WorkerId("worker-0"), "a")
B = Member(WorkerId("worker-1"), "b")

STABLE = replace(claims.accept(claims.assign(Claim(P), A, term=1), A, target=0), cursor=10)
PREPARE = claims.prepare(STABLE, B, term=1)
READY = claims.ready(PREPARE, B, target=80)
COMMIT = claims.release(READY, A, cursor=70)
TAKEN = claims.accept(COMMIT, B, target=80)


class Inbox:
    """Feeds one holding and remembers what it asked for."""

    def __init__(self, me: Member, retention: Retention = Retention.LIMITS) -> None:
        self.state = PerWorkerPartition(P, me, retention=retention)
        self.revision = 0

    def feed(self, event: per_worker_partition.Event) -> list[object]:
        self.state, effects = step(self.state, event)
        return list(effects)

    def claim(self, claim: Claim) -> list[object]:
        self.revision += 1
        return self.feed(signals.ClaimSeen(claim, self.revision))


def live_owner(retention: Retention = Retention.LIMITS) -> Inbox:
    """A at cursor 10, live since T = 10."""
    inbox = Inbox(A, retention)
    offered = replace(claims.assign(Claim(P, cursor=10), A, term=1), epoch=1)
    assert inbox.claim(offered) == [signals.AddFilter(P, 1)]
    (write,) = inbox.feed(signals.FilterAdded(10, 1))
    assert isinstance(write, signals.WriteClaim)
    assert inbox.claim(write.claim) == [signals.Granted(write.claim.lease()), signals.CatchUp(P, 10, 10, 2)]
    assert inbox.state.phase is Phase.LIVE
    return inbox


def test_the_next_owner_filters_first_and_reports_t() -> None:
    inbox = Inbox(B)
    assert inbox.claim(PREPARE) == [signals.AddFilter(P, 1)]
    assert inbox.feed(signals.FilterAdded(80, 1)) == [signals.WriteClaim(READY, 1)]


def test_after_the_commit_the_gap_is_read_and_the_claim_is_stable_when_all_up_to_t_is_processed() -> None:
    inbox = Inbox(B)
    inbox.claim(PREPARE)
    inbox.feed(signals.FilterAdded(80, 1))
    assert inbox.claim(COMMIT) == [signals.WriteClaim(TAKEN, 2)]
    assert inbox.state.lease is None, "nothing may start before the accept is confirmed"
    assert inbox.claim(TAKEN) == [signals.Granted(TAKEN.lease()), signals.CatchUp(P, 70, 80, 2)]
    assert inbox.state.cursor == 70
    (write,) = inbox.feed(signals.ReadUpTo(80, 2))
    assert isinstance(write, signals.WriteClaim)
    assert (write.claim.state, write.claim.cursor) == (ClaimState.STABLE, 80)


def test_the_owner_goes_on_until_the_next_one_is_ready_then_stops_drains_and_releases_exactly() -> None:
    inbox = live_owner()
    assert inbox.claim(PREPARE) == []
    assert inbox.claim(READY) == [signals.StopLane(P)]
    assert inbox.feed(signals.LaneStopped(last_started=13, dropped_from=14)) == []
    effects = inbox.feed(signals.MessageDone(13))
    assert effects[0] == signals.Revoked(desk_lease(1))
    assert isinstance(effects[1], signals.WriteClaim)
    assert (effects[1].claim.owner, effects[1].claim.cursor) == (B, 13)
    assert inbox.state.unreleased == (READY.epoch, 13), "until the claim says it, our positions do (seed 103447)"
    assert inbox.claim(COMMIT) == [signals.DropFilter(P)]
    assert inbox.state.unreleased is None


def desk_lease(epoch: int) -> Lease:
    return replace(STABLE, epoch=epoch).lease()


def test_an_owner_with_an_idle_lane_releases_at_once() -> None:
    inbox = live_owner()
    inbox.claim(READY)
    effects = inbox.feed(signals.LaneStopped(last_started=10, dropped_from=None))
    assert isinstance(effects[-1], signals.WriteClaim)
    assert effects[-1].claim.cursor == 10


def test_an_aborted_move_resumes_where_the_owner_stopped_and_reads_what_it_ignored() -> None:
    inbox = live_owner()
    inbox.claim(READY)
    inbox.feed(signals.LaneStopped(0, None))
    aborted = claims.abort(READY, term=2)
    assert inbox.claim(aborted) == [signals.Granted(aborted.lease()), signals.ReadLast(P, 3)]
    assert inbox.feed(signals.LastRead(25, 3)) == [signals.CatchUp(P, 10, 25, 4)]


def test_an_abort_before_the_owner_stopped_only_changes_the_epoch() -> None:
    inbox = live_owner()
    inbox.claim(PREPARE)
    aborted = claims.abort(PREPARE, term=2)
    assert inbox.claim(aborted) == [signals.Granted(aborted.lease())]
    assert inbox.state.phase is Phase.LIVE


@pytest.mark.parametrize("late", [signals.FilterAdded(5, 0), signals.LastRead(5, 1), signals.ReadUpTo(900, 1)])
def test_an_answer_to_an_older_question_changes_nothing(late: per_worker_partition.Event) -> None:
    inbox = live_owner()
    inbox.claim(READY)
    inbox.feed(signals.LaneStopped(0, None))
    inbox.claim(claims.abort(READY, term=2))
    before = inbox.state
    assert inbox.feed(late) == []
    assert inbox.state == before


def test_a_refused_write_is_repeated_when_the_claim_is_seen_again() -> None:
    inbox = Inbox(B)
    inbox.claim(PREPARE)
    inbox.feed(signals.FilterAdded(80, 1))
    assert inbox.feed(signals.ClaimSeen(PREPARE, 1)) == [], "the first write is still under way"
    inbox.feed(signals.WriteFailed())
    assert inbox.feed(signals.ClaimSeen(PREPARE, 1)) == [signals.WriteClaim(READY, 1)]


def test_a_stale_read_of_the_claim_changes_nothing() -> None:
    inbox = live_owner()
    before = inbox.state
    assert inbox.feed(signals.ClaimSeen(COMMIT, inbox.revision - 1)) == []
    assert inbox.state == before


def test_a_fenced_worker_holds_nothing() -> None:
    inbox = live_owner()
    assert inbox.feed(signals.Fenced()) == [signals.Revoked(desk_lease(1))]
    assert (inbox.state.lease, inbox.state.cursor) == (None, 10)


def test_a_partition_taken_over_our_head_is_given_up_at_once() -> None:
    inbox = live_owner()
    taken = claims.take_over(STABLE, B, start=10, term=3)
    assert inbox.claim(taken) == [signals.Revoked(desk_lease(1)), signals.DropFilter(P)]
    assert inbox.state.lease is None


def test_on_a_work_queue_the_filter_goes_before_the_release() -> None:
    inbox = live_owner(Retention.WORKQUEUE)
    assert inbox.claim(PREPARE) == [signals.StopLane(P)]
    effects = inbox.feed(signals.LaneStopped(0, None))
    assert effects == [signals.Revoked(desk_lease(1)), signals.DropFilter(P)]
    (write,) = inbox.feed(signals.FilterDropped())
    assert isinstance(write, signals.WriteClaim)
    assert write.claim.owner == B


def test_on_a_work_queue_the_next_owner_filters_only_after_the_commit() -> None:
    inbox = Inbox(B, Retention.WORKQUEUE)
    assert inbox.claim(PREPARE) == []
    assert inbox.claim(COMMIT) == [signals.AddFilter(P, 1)]


def test_on_an_interest_stream_the_filter_stays_until_the_next_owner_has_processed_up_to_t() -> None:
    inbox = live_owner(Retention.INTEREST)
    inbox.claim(READY)
    inbox.feed(signals.LaneStopped(0, None))
    assert inbox.claim(COMMIT) == []
    assert inbox.claim(TAKEN) == []
    assert inbox.state.filtered
    assert inbox.claim(claims.caught_up(TAKEN, B, cursor=80)) == [signals.DropFilter(P)]


def test_a_new_process_keeps_the_filter_of_what_the_one_before_it_owned() -> None:
    reborn = Inbox(replace(A, nonce="a2"))
    reborn.claim(STABLE)
    assert reborn.state.filtered


def test_a_retired_partition_is_drained_without_a_next_owner() -> None:
    inbox = live_owner()
    assert inbox.claim(claims.prepare(STABLE, None, term=2)) == [signals.StopLane(P)]


def test_it_says_what_it_is_doing() -> None:
    assert repr(live_owner().state) == "<PerWorkerPartition orders.7 live epoch=1 cursor=10 T=10>"
