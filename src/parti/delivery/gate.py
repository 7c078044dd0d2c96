"""Decides which lane may send now: limits in total, per host and per trigger, fair between hosts.

A lane waits its turn in memory while its line moves. If its host is down, or the line is longer than memory should
hold, it gets `Postponed`: its document is parked and waits outside the line, which calls it when its turn comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable

from parti.clock import Clock, Randomness
from parti.config.deliver import DeliverSection
from parti.delivery.line import HostLine, Line, Name, Postponed, TriggerLine, places
from parti.delivery.order import OrderRules
from parti.delivery.policy import AttemptOutcome

__all__ = ["Gate", "Postponed"]

_SOON = 5.0  # seconds: a lane that starts within this time should wait in memory
_AT_ONCE = 1.0  # seconds: a lane that starts within this time blocks nobody, even when there is no room
_LONG = 300.0  # seconds of a trigger's line in memory: its heartbeats cost one message in ten minutes (`Feed`)
_FEW = 64  # tasks of a line that may always stay in memory
_LET_IN = 32  # documents called in from outside at once
_LOOK_AGAIN = 1.0
_UNPROVEN = 4  # concurrent requests to a host that has not answered yet
_MOST_LINES = 10_000
_OPEN = OrderRules()


class Gate:
    """One per process. Every `admit` that returns None must be followed by one `release`."""

    def __init__(self, config: DeliverSection, clock: Clock, rng: Randomness, *, patience: float | None = None) -> None:
        """`patience`: the longest wait for a trigger's limits; None: no limit."""
        self._config = config
        self._clock = clock
        self._rng = rng
        self._patience = patience
        self._hosts: dict[str, HostLine] = {}
        self._triggers: dict[str, TriggerLine] = {}
        self._rules: dict[TriggerLine, OrderRules] = {}
        self._hungry: deque[HostLine] = deque()  # hosts with lanes that wait for one of the total places
        self.running = 0
        self.held = 0
        self.bytes = 0
        self.pressed: Callable[[], bool] = lambda: self.held >= config.max_ack_pending // 2
        """Whether the tasks in memory block others from coming in."""
        self._few = min(_FEW, max(1, config.max_ack_pending // config.partitions // 8))
        self.share: Callable[[], float] = lambda: 1.0
        """This process's share of each trigger's limits: its share of the partitions that it delivers and keeps."""
        self._fits: asyncio.Future[None] | None = None  # `fit`, waiting for calls to end

    def __repr__(self) -> str:
        return f"<Gate running={self.running} held={self.held} hosts={len(self._hosts)}>"

    @property
    def open_breakers(self) -> int:
        return sum(host.breaker.is_open for host in self._hosts.values())

    @property
    def has_room(self) -> bool:
        """Whether memory may hold more, by bytes."""
        return self.bytes < self._config.max_bytes

    def hold(self, host: str, size: int = 0, trigger: str = "", rules: OrderRules = _OPEN) -> None:
        """A task of `size` bytes for this host came into memory."""
        self.held += 1
        self.bytes += size
        now = self._clock.now()
        for line in self._lines(host, trigger, rules):
            line.came(now, size)

    def unhold(self, host: str, size: int = 0, trigger: str = "", rules: OrderRules = _OPEN) -> None:
        """A task left memory: delivered, parked, dead-lettered or handed back."""
        self.held -= 1
        self.bytes -= size
        now = self._clock.now()
        for line in self._lines(host, trigger, rules):
            line.went(now, size)

    async def admit(self, host: str, trigger: str, rules: OrderRules) -> Postponed | None:
        """None when the call may start now, perhaps after a wait in line; else where to wait meanwhile."""
        state = self._host(host)
        probing = state.breaker.is_open
        if probing and (wait := state.breaker.ask(self._clock.now())):
            return Postponed(wait * self._rng.uniform(1.0, 1.2), "breaker", state)
        try:
            return await self._admit(state, trigger, rules, probing)
        except asyncio.CancelledError:
            if probing:
                state.breaker.forget_probe()  # else this host would never be probed again
            raise

    async def _admit(self, state: HostLine, name: str, rules: OrderRules, probing: bool) -> Postponed | None:
        trigger = self._trigger(name, rules)
        if not probing and (line := self._hog(state, trigger)) is not None:
            return Postponed(self._rng.uniform(1.0, _SOON), "crowded", line)
        if trigger is None and self._room(state):
            self._take(state)
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if trigger is None:
            state.waiting.append(turn)
            self._queue(state)
        else:
            trigger.host = state
            trigger.waiting.setdefault(state, deque()).append(turn)
            self._stand(trigger, state)
            self._pump()
        try:
            async with asyncio.timeout(self._patience if trigger is not None else None):
                try:
                    await turn
                except asyncio.CancelledError:
                    if turn.done() and not turn.cancelled():
                        self._give_back(state, trigger)  # the place was granted in the same moment
                    raise
        except TimeoutError:
            if probing:
                state.breaker.forget_probe()
            return Postponed(self._rng.uniform(0.2, 1.0) * (self._patience or _SOON), "trigger_limit")
        if probing:
            state.breaker.forget_probe()  # ask again: other calls may have answered the question meanwhile
        if state.breaker.is_open and (wait := state.breaker.ask(self._clock.now())):  # down, or just went down
            self._give_back(state, trigger)
            return Postponed(wait * self._rng.uniform(1.0, 1.2), "breaker", state)
        return None

    def crowds(self, host: str, trigger: str, rules: OrderRules) -> bool:
        """Whether tasks of this host and trigger should not wait in memory, because others need it."""
        return self._hog(self._host(host), self._trigger(trigger, rules)) is not None

    def pace(self, trigger: str, rules: OrderRules) -> Callable[[], Awaitable[None]] | None:
        """The wait for the trigger's rate, right before its request is sent; None when it has no rate."""
        line = self._trigger(trigger, rules) if rules.rate else None
        if line is None:
            return None

        async def wait() -> None:
            while left := line.hurry(self._clock.now(), rules, self.share()):
                await self._clock.sleep(left)

        return wait

    async def fit(self, share: Callable[[], float], within: float) -> None:
        """Return when no trigger has more calls in flight than this share of its concurrency allows.

        The next owner of a partition uses its share at once. Returns after `within` seconds in any case.
        """
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while any(
                    it.running > places(rules, share()) for it, rules in self._rules.items() if rules.concurrency
                ):
                    self._fits = self._fits or loop.create_future()
                    await asyncio.shield(self._fits)

    def release(
        self, host: str, trigger: str, rules: OrderRules, outcome: AttemptOutcome | None, rest: float | None = None
    ) -> bool:
        """The call has ended; `outcome` None: it never took place. True when this made the host count as down.

        `rest`: for this many seconds a local problem prevents calls to this host. Its documents wait outside.
        """
        state, line = self._host(host), self._trigger(trigger, rules)
        opened, closed = False, state.closed
        if outcome is None:
            state.breaker.forget_probe()
            if rest:
                state.breaker.rest(self._clock.now(), rest)
        else:
            now = self._clock.now()
            opened = state.breaker.record(now, failed=outcome.hurts_host)
            state.proven = not opened and (state.proven or not outcome.hurts_host)
            for each in (state, line):
                if each is not None:
                    each.ended(now, failed=outcome.hurts_host)
        self._give_back(state, line)
        for each in (state, line):
            if each is None or not each.outside:
                continue
            if outcome is None and each.closed:
                self._arm(each)  # a local problem: every document called in now would meet the same
            else:
                # Call one for the one that left: those called before are coming. Call all when the host is up again.
                self._call(each, _LET_IN if closed and not each.closed else 1)
        return opened

    def wait_outside(self, line: Line, name: Name, call: Callable[[], None]) -> None:
        """`call` is called once, when the document's turn in the line has come; until then nothing happens."""
        line.outside[name] = call
        self._arm(line)

    def line(self, host: str) -> Line:
        """The line outside which a document of this host waits, if nothing more is known about the document."""
        return self._host(host)

    def stir(self) -> None:
        """Call in the documents that may come, in all lines."""
        for line in (*self._hosts.values(), *self._triggers.values()):
            if line.outside:
                self._call(line)

    def close(self) -> None:
        """After this, nobody is called any more."""
        for line in (*self._hosts.values(), *self._triggers.values()):
            line.outside.clear()
            for timer in (line.timer, line.ticker if isinstance(line, TriggerLine) else None):
                if timer is not None:
                    timer.cancel()

    # -- places -------------------------------------------------------------------------------------------------------

    def _room(self, host: HostLine) -> bool:
        total, most = self._config.concurrency, self._most(host)
        if self.running >= total or host.running >= most:
            return False
        # The last quarter is reserved for hosts with few places: eight hanging hosts must not take everything.
        return self.running < total - total // 4 or host.running < max(1, most // 4)

    def _most(self, host: HostLine) -> int:
        """Places that a host may take: few until it has answered, because calls to a hanging host or name free none."""
        most = self._config.host_concurrency
        return most if host.proven else min(most, _UNPROVEN)

    def _take(self, host: HostLine) -> None:
        self.running += 1
        host.running += 1

    def _give_back(self, host: HostLine, trigger: TriggerLine | None) -> None:
        self.running -= 1
        host.running -= 1
        if trigger is not None:
            trigger.running -= 1
            self._stand_everywhere(trigger)
            if self._fits is not None:
                self._fits.set_result(None)
                self._fits = None
        self._queue(host)
        self._pump()

    def _pump(self) -> None:
        """Give free places to the hosts in turn, and at each host to the next lane."""
        waiting = len(self._hungry)
        while self._hungry and waiting and self.running < self._config.concurrency:
            host = self._hungry.popleft()
            host.hungry = False
            waiting -= 1
            if not self._room(host):
                self._queue(host)  # only when no place of the total is free
                continue
            if (turn := self._next(host)) is not None:
                self._take(host)
                turn.set_result(None)
                waiting = len(self._hungry) + 1
            self._queue(host)

    def _queue(self, host: HostLine) -> None:
        # A host that uses all its places is queued again by its own next release.
        if host.waiting and not host.hungry and host.running < self._most(host):
            host.hungry = True
            self._hungry.append(host)

    def _next(self, host: HostLine) -> asyncio.Future[None] | None:
        """The next turn at a host; a trigger in its line passes the turn to its own next lane, if its limits allow."""
        while host.waiting:
            first = host.waiting.popleft()
            if not isinstance(first, TriggerLine):
                if not first.done():
                    return first
                continue
            first.standing.discard(host)
            queue = first.waiting[host]
            while queue and queue[0].done():
                queue.popleft()
            if not queue:
                del first.waiting[host]
                continue
            now, rules, share = self._clock.now(), self._rules[first], self.share()
            if not first.ready(now, rules, share):
                if rules.rate and first.free_at > now:  # by the same reading of the clock: time may have passed since
                    self._tick(first, first.free_at - now)
                continue  # queued again when one of its own calls ends
            first.start(now, rules, share)
            turn = queue.popleft()
            if queue:
                self._stand(first, host)
            else:
                del first.waiting[host]
            return turn
        return None

    def _stand(self, trigger: TriggerLine, host: HostLine) -> None:
        if host not in trigger.standing:
            trigger.standing.add(host)
            host.waiting.append(trigger)
        self._queue(host)

    def _stand_everywhere(self, trigger: TriggerLine) -> None:
        for host in list(trigger.waiting):
            self._stand(trigger, host)

    def _tick(self, trigger: TriggerLine, wait: float) -> None:
        """Try again when the trigger's rate allows the next call."""
        if trigger.ticker is None or trigger.ticker.done():
            trigger.ticker = asyncio.get_running_loop().create_task(self._ticked(trigger, wait))

    async def _ticked(self, trigger: TriggerLine, wait: float) -> None:
        await self._clock.sleep(wait)
        trigger.ticker = None
        self._stand_everywhere(trigger)
        self._pump()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _hog(self, host: HostLine, trigger: TriggerLine | None) -> Line | None:
        return next((line for line in (host, trigger) if line is not None and self._hogs(line)), None)

    def _hogs(self, line: Line) -> bool:
        """Whether this line fills the memory without moving."""
        limit, now = self._config.max_bytes, self._clock.now()
        speed = line.speed(now)
        if self.bytes >= limit * 1.5 and line.bytes * 2 > self.bytes and line.held > max(1, speed or 0):
            return True  # heads read from the park, because the feed stops earlier: parked, they take no memory
        if line.held <= self._few and line.bytes <= limit // 8:
            return False
        if isinstance(line, TriggerLine):
            rules = self._rules[line]
            fastest = rules.rate * self.share() if rules.rate else speed
            if fastest and line.held > max(self._few, fastest * _LONG):
                return True
        if self.bytes < limit // 2 and not self.pressed():
            return False
        # A line that was not tried lately shows its speed by the calls that it has places for; if they hang, no more
        # come. (Free places alone say nothing: the tasks of a host that fails wait for their next attempts.)
        if speed is None:
            moves = line.active < (self._most(line) if isinstance(line, HostLine) else _UNPROVEN)
        else:
            moves = line.held <= speed * _AT_ONCE
        if moves:
            return False
        own = line.host if isinstance(line, TriggerLine) else line
        return any(other is not own and now - other.seen < 60 for other in self._hosts.values())

    def _call(self, line: Line, most: int = _LET_IN) -> None:
        """Call in documents: one probe for a host that is down, when due; else as many as the line has room for."""
        now = self._clock.now()
        if line.closed:
            if line.outside and isinstance(line, HostLine) and line.breaker.wants_probe(now):
                line.next_outside()
        else:
            # Enough that the line never waits for the park; do not count tasks in memory that wait for something else.
            wanted = max(_LET_IN, (line.speed(now) or 0) * _SOON) if self.has_room else 1
            for _ in range(min(len(line.outside), max(0, int(wanted) - line.active), most)):
                line.next_outside()
        self._arm(line)

    def _arm(self, line: Line) -> None:
        if not line.outside or (line.timer is not None and not line.timer.done()):
            return
        wait = max(line.closed - self._clock.now(), _LOOK_AGAIN)
        line.timer = asyncio.get_running_loop().create_task(self._look(line, wait))

    async def _look(self, line: Line, wait: float) -> None:
        await self._clock.sleep(wait)
        line.timer = None
        self._call(line)

    # -- who is known -------------------------------------------------------------------------------------------------

    def _lines(self, host: str, trigger: str, rules: OrderRules) -> tuple[Line, ...]:
        state, line = self._host(host), self._trigger(trigger, rules)
        return (state,) if line is None else (state, line)

    def _trigger(self, name: str, rules: OrderRules) -> TriggerLine | None:
        if not (rules.rate or rules.concurrency):
            return None
        line = self._triggers.get(name)
        if line is None:
            if len(self._triggers) >= _MOST_LINES:
                now = self._clock.now()
                for idle in [key for key, it in self._triggers.items() if it.idle and it.free_at <= now]:
                    del self._rules[self._triggers.pop(idle)]
            line = self._triggers[name] = TriggerLine()
        self._rules[line] = rules
        return line

    def _host(self, host: str) -> HostLine:
        state = self._hosts.get(host)
        if state is None:
            if len(self._hosts) >= _MOST_LINES:
                for name in [name for name, it in self._hosts.items() if it.idle]:
                    del self._hosts[name]
            state = self._hosts[host] = HostLine(self._config)
        return state
