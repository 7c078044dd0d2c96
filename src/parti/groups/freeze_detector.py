"""A member's sense of time: whether its process stood still, and when messages in hand need another `ack_wait`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parti.clock import Clock
from parti.errors import TransientError


class Frozen(TransientError):
    """The process stood still for longer than its pin is safe; it must join again before it handles anything."""


@dataclass(slots=True)
class Limits:
    """The times of the consumer in use; those of the template until there is one."""

    ack_wait: float
    pin_ttl: float
    max_pending: int
    """0: no limit."""
    acks: bool = True
    """Whether messages are acknowledged at all."""
    max_batch: int = 0
    max_expires: float = 0.0
    """What one pull may ask for; 0: no limit."""

    def follow(self, config: Mapping[str, Any]) -> None:
        """Take the limits of a consumer as it is, also when somebody else made it: fields may be left out."""
        self.acks = config.get("ack_policy") != "none"
        self.ack_wait = int(config.get("ack_wait") or 0) / 1e9 or self.ack_wait
        self.pin_ttl = int(config.get("priority_timeout") or 0) / 1e9 or self.pin_ttl
        self.max_pending = max(0, int(config.get("max_ack_pending") or 0))
        self.max_batch = max(0, int(config.get("max_batch") or 0))
        self.max_expires = max(0, int(config.get("max_expires") or 0)) / 1e9


class FreezeDetector:
    """Beats while the event loop runs. `fresh()` is false from half a pin's life after the last beat on.

    A process that was stopped reads deliveries that waited in its socket as if they were new; somebody else may have
    had them since. The clock counts while the process is stopped, so that the first look after it tells.
    """

    def __init__(
        self, clock: Clock, limits: Limits, *, on_freeze: Callable[[Frozen], None], on_beat: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._on_freeze = on_freeze
        self._on_beat = on_beat
        self._alive_at = clock.now()
        self._beat_at = 0.0

    def fresh(self) -> bool:
        """Whether this process ran all the time lately."""
        return self._clock.now() - self._alive_at < self._limits.pin_ttl / 2

    def look(self) -> bool:
        """`fresh()`; tells of a freeze when it ended just now."""
        if self.fresh():
            return True
        stood = self._clock.now() - self._alive_at
        self._alive_at = self._clock.now()
        self._on_freeze(Frozen(f"the process stood still for {stood:.1f} s"))
        return False

    async def run(self) -> None:
        """Beat for ever; `on_beat` is called three times per `ack_wait`."""
        while True:
            await self._clock.sleep(min(0.25, self._limits.pin_ttl / 10))
            self.look()
            now = self._alive_at = self._clock.now()
            if now - self._beat_at >= self._limits.ack_wait / 3:
                self._beat_at = now
                self._on_beat()
