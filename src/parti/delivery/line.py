"""A line: what one host, or one trigger with limits, has in memory, how quickly it moves, and who waits outside for it.

Who waits outside is a document in the park, known here by its name alone: ten thousand of them cost a megabyte and not
one message. They are called in one by one, as the line moves, and a single one when a host that is down is to be asked.
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

_WINDOW = 5.0  # seconds in which the ends of calls are counted
_TOLERANCE = 0.05  # seconds that a start may be made up for: timers are late, and the rate would never be reached
_MOST = 1.1  # times the rate, in any second
_SECOND = 1.05  # seconds: one request may take 50 ms longer to its endpoint than another, and still no second has more
_TICKS = 20.0  # starts a second from which on that is no burst

Name = tuple[int, str]
"""A document: its partition and its key."""


@dataclass(frozen=True, slots=True)
class Postponed:
    """Not now, and not soon. No attempt was spent."""

    wait: float
    """Come back after so many seconds, if nobody calls."""
    why: str
    line: Line | None = None
    """Wait outside this one; it calls."""


def places(rules: OrderRules, share: float) -> int:
    """Requests at once that a share of a trigger may have."""
    return max(1, int(rules.concurrency * share + 1e-9))


class Line:
    """Counts what moves. Those outside are called in the order they came."""

    __slots__ = ("bytes", "ends", "held", "outside", "seen", "timer", "window")

    def __init__(self) -> None:
        self.held = 0  # tasks in memory that will ask for it
        self.bytes = 0
        self.seen = 0.0
        self.ends = [0, 0]  # calls that ended in the last window and in this one
        self.window = -math.inf
        self.outside: dict[Name, Callable[[], None]] = {}
        self.timer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} held={self.held} outside={len(self.outside)}>"

    @property
    def closed(self) -> float:
        """Nobody is called in before this time, and then one; 0: it is open."""
        return 0.0

    @property
    def active(self) -> int:
        """Calls under way, and those that wait in line for theirs."""
        return 0

    def ended(self, now: float) -> None:
        self._roll(now)
        self.ends[1] += 1

    def speed(self, now: float) -> float:
        """Calls a second, as of late."""
        self._roll(now)
        return max(self.ends) / _WINDOW

    def next_outside(self) -> None:
        """Call the one that has waited longest."""
        name = next(iter(self.outside))
        self.outside.pop(name)()

    def _roll(self, now: float) -> None:
        if now - self.window >= _WINDOW:
            self.ends = [self.ends[1] if now - self.window < 2 * _WINDOW else 0, 0]
            self.window = now


class HostLine(Line):
    """One host: its breaker, and the turns of those that wait for a place. A trigger stands in `waiting` once."""

    __slots__ = ("breaker", "hungry", "proven", "running", "waiting")

    def __init__(self, config: DeliverSection) -> None:
        super().__init__()
        self.breaker = Breaker(config)
        self.running = 0
        self.waiting: deque[asyncio.Future[None] | TriggerLine] = deque()
        self.hungry = False  # stands in the line for a place of the total
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
    """One trigger with limits: calls under way, when the next may start, and the turns of those that wait, by host."""

    __slots__ = ("free_at", "host", "running", "sent", "standing", "ticker", "waiting")

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.free_at = -math.inf
        self.sent: deque[float] = deque()  # when requests left, of the last second
        self.host: HostLine | None = None  # the last one that it asked for
        self.waiting: dict[HostLine, deque[asyncio.Future[None]]] = {}
        self.standing: set[HostLine] = set()  # hosts in whose line it stands
        self.ticker: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not (self.running or self.held or self.waiting or self.outside)

    @property
    def active(self) -> int:
        return self.running + sum(map(len, self.waiting.values()))

    def ready(self, now: float, rules: OrderRules, share: float) -> bool:
        """Whether another call may start, as far as the trigger goes."""
        if rules.concurrency and self.running >= places(rules, share):
            return False
        return not rules.rate or now >= self.free_at

    def hurry(self, now: float, rules: OrderRules, share: float) -> float:
        """Seconds for which a request that is ready to leave has to wait; 0: it counts as gone.

        Starts are spread, but what comes between a start and the first byte (a connection to open, a busy processor)
        brings requests together again. No second of the endpoint sees more than a tenth above the rate of them.
        """
        while self.sent and self.sent[0] <= now - _SECOND:
            self.sent.popleft()
        most = math.ceil(rules.rate * share * _MOST - 1e-9)
        if len(self.sent) >= max(1, most):
            return self.sent[0] + _SECOND - now
        self.sent.append(now)
        return 0.0

    def start(self, now: float, rules: OrderRules, share: float) -> None:
        """A call starts. Starts are evenly spread: no burst makes up for an idle time."""
        self.running += 1
        if rules.rate:
            rate = max(rules.rate * share, 1e-9)
            late = _TOLERANCE if rate >= _TICKS else 0.0
            self.free_at = max(self.free_at, now - late) + 1.0 / rate
