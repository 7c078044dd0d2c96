"""The leader's writes in flight: at most one per key, a limited number in total, and only the newest wish per key.

A leader decides again about every write without a reply for half a second. When each was sent again, 900 new partitions
on a busy machine became 75,700 writes that delayed each other. Here a wish that is already in flight is dropped, and a
waiting one is replaced. A key is free again *before* its reply is reported, so the leader's next wish for it is sent at
once and not lost (when it was lost, a broken broker stalled the fleet).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

Wish = TypeVar("Wish")
Tell = Callable[[], None]
"""Reports the result of a wish to the leader; called when its key is free again."""


class LeaderWrites(Generic[Wish]):
    """Performs wishes concurrently. At most one wish waits per key, so the number of keys bounds the memory."""

    def __init__(
        self,
        perform: Callable[[Wish], Awaitable[Tell | None]],
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        *,
        limit: int,
    ) -> None:
        self._perform = perform
        self._spawn = spawn
        self._limit = limit
        self._under_way: dict[str, Wish] = {}
        self._waiting: dict[str, Wish] = {}
        self._turn: deque[str] = deque()
        """Keys that wait and are not in flight, first in first out; a key that no longer waits is skipped."""

    def __repr__(self) -> str:
        return f"<LeaderWrites under_way={len(self._under_way)} waiting={len(self._waiting)}>"

    def want(self, key: str, wish: Wish) -> None:
        """Do this as soon as the key is free, unless the identical wish is in flight: its reply is still to come."""
        if self._under_way.get(key) == wish:
            self._waiting.pop(key, None)
            return
        if key not in self._waiting and key not in self._under_way:
            self._turn.append(key)
        self._waiting[key] = wish
        self._send()

    def forget(self) -> None:
        """The term is over: waiting wishes are discarded."""
        self._waiting.clear()
        self._turn.clear()

    def _send(self) -> None:
        while self._turn and len(self._under_way) < self._limit:
            key = self._turn.popleft()
            if key in self._waiting and key not in self._under_way:
                wish = self._under_way[key] = self._waiting.pop(key)
                self._spawn(self._do(key, wish), f"parti-{key.partition(' ')[0]}")

    async def _do(self, key: str, wish: Wish) -> None:
        try:
            tell = await self._perform(wish)
        finally:
            del self._under_way[key]
            if key in self._waiting:
                self._turn.append(key)
        if tell is not None:
            tell()
        self._send()
