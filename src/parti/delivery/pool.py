"""Connections to endpoints: never more than the process has descriptors for, and none with unrequested data on it.

aiohttp's pool keeps every connection while it may be useful; 3,000 hosts and 1,024 descriptors made 5,972 failed
attempts. Here the least recently used idle connection is closed for a new one. When none is idle, the request waits for
its turn: before its timeout starts, and before anything counts as an attempt.
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

from parti.delivery.guard import AddressGuard
from parti.delivery.response_head import HeadHandler

_SHARE = 0.75  # of the free descriptors; the rest is for NATS, logs, secrets and look-ups
_LEAST = 4
_MOST = 1 << 20
_PATIENCE = 5.0  # seconds
_SELECTABLE = 1024  # select, which is faster than poll for one descriptor, accepts no higher one
_UNKNOWN = 64  # descriptors assumed to be open where the system does not say


def affordable() -> int:
    """How many connections this process may hold open, by its descriptor limit and its open descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit in (resource.RLIM_INFINITY, -1):
        return _MOST
    try:
        taken = len(os.listdir("/proc/self/fd"))
    except OSError:
        taken = _UNKNOWN
    return max(_LEAST, int((limit - taken) * _SHARE))


class ConnectionPool(aiohttp.TCPConnector):
    """aiohttp's connector with at most `most` open sockets, counted where they are created: at the guard."""

    def __init__(self, guard: AddressGuard, most: int, **settings: object) -> None:
        super().__init__(limit=0, limit_per_host=0, socket_factory=guard.socket, **settings)  # type: ignore[arg-type]
        self._factory = functools.partial(HeadHandler, loop=self._loop)  # type: ignore[assignment]  # a ResponseHandler
        self._guard = guard
        self.most = most
        self.turns: deque[asyncio.Future[None]] = deque()
        self._poll = select.poll()
        guard.on_closed = self.next_turn

    def __repr__(self) -> str:
        return f"<ConnectionPool open={self._guard.alive} most={self.most} waiting={len(self.turns)}>"

    async def room(self, key: ConnectionKey) -> None:
        """Return when the request can have a connection: an idle one to its host, or a descriptor for a new one.

        Raises `OSError` when there is none within a few seconds.
        """
        while self._guard.alive >= self.most and not self._conns.get(key):
            self.close_idle()
            turn: asyncio.Future[None] = self._loop.create_future()
            self.turns.append(turn)
            try:
                # Closing takes one turn of the loop, and only then is the descriptor free.
                async with asyncio.timeout(_PATIENCE):
                    await turn
            except TimeoutError:
                raise OSError(errno.EMFILE, f"none of {self.most} connections became free") from None
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.next_turn()
                raise

    def next_turn(self) -> None:
        """A connection became idle, or was closed: the first waiting request checks again."""
        while self.turns:
            turn = self.turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def is_clean(self, connection: Connection) -> bool:
        """Whether no unrequested data has arrived, which would be mistaken for the next response."""
        protocol: HeadHandler = connection.protocol  # type: ignore[assignment]  # as all of ours
        if not protocol.used:
            return True
        if protocol.has_news or protocol.transport is None:
            return False
        # Data that the event loop has not read yet counts as well, and so does the end of the connection.
        descriptor = protocol.descriptor
        if 0 <= descriptor < _SELECTABLE:
            return not select.select((descriptor,), (), (), 0)[0]
        self._poll.register(descriptor, select.POLLIN)
        try:
            return not self._poll.poll(0)
        finally:
            self._poll.unregister(descriptor)

    def close_idle(self, count: int = 1) -> bool:
        """Close idle connections, least recently used first; False when there is none."""
        closed = False
        for _ in range(count):
            key = next(iter(self._conns), None)  # a host's entry is recreated after its last idle connection was used
            if key is None:
                break
            waiting = self._conns[key]
            protocol, _ = waiting.popleft()
            if not waiting:
                del self._conns[key]
            protocol.abort()  # no clean shutdown: TLS would wait for the other side's
            closed = True
        return closed
