"""The sink of a proof: every effect arrives here, in the order in which it took effect, and is judged at once.

Worker processes reach it over a socket on loopback, so that a broken broker cannot hide an effect. With `fenced`, it
does what a careful sink does: it refuses an effect whose epoch is below the highest it has seen for the partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from typing import Self

from parti.clock import SystemClock
from parti.testing.history import Effect, History, Verdict

Origin = tuple[int, float, int, float]
"""The sequence of an effect's message, when that was stored, which attempt it was, and when its handler began."""
Record = Callable[[Effect, int, float, int, float], None]
"""Called with each accepted effect and its origin."""
_GAPS = 200_000  # gaps kept: enough for percentiles of any run


class Sink:
    """Accepts effects; `verdict()` says what was lost, repeated, out of order, doubly owned or stale."""

    def __init__(self, *, fenced: bool = False, record: Record | None = None) -> None:
        self.history = History()
        self._record = record
        self.refused = 0
        self.last: dict[str, tuple[float, str]] = {}
        """Partition -> when its last effect came, and from whom."""
        self.moved: deque[float] = deque(maxlen=_GAPS)
        """Seconds between the last effect of one owner and the first of the next."""
        self.steady: deque[float] = deque(maxlen=_GAPS)
        """Seconds between two effects of one owner."""
        self.first_since: dict[str, float] = {}
        self.port = 0
        self._fenced = fenced
        self._newest: dict[str, int] = {}
        self._clock = SystemClock()
        self._server: asyncio.Server | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    def effect(self, effect: Effect, origin: Origin | None = None) -> bool:
        """Take one effect; False when it is refused as stale."""
        partition, owner, epoch = effect.partition, effect.owner, effect.epoch
        if self._fenced and epoch < self._newest.get(partition, 0):
            self.refused += 1
            return False
        self._newest[partition] = max(epoch, self._newest.get(partition, 0))
        now = self._clock.now()
        before = self.last.get(partition)
        if before is not None:
            (self.steady if before[1] == owner else self.moved).append(now - before[0])
            if before[1] != owner:
                self.first_since[partition] = now
        self.last[partition] = (now, owner)
        self.history.effect(effect)
        if self._record is not None and origin is not None:
            self._record(effect, *origin)
        self._changed.set()
        return True

    def verdict(self) -> Verdict:
        return self.history.verdict()

    async def complete(self, timeout: float) -> Verdict:
        """Wait until nothing is missing, or for as long as `timeout`; then judge."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.verdict().lost:
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await self._changed.wait()
        return self.verdict()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                effect, origin = json.loads(line)
                accepted = self.effect(Effect(*effect), origin)
                writer.write(b"1\n" if accepted else b"0\n")
        writer.close()


class SinkClient:
    """The handler's end: `effect` returns when the sink has taken or refused it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._task = asyncio.get_running_loop().create_task(self._read(), name="parti-sink-client")

    @classmethod
    async def open(cls, port: int) -> SinkClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def effect(self, effect: Effect, origin: Origin | None = None) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._writer.write(json.dumps([astuple(effect), origin]).encode() + b"\n")
        return await answer

    async def _read(self) -> None:
        while line := await self._reader.readline():
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_result(line == b"1\n")

    async def close(self) -> None:
        self._task.cancel()
        self._writer.close()
        await asyncio.gather(self._task, return_exceptions=True)


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of them lies; 0 when there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
