"""A very cheap endpoint in its own process, so that the benchmark measures the client's CPU.

    python -m parti_lab.bench.deliver_sink 50

Listens on the given number of loopback ports and prints them as one line of JSON. The first port never answers, the
others answer at once. Ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class EndpointSink(asyncio.Protocol):
    """Answers every complete request with 200, or never answers."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            at = self._data.lower().find(b"content-length:", 0, end)
            length = int(self._data[at + 15 : self._data.index(b"\r\n", at)]) if at >= 0 else 0
            if len(self._data) < end + 4 + length:
                return
            del self._data[: end + 4 + length]
            if self._answers:
                self._transport.write(_OK)


async def main(ports: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda answers=number > 0: EndpointSink(answers), "127.0.0.1", 0)  # type: ignore[misc]
        for number in range(ports)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
