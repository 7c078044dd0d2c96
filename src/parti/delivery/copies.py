"""Tasks of `order=skip` that exist twice: an owner died after it had put one aside, and before it said so.

A document's own queue tells what is in it. A task that waits alone has none: it comes from the stream once more, and by
itself as well, and both would be sent. The one that waits alone stays, as it knows how often it was tried.
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
    """Of one partition, for as long as we own it."""

    def __init__(self, park: Park, surely: RetryWhileOwner, wakes: Feed, recorder: DeliveryRecorder) -> None:
        self._park = park
        self._surely = surely
        self._wakes = wakes
        self._recorder = recorder
        self._alone: dict[str, None] = {}  # sources of those that came alone; they may be done by now

    def __repr__(self) -> str:
        return f"<Copies alone={len(self._alone)}>"

    def came(self, held: Pending) -> None:
        """A task came into memory, from wherever."""
        if held.rules.order is TaskOrder.SKIP and (held.feed is self._wakes or is_alone(held.key)):
            self._alone[held.source] = None
            if len(self._alone) > _REMEMBERED:
                del self._alone[next(iter(self._alone))]

    async def has_another(self, held: Pending) -> bool:
        """Whether the task waits alone as well, or has done so: then this one is too many. It is asked once."""
        if not held.again or held.rules.order is not TaskOrder.SKIP:
            return False
        held.again = False
        found = held.feed is not self._wakes and held.source in self._alone
        found = found or await self._surely(lambda: self._park.has_alone(held))
        if found:
            self._recorder.duplicate(held.id)
        return found
