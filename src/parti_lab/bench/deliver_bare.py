"""The baseline of `parti bench deliver`: an aiohttp loop that only posts."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from threading import BrokenBarrierError
from typing import Any

import aiohttp

from parti.cli.tune_gc import tune_gc

IN_FLIGHT = 64
BODY = 1_000
_WARM = 500
_TOGETHER = 60.0  # seconds that one process waits until the others are ready

_ready: Any = None
"""In a process of `bare_at_once`: the barrier of all processes."""


async def bare(count: int, port: int) -> float:
    """Requests per CPU-second."""
    url, body = f"http://127.0.0.1:{port}/hook", b"x" * (BODY + 180)
    left = iter(range(count))

    async def worker(session: aiohttp.ClientSession) -> None:
        for _ in left:
            async with session.post(url, data=body) as response:
                await response.read()

    gc.collect()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(worker(session))
        return count / (time.process_time() - started)


def bare_at_once(processes: int, count: int, port: int) -> float:
    """Requests per CPU-second of several processes that post at the same time, over all of them.

    A CPU-second achieves less when the other cores are busy too: two concurrent loops made 15 % fewer requests per
    CPU-second than one alone. So an engine with several processes is compared with as many loops.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _meet, (context.Barrier(processes),)) as pool:
        rates = list(pool.map(_bare, [count] * processes, [port] * processes))
    return processes / sum(1 / rate for rate in rates)


def _meet(barrier: Any) -> None:
    global _ready
    _ready = barrier


def _bare(count: int, port: int) -> float:
    async def measured() -> float:
        await bare(_WARM, port)
        tune_gc()  # as in all other processes of the run
        try:
            _ready.wait(_TOGETHER)
        except BrokenBarrierError:
            raise RuntimeError(f"the processes did not come together within {_TOGETHER:g} s") from None
        return await bare(count, port)

    return asyncio.run(measured())
