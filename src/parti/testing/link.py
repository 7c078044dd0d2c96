"""One proxied connection, and the faults that act on each of its two directions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Mapping
from enum import StrEnum

_CHUNK = 64 * 1024
_QUEUED = 64  # chunks inside a delay: 4 MiB per direction, then the sender sees backpressure
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with time 0: closing sends RST instead of FIN
_TICKS = 20  # a throttled direction forwards at most a twentieth of a second's bytes at once


class Direction(StrEnum):
    """The direction of the bytes."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


class Flow:
    """The faults of one direction, shared by all connections; accessed only by the proxy's own loop."""

    def __init__(self, randomness: random.Random) -> None:
        self.forwarded = 0
        self.swallowed = 0
        self._randomness = randomness
        self._delay = 0.0
        self._drop = 0.0
        self._rate: float | None = None
        self._next_turn = 0.0
        self._left_before_cut: int | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()

    def delay_by(self, seconds: float) -> None:
        self._delay = seconds
        self._wake()

    def drop_share(self, share: float) -> None:
        self._drop = share

    def throttle_to(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._next_turn = 0.0

    def cut_after(self, nbytes: int) -> None:
        self._left_before_cut = nbytes

    def block(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._delay = self._drop = 0.0
        self._rate = self._left_before_cut = None
        self._open.set()
        self._wake()

    def swallows(self, size: int) -> bool:
        """Whether to drop this chunk; counts it if so."""
        gone = self._drop > 0.0 and self._randomness.random() < self._drop
        self.swallowed += size * gone
        return gone

    async def passage(self, arrived: float) -> None:
        """Return when a chunk that arrived at this loop time may be forwarded: after the delay, not while blocked."""
        loop = asyncio.get_running_loop()
        while (wait := arrived + self._delay - loop.time()) > 0:
            await self._change(wait)
        await self._open.wait()

    async def allowance(self, wanted: int) -> int:
        """How many of `wanted` bytes may be forwarded now, after waiting for the throttle."""
        if self._rate is None:
            return wanted
        loop = asyncio.get_running_loop()
        piece = min(wanted, max(1, int(self._rate / _TICKS)))
        turn = max(loop.time(), self._next_turn)
        self._next_turn = turn + piece / self._rate
        while self._rate is not None and (wait := turn - loop.time()) > 0:
            await self._change(wait)
        await self._open.wait()
        return piece

    def until_cut(self, wanted: int) -> int:
        """How many of `wanted` bytes may be forwarded before the armed cut; counts them. Fewer means: cut now."""
        if self._left_before_cut is None:
            return wanted
        granted = min(wanted, self._left_before_cut)
        # Disarmed when it fires: it cuts one connection, once.
        self._left_before_cut = None if granted < wanted else self._left_before_cut - granted
        return granted

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def __repr__(self) -> str:
        faults = {
            "blocked": not self._open.is_set(),
            f"delay={self._delay:g}s": self._delay,
            f"drop={self._drop:g}": self._drop,
            f"throttle={self._rate or 0:g}B/s": self._rate,
            f"cut_after={self._left_before_cut}": self._left_before_cut is not None,
        }
        return " ".join(text for text, active in faults.items() if active) or "healthy"


class _Cut(Exception):
    """Reset this connection now."""


class ProxiedLink:
    """One client connection joined to one target connection; cancelling `run()` resets both."""

    def __init__(self, client: socket.socket, target: tuple[str, int], flows: Mapping[Direction, Flow]) -> None:
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        self._client = client
        self._server = socket.socket(family, socket.SOCK_STREAM)
        self._target = target
        self._flows = flows

    async def run(self) -> None:
        """Forward bytes until both sides have ended; a reset of one side, a dead target or a cut resets the other."""
        try:
            for end in (self._client, self._server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(self._server, self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(self._client, self._server, self._flows[Direction.TO_SERVER]))
                group.create_task(self._carry(self._server, self._client, self._flows[Direction.TO_CLIENT]))
            self._client.close()
            self._server.close()
        except* (_Cut, OSError):
            self.reset()

    def reset(self) -> None:
        """After this returns, both sockets are closed; those still open were closed by RST."""
        for end in (self._client, self._server):
            if end.fileno() >= 0:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.close()

    async def _carry(self, source: socket.socket, sink: socket.socket, flow: Flow) -> None:
        """Forward everything from `source` to `sink` until `source` ends; a reset becomes an error."""
        chunks: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(_QUEUED)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(source, flow, chunks))
            group.create_task(self._write(sink, flow, chunks))

    @staticmethod
    async def _read(source: socket.socket, flow: Flow, chunks: asyncio.Queue[tuple[float, bytes | None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(source, _CHUNK)
            except OSError:
                await flow.passage(loop.time())  # a black hole hides the other side's close too
                raise
            if data and flow.swallows(len(data)):
                continue
            await chunks.put((loop.time(), data or None))
            if not data:
                return

    @staticmethod
    async def _write(sink: socket.socket, flow: Flow, chunks: asyncio.Queue[tuple[float, bytes | None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            arrived, data = await chunks.get()
            await flow.passage(arrived)
            if data is None:
                with contextlib.suppress(OSError):  # the sink may be gone already
                    sink.shutdown(socket.SHUT_WR)
                return
            rest = memoryview(data)
            while rest:
                wanted = await flow.allowance(len(rest))
                granted = flow.until_cut(wanted)
                flow.forwarded += granted  # before sending, so that bytes a receiver has seen are always counted
                await loop.sock_sendall(sink, rest[:granted])
                if granted < wanted:
                    raise _Cut
                rest = rest[granted:]
