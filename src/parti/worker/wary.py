"""Partitions under suspicion: what a worker does about a message that may have ended the process before it."""

from __future__ import annotations

from typing import Protocol

from parti.outcomes import Bury, Done
from parti.worker.message import Message


class Wary(Protocol):
    """Asked before each start of a message of a partition under suspicion."""

    async def enter(self, message: Message) -> Bury | Done | float | None:
        """None: start it, and call `leave` when it has ended. A number: ask again after so many seconds.

        Bury: its lives are used up. Done: it was buried before.
        """
        ...

    async def buried(self, message: Message) -> None:
        """Its letter is stored: those after us need not write it again."""
        ...

    def leave(self, message: Message) -> None:
        """Its attempt has ended, and the process lives."""
        ...
