"""A TCP proxy on loopback that breaks connections as networks do."""

from __future__ import annotations

import asyncio
import functools
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from parti.errors import UsageError
from parti.testing.errors import NeverHappened
from parti.testing.eventually import PATIENCE
from parti.testing.link import Direction, Flow, ProxiedLink
from parti.testing.ports import pick_port
from parti.testing.running import Running

T = TypeVar("T")

_HOST = "127.0.0.1"
_ORDER_WITHIN = PATIENCE  # a command to the proxy's own thread takes microseconds on an idle machine
_PORT_TRIES = 10


class FaultProxy(Running):
    """While the context is open, clients of `url` talk to the target through the faults that are set.

    Every method takes effect before it returns, blocks for microseconds only, and can be called from synchronous code,
    any thread and any event loop: the proxy has its own thread and loop. Faults accumulate until `heal()`. Servers of a
    cluster advertise their real addresses to clients; use `NatsServer.cluster(3, advertise=False)` there.
    """

    def __init__(self, target: str | int, *, seed: int = 0) -> None:
        """Describe a proxy to `target`, a URL or a port on loopback; `seed` determines which chunks `drop` takes."""
        parts = urlsplit(f"nats://{_HOST}:{target}" if isinstance(target, int) else target)
        if not parts.hostname or not parts.port:
            raise UsageError(f"the proxy's target must be a URL with a port, or a port, not {parts.hostname!r}")
        self._scheme = parts.scheme
        self._target = (parts.hostname, parts.port)
        self._flows = {
            Direction.TO_SERVER: Flow(random.Random(seed)),
            Direction.TO_CLIENT: Flow(random.Random(seed + 1)),
        }
        self._links: dict[ProxiedLink, asyncio.Task[None]] = {}
        self._connections = 0
        self._seen = threading.Condition()
        self._refusing = False
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    @property
    def port(self) -> int:
        if self._port == 0:
            raise UsageError("the proxy has no port before its start")
        return self._port

    @property
    def url(self) -> str:
        """The address for clients; without credentials, even if the target's URL has some."""
        return f"{self._scheme}://{_HOST}:{self.port}"

    @property
    def connections(self) -> int:
        """Number of connections accepted since the start."""
        return self._connections

    @property
    def live(self) -> int:
        """Number of connections open now."""
        return len(self._links)

    @property
    def bytes_to_server(self) -> int:
        """Bytes forwarded to the target since the start."""
        return self._flows[Direction.TO_SERVER].forwarded

    @property
    def bytes_to_client(self) -> int:
        """Bytes forwarded to the clients since the start."""
        return self._flows[Direction.TO_CLIENT].forwarded

    @property
    def swallowed(self) -> int:
        """Bytes that `drop` discarded since the start, both directions together."""
        return sum(flow.swallowed for flow in self._flows.values())

    def cut(self, *, refuse: bool = False) -> int:
        """Reset (RST) every live connection and return their number; with `refuse`, refuse new ones until `heal()`."""
        return self._order(self._cut(refuse))

    def cut_after(self, nbytes: int, direction: Direction = Direction.TO_CLIENT) -> None:
        """Reset, once, the connection that would carry byte `nbytes` + 1 from now on; no later byte gets through."""
        if nbytes < 0:
            raise UsageError(f"cut_after needs a count of bytes, not {nbytes}")
        self._set(direction, lambda flow: flow.cut_after(nbytes))

    def delay(self, seconds: float, direction: Direction | None = None) -> None:
        """Forward each byte this much later; order and throughput stay."""
        self._set(direction, lambda flow: flow.delay_by(seconds))

    def drop(self, share: float = 1.0, direction: Direction | None = None) -> None:
        """Discard this share of the chunks. The streams then miss bytes, which healthy TCP never does."""
        if not 0.0 <= share <= 1.0:
            raise UsageError(f"the share to drop lies between 0 and 1, not at {share}")
        self._set(direction, lambda flow: flow.drop_share(share))

    def throttle(self, bytes_per_second: float, direction: Direction | None = None) -> None:
        """Forward at most this many bytes per second in each direction, all connections together."""
        if bytes_per_second <= 0:
            raise UsageError(f"throttle needs a positive rate, not {bytes_per_second}; half_open() stops all traffic")
        self._set(direction, lambda flow: flow.throttle_to(bytes_per_second))

    def half_open(self, direction: Direction | None = None) -> None:
        """Forward nothing, neither bytes nor closes, and keep every socket open: a black hole.

        Bytes sent meanwhile arrive after `heal()`, as after a network partition that TCP survived.
        """
        self._set(direction, Flow.block)

    def heal(self) -> None:
        """Remove every fault; connections that were cut stay cut."""
        self._order(self._heal())

    def wait_for_connection(self, count: int = 1, timeout: float = PATIENCE) -> None:
        """Return when `count` connections have been accepted since the start."""
        with self._seen:
            if not self._seen.wait_for(lambda: self._connections >= count, timeout):
                raise NeverHappened(f"the proxy saw {self._connections} of {count} connections within {timeout:g} s")

    def start(self) -> None:
        """After this returns, the proxy listens on `url`."""
        if self._thread is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="parti-proxy", daemon=True)
        self._thread.start()
        try:
            self._order(self._listen())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """After this returns, all connections are reset, the port is free and the thread has ended."""
        if self._thread is None or self._loop is None:
            return
        self._order(self._cut(refuse=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._thread = self._loop = None

    def __repr__(self) -> str:
        faults = ", ".join(f"{direction}: {flow!r}" for direction, flow in self._flows.items())
        refusing = " refusing" if self._refusing else ""
        target = f"{self._target[0]}:{self._target[1]}"
        return f"<FaultProxy {self._port} -> {target}{refusing} live={self.live} {faults}>"

    def _set(self, direction: Direction | None, change: Callable[[Flow], None]) -> None:
        async def apply() -> None:
            for each in Direction if direction is None else (direction,):
                change(self._flows[each])

        self._order(apply())

    def _order(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise UsageError("the proxy is not running: start it first")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ORDER_WITHIN)

    async def _listen(self) -> None:
        for left in reversed(range(_PORT_TRIES)):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port = self._port or pick_port(_HOST)
            try:
                listener.bind((_HOST, port))
                listener.listen(128)
            except OSError:
                listener.close()
                if left == 0 or self._port:
                    raise
            else:
                self._port, self._listener, self._refusing = port, listener, False
                self._acceptor = asyncio.create_task(self._accept(listener))
                return

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            link = ProxiedLink(client, self._target, self._flows)
            task = asyncio.create_task(link.run())
            self._links[link] = task
            task.add_done_callback(functools.partial(self._ended, link))
            with self._seen:
                self._connections += 1
                self._seen.notify_all()

    def _ended(self, link: ProxiedLink, _task: asyncio.Task[None]) -> None:
        link.reset()  # a task cancelled before its first step closes nothing itself
        del self._links[link]

    async def _cut(self, refuse: bool) -> int:
        if refuse and self._acceptor is not None and self._listener is not None:
            self._acceptor.cancel()
            await asyncio.gather(self._acceptor, return_exceptions=True)
            self._listener.close()
            self._acceptor = self._listener = None
            self._refusing = True
        tasks = list(self._links.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    async def _heal(self) -> None:
        for flow in self._flows.values():
            flow.heal()
        if self._listener is None:
            await self._listen()
