"""The per-worker layout in the simulator: one durable per worker id, filters that follow the claims, range reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parti.control import holding
from parti.control.continuity import Continuity
from parti.control.holding import Holding, Phase
from parti.control.signals import (
    AddFilter,
    CatchUp,
    Discard,
    DropFilter,
    FilterAdded,
    FilterDropped,
    Gap,
    Granted,
    LastRead,
    Offer,
    Read,
    ReadLast,
    ReadUpTo,
    Revoked,
    StopLane,
    Verdict,
    WriteClaim,
)
from parti.control.slot import Slot
from parti.model import Member, PartitionId, Retention
from parti.testing.sim.plane import Plane
from parti.testing.sim.stream import REFUSED, Pull

if TYPE_CHECKING:
    from parti.testing.sim.process import Process

PULL_EXPIRES = 0.4  # shorter than the lease, or a frozen owner's pull swallows the next owner's messages


class PerWorkerPlane(Plane):
    """Performs the effects of `control.holding`."""

    confirm_with_leader = True
    """The completeness rule of the range reader; a test turns it off to see the simulator notice."""

    def __init__(self, process: Process, member: Member) -> None:
        super().__init__(process, member)
        self._holdings: dict[PartitionId, Holding] = {}
        self._held: dict[PartitionId, set[int]] = {}
        self._unacked: dict[PartitionId, set[int]] = {}
        self._adding: dict[PartitionId, int] = {}
        self._applied: frozenset[str] | None = None
        self._updating = False
        self._continuity: Continuity | None = None

    def state(self, partition: PartitionId) -> Holding:
        held = self._holdings.get(partition)
        if held is None:
            held = self._holdings[partition] = Holding(partition, self.member, self.cluster.retention)
        return held

    def states(self) -> list[Holding | Slot]:
        return list(self._holdings.values())

    def feed(self, partition: PartitionId, event: holding.Event) -> None:
        self._holdings[partition], effects = holding.step(self.state(partition), event)
        for effect in effects:
            self._perform(partition, effect)

    def _perform(self, partition: PartitionId, effect: holding.Effect) -> None:
        match effect:
            case AddFilter(_, ticket):
                self._adding[partition] = ticket
                self._update_filters()
            case DropFilter():
                self._adding.pop(partition, None)
                self._update_filters()
            case ReadLast(_, ticket):
                self._read_last(partition, ticket)
            case CatchUp(_, _, upto, ticket):
                self._catch_up(partition, upto, ticket)
            case Offer():
                for seq in sorted(self._held.pop(partition, ())):
                    self._judge(partition, seq)
            case StopLane():
                self._held.pop(partition, None)
                self.stop_lane(partition)
            case Discard():
                self._held.pop(partition, None)
                self._unacked.pop(partition, None)
                self.drop_lane(partition)
            case WriteClaim():
                self.write_claim(effect)
            case Granted(lease):
                self.granted(lease)
            case Revoked(lease):
                self.process.log(f"revoked {lease.partition}@{lease.epoch}")

    # -- the durable ----------------------------------------------------------------------------------------------

    def tick(self, number: int) -> None:
        self._update_filters()
        if number % 4 == 0 and self._continuity is not None and self.process.may_act() and not self.closed:
            pull = Pull(self.process, self._delivered, 0, 40, self.world.now + PULL_EXPIRES)
            if not self.world.lost(self.process):
                self.world.after(self.world.delay(), None, self.cluster.stream.pull, self.member.worker, pull)

    def _wanted(self) -> frozenset[str]:
        """Filters that our claims ask for; those the durable had before us stay until we know whose they are."""
        inherited = self.cluster.stream.consumer(self.member.worker).filters if self._applied is None else self._applied
        unknown = {p for p in inherited if p not in self._holdings or self._holdings[PartitionId(p)].claim is None}
        return frozenset({p for p, h in self._holdings.items() if h.filtered} | unknown)

    def _update_filters(self) -> None:
        """One update at a time, always with the whole set; what changed meanwhile goes into the next."""
        wanted = self._wanted()
        if self._updating or self.closed or (wanted == self._applied and not self._adding):
            return
        if not self.process.may_act():
            return
        self._updating = True
        adding = dict(self._adding)

        def answered(sequence: int) -> None:
            self._updating = False
            if sequence == -REFUSED:
                for partition in sorted(wanted - (self._applied or frozenset())):
                    self.cluster.stream.strip_filter(partition, self.member.worker)
                return
            if self._continuity is None:
                self._continuity = Continuity(sequence + 1)
            dropped = (self._applied or frozenset()) - wanted
            self._applied = wanted
            for partition in sorted(dropped):
                self.feed(PartitionId(partition), FilterDropped())
            for partition, ticket in adding.items():
                if self._adding.get(partition) == ticket:
                    del self._adding[partition]
                    self._read_last(partition, ticket, added=True)

        def failed() -> None:
            self._updating = False

        stream = self.cluster.stream
        self.world.call(
            self.process, lambda: stream.set_filters(self.member.worker, wanted), answered, failed, late=False
        )

    def _read_last(self, partition: PartitionId, ticket: int, *, added: bool = False) -> None:
        def answered(last: int) -> None:
            self.feed(partition, FilterAdded(last, ticket) if added else LastRead(last, ticket))

        def failed() -> None:
            if self.state(partition).ticket == ticket and not self.closed:
                self._read_last(partition, ticket, added=added)

        self.world.call(self.process, lambda: self.cluster.stream.last, answered, failed)

    def _catch_up(self, partition: PartitionId, upto: int, ticket: int) -> None:
        """Read, hand over, and believe the end only when the stream's leader confirms it."""
        stream = self.cluster.stream

        def current() -> bool:
            state = self.state(partition)
            return state.ticket == ticket and state.phase is Phase.CATCHING_UP and not self.closed

        def read(leader: bool) -> None:
            after = self.state(partition).queued
            self.world.call(
                self.process,
                lambda: stream.read(partition, after, upto, leader=leader),
                lambda found: handed(found, leader),
                lambda: read(leader) if current() else None,
            )

        def handed(found: tuple[int, ...], leader: bool) -> None:
            if not current():
                return
            for seq in found:
                if seq > self.state(partition).queued:
                    self.feed(partition, Read(seq, ticket))
                    self.queue(partition, seq)
            if (leader and not found) or not self.confirm_with_leader:
                self.feed(partition, ReadUpTo(upto, ticket))
                self.settle(partition)
            else:
                read(True)

        read(False)

    # -- deliveries -----------------------------------------------------------------------------------------------

    def _delivered(self, _inbox: int, packet: tuple[tuple[int, int], ...]) -> None:
        if self._continuity is None or self.closed:
            return
        for seq, sequence in packet:
            self._continuity, missing = self._continuity.check(sequence)
            if missing:
                self.process.log(f"gap before {sequence}")
                self.process.reached("gap")
                for partition in list(self._holdings):
                    self.feed(partition, Gap())
            self._judge(PartitionId(self.cluster.stream.partition_of[seq]), seq)

    def _judge(self, partition: PartitionId, seq: int) -> None:
        self._holdings[partition], verdict = holding.deliver(self.state(partition), seq)
        match verdict:
            case Verdict.PROCESS:
                self._unacked.setdefault(partition, set()).add(seq)
                self.queue(partition, seq)
            case Verdict.HOLD:
                self._held.setdefault(partition, set()).add(seq)
            case Verdict.ACK_WHEN_DONE:
                self._unacked.setdefault(partition, set()).add(seq)
            case Verdict.ACK:
                self._ack((seq,))
            case Verdict.IGNORE:
                pass

    def settle(self, partition: PartitionId) -> None:
        cursor = self.state(partition).cursor
        waiting = self._unacked.get(partition, set())
        done = tuple(sorted(s for s in waiting if s <= cursor))
        if done:
            waiting.difference_update(done)
            self._ack(done)
        if self.cluster.retention is Retention.WORKQUEUE:
            self.cluster.remove_done(self.process, partition, cursor)

    def _ack(self, seqs: tuple[int, ...]) -> None:
        if self.process.may_act() and not self.world.lost(self.process):
            self.world.after(self.world.delay(), None, self.cluster.stream.ack, self.member.worker, seqs)
