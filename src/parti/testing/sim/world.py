"""Virtual time, one source of randomness, an unreliable network, and the event log.

The same seed gives the same order of events, byte for byte: `digest` proves it.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

_STORY: Final = 4000  # events kept for the report of a failure; the digest covers all of them


class SimMachine(Protocol):
    """A process on a machine: it can be dead or frozen, and has a name for the log."""

    name: str
    dead: bool
    thaw_at: float
    cut_until: float
    """Until this time nothing it sends arrives, and nothing reaches it."""

    def enter(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run this in the event loop of the host."""
        ...


@dataclass(frozen=True, slots=True)
class SimLinks:
    """The network's faults: probabilities per message, delays in seconds."""

    lose: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    fastest: float = 0.0005
    slowest: float = 0.004
    straggle: float = 0.0
    """Share of messages that take up to `straggler` seconds."""
    straggler: float = 0.3


class World:
    """The scheduler. It is the simulation's only source of time and randomness."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.network = SimLinks()
        self.steps = 0
        self._queue: list[tuple[float, int, SimMachine | None, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.story: deque[str] = deque(maxlen=_STORY)
        self.bugs: list[str] = []
        """Unexpected events, as text."""

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def log(self, who: str, what: str) -> None:
        """Add one line to the event log."""
        line = f"{self.now:8.4f} {who:<12} {what}"
        self._digest.update(line.encode())
        self.story.append(line)

    def bug(self, host: SimMachine, what: str, error: BaseException | None = None) -> None:
        """Record an unexpected event on a host."""
        self.log(host.name, f"BUG: {what}")
        where = "".join(traceback.format_exception(error)[-6:]) if error is not None else ""
        self.bugs.append(f"{host.name}: {what}\n{where}".rstrip())

    def at(self, when: float, host: SimMachine | None, act: Callable[..., object], *args: Any) -> None:
        """Run `act` at this time; on a frozen host after the thaw, on a dead host never."""
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, host, act, args))

    def after(self, delay: float, host: SimMachine | None, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay, host, act, *args)

    def delay(self) -> float:
        """The delay of one message."""
        net = self.network
        if net.straggle and self.rng.random() < net.straggle:
            return self.rng.uniform(net.slowest, net.straggler)
        return self.rng.uniform(net.fastest, net.slowest)

    def lost(self, host: SimMachine) -> bool:
        """Whether a message to or from this host is lost."""
        return host.cut_until > self.now or (self.network.lose > 0 and self.rng.random() < self.network.lose)

    def call(
        self,
        host: SimMachine,
        serve: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[], None],
        *,
        timeout: float = 0.1,
        late: bool = True,
    ) -> None:
        """A request to the server: it or its answer may be lost, it may be served twice, or after the caller gave up.

        `late=False` is for requests that travel in order on one connection: served once and in time, or not at all.
        """
        going, coming = self.delay(), self.delay()
        lost_request, lost_answer = self.lost(host), self.lost(host)
        if lost_request or (not late and going >= timeout):
            self.after(timeout, host, failed)
            return
        in_time = not lost_answer and going + coming < timeout
        self.after(going, None, self._serve, host, serve, answered if in_time else None, coming)
        if not in_time:
            self.after(timeout, host, failed)
        if late and self.network.duplicate and self.rng.random() < self.network.duplicate:
            self.after(going + self.delay(), None, self._serve, host, serve, None, 0.0)

    def _serve(
        self, host: SimMachine, serve: Callable[[], Any], answered: Callable[[Any], None] | None, coming: float
    ) -> None:
        result = serve()
        if answered is not None:
            self.after(coming, host, answered, result)

    def run(self, until: float, stop: Callable[[], bool]) -> None:
        """Run events in order of time until then, or until `stop` returns true after one of them."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            when, _, host, act, args = heapq.heappop(queue)
            self.now = max(self.now, when)
            if host is not None:
                if host.dead:
                    continue
                if host.thaw_at > self.now:
                    self.at(host.thaw_at, host, act, *args)
                    continue
                try:
                    host.enter(act, args)
                except Exception as error:  # any exception fails the run, and its seed is known
                    self.bug(host, f"{getattr(act, '__name__', act)}: {error!r}", error)
            else:
                act(*args)
            self.steps += 1
            if stop():
                return
        self.now = max(self.now, until)
