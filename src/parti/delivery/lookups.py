"""DNS look-ups, each name separately: a hanging name does not delay others, and is never asked twice at once.

`getaddrinfo` cannot be cancelled, and event loops have few threads for it (uvloop four for everything): eight names
with silent DNS servers stopped every host. Here each look-up has its own thread, within a limit. Late look-ups, and
names that were late before, have a separate limit, so that they leave room. Known addresses are used during a refresh,
and for a while after a failed one. A look-up that is late, or waits for its turn, says nothing about the host: see
`LookupLate`.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from parti.delivery.guard import AddrInfo

_FRESH = 10.0  # seconds; short, because endpoints move, and each use is checked at the socket anyway
_STALE = 300.0  # how long addresses may be used when no newer answer comes
_REFRESH = 0.25  # how long a request waits for newer addresses when it has usable ones
_REMEMBERED = 2.0  # how long the answer "no such name" counts
_LONGEST_WAIT = 30.0
_THREADS = 64  # look-ups that are not late
_SUSPECTS = 32  # further look-ups of names that were late before; beyond this, none is started
_MOST_THREADS = 256  # including all that hang
_NAMES = 4_096
_NO_SUCH_NAME = frozenset(
    getattr(socket, code)
    for code in ("EAI_NONAME", "EAI_NODATA", "EAI_ADDRFAMILY", "EAI_FAIL")
    if hasattr(socket, code)
)

Answer = Sequence[AddrInfo] | OSError
Lookup = Callable[[str], Sequence[AddrInfo]]
"""Looks up one name; blocks until the answer."""


class LookupLate(OSError):
    """No answer for the name yet: ask again after `wait` seconds. No attempt may be spent on it."""

    def __init__(self, why: str, wait: float) -> None:
        super().__init__(why)
        self.wait = wait


class _Name:
    __slots__ = ("answer", "at", "late", "pending", "retry_at", "started", "suspect")

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.at = 0.0
        self.pending: asyncio.Future[None] | None = None
        self.started = 0.0  # when its thread started; 0 while it waits for one
        self.late = 0  # times in a row
        self.retry_at = 0.0
        self.suspect = False  # its thread counts as a suspect

    def addresses(self, now: float, within: float) -> Sequence[AddrInfo] | None:
        if self.answer is None or isinstance(self.answer, OSError) or now - self.at >= within:
            return None
        return self.answer


class Lookups:
    """One per process and event loop. `timeout` is how long one request waits for one look-up."""

    def __init__(self, timeout: float = 3.0, ask: Lookup | None = None) -> None:
        self._timeout = timeout
        self._ask = ask or _system
        self._names: dict[str, _Name] = {}
        self._fresh: deque[str] = deque()
        self._suspects: deque[str] = deque()
        self._running = 0
        self._suspected = 0
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Lookups names={len(self._names)} running={self._running} suspects={self._suspected}>"

    async def known(self, host: str) -> None:
        """Return when addresses of the host are known; raises `LookupLate`, or the error that there are none."""
        name, now = self._names.get(host), self._loop.time()
        if name is None or name.addresses(now, _STALE) is None:
            await self(host)

    async def __call__(self, host: str, port: int = 0, family: int = 0) -> Sequence[AddrInfo]:  # noqa: ARG002
        """The addresses, as fresh as a short wait allows."""
        name, now = self._name(host), self._loop.time()
        found = name.addresses(now, _FRESH)
        if found is None:
            spare = name.addresses(now, _STALE)
            try:
                found = await self._look_up(host, name, now, _REFRESH if spare else self._timeout)
            except OSError:
                if spare is None:
                    raise
                found = spare
        return [info for info in found if family in (0, info[0])]

    async def _look_up(self, host: str, name: _Name, now: float, patience: float) -> Sequence[AddrInfo]:
        if name.pending is None:
            if now < name.retry_at:
                raise name.answer if isinstance(name.answer, OSError) else self._late(name, now)
            name.pending = self._loop.create_future()
            name.started = 0.0
            (self._suspects if name.late else self._fresh).append(host)
            self._start()
        elif name.started and now - name.started >= self._timeout:
            raise self._late(name, now)  # the first caller has waited, and the thread continues
        pending = name.pending
        await asyncio.wait([pending], timeout=patience)
        now = self._loop.time()
        if not pending.done():
            if name.started and patience == self._timeout and now >= name.retry_at:
                name.late += 1
                name.retry_at = now + min(_LONGEST_WAIT, 2.0 ** min(name.late, 8))
                self._suspected += not name.suspect
                name.suspect = True
                self._start()  # another look-up has room now
            raise self._late(name, now)
        if name.answer is None or isinstance(name.answer, OSError):
            raise name.answer or self._late(name, now)
        return name.answer

    def _late(self, name: _Name, now: float) -> LookupLate:
        if name.pending is not None and not name.started:
            return LookupLate("the look-up of the host's name waits for its turn: too many others hang", 1.0)
        return LookupLate("the host's name is not looked up in time", max(0.5, name.retry_at - now))

    def _start(self) -> None:
        """Start waiting look-ups, first those of names not known to hang."""
        while self._running < _MOST_THREADS:
            if self._fresh and self._running - self._suspected < _THREADS:
                host, suspect = self._fresh.popleft(), False
            elif self._suspects and self._suspected < _SUSPECTS:
                host, suspect = self._suspects.popleft(), True
            else:
                return
            name = self._names[host]
            name.started, name.suspect = self._loop.time(), suspect
            self._running += 1
            self._suspected += suspect
            # A daemon thread: process exit must not wait for a server that never answers.
            thread = threading.Thread(target=self._run, args=(host,), name="parti-lookup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread available
                self._answered(host, LookupLate(str(error), 1.0))

    def _run(self, host: str) -> None:
        answer: Answer
        try:
            answer = self._ask(host)
        except OSError as error:
            answer = error
        except UnicodeError:
            answer = socket.gaierror(socket.EAI_NONAME, "no name that a resolver takes")
        except Exception as error:
            answer = LookupLate(f"the resolver failed ({type(error).__name__})", 1.0)
        try:
            self._loop.call_soon_threadsafe(self._answered, host, answer)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _answered(self, host: str, answer: Answer) -> None:
        name, now = self._names[host], self._loop.time()
        self._running -= 1
        self._suspected -= name.suspect
        name.suspect = False
        pending, name.pending = name.pending, None
        if not isinstance(answer, OSError):
            name.answer, name.at, name.late, name.retry_at = answer, now, 0, 0.0
        elif isinstance(answer, socket.gaierror) and answer.errno in _NO_SUCH_NAME:
            name.answer, name.late, name.retry_at = answer, 0, now + _REMEMBERED
        else:
            # Temporary, or a problem of the resolver: older addresses are still the best ones known.
            if name.addresses(now, _STALE) is None:
                name.answer = None
            if now >= name.retry_at:
                name.late += 1
                name.retry_at = now + min(_LONGEST_WAIT, 2.0 ** min(name.late - 1, 8))
        if pending is not None and not pending.done():
            pending.set_result(None)
        self._start()

    def _name(self, host: str) -> _Name:
        name = self._names.get(host)
        if name is None:
            if len(self._names) >= _NAMES:
                for idle in [key for key, it in self._names.items() if it.pending is None]:
                    del self._names[idle]
            name = self._names[host] = _Name()
        return name


def is_definite(error: OSError) -> bool:
    """Whether the answer is "no such name": that is the endpoint's fault; any other error may be local."""
    return isinstance(error, socket.gaierror) and error.errno in _NO_SUCH_NAME


def _system(host: str) -> Sequence[AddrInfo]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
