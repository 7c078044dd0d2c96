"""Who may send now: limits in total, per host and per trigger, fair between hosts; and who had better wait elsewhere.

A lane that cannot start soon is told so (`Postponed`) and parks its document: memory belongs to those that move.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass

from parti.clock import Clock, Randomness
from parti.config.deliver import DeliverSection
from parti.tasks.breaker import Breaker
from parti.tasks.order import Rules
from parti.tasks.policy import Outcome

_SOON = 5.0  # seconds: who starts within them waits in memory
_FEW = 64  # tasks of a host in memory that are never too many
_MOST_HOSTS = 10_000
_RATE_WINDOW = 5.0


@dataclass(frozen=True, slots=True)
class Postponed:
    """Not now, and not soon: come back after `wait` seconds. No attempt was spent."""

    wait: float
    why: str


class _Host:
    __slots__ = ("breaker", "ends", "held", "hungry", "running", "seen", "waiting", "window")

    def __init__(self, config: DeliverSection) -> None:
        self.breaker = Breaker(config)
        self.running = 0
        self.held = 0  # tasks in memory that will ask for this host
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.hungry = False  # stands in the line for a place of the total
        self.ends = [0, 0]  # calls that ended in the last window and in this one
        self.window = 0.0
        self.seen = 0.0

    @property
    def idle(self) -> bool:
        return not self.running and not self.held and not self.waiting and self.breaker.idle


class _Trigger:
    """A token bucket of one second's worth, and the calls under way."""

    __slots__ = ("free_at", "running")

    def __init__(self) -> None:
        self.running = 0
        self.free_at = -math.inf


class Gate:
    """One per process. Every `admit` that returns None must be followed by one `release`."""

    def __init__(self, config: DeliverSection, clock: Clock, rng: Randomness) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._hosts: dict[str, _Host] = {}
        self._triggers: dict[str, _Trigger] = {}
        self._hungry: deque[_Host] = deque()  # hosts with lanes waiting for a place of the total
        self.running = 0
        self.held = 0

    def __repr__(self) -> str:
        return f"<Gate running={self.running} held={self.held} hosts={len(self._hosts)}>"

    @property
    def open_breakers(self) -> int:
        return sum(host.breaker.is_open for host in self._hosts.values())

    def hold(self, host: str) -> None:
        """A task for this host came into memory."""
        self.held += 1
        state = self._host(host)
        state.held += 1
        state.seen = self._clock.now()

    def unhold(self, host: str) -> None:
        """It left memory: delivered, parked, buried or handed back."""
        self.held -= 1
        state = self._hosts.get(host)
        if state is not None:
            state.held -= 1

    async def admit(self, host: str, trigger: str, rules: Rules) -> Postponed | None:
        """None when the call may start now, after a short wait perhaps; else where to go in the meantime."""
        state = self._host(host)
        probing = state.breaker.is_open
        if probing and (wait := state.breaker.ask(self._clock.now())):
            return Postponed(wait * self._rng.uniform(1.0, 1.2), "breaker")
        try:
            return await self._admit(state, trigger, rules, probing)
        except asyncio.CancelledError:
            if probing:
                state.breaker.forget_probe()  # or nobody would ever ask this host again
            raise

    async def _admit(self, state: _Host, trigger: str, rules: Rules, probing: bool) -> Postponed | None:
        if self._hogs(state):
            state.breaker.forget_probe()
            return Postponed(self._rng.uniform(1.0, _SOON), "crowded")
        if (rules.rate or rules.concurrency) and (later := await self._trigger(trigger, rules)):
            state.breaker.forget_probe()
            return later
        if self._has_room(state):
            self._enter(state)
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state.waiting.append(turn)
        self._queue(state)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free(state)  # the place was given to us in the same moment; a cancelled turn is passed over
            self._leave_trigger(trigger, rules)
            raise
        if probing:
            state.breaker.forget_probe()  # the question is asked anew: others may have answered it meanwhile
        if state.breaker.is_open and (wait := state.breaker.ask(self._clock.now())):  # it is down, or went down
            self._leave_trigger(trigger, rules)
            self._free(state)
            return Postponed(wait * self._rng.uniform(1.0, 1.2), "breaker")
        return None

    def release(self, host: str, trigger: str, rules: Rules, outcome: Outcome | None) -> bool:
        """The call has ended; None when it never took place. True when the host counts as down from now on."""
        state = self._host(host)
        self._leave_trigger(trigger, rules)
        opened = False
        if outcome is None:
            state.breaker.forget_probe()
        else:
            now = self._clock.now()
            opened = state.breaker.record(now, failed=outcome.hurts_host)
            self._roll(state, now)
            state.ends[1] += 1
        self._free(state)
        return opened

    def _has_room(self, state: _Host) -> bool:
        """Whether one more call to this host may start.

        Of several hosts that are busy none takes more than half of what it leaves to the others: so a part stays free
        for those that come, however many hosts hang. (Eight of them had all places, and the rest waited 15 s.)
        """
        free = self._config.concurrency - self.running
        if free <= 0 or state.running >= self._config.host_concurrency:
            return False
        return not state.running or self.running == state.running or 2 * state.running < free

    def _enter(self, state: _Host) -> None:
        self.running += 1
        state.running += 1

    def _free(self, state: _Host) -> None:
        self.running -= 1
        state.running -= 1
        self._queue(state)
        while self._hungry and self.running < self._config.concurrency:
            host = self._hungry.popleft()
            host.hungry = False
            while host.waiting and host.waiting[0].done():
                host.waiting.popleft()
            if not host.waiting or not self._has_room(host):
                continue  # its own next release brings it back
            turn = host.waiting.popleft()
            self._enter(host)
            turn.set_result(None)
            self._queue(host)

    def _queue(self, host: _Host) -> None:
        if host.waiting and not host.hungry and host.running < self._config.host_concurrency:
            host.hungry = True
            self._hungry.append(host)

    def _hogs(self, state: _Host) -> bool:
        """Whether this host fills the memory without moving, while others wait for a place in it."""
        if self.held < self._config.max_ack_pending // 2 or state.held <= _FEW:
            return False
        now = self._clock.now()
        self._roll(state, now)
        rate = max(state.ends) / _RATE_WINDOW
        if state.held <= rate * _SOON:
            return False
        return any(other is not state and now - other.seen < 60 for other in self._hosts.values())

    def _roll(self, state: _Host, now: float) -> None:
        if now - state.window >= _RATE_WINDOW:
            state.ends = [state.ends[1] if now - state.window < 2 * _RATE_WINDOW else 0, 0]
            state.window = now

    async def _trigger(self, name: str, rules: Rules) -> Postponed | None:
        state = self._triggers.get(name)
        if state is None:
            if len(self._triggers) >= _MOST_HOSTS:
                now = self._clock.now()
                for idle in [key for key, it in self._triggers.items() if not it.running and it.free_at <= now]:
                    del self._triggers[idle]
            state = self._triggers[name] = _Trigger()
        if rules.concurrency and state.running >= rules.concurrency:
            return Postponed(self._rng.uniform(0.2, 1.0), "trigger_concurrency")
        if rules.rate:
            now = self._clock.now()
            start = max(state.free_at, now - 1.0)  # a second's worth may be sent at once
            wait = start - now
            if wait > _SOON:
                return Postponed(wait, "trigger_rate")
            state.free_at = start + 1.0 / rules.rate
            state.running += 1
            if wait > 0:
                try:
                    await self._clock.sleep(wait)
                except asyncio.CancelledError:
                    state.running -= 1
                    raise
            return None
        state.running += 1
        return None

    def _leave_trigger(self, name: str, rules: Rules) -> None:
        if (rules.rate or rules.concurrency) and (state := self._triggers.get(name)) is not None:
            state.running -= 1

    def _host(self, host: str) -> _Host:
        state = self._hosts.get(host)
        if state is None:
            if len(self._hosts) >= _MOST_HOSTS:
                self._forget_idle()
            state = self._hosts[host] = _Host(self._config)
        return state

    def _forget_idle(self) -> None:
        for name in [name for name, state in self._hosts.items() if state.idle]:
            del self._hosts[name]
