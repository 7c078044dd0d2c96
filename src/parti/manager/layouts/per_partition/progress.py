"""Reports deliveries and done messages to the slots, one read at a time: a step per message would cost too much.

A steady slot does nothing when a message is done. So it learns of done messages only before it is asked or gets another
event. It never handles an event without knowing everything done before it, so the delay is not observable.
"""

from __future__ import annotations

from parti.control import per_partition
from parti.control.signals import DeliveryVerdict, MessageDone
from parti.manager.host import Host
from parti.manager.layouts.per_partition.flow import SlotFlow
from parti.manager.layouts.per_partition.states import SlotPlane
from parti.model import Member, PartitionId


class SlotProgress(SlotPlane):
    """The partitions of one member, and the flow of each."""

    def __init__(self, host: Host, member: Member) -> None:
        super().__init__(host, member)
        self._flows: dict[PartitionId, SlotFlow] = {}
        self._untold: set[PartitionId] = set()
        """Partitions with done messages that their slot does not know of yet."""

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        self._tell_all()
        found = {p: (s.lease.epoch, s.cursor) if s.lease is not None else s.unreleased for p, s in self._slots.items()}
        return {p: at for p, at in found.items() if at is not None}

    def deliver(self, partition: PartitionId, sequence: int, consumer_sequence: int, inbox: int) -> DeliveryVerdict:
        if self._closed:
            return DeliveryVerdict.IGNORE
        if partition in self._untold:
            self._tell_done(partition)
        held, verdict, effects = per_partition.deliver(self._slots[partition], sequence, consumer_sequence, inbox)
        self._slots[partition] = held
        for effect in effects:
            self._perform(partition, effect)
        return verdict

    def deliver_new(self, partition: PartitionId, sequences: list[int], consumer_sequence: int, inbox: int) -> bool:
        """Accept all messages of one read if each would be processed; else False, and nothing is changed."""
        if self._closed:
            return False
        held, done = self._slots[partition], None
        if partition in self._untold:
            done = self._flows[partition].finished_up_to(held.queued)
        after = per_partition.deliver_new(held, sequences, consumer_sequence, inbox, done)
        if after is None:
            return False
        self._slots[partition] = after
        self._untold.discard(partition)
        return True

    def skipped(self, partition: PartitionId) -> None:
        """A message is done, here or by an earlier owner."""
        if self._slots[partition].steady and not self._closed:
            self._untold.add(partition)
        else:
            self._tell_done(partition)

    def _tell_done(self, partition: PartitionId) -> None:
        self._untold.discard(partition)
        held = self._slots[partition]
        self._slots[partition], effects = per_partition.step(
            held, MessageDone(self._flows[partition].finished_up_to(held.queued))
        )
        for effect in effects if not self._closed else ():
            self._perform(partition, effect)

    def _tell_all(self) -> None:
        for partition in tuple(self._untold):
            self._tell_done(partition)

    def _feed(self, partition: PartitionId, event: per_partition.Event) -> None:
        if partition in self._untold:
            self._tell_done(partition)
        super()._feed(partition, event)
