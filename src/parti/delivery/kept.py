"""What is parked, kept in memory as well as far as it fits: then nobody asks the server for it when its turn comes.

Of a document that only its owner writes to we know how many tasks are parked: none when we began to park it, or as many
as the server counted when we took over. Kept are the first of them; how many stand behind those is a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from parti.wire.stored import StoredMessage

_BESIDE = 1_000  # bytes that a task takes in memory beside its data, about: headers and what Python makes of them


class Kept:
    """The beginnings of documents' queues, within a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit
        self._queues: dict[str, deque[StoredMessage]] = {}  # none for a document of which nothing is kept
        self._left: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Kept documents={len(self._left)} bytes={self.bytes}>"

    def __contains__(self, key: str) -> bool:
        """Whether it is known how many tasks of the document are parked."""
        return key in self._left

    @property
    def room(self) -> int:
        """Bytes that may still be kept."""
        return self._limit - self.bytes

    def begin(self, key: str, count: int = 0) -> None:
        """So many tasks of the document are parked."""
        self.forget(key)
        self._left[key] = count

    def forget(self, key: str) -> None:
        self._left.pop(key, None)
        for stored in self._queues.pop(key, ()):
            self.bytes -= _size(stored)

    def left(self, key: str) -> int:
        """How many stand behind those that are kept."""
        return self._left[key]

    def append(self, key: str, stored: StoredMessage) -> None:
        """We parked one more."""
        if key in self._left:
            self._left[key] += 1
            if self._left[key] == 1:
                self.took(key, [stored])

    def took(self, key: str, stored: Iterable[StoredMessage]) -> None:
        """The next of those that stand behind, in order, as the server has them. What does not fit is not kept."""
        for each in stored:
            if self.bytes + _size(each) > self._limit:
                return
            self._queues.setdefault(key, deque()).append(each)
            self._left[key] -= 1
            self.bytes += _size(each)

    def removed(self, key: str, sequence: int) -> None:
        """That task is no longer parked."""
        queue = self._queues.get(key, ())
        for place, stored in enumerate(queue):
            if stored.seq == sequence:
                del self._queues[key][place]
                self._dropped(key, stored)
                return
        if not queue and self._left.get(key):
            self._left[key] -= 1  # it was read without being kept, and only the first is
        else:  # behind those that are kept
            self.forget(key)

    def cut(self, key: str, sequence: int) -> None:
        """Nothing before that place is parked any more."""
        queue = self._queues.get(key)
        while queue and queue[0].seq < sequence:
            self._dropped(key, queue.popleft())
        if not queue and self._left.get(key):
            self.forget(key)  # how many of those behind went, too, nobody has counted

    def _dropped(self, key: str, stored: StoredMessage) -> None:
        self.bytes -= _size(stored)
        if not self._queues[key]:
            del self._queues[key]

    def first(self, key: str) -> StoredMessage | None:
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def after(self, key: str, sequence: int) -> StoredMessage | None:
        """The first behind a place, of those that are kept."""
        return next((stored for stored in self._queues.get(key, ()) if stored.seq > sequence), None)

    def last(self, key: str) -> StoredMessage | None:
        """The last of those that are kept: of all, where none stands behind."""
        queue = self._queues.get(key)
        return queue[-1] if queue else None


def _size(stored: StoredMessage) -> int:
    return len(stored.data) + _BESIDE
