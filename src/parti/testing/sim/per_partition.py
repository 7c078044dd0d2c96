"""The per-partition layout in the simulator: one durable per partition, moved by RESET."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parti.control import slot
from parti.control.holding import Holding
from parti.control.signals import (
    Discard,
    Granted,
    Reset,
    ResetDone,
    Revoked,
    Settle,
    Settled,
    StopLane,
    Verdict,
    WriteClaim,
)
from parti.control.slot import Phase, Slot
from parti.model import Member, PartitionId
from parti.testing.sim.per_worker import PULL_EXPIRES
from parti.testing.sim.plane import Plane
from parti.testing.sim.stream import Pull

if TYPE_CHECKING:
    from parti.testing.sim.process import Process


class PerPartitionPlane(Plane):
    """Performs the effects of `control.slot`."""

    def __init__(self, process: Process, member: Member) -> None:
        super().__init__(process, member)
        self._slots: dict[PartitionId, Slot] = {}
        self._unacked: dict[PartitionId, set[int]] = {}

    def state(self, partition: PartitionId) -> Slot:
        found = self._slots.get(partition)
        if found is None:
            found = self._slots[partition] = Slot(partition, self.member)
        return found

    def states(self) -> list[Holding | Slot]:
        return list(self._slots.values())

    def feed(self, partition: PartitionId, event: slot.Event) -> None:
        self._slots[partition], effects = slot.step(self.state(partition), event)
        for effect in effects:
            self._perform(partition, effect)

    def _perform(self, partition: PartitionId, effect: slot.Effect) -> None:
        match effect:
            case Reset(_, seq, ticket):
                self._unacked.pop(partition, None)
                self._reset(partition, seq, ticket)
            case Settle(_, ticket):
                self._settle_all(partition, ticket, 3)
            case StopLane():
                self.stop_lane(partition)
            case Discard():
                self._unacked.pop(partition, None)
                self.drop_lane(partition)
            case WriteClaim():
                self.write_claim(effect)
            case Granted(lease):
                self.granted(lease)
            case Revoked(lease):
                self.process.log(f"revoked {lease.partition}@{lease.epoch}")

    def tick(self, number: int) -> None:
        if number % 4 == 0:
            for partition, state in self._slots.items():
                if state.phase is Phase.LIVE:
                    self._pull(partition)

    def _pull(self, partition: PartitionId) -> None:
        if not self.process.may_act() or self.closed or self.world.lost(self.process):
            return
        inbox = self.state(partition).ticket

        def deliver(to: int, packet: tuple[tuple[int, int], ...]) -> None:
            for seq, sequence in packet:
                self._judge(partition, seq, sequence, to)

        pull = Pull(self.process, deliver, inbox, 20, self.world.now + PULL_EXPIRES)
        self.world.after(self.world.delay(), None, self.cluster.stream.pull, partition, pull)

    def _reset(self, partition: PartitionId, seq: int, ticket: int) -> None:
        def current() -> bool:
            return self.state(partition).ticket == ticket and not self.closed

        def answered(_: bool) -> None:
            self.feed(partition, ResetDone(ticket))
            if current():
                self._pull(partition)

        def failed() -> None:
            if current() and self.process.may_act():
                self._reset(partition, seq, ticket)

        if self.process.may_act():
            self.process.log(f"resets {partition} to {seq}")
            self.process.reached("gap")
            self.world.call(self.process, lambda: self.cluster.stream.reset(partition, seq), answered, failed)

    def _settle_all(self, partition: PartitionId, ticket: int, tries: int) -> None:
        cursor = self.state(partition).cursor
        done = tuple(sorted(s for s in self._unacked.get(partition, ()) if s <= cursor))

        def answered(_: bool) -> None:
            self.feed(partition, Settled(ticket))

        def failed() -> None:
            if tries > 1:
                self._settle_all(partition, ticket, tries - 1)
            else:
                self.feed(partition, Settled(ticket))

        self.world.call(self.process, lambda: self.cluster.stream.ack(partition, done), answered, failed)

    def _judge(self, partition: PartitionId, seq: int, sequence: int, inbox: int) -> None:
        if self.closed:
            return
        self._slots[partition], verdict, effects = slot.deliver(self.state(partition), seq, sequence, inbox)
        for effect in effects:
            self._perform(partition, effect)
        if verdict is Verdict.PROCESS:
            self._unacked.setdefault(partition, set()).add(seq)
            self.queue(partition, seq)
        elif verdict is Verdict.ACK_WHEN_DONE:
            self._unacked.setdefault(partition, set()).add(seq)
        elif verdict is Verdict.ACK:
            self._ack(partition, (seq,))

    def settle(self, partition: PartitionId) -> None:
        cursor = self.state(partition).cursor
        waiting = self._unacked.get(partition, set())
        done = tuple(sorted(s for s in waiting if s <= cursor))
        if done:
            waiting.difference_update(done)
            self._ack(partition, done)

    def _ack(self, partition: PartitionId, seqs: tuple[int, ...]) -> None:
        if self.process.may_act() and not self.world.lost(self.process):
            self.world.after(self.world.delay(), None, self.cluster.stream.ack, partition, seqs)
