"""`order=latest`: of the waiting tasks of a document, only the newest is kept, by the document's own order."""

from __future__ import annotations

from collections.abc import Callable

from parti.delivery.document import Document
from parti.delivery.park import Park
from parti.delivery.pending import Pending
from parti.delivery.recency import has_order, newest
from parti.delivery.retrying import RetryWhileOwner
from parti.wire.stored import StoredMessage


class Latest:
    """Drops tasks that a newer one replaces; the newest itself is never touched, so no crash can lose it."""

    def __init__(
        self,
        park: Park,
        surely: RetryWhileOwner,
        read: Callable[[Document, StoredMessage], Pending],
        release: Callable[[Pending], None],
    ) -> None:
        self._park = park
        self._surely = surely
        self._read = read
        self._release = release

    def in_memory(self, lane: Document) -> int:
        """Keep one task of the queue; returns how many were dropped."""
        return self._drop(lane, lane.queue[newest([held.task for held in lane.queue])])

    async def parked(self, lane: Document, head: Pending) -> int:
        """Keep one of all waiting tasks, parked or in memory; returns how many were dropped. 0: it is the head."""
        last = await self._surely(lambda: self._park.last(lane.key))
        if last is None or (last.seq <= head.park_sequence and not lane.queue):
            return 0
        parked = [head]
        if last.seq > head.park_sequence:
            parked += await self._behind(lane, head, last)
        waiting = [*parked, *lane.queue]
        best = waiting[newest([held.task for held in waiting])]
        self._drop(lane, best)
        if not best.park_sequence:
            await self._surely(lambda: self._park.remove_before(lane.key, last.seq + 1))
            return len(waiting) - 1
        for sequence in [held.park_sequence for held in parked if held.park_sequence > best.park_sequence]:
            await self._surely(lambda sequence=sequence: self._park.remove(lane.key, sequence))  # type: ignore[misc]
        if best is not head:
            await self._surely(lambda: self._park.remove_before(lane.key, best.park_sequence))
        return len(waiting) - 1

    async def _behind(self, lane: Document, head: Pending, last: StoredMessage) -> list[Pending]:
        """The parked tasks behind the head. For tasks without an order of their own, only the last: it is newest."""
        final = self._read(lane, last)
        if not has_order(head.task) and not has_order(final.task):
            return [final]
        found: list[Pending] = []
        place = head.park_sequence
        while place < last.seq:
            stored = await self._surely(lambda: self._park.after(lane.key, place))  # noqa: B023 - called at once
            if stored is None:
                break
            found.append(self._read(lane, stored))
            place = stored.seq
        return found

    def _drop(self, lane: Document, best: Pending) -> int:
        others = [held for held in lane.queue if held is not best]
        for held in others:
            lane.queue.remove(held)
            self._release(held)
        return len(others)
