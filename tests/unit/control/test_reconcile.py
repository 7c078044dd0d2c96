"""The leader's decisions: adopt, assign, move, take over, and leave healthy partitions alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from parti.control import claims, membership, reconcile
from parti.control.handoff import HandoffTerms
from parti.control.identity import LeaseRecord, LeaseStatus
from parti.control.lease import LeaseTerms
from parti.control.membership import Confirm, LeaseSeen, Membership
from parti.control.pacing import PacingTerms
from parti.control.reconcile import (
    AssignmentSeen,
    ClaimsSeen,
    Found,
    Leader,
    LeaderRules,
    MembersChanged,
    PartitionsChanged,
    PositionsRead,
    ReadPositions,
    Tick,
    WriteAssignment,
    WriteClaim,
    elect,
)
from parti.errors import ConfigError
from parti.model import Assignment, Claim, ClaimState, Member, Partition, PartitionId, WorkerId

TERMS = LeaseTerms(ttl=6.0, renew_every=2.0, margin=0.3)
RULES = LeaderRules(windows=PacingTerms(cold_start=10.0, planned=2.0, cooldown=2.0), handoff=HandoffTerms())


def member(n: int, nonce: str = "") -> Member:
    return Member(WorkerId(f"worker-{n}"), nonce or f"n{n}")


def partitions(count: int) -> tuple[Partition, ...]:
    return tuple(Partition((f"p{i:03d}",)) for i in range(count))


class Room:
    """A leader, the members it sees, and a bucket that does what it writes."""

    def __init__(self, members: int, count: int, *, rules: LeaderRules = RULES) -> None:
        self.now = 100.0
        self.members = Membership(TERMS, started=0.0)
        self.revision = 1000
        self.bucket: dict[PartitionId, tuple[Claim, int]] = {}
        self.stored: tuple[Assignment | None, int] = (None, 0)
        self.partitions = partitions(count)
        self.rules = rules
        self.asked: list[ReadPositions] = []
        self.moves = 0
        for n in range(members):
            self._lease(member(n))
        self.leader = self.elect(1)

    def elect(self, term: int) -> Leader:
        return elect(
            term,
            self.now,
            self.members,
            self.partitions,
            Found(*self.stored, dict(self.bucket)),
            rules=self.rules,
        )

    def _lease(self, who: Member, **more: object) -> tuple[membership.Change, ...]:
        self.revision += 1
        record: LeaseRecord = replace(LeaseRecord(who), **more)  # type: ignore[arg-type]
        self.members, effects = membership.step(self.members, LeaseSeen(self.now, who.worker, record, self.revision))
        return tuple(e for e in effects if not isinstance(e, Confirm))

    def lease(self, who: Member, **more: object) -> None:
        changes = self._lease(who, **more)
        self.feed(MembersChanged(self.now, self.members, changes))

    def dies(self, who: Member) -> None:
        """Its lease ran out, and a read confirms it."""
        self.now += 7
        for other in self.members.active().values():
            if other != who:
                self._lease(other)
        seat = self.members.seats[who.worker]
        event = LeaseSeen(self.now, who.worker, seat.record, seat.sighting.revision, asked=self.now)
        self.members, effects = membership.step(self.members, event)
        self.feed(MembersChanged(self.now, self.members, tuple(e for e in effects if not isinstance(e, Confirm))))

    def feed(self, event: reconcile.Event) -> list[reconcile.Effect]:
        self.leader, effects = reconcile.step(self.leader, event)
        for effect in effects:
            self._perform(effect)
        self.write(*(e.claim for e in effects if isinstance(e, WriteClaim)))
        self.moves += sum(isinstance(e, WriteClaim) and e.reason == "moved" for e in effects)
        return list(effects)

    def _perform(self, effect: reconcile.Effect) -> None:
        self.revision += 1
        if isinstance(effect, WriteAssignment):
            assert effect.expected == self.stored[1]
            self.stored = (effect.assignment, self.revision)
            self.feed(AssignmentSeen(self.now, effect.assignment, self.revision))
        elif isinstance(effect, ReadPositions):
            self.asked.append(effect)

    def write(self, *written: Claim) -> None:
        for claim in written:
            self.revision += 1
            self.bucket[claim.partition] = (claim, self.revision)
        if written:
            self.feed(ClaimsSeen(self.now, tuple(self.bucket[c.partition] for c in written)))

    def settle(self) -> None:
        """Every member does at once what its claims ask of it."""
        for _ in range(10):
            self.now += 0.3
            self.write(*(after for claim, _ in self.bucket.values() if (after := comply(claim)) is not None))
            self.feed(Tick(self.now))

    def answer(self, *, cursor: int = 0) -> None:
        for asked in self.asked:
            positions: Mapping[PartitionId, int] = dict.fromkeys(asked.partitions, cursor)
            self.feed(PositionsRead(self.now, asked.member, positions))
        self.asked.clear()

    @property
    def owners(self) -> dict[PartitionId, Member | None]:
        return {p: c.owner for p, (c, _) in self.bucket.items()}


def comply(claim: Claim) -> Claim | None:
    if claim.state is ClaimState.PREPARE and claim.owner is not None:
        return claims.release(claim, claim.owner, cursor=claim.cursor + 1)
    if claim.state is ClaimState.COMMIT and not claim.accepted and claim.owner is not None:
        return claims.accept(claim, claim.owner, target=claim.cursor)
    return None


def settled(members: int = 3, count: int = 12, **more: LeaderRules) -> Room:
    room = Room(members, count, **more)
    room.feed(Tick(room.now))
    room.settle()
    assert room.leader.converged
    room.now += 20
    room.moves = 0
    return room


def test_a_cold_start_assigns_at_once_to_whoever_is_there() -> None:
    room = Room(3, 12)
    first = room.feed(Tick(room.now))[0]
    assert isinstance(first, WriteAssignment)
    assert (first.assignment.reason, first.assignment.term) == ("cold_start", 1)
    assert all(c.state is ClaimState.COMMIT for c, _ in room.bucket.values())
    room.settle()
    assert room.leader.converged


def test_a_fleet_has_not_converged_before_a_new_process_has_taken_over_from_the_one_before_it() -> None:
    room = settled()
    back = member(1, "again")
    room.lease(back, clean=True)
    assert not room.leader.converged, "the claims name the id, but a process that is gone"
    room.answer()
    room.settle()
    assert room.leader.converged
    assert back in room.owners.values()


def test_a_new_leader_adopts_what_is_stored_and_moves_nothing() -> None:
    room = settled()
    before = room.owners
    room.leader = room.elect(2)
    room.settle()
    assert room.owners == before
    assert room.moves == 0
    assert room.stored[0] is not None
    assert (room.stored[0].term, room.stored[0].reason) == (2, "adopt")


@pytest.mark.parametrize("state", ["prepare", "ready", "commit", "accepted"])
def test_a_new_leader_resumes_a_move_from_every_state(state: str) -> None:
    room = settled(2, 2)
    p = PartitionId("p000")
    claim, _ = room.bucket[p]
    assert claim.owner is not None
    other = next(m for m in room.members.active().values() if m != claim.owner)
    moving = claims.prepare(claim, other, term=1)
    if state != "prepare":
        moving = claims.ready(moving, other, target=9)
    if state in ("commit", "accepted"):
        moving = claims.release(moving, claim.owner, cursor=7)
    if state == "accepted":
        moving = claims.accept(moving, other, target=9)
    room.revision += 1
    room.bucket[p] = (moving, room.revision)
    room.leader = room.elect(2)
    assert p in room.leader.moving
    room.settle()
    if state == "accepted":
        room.write(claims.caught_up(moving, other, cursor=9))
    room.settle()
    assert room.leader.converged
    assert p not in room.leader.moving


def test_a_crash_moves_exactly_the_dead_ones_partitions_and_waits_for_no_window() -> None:
    room = settled()
    before = room.owners
    dead = member(1)
    lost = {p for p, owner in before.items() if owner == dead}
    room.dies(dead)
    (asked,) = room.asked
    assert (asked.member, set(asked.partitions)) == (dead, lost)
    room.answer(cursor=50)
    room.settle()
    assert {p for p in before if room.owners[p] != before[p]} == lost
    assert all(room.bucket[p][0].cursor >= 50 for p in lost)
    assert room.leader.converged


def test_a_silent_member_that_is_not_certainly_gone_keeps_its_partitions() -> None:
    room = settled()
    room.now += 60
    for n in (0, 2):
        room.lease(member(n))
    room.feed(Tick(room.now))
    assert room.asked == []
    assert room.moves == 0


def test_a_join_is_gathered_for_its_window_and_then_takes_its_share() -> None:
    room = settled(3, 12)
    room.lease(member(3))
    assert room.moves == 0
    room.now += 2.1
    room.feed(Tick(room.now))
    assert room.moves == 3
    room.settle()
    assert sum(owner == member(3) for owner in room.owners.values()) == 3


def test_a_crash_while_joins_are_gathered_is_covered_at_once() -> None:
    """docs/evidence/go-library.md#w11."""
    room = settled()
    room.lease(member(3))
    room.dies(member(1))
    assert room.asked


def test_a_leaving_member_is_relieved_by_planned_moves() -> None:
    room = settled()
    mine = [p for p, owner in room.owners.items() if owner == member(2)]
    room.lease(member(2), status=LeaseStatus.LEAVING)
    assert room.moves == len(mine)
    assert room.asked == [], "nothing is taken over: it hands over itself"
    room.settle()
    assert member(2) not in room.owners.values()


def test_a_restarted_worker_gets_its_partitions_back_under_new_epochs_and_nothing_moves() -> None:
    room = settled()
    before = {p: c for p, (c, _) in room.bucket.items()}
    room.lease(member(1), status=LeaseStatus.RESTING)
    room.now += 1
    room.feed(Tick(room.now))
    assert room.asked == [], "it will be back"
    reborn = member(1, "reborn")
    room.lease(reborn)
    room.feed(Tick(room.now + 1))
    room.answer(cursor=30)
    room.settle()
    assert room.moves == 0
    for p, claim in before.items():
        now = room.bucket[p][0]
        if claim.owner == member(1):
            assert (now.owner, now.epoch > claim.epoch) == (reborn, True)
        else:
            assert now.owner == claim.owner


def test_a_resting_worker_that_does_not_come_back_is_replaced() -> None:
    room = settled()
    room.lease(member(1), status=LeaseStatus.RESTING)
    room.dies(member(1))
    room.answer()
    room.settle()
    assert room.leader.converged
    assert member(1) not in room.owners.values()


def test_a_deposed_leader_writes_nothing() -> None:
    """docs/evidence/go-library.md#w5: a deposed leader published six seconds later, and was believed."""
    room = settled()
    newer = replace(room.stored[0] or Assignment(), term=9, version=77)
    room.feed(AssignmentSeen(room.now, newer, room.revision + 1))
    room.now += 60
    effects = room.feed(PartitionsChanged(room.now, partitions(40)))
    effects += room.feed(Tick(room.now))
    assert not any(isinstance(e, WriteAssignment | WriteClaim) for e in effects)


def test_new_partitions_are_assigned_at_once_and_removed_ones_are_retired_with_their_cursor() -> None:
    room = settled(10, 100)
    room.partitions = partitions(1000)
    room.feed(PartitionsChanged(room.now, room.partitions))
    room.settle()
    assert room.leader.converged
    counts = [list(room.owners.values()).count(member(n)) for n in range(10)]
    assert counts == [100] * 10
    room.feed(PartitionsChanged(room.now, room.partitions[:-1]))
    room.settle()
    gone = room.bucket[PartitionId("p999")][0]
    assert (gone.state, gone.owner) == (ClaimState.UNASSIGNED, None)


def test_a_refresh_recomputes_even_when_nothing_is_known_to_have_changed() -> None:
    room = settled()
    assert room.feed(PartitionsChanged(room.now, room.partitions)) == []
    room.feed(PartitionsChanged(room.now, room.partitions, refresh=True))
    assert room.leader.pacing.reason is None, "the same map again needs no write"


def test_moves_are_limited_and_the_rest_follows() -> None:
    room = settled(1, 40, rules=replace(RULES, parallel=5))
    room.lease(member(1))
    room.now += 3
    room.feed(Tick(room.now))
    assert room.moves == 5
    for _ in range(6):
        room.settle()
    assert room.leader.converged


def test_nothing_happens_without_members() -> None:
    room = Room(0, 5)
    assert room.feed(Tick(room.now)) == []


def test_a_write_whose_answer_is_lost_is_decided_anew() -> None:
    room = Room(2, 2)
    leader, effects = reconcile.step(room.leader, Tick(100.0))
    assert [type(e) for e in effects] == [WriteAssignment]
    leader, effects = reconcile.step(leader, Tick(100.2))
    assert effects == ()
    _, effects = reconcile.step(leader, Tick(100.6))
    assert [type(e) for e in effects] == [WriteAssignment]


class Late(Room):
    """A bucket that stores an assignment some time after it was sent, maybe when the leader has given it up."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.on_their_way: list[WriteAssignment] = []
        super().__init__(3, 4)

    def _perform(self, effect: reconcile.Effect) -> None:
        if isinstance(effect, WriteAssignment):
            self.on_their_way.append(effect)

    def arrive(self) -> None:
        """The oldest write is judged; what is stored is heard of, or a refusal is answered with what there is."""
        write = self.on_their_way.pop(0)
        if write.expected == self.stored[1]:
            self.revision += 1
            self.stored = (write.assignment, self.revision)
        assignment, revision = self.stored
        if assignment is not None:
            self.feed(AssignmentSeen(self.now, assignment, revision))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick(self.now))


@pytest.mark.parametrize("seed", range(100))
def test_whatever_is_stored_late_every_partition_ends_with_an_owner(seed: int) -> None:
    """An assignment that arrived late counted for the one that was sent after it: a new partition had no owner ever."""
    rng = random.Random(seed)
    room = Late(rng)
    for _ in range(60):
        match rng.choice(("time", "time", "arrive", "arrive", "partitions", "join")):
            case "time":
                room.pass_time(rng.choice((0.1, 0.6, 3.0)))
            case "arrive" if room.on_their_way:
                room.arrive()
            case "partitions":
                room.partitions = partitions(rng.randint(1, 8))
                room.feed(PartitionsChanged(room.now, room.partitions))
            case "join":
                room.lease(member(rng.randint(0, 5), f"n{rng.randint(0, 9)}"))
    for _ in range(40):
        room.pass_time(1.0)
        while room.on_their_way:
            room.arrive()
    assert room.stored[0] is not None
    assert room.stored[0].owners.keys() == {p.id for p in room.partitions}
    assert set(room.stored[0].owners.values()) <= room.members.takers().keys()


def test_rules_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError):
        LeaderRules(parallel=0)
