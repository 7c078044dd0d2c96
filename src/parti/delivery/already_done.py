"""Recognises redelivered tasks that are already handled: their acknowledgements were lost with the previous owner."""

from __future__ import annotations

from parti.delivery.document import Document, place


class AlreadyDone:
    """For each document whose park became empty: the stream sequence up to which every task was parked or delivered.

    Wake-ups arrive sooner than the tasks themselves. So a document may be drained before the stream redelivers tasks
    that were delivered before its parked ones. Without a lane in memory, only this record tells that they are old.
    """

    __slots__ = ("_stream", "_through", "_up_to")

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._through: dict[str, int] = {}
        self._up_to = 0

    def __repr__(self) -> str:
        return f"<AlreadyDone documents={len(self._through)} up_to={self._up_to}>"

    def __bool__(self) -> bool:
        return bool(self._through)

    def through(self, key: str) -> int:
        """Tasks of this document up to this sequence are old; 0: nothing is known."""
        return self._through.get(key, 0)

    def drained(self, lane: Document) -> None:
        """Record that no task of the document is parked any more."""
        if lane.through:
            self._through[lane.key] = lane.through
            self._up_to = max(self._up_to, lane.through)

    def came(self, source: str) -> None:
        """The stream delivered a task. Redeliveries come before new tasks: at the first new one, forget all."""
        if place(source, self._stream) > self._up_to:
            self._through.clear()
            self._up_to = 0
