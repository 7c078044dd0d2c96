"""What we parked ourselves, kept in memory as well: then nobody has to ask the server for it when its turn comes.

Of a document that had nothing in the park when we began, and that only its owner writes to, we know the whole queue.
What does not fit is not kept: then the server is asked, as for everything that an owner before us has parked.
"""

from __future__ import annotations

from collections import deque

from parti.wire.stored import StoredMessage

_BESIDE = 1_000  # bytes that a task takes in memory beside its data, about: headers and what Python makes of them


class Kept:
    """Whole queues of documents, within a limit of bytes."""

    def __init__(self, limit: int) -> None:
        self.bytes = 0
        self._limit = limit
        self._queues: dict[str, deque[StoredMessage]] = {}
        self._keys: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"<Kept documents={len(self._queues)} bytes={self.bytes}>"

    def __contains__(self, key: str) -> bool:
        """Whether the document's queue is known as a whole."""
        return key in self._queues

    def begin(self, key: str) -> None:
        """The document has nothing in the park."""
        self.forget(key)
        self._queues[key] = deque()

    def forget(self, key: str) -> None:
        for stored in self._queues.pop(key, ()):
            self._drop(stored)

    def append(self, key: str, stored: StoredMessage) -> None:
        queue = self._queues.get(key)
        if queue is None or (queue and stored.seq <= queue[-1].seq):  # the second: stored before, the answer got lost
            return
        if self.bytes + _size(stored) > self._limit:
            self.forget(key)
            return
        queue.append(stored)
        self._keys[stored.seq] = key
        self.bytes += _size(stored)

    def removed(self, sequence: int) -> None:
        """That task is no longer parked."""
        key = self._keys.get(sequence)
        if key is None:
            return
        queue = self._queues[key]
        if queue[0].seq == sequence:
            self._drop(queue.popleft())
        else:  # out of the middle: rare, and no reason to search
            self.forget(key)

    def after(self, key: str, sequence: int) -> StoredMessage | None:
        """The first behind a place."""
        return next((stored for stored in self._queues[key] if stored.seq > sequence), None)

    def last(self, key: str) -> StoredMessage | None:
        queue = self._queues[key]
        return queue[-1] if queue else None

    def _drop(self, stored: StoredMessage) -> None:
        del self._keys[stored.seq]
        self.bytes -= _size(stored)


def _size(stored: StoredMessage) -> int:
    return len(stored.data) + _BESIDE
