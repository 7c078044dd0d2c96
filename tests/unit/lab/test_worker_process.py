"""Processes of a proof, as their parent reads them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack

from parti.testing.child import spawn
from parti_lab.prove.worker_process import WorkerProcess

_QUIET = 'import signal; print(\'{"say": "live", "worker": "w"}\', flush=True); signal.pause()'


async def test_processes_that_say_nothing_more_keep_no_other_from_being_heard() -> None:
    """Each reader kept a thread of the loop's pool (six on two cores): a seventh process was never heard."""
    async with AsyncExitStack() as stack:
        for _ in range(12):
            child = WorkerProcess(spawn([sys.executable, "-I", "-S", "-c", _QUIET]))
            child._reader = asyncio.create_task(child._read())
            stack.push_async_callback(child.close)
            await child.live(60.0)
