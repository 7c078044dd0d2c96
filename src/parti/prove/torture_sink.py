"""The checking sink of a torture run, over a socket on loopback: refuses stale epochs, remembers who misbehaved."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from typing import Any, Self

from parti.prove.torture_judge import Happened, Ledger


class TortureSink:
    """Takes effects into a ledger, in the order in which they took effect."""

    def __init__(self, ledger: Ledger, misbehaved: set[str] | None = None) -> None:
        """`misbehaved`: messages that had their turn, also at another sink that shares this set."""
        self.ledger = ledger
        self.port = 0
        self.lives: dict[str, list[str]] = {}
        """Value of a poisonous message -> the owners that a handler of it was started in."""
        self.misbehaved: set[str] = set() if misbehaved is None else misbehaved
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                writer.write(b"1\n" if self._answer(json.loads(line)) else b"0\n")
        writer.close()

    def _answer(self, said: list[Any]) -> bool:
        if said[0] == "misbehave":  # once a message: the next one who gets it must be able to go on
            first = said[1] not in self.misbehaved
            self.misbehaved.add(said[1])
            return first
        if said[0] == "life":  # of a message that kills whoever handles it
            self.lives.setdefault(said[1], []).append(said[2])
            return True
        _, partition, unit, counter, owner, epoch, began, sequence, attempt = said
        effect = Happened(time.monotonic(), owner, epoch, began, sequence, attempt)
        return self.ledger.happen(partition, unit, counter, effect)


class SinkCaller:
    """The handler's end; each call returns the sink's yes or no."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._task = asyncio.get_running_loop().create_task(self._read(), name="parti-sink-caller")

    @classmethod
    async def open(cls, port: int) -> SinkCaller:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, *said: Any) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self._writer.write(json.dumps(said).encode() + b"\n")
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
