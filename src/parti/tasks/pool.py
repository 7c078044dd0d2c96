"""Connections to endpoints: never more than the process has descriptors for, and none that somebody wrote to unasked.

aiohttp's pool keeps every connection for as long as it may be of use; 3,000 hosts and 1,024 descriptors made 5,972
failed attempts. Here the idle connection that was used longest ago is closed for a new one, and when none is idle the
request waits for its turn: that is before its time begins, and before anything counts as tried.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import resource
import select
from collections import deque

import aiohttp
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection

from parti.tasks.guard import AddressGuard
from parti.tasks.heads import Handler

_SHARE = 0.75  # of the free descriptors; the rest is for NATS, logs, secrets and look-ups
_LEAST = 4
_MOST = 1 << 20
_PATIENCE = 5.0  # seconds
_UNKNOWN = 64  # descriptors that count as taken where nobody tells


def affordable() -> int:
    """How many connections this process may hold open, by its descriptor limit and what it has open now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit in (resource.RLIM_INFINITY, -1):
        return _MOST
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = _UNKNOWN
    return max(_LEAST, int((limit - taken) * _SHARE))


class Pool(aiohttp.TCPConnector):
    """aiohttp's connector within `most` open sockets, counted where they are made: at the guard."""

    def __init__(self, guard: AddressGuard, most: int, **settings: object) -> None:
        super().__init__(limit=0, limit_per_host=0, socket_factory=guard.socket, **settings)  # type: ignore[arg-type]
        self._factory = functools.partial(Handler, loop=self._loop)  # type: ignore[assignment]  # a ResponseHandler
        self._guard = guard
        self._most = most
        self._turns: deque[asyncio.Future[None]] = deque()
        self._poll = select.poll()
        guard.on_closed = self.next_turn

    def __repr__(self) -> str:
        return f"<Pool open={self._guard.alive} most={self._most} waiting={len(self._turns)}>"

    async def room(self, key: ConnectionKey) -> None:
        """Return when the request can have a connection: an idle one of its host, or a descriptor for a new one.

        `OSError` when there is none within a few seconds.
        """
        while self._guard.alive >= self._most and not self._conns.get(key):
            self.close_idle()
            turn: asyncio.Future[None] = self._loop.create_future()
            self._turns.append(turn)
            try:
                # Closing takes a turn of the loop, and only then is the descriptor free.
                async with asyncio.timeout(_PATIENCE):
                    await turn
            except TimeoutError:
                raise OSError(errno.EMFILE, f"none of {self._most} connections became free") from None
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.next_turn()
                raise

    def next_turn(self) -> None:
        """A connection became idle, or was closed: the first that waits looks again."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def clean(
        self, target: aiohttp.ClientRequest, key: ConnectionKey, timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """A connection on which nothing has come that nobody asked for: it would pass for the next answer."""
        while True:
            used_before = bool(self._conns.get(key))
            connection = await self.connect(target, [], timeout)
            if not used_before or self._is_clean(connection):
                return connection
            connection.close()

    def _is_clean(self, connection: Connection) -> bool:
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None or protocol.should_close:
            return False
        # What the event loop has not read yet counts as well, and so does the end of the connection.
        descriptor = transport.get_extra_info("socket").fileno()
        if descriptor < 0:
            return False
        self._poll.register(descriptor, select.POLLIN)
        try:
            return not self._poll.poll(0)
        finally:
            self._poll.unregister(descriptor)

    def close_idle(self, count: int = 1) -> bool:
        """Close idle connections, those that were used longest ago first; False when there is none."""
        closed = False
        for _ in range(count):
            key = next(iter(self._conns), None)  # a host's entry is made anew when its last idle connection was used
            if key is None:
                break
            waiting = self._conns[key]
            protocol, _ = waiting.popleft()
            if not waiting:
                del self._conns[key]
            protocol.abort()  # no farewell: TLS would wait for the other side's
            closed = True
        return closed
