"""The worker's data plane in miniature: lanes that run handlers in order, and what both layouts share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from parti.control.holding import Holding
from parti.control.signals import ClaimLost, ClaimSeen, Done, LaneStopped, WriteClaim, WriteFailed
from parti.control.slot import Slot
from parti.model import Claim, Lease, Member, PartitionId
from parti.testing.sim.kv import Entry

if TYPE_CHECKING:
    from parti.testing.sim.process import Process


class Lane:
    """Runs one message at a time; each effect checks the lease and the fence in the moment it happens."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.running: int | None = None
        self.started = 0


class Plane(ABC):
    """Partitions of one process."""

    def __init__(self, process: Process, member: Member) -> None:
        self.process = process
        self.world = process.world
        self.cluster = process.cluster
        self.member = member
        self.lanes: dict[PartitionId, Lane] = {}
        self.closed = False

    @abstractmethod
    def state(self, partition: PartitionId) -> Holding | Slot:
        """The partition as this worker sees it."""

    @abstractmethod
    def states(self) -> list[Holding | Slot]:
        """All partitions seen so far."""

    @abstractmethod
    def feed(self, partition: PartitionId, event: ClaimSeen | ClaimLost | WriteFailed | Done | LaneStopped) -> None:
        """One step, and the effects that it asks for."""

    @abstractmethod
    def tick(self, number: int) -> None:
        """Pull, and try again what failed."""

    @abstractmethod
    def settle(self, partition: PartitionId) -> None:
        """A message is done: ack what may be acked."""

    def claim_seen(self, claim: Claim, revision: int) -> None:
        if not self.closed:
            self.feed(claim.partition, ClaimSeen(claim, revision))

    def claim_lost(self, partition: PartitionId, revision: int, expected: int) -> None:
        if not self.closed:
            self.feed(partition, ClaimLost(revision, expected))

    def spoken(self, revision: int) -> int:
        """Up to which revision we have said all that we have to say about lost claims."""
        return min([revision, *(s.unspoken - 1 for s in self.states() if s.unspoken is not None)])

    def holds_nothing(self) -> bool:
        return not any(s.lease is not None or s.phase not in ("idle", "released") for s in self.states())

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        found = {s.partition: (s.lease.epoch, s.cursor) if s.lease is not None else s.unreleased for s in self.states()}
        return {p: at for p, at in found.items() if at is not None}

    def final_positions(self) -> dict[PartitionId, tuple[int, int]]:
        return self.positions()

    def close(self) -> None:
        """Nothing starts any more."""
        self.closed = True
        for lane in self.lanes.values():
            lane.waiting.clear()
            lane.running = None

    # -- lanes ----------------------------------------------------------------------------------------------------

    def queue(self, partition: PartitionId, seq: int) -> None:
        self.lanes.setdefault(partition, Lane()).waiting.append(seq)
        self._start(partition)

    def drop_lane(self, partition: PartitionId) -> None:
        lane = self.lanes.setdefault(partition, Lane())
        lane.waiting.clear()
        lane.running = None

    def stop_lane(self, partition: PartitionId) -> None:
        lane = self.lanes.setdefault(partition, Lane())
        dropped = lane.waiting[0] if lane.waiting else None
        lane.waiting.clear()
        self.feed(partition, LaneStopped(lane.started, dropped))

    def _start(self, partition: PartitionId) -> None:
        lane = self.lanes[partition]
        lease = self.state(partition).lease
        if lane.running is not None or not lane.waiting or lease is None or self.closed:
            return
        lane.running = lane.started = lane.waiting.popleft()
        rng = self.world.rng
        takes = rng.uniform(0.05, 0.2) if rng.random() < 0.05 else rng.uniform(0.001, 0.025)
        self.world.after(takes, self.process, self._finish, partition, lane.running)
        self.process.reached("handler")

    def _finish(self, partition: PartitionId, seq: int) -> None:
        lane = self.lanes[partition]
        lease = self.state(partition).lease
        if lane.running != seq or lease is None or self.closed:
            return
        if not self.process.may_act():
            return  # fenced: the next tick says so
        lane.running = None
        self.cluster.effect(self.process, lease, seq)
        self.feed(partition, Done(seq))
        self.settle(partition)
        self._start(partition)

    # -- claims ---------------------------------------------------------------------------------------------------

    def write_claim(self, effect: WriteClaim) -> None:
        """CAS, and whatever happens: hear what the bucket holds then."""
        key = ("claim", effect.claim.partition)
        if not self.process.may_act():
            return
        self.process.log(f"writes {effect.claim}")
        self.process.reached("claim")

        def written(entry: Entry | None) -> None:
            if entry is not None:
                self.process.heard(key, *entry)
            else:
                failed()

        def failed() -> None:
            if not self.closed:
                self.feed(effect.claim.partition, WriteFailed())
                self.process.reread(key)

        self.world.call(self.process, lambda: self.cluster.kv.cas(key, effect.claim, effect.expected), written, failed)

    def granted(self, lease: Lease) -> None:
        self.process.log(f"granted {lease.partition}@{lease.epoch}")
        self._start_if_waiting(lease.partition)

    def _start_if_waiting(self, partition: PartitionId) -> None:
        if partition in self.lanes:
            self._start(partition)
