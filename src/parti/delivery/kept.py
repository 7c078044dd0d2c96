"""A memory cache of parked tasks, within a byte limit: a cached task needs no read from the server at its turn.

Only the owner writes to a document, so it knows how many tasks are parked: none when it began to park the document, or
the server's count at takeover. The cache holds the first of them; those behind are only a count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from parti.wire.stored import StoredMessage

_BESIDE = 1_000  # bytes, about, that a task takes in memory beside its data: headers and Python objects


class Kept:
    """The first tasks of documents' queues, within a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit
        self._queues: dict[str, deque[StoredMessage]] = {}  # no entry for a document without cached tasks
        self._left: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Kept documents={len(self._left)} bytes={self.bytes}>"

    def __contains__(self, key: str) -> bool:
        """Whether the number of parked tasks of the document is known."""
        return key in self._left

    @property
    def room(self) -> int:
        """Bytes that may still be cached."""
        return self._limit - self.bytes

    def begin(self, key: str, count: int = 0) -> None:
        """The document has `count` parked tasks."""
        self.forget(key)
        self._left[key] = count

    def forget(self, key: str) -> None:
        self._left.pop(key, None)
        for stored in self._queues.pop(key, ()):
            self.bytes -= _size(stored)

    def left(self, key: str) -> int:
        """How many tasks are parked behind the cached ones."""
        return self._left[key]

    def append(self, key: str, stored: StoredMessage) -> None:
        """This process parked one more task."""
        if key in self._left:
            self._left[key] += 1
            if self._left[key] == 1:
                self.took(key, [stored])

    def took(self, key: str, stored: Iterable[StoredMessage]) -> None:
        """The next tasks behind the cached ones, in order, as read from the server. Stops when the cache is full."""
        for each in stored:
            if self.bytes + _size(each) > self._limit:
                return
            self._queues.setdefault(key, deque()).append(each)
            self._left[key] -= 1
            self.bytes += _size(each)

    def removed(self, key: str, sequence: int) -> None:
        """The task is no longer parked."""
        queue = self._queues.get(key, ())
        for place, stored in enumerate(queue):
            if stored.seq == sequence:
                del self._queues[key][place]
                self._dropped(key, stored)
                return
        if not queue and self._left.get(key):
            self._left[key] -= 1  # it was read without being cached, and only the first task is read
        else:  # behind the cached ones
            self.forget(key)

    def cut(self, key: str, sequence: int) -> None:
        """Nothing before that sequence is parked any more."""
        queue = self._queues.get(key)
        while queue and queue[0].seq < sequence:
            self._dropped(key, queue.popleft())
        if not queue and self._left.get(key):
            self.forget(key)  # how many uncached tasks were removed as well is not known

    def _dropped(self, key: str, stored: StoredMessage) -> None:
        self.bytes -= _size(stored)
        if not self._queues[key]:
            del self._queues[key]

    def first(self, key: str) -> StoredMessage | None:
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def after(self, key: str, sequence: int) -> StoredMessage | None:
        """The first cached task after a sequence."""
        return next((stored for stored in self._queues.get(key, ()) if stored.seq > sequence), None)

    def last(self, key: str) -> StoredMessage | None:
        """The last cached task; the last of all, if none is parked behind it."""
        queue = self._queues.get(key)
        return queue[-1] if queue else None


def _size(stored: StoredMessage) -> int:
    return len(stored.data) + _BESIDE
