"""What was dealt with before, and may come again: tasks whose acknowledgements got lost with the owner before us."""

from __future__ import annotations

from parti.delivery.document import Document, place


class AlreadyDone:
    """Of documents whose park ran empty: up to which task of the stream everything was parked or delivered.

    Wake-ups come sooner than the tasks themselves. So a document may be drained before the stream has brought once more
    what was delivered before its parked tasks; without a lane in memory nobody else would know.
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
        """Tasks of this document up to here are old; 0: nothing is known."""
        return self._through.get(key, 0)

    def drained(self, lane: Document) -> None:
        """Nothing of the document is parked any more."""
        if lane.through:
            self._through[lane.key] = lane.through
            self._up_to = max(self._up_to, lane.through)

    def came(self, source: str) -> None:
        """The stream brought a task. What the owner before had in hand comes before anything newer: then it is over."""
        if place(source, self._stream) > self._up_to:
            self._through.clear()
            self._up_to = 0
