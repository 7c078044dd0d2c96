"""Partitions under suspicion: how a worker treats a message that may have ended the previous owner's process."""

from __future__ import annotations

from typing import Protocol

from parti.outcomes import Bury, Done
from parti.worker.message import Message


class Wary(Protocol):
    """Called before each start of a message of a partition under suspicion."""

    async def enter(self, message: Message) -> Bury | Done | float | None:
        """None: start it, and call `leave` when it has ended. A number: ask again after that many seconds.

        Bury: it has used up its attempts. Done: it was buried before.
        """
        ...

    async def buried(self, message: Message) -> None:
        """Its letter is stored: later owners need not write it again."""
        ...

    def leave(self, message: Message) -> None:
        """Its attempt has ended, and the process survived."""
        ...
