"""Wait for the first of several awaitables, and for the signals that ask a process to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


async def first_of(*ways: asyncio.Future[Any] | Coroutine[Any, Any, Any], timeout: float | None = None) -> list[bool]:
    """Return when one of these has ended, or after `timeout` seconds; the result says for each whether it has ended.

    A coroutine belongs to this call: it is cancelled when another one ends first, and its exception is raised here. A
    future or task belongs to the caller: it continues, and its exception is left to the caller.
    """
    waits = [asyncio.ensure_future(way) for way in ways]
    own = [wait for wait, way in zip(waits, ways, strict=True) if wait is not way]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        ended = [wait.done() for wait in waits]
        for wait in own:
            if wait.done():
                wait.result()
        return ended
    finally:
        for wait in own:
            wait.cancel()
        await asyncio.gather(*own, return_exceptions=True)


@contextmanager
def stop_signals(*chosen: signal.Signals) -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT (or the given ones) set instead of ending the process, until the block ends."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    chosen = chosen or (signal.SIGTERM, signal.SIGINT)
    for each in chosen:
        loop.add_signal_handler(each, asked.set)
    try:
        yield asked
    finally:
        for each in chosen:
            loop.remove_signal_handler(each)
