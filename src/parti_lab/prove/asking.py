"""Yes-or-no questions over a loopback socket: many processes ask one server, one JSON line each, answered in order.

Reports sent this way do not pass through NATS, so a broken broker cannot hide them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Self


class Answering(ABC):
    """The server; listens on `port` while the context is entered."""

    port = 0
    _server: asyncio.Server | None = None

    @abstractmethod
    def answer(self, said: list[Any]) -> bool:
        """Yes or no."""

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
                writer.write(b"1\n" if self.answer(json.loads(line)) else b"0\n")
        writer.close()


class Asking:
    """The client; each call returns the server's answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._task = asyncio.get_running_loop().create_task(self._read(), name="parti-asking")

    @classmethod
    async def open(cls, port: int) -> Self:
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
