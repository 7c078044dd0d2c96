"""Blocking work from an event loop, without leaving it half done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def to_its_end(action: Callable[[], None]) -> None:
    """Run `action` in a thread; after this returns or raises it has ended, also when the caller was cancelled.

    A thread cannot be cancelled: without this, a cancelled caller would go on while its server still starts or stops.
    """
    work = asyncio.create_task(asyncio.to_thread(action))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
