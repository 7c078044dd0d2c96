"""A base for things that start and stop, usable with `with` and `async with`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self


async def to_its_end(action: Callable[[], None]) -> None:
    """Run `action` in a thread; when this returns or raises, it has ended, even if the caller was cancelled.

    A thread cannot be cancelled: without this, a cancelled caller would continue while its server starts or stops.
    """
    work = asyncio.create_task(asyncio.to_thread(action))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class Running(ABC):
    """Runs inside its context, and has ended after it, even if the caller was cancelled meanwhile."""

    @abstractmethod
    def start(self) -> None:
        """After this returns, it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """After this returns, nothing of it remains."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        try:
            await to_its_end(self.start)
        except asyncio.CancelledError:
            await to_its_end(self.stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await to_its_end(self.stop)
