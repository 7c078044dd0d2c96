"""Claims that were removed or damaged: who may write them again, with what, and when another worker may own them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parti.control import claims, membership, per_partition, per_worker_partition, reconcile, records
from parti.control.claims import IllegalTransition
from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.leader_signals import Gone, Trace, TracesRead, traces_of
from parti.control.lease import LeaseTerms
from parti.control.membership import LeaseSeen, Membership
from parti.control.per_partition import PerPartition
from parti.control.per_worker_partition import PerWorkerPartition
from parti.control.reconcile import AssignmentSeen, ClaimsLost, ClaimsSeen, Leader, ReadTraces, Tick, WriteClaim
from parti.control.signals import ClaimLost, ClaimSeen, WriteFailed
from parti.control.signals import WriteClaim as OwnWrite
from parti.manager.positions import is_former
from parti.model import (
    Ahead,
    Assignment,
    Checkpoint,
    Claim,
    ClaimState,
    Lease,
    Member,
    Partition,
    PartitionId,
    WorkerId,
)

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)
P = PartitionId("p0")
A, B = Member(WorkerId("worker-0"), "a"), Member(WorkerId("worker-1"), "b")
STABLE = Claim(P, ClaimState.STABLE, 7, A, cursor=40, target=40, accepted=True, term=3)


def held(kind: type[PerWorkerPartition] | type[PerPartition]) -> PerWorkerPartition | PerPartition:
    known = {"claim": STABLE, "revision": 10, "queued": 55, "tail": 55, "done": 55, "lease": Lease(P, 7)}
    if kind is PerWorkerPartition:
        return PerWorkerPartition(P, A, phase=per_worker_partition.Phase.LIVE, **known)  # type: ignore[arg-type]
    return PerPartition(P, A, phase=per_partition.Phase.LIVE, **known)  # type: ignore[arg-type]


def step(
    state: PerWorkerPartition | PerPartition, event: ClaimLost | ClaimSeen | WriteFailed
) -> tuple[PerWorkerPartition | PerPartition, list[OwnWrite]]:
    after, effects = (
        per_worker_partition.step(state, event)
        if isinstance(state, PerWorkerPartition)
        else per_partition.step(state, event)
    )
    return after, [effect for effect in effects if isinstance(effect, OwnWrite)]


@pytest.mark.parametrize("kind", [PerWorkerPartition, PerPartition])
def test_who_holds_a_partition_writes_its_claim_again_under_a_higher_epoch_and_with_its_cursor(
    kind: type[PerWorkerPartition] | type[PerPartition],
) -> None:
    lost, writes = step(held(kind), ClaimLost(12, 12))
    assert [(w.claim.state, w.claim.epoch, w.claim.owner, w.claim.cursor, w.expected) for w in writes] == [
        (ClaimState.STABLE, 8, A, 55, 12)
    ]
    assert lost.unspoken == 12, "until it is written our lease does not say that we know of the loss"
    failed, _ = step(lost, WriteFailed())
    again, writes = step(failed, ClaimLost(12, 12))
    assert len(writes) == 1
    mislaid = claims.mislaid(STABLE, cursor=0, term=4)
    over, writes = step(again, ClaimSeen(mislaid, 13))
    assert writes[0].expected == 13
    assert writes[0].claim.epoch > mislaid.epoch
    well, _ = step(over, ClaimSeen(writes[0].claim, 14))
    assert well.unspoken is None
    assert well.lease == Lease(P, writes[0].claim.epoch)


@pytest.mark.parametrize("kind", [PerWorkerPartition, PerPartition])
def test_who_holds_nothing_writes_nothing_and_an_old_loss_is_no_news(
    kind: type[PerWorkerPartition] | type[PerPartition],
) -> None:
    _, writes = step(kind(P, B, claim=STABLE, revision=10), ClaimLost(12, 12))
    assert writes == []
    known = held(kind)
    same, writes = step(known, ClaimLost(9, 9))
    assert (same, writes) == (known, [])


def test_only_the_owner_may_reclaim_and_a_mislaid_claim_is_not_assigned_like_a_new_one() -> None:
    with pytest.raises(IllegalTransition):
        claims.reclaim(STABLE, B, cursor=1)
    mislaid = claims.mislaid(STABLE, cursor=50, term=4)
    assert (mislaid.lost, mislaid.owner, mislaid.previous, mislaid.cursor) == (True, None, A, 50)
    with pytest.raises(IllegalTransition):
        claims.assign(mislaid, B, term=4)
    found = claims.find(mislaid, B, start=60, epoch=100, previous=None, term=4)
    assert (found.owner, found.cursor, found.epoch, found.previous, found.lost) == (B, 60, 101, A, False)


def led(now: float, seen: dict[Member, int], lost: Gone | None = None, **more: Any) -> Leader:
    members = Membership(TERMS, started=0.0)
    for n, (each, revision) in enumerate(seen.items()):
        members, _ = membership.step(members, LeaseSeen(now, each.worker, LeaseRecord(each, seen=revision), 100 + n))
    stored = Assignment(2, 5, "adopt", {P: A.worker})
    leader = reconcile.elect(
        3,
        now,
        members,
        (Partition(("p0",)),),
        reconcile.Found(stored, 90, lost={P: lost} if lost else {}, **more),
    )
    ours = Assignment(3, 6, "adopt", {P: A.worker})
    return reconcile.step(leader, AssignmentSeen(now, ours, 120))[0]


def test_a_leader_that_does_not_find_a_claim_waits_for_all_to_speak_and_goes_on_from_the_furthest_trace() -> None:
    leader = led(100.0, {A: 50, B: 50})
    leader, effects = reconcile.step(leader, Tick(100.1))
    assert effects == (), "its owner is given the time to write it again"
    leader, effects = reconcile.step(leader, Tick(100.6))
    placed = next(e for e in effects if isinstance(e, WriteClaim))
    assert placed.claim.lost
    assert not placed.fresh
    leader, effects = reconcile.step(leader, ClaimsSeen(100.7, ((placed.claim, 130),)))
    assert effects == (), "not everybody has said that it knows"
    members = leader.membership
    for n, each in enumerate((A, B)):
        members, _ = membership.step(members, LeaseSeen(101.0, each.worker, LeaseRecord(each, seen=130), 140 + n))
    leader, _ = reconcile.step(leader, reconcile.MembersChanged(101.0, members))
    leader, effects = reconcile.step(leader, Tick(101.2))
    assert effects == (ReadTraces((P,)),)
    _, effects = reconcile.step(leader, TracesRead(101.3, (P,), {P: Trace(9, 77, B, Ahead(90, frozenset({78})))}))
    found = next(e for e in effects if isinstance(e, WriteClaim))
    assert found.claim.ahead == Ahead(90, frozenset({78})), "what was done above it is not repeated"
    assert (found.claim.owner, found.claim.cursor, found.expected, found.fresh) == (A, 77, 130, False)
    assert found.claim.epoch > 130, "above every epoch that was ever given"


def test_a_claim_that_changed_while_a_new_leader_read_is_adopted_as_it_is_now() -> None:
    moving = claims.accept(claims.release(claims.prepare(STABLE, B, term=2), A, cursor=50), B, target=60)
    done = claims.caught_up(moving, B, cursor=60)
    leader = led(100.0, {A: 50, B: 50}, claims={P: (moving, 80)}, remembered={P: (done, 85)})
    assert leader.claims[P] == (done, 85)
    assert not leader.moving
    older = led(100.0, {A: 50, B: 50}, claims={P: (done, 85)}, remembered={P: (moving, 80)})
    assert older.claims[P] == (done, 85)
    gone = led(100.0, {A: 50, B: 50}, Gone(90, 90), remembered={P: (done, 85)})
    assert P in gone.lost, "removed after this member saw it"
    back = led(100.0, {A: 50, B: 50}, Gone(90, 90), remembered={P: (done, 95)})
    assert back.claims[P] == (done, 95)


def test_what_its_owner_writes_again_is_left_alone() -> None:
    leader = led(100.0, {A: 50, B: 50}, Gone(60, 60), remembered={P: (STABLE, 40)})
    again = claims.reclaim(STABLE, A, cursor=55)
    leader, effects = reconcile.step(leader, ClaimsSeen(100.2, ((again, 130),)))
    assert effects == ()
    leader, effects = reconcile.step(leader, Tick(101.0))
    assert effects == ()
    leader, effects = reconcile.step(leader, ClaimsLost(102.0, {P: Gone(129, 129)}))
    assert not leader.lost, "older than what was written since"


def test_the_furthest_of_all_positions_counts() -> None:
    noted = [Checkpoint(A, {P: (3, 90)}), Checkpoint(B, {P: (5, 80), PartitionId("p9"): (1, 1)})]
    assert traces_of(noted, [P]) == {P: Trace(5, 90, B)}


def test_records_of_an_older_parti_say_nothing_about_capacity_health_and_what_they_know() -> None:
    old = {"kind": "parti.lease", "v": 1, "worker": "worker-0", "nonce": "a", "status": "active", "beat": 3}
    assert records.decode_lease(json.dumps(old).encode()) == LeaseRecord(A, LeaseStatus.ACTIVE, 3, "", True, 0, 0, True)
    told = LeaseRecord(A, beat=4, seen=17, capacity=500, well=False)
    assert records.decode_lease(records.encode_lease(told)) == told
    mislaid = claims.mislaid(STABLE, cursor=0, term=4)
    assert records.decode_claim(records.encode_claim(mislaid)) == mislaid


def test_what_a_former_process_noted_counts_until_somebody_has_gone_on_from_it_also_when_the_claim_was_lost() -> None:
    """The note was dropped when the mislaid claim came, and with it the position of a whole partition (prove sim)."""
    assert is_former(STABLE, A.worker)
    assert is_former(claims.mislaid(STABLE, cursor=0, term=3), A.worker)
    assert is_former(None, A.worker)
    assert not is_former(STABLE, B.worker)
