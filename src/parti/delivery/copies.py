"""Detects tasks of `order=skip` that exist twice: an owner crashed after scheduling one, before acknowledging it.

A document's queue shows which tasks it holds. A task scheduled by itself has no queue: the stream redelivers it, its
schedule delivers it as well, and both would be sent. The scheduled one is kept, because it carries its attempt count.
"""

from __future__ import annotations

from parti.delivery.document import is_alone
from parti.delivery.feed import Feed
from parti.delivery.order import TaskOrder
from parti.delivery.park import Park
from parti.delivery.pending import Pending
from parti.delivery.recorder import DeliveryRecorder
from parti.delivery.retrying import RetryWhileOwner

_REMEMBERED = 4_096


class Copies:
    """The copies of one partition, while this process owns it."""

    def __init__(self, park: Park, surely: RetryWhileOwner, wakes: Feed, recorder: DeliveryRecorder) -> None:
        self._park = park
        self._surely = surely
        self._wakes = wakes
        self._recorder = recorder
        self._alone: dict[str, None] = {}  # sources of the tasks that came by their own schedule; may be done by now

    def __repr__(self) -> str:
        return f"<Copies alone={len(self._alone)}>"

    def came(self, held: Pending) -> None:
        """A task came into memory, from any source."""
        if held.rules.order is TaskOrder.SKIP and (held.feed is self._wakes or is_alone(held.key)):
            self._alone[held.source] = None
            if len(self._alone) > _REMEMBERED:
                del self._alone[next(iter(self._alone))]

    async def has_another(self, held: Pending) -> bool:
        """Whether the task is, or was, also scheduled by itself: then this copy is dropped. Looked up once."""
        if not held.again or held.rules.order is not TaskOrder.SKIP:
            return False
        held.again = False
        found = held.feed is not self._wakes and held.source in self._alone
        found = found or await self._surely(lambda: self._park.has_alone(held))
        if found:
            self._recorder.duplicate(held.id)
        return found
