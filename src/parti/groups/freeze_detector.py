"""Detects that the process was frozen, and times the renewals of `ack_wait` for messages in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parti.clock import Clock
from parti.errors import TransientError


class Frozen(TransientError):
    """The process was frozen for longer than its pin is safe; it must join again before it handles any message."""


@dataclass(slots=True)
class Limits:
    """The time limits of the current consumer; those of the template until there is one."""

    ack_wait: float
    pin_ttl: float
    max_pending: int
    """0: no limit."""
    acks: bool = True
    """Whether messages are acknowledged at all."""
    max_batch: int = 0
    max_expires: float = 0.0
    """Limit of one pull's expiry; 0: no limit."""

    def follow(self, config: Mapping[str, Any]) -> None:
        """Use the limits of an existing consumer, created by any client: fields may be missing."""
        self.acks = config.get("ack_policy") != "none"
        self.ack_wait = int(config.get("ack_wait") or 0) / 1e9 or self.ack_wait
        self.pin_ttl = int(config.get("priority_timeout") or 0) / 1e9 or self.pin_ttl
        self.max_pending = max(0, int(config.get("max_ack_pending") or 0))
        self.max_batch = max(0, int(config.get("max_batch") or 0))
        self.max_expires = max(0, int(config.get("max_expires") or 0)) / 1e9


class FreezeDetector:
    """Beats while the event loop runs. `fresh()` turns false half a pin's TTL after the last beat.

    A process that was stopped reads deliveries waiting in its socket as if they were new; another instance may have
    handled them since. The clock also counts while the process is stopped: the first check afterwards detects it.
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
        """Whether this process ran without a freeze recently."""
        return self._clock.now() - self._alive_at < self._limits.pin_ttl / 2

    def look(self) -> bool:
        """`fresh()`; also reports a freeze that has just ended."""
        if self.fresh():
            return True
        stood = self._clock.now() - self._alive_at
        self._alive_at = self._clock.now()
        self._on_freeze(Frozen(f"the process stood still for {stood:.1f} s"))
        return False

    async def run(self) -> None:
        """Beat forever; `on_beat` is called three times per `ack_wait`."""
        while True:
            await self._clock.sleep(min(0.25, self._limits.pin_ttl / 10))
            self.look()
            now = self._alive_at = self._clock.now()
            if now - self._beat_at >= self._limits.ack_wait / 3:
                self._beat_at = now
                self._on_beat()
