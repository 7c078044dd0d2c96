"""A line: the tasks of one host, or one limited trigger, in memory, how fast they move, and who waits outside.

Outside wait parked documents, known here by name only: ten thousand of them cost one megabyte and no message. They are
called in one by one as the line moves, and a single one when a host that is down is to be probed.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from parti.config.deliver import DeliverSection
from parti.delivery.breaker import Breaker
from parti.delivery.order import OrderRules

_WINDOW = 5.0  # seconds in which ended calls are counted
_BLINK = 0.001  # seconds: a line holds tasks for at least this long
_RETRY = 1.0  # seconds that a failed call adds: its task has not left, and waits for the next attempt
_TOLERANCE = 0.05  # seconds of delay that later starts make up for: with late timers the rate would not be reached
_MOST = 1.1  # times the rate, within any second
_SECOND = 1.05  # seconds: with 50 ms difference between the delays of two requests, still no second has more
_TICKS = 20.0  # starts per second from which on this is not a burst

Name = tuple[int, str]
"""A document: its partition and its key."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Not now, and not soon. No attempt was spent."""

    wait: float
    """Try again after this many seconds, if not called before."""
    why: str
    line: Line | None = None
    """Wait outside this line; it calls the document."""


def places(rules: OrderRules, share: float) -> int:
    """Concurrent requests that a share of a trigger may have."""
    return max(1, int(rules.concurrency * share + 1e-9))


class Line:
    """Counts calls. Documents outside are called in the order they came."""

    __slots__ = ("busy", "bytes", "ends", "held", "outside", "rolled", "seen", "timer", "window")

    def __init__(self) -> None:
        self.held = 0  # tasks in memory that will ask for this line
        self.bytes = 0
        self.seen = 0.0
        self.ends = [0, 0]  # calls that ended in the last window and in this one
        self.busy = [0.0, 0.0]  # seconds of them in which the line held tasks
        self.rolled = 0.0  # until when they are counted
        self.window = -math.inf
        self.outside: dict[Name, Callable[[], None]] = {}
        self.timer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} held={self.held} outside={len(self.outside)}>"

    @property
    def closed(self) -> float:
        """Nobody is called in before this time, and then one document; 0: it is open."""
        return 0.0

    @property
    def active(self) -> int:
        """Calls in flight, and those that wait in line."""
        return 0

    def came(self, now: float, size: int) -> None:
        self._roll(now)
        self.held += 1
        self.bytes += size
        self.seen = now

    def went(self, now: float, size: int) -> None:
        self._roll(now)
        self.held -= 1
        self.bytes -= size

    def ended(self, now: float, *, failed: bool) -> None:
        self._roll(now)
        self.ends[1] += 1
        self.busy[1] += _RETRY * failed

    def speed(self, now: float) -> float | None:
        """Recent calls per second, of the time with tasks: a line is not slow because it has no work. None: no call."""
        self._roll(now)
        if not any(self.ends):
            return None
        return max(max(self.ends) / _WINDOW, sum(self.ends) / max(sum(self.busy), _BLINK))

    def next_outside(self) -> None:
        """Call the document that has waited longest."""
        name = next(iter(self.outside))
        self.outside.pop(name)()

    def _roll(self, now: float) -> None:
        if self.held:
            self.busy[1] += now - self.rolled
        self.rolled = now
        if now - self.window >= _WINDOW:
            recent = self.held or now - self.window < 2 * _WINDOW
            self.ends = [self.ends[1] if recent else 0, 0]
            self.busy = [self.busy[1] if recent else 0.0, 0.0]
            self.window = now


class HostLine(Line):
    """One host: its breaker, and the turns of lanes that wait for a place. A trigger is in `waiting` once."""

    __slots__ = ("breaker", "hungry", "proven", "running", "waiting")

    def __init__(self, config: DeliverSection) -> None:
        super().__init__()
        self.breaker = Breaker(config)
        self.running = 0
        self.waiting: deque[asyncio.Future[None] | TriggerLine] = deque()
        self.hungry = False  # waits in line for one of the total places
        self.proven = False  # has answered since it was last down

    @property
    def idle(self) -> bool:
        return not (self.running or self.held or self.waiting or self.outside) and self.breaker.idle

    @property
    def closed(self) -> float:
        return self.breaker.open_until

    @property
    def active(self) -> int:
        return self.running + len(self.waiting)


class TriggerLine(Line):
    """One limited trigger: calls in flight, when the next may start, and the turns of waiting lanes, by host."""

    __slots__ = ("free_at", "host", "running", "sent", "standing", "ticker", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.free_at = -math.inf
        self.sent: deque[float] = deque()  # when the requests of the last second were sent
        self.host: HostLine | None = None  # the last host it asked for
        self.waiting: dict[HostLine, deque[asyncio.Future[None]]] = {}
        self.standing: set[HostLine] = set()  # hosts in whose line it waits
        self.ticker: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not (self.running or self.held or self.waiting or self.outside)

    @property
    def active(self) -> int:
        return self.running + sum(map(len, self.waiting.values()))

    def ready(self, now: float, rules: OrderRules, share: float) -> bool:
        """Whether the trigger's limits allow another call."""
        if rules.concurrency and self.running >= places(rules, share):
            return False
        return not rules.rate or now >= self.free_at

    def hurry(self, now: float, rules: OrderRules, share: float) -> float:
        """Seconds that a request which is ready must still wait; 0: it counts as sent.

        Starts are evenly spread, but delays between a start and the first byte (opening a connection, a busy processor)
        bring requests together again. The endpoint never sees more than the rate plus a tenth in any second.
        """
        while self.sent and self.sent[0] <= now - _SECOND:
            self.sent.popleft()
        most = math.ceil(rules.rate * share * _MOST - 1e-9)
        if len(self.sent) >= max(1, most):
            return self.sent[0] + _SECOND - now
        self.sent.append(now)
        return 0.0

    def start(self, now: float, rules: OrderRules, share: float) -> None:
        """A call starts. Starts are evenly spread: no burst makes up for idle time."""
        self.running += 1
        if rules.rate:
            rate = max(rules.rate * share, 1e-9)
            late = _TOLERANCE if rate >= _TICKS else 0.0
            self.free_at = max(self.free_at, now - late) + 1.0 / rate
