"""Common part of the planes over `parti.control.per_partition`: one state per partition, with its steps and queries."""

from __future__ import annotations

from abc import ABC, abstractmethod

from parti.control import per_partition
from parti.control.per_partition import PerPartition, Phase
from parti.control.signals import ClaimLost, Fenced, Revoked
from parti.manager.claim_writer import ClaimWriter
from parti.manager.host import Host
from parti.model import Ahead, Lease, Member, PartitionId


class SlotPlane(ABC):
    """The partitions of one member. Once `_closed` is set, no event changes a slot or leads to an effect."""

    def __init__(self, host: Host, member: Member) -> None:
        self._host = host
        self._member = member
        self._slots: dict[PartitionId, PerPartition] = {}
        self._writer = ClaimWriter(host, self._feed)
        self._closed = False
        self._spoken = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._member} owns={len(self.owned())}>"

    def allows(self, lease: Lease) -> bool:
        held = self._slots.get(lease.partition)
        return held is not None and (held.lease is lease or held.lease == lease)

    def claim_lost(self, partition: PartitionId, revision: int, expected: int) -> None:
        if partition in self._slots:
            self._feed(partition, ClaimLost(revision, expected))

    def spoken(self, revision: int) -> int:
        if not self._closed:  # while stopping, events are ignored: the last positions are not stored yet
            unspoken = (s.unspoken - 1 for s in self._slots.values() if s.unspoken is not None)
            self._spoken = min([revision, *unspoken])
        return self._spoken

    def holds_nothing(self) -> bool:
        return all(s.lease is None and s.phase is Phase.IDLE for s in self._slots.values())

    def owned(self) -> frozenset[PartitionId]:
        return frozenset(p for p, s in self._slots.items() if s.lease is not None)

    def ahead(self) -> dict[PartitionId, Ahead]:
        return {}

    def _feed(self, partition: PartitionId, event: per_partition.Event) -> None:
        if self._closed:
            return
        held = self._slots.get(partition) or PerPartition(partition, self._member)
        self._slots[partition], effects = per_partition.step(held, event)
        for effect in effects:
            self._perform(partition, effect)

    @abstractmethod
    def _perform(self, partition: PartitionId, effect: per_partition.Effect) -> None:
        """Perform the effects of a step."""

    def _fence(self) -> None:
        """Nothing is owned any more, and every receiver of a lease is notified of its end."""
        self._closed = True
        for partition in list(self._slots):
            self._slots[partition], effects = per_partition.step(self._slots[partition], Fenced())
            for effect in effects:
                if isinstance(effect, Revoked):
                    self._host.revoked(effect.lease)
