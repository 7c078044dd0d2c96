"""Degraded mode: NATS is unreachable. Workers keep processing what they own until their lease expires by their clock.

The lease and the fence work without NATS. This module only detects the outage, shows it, raises alerts by level, and,
when NATS is back, gives members time to renew before any of them is declared dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.config.units import parse_duration
from parti.manager.hooks import AlertLevel, HookRunner
from parti.manager.observer import Observer
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics
from parti.wire.connect import Connection

log = get_logger("control")

_LOOK_EVERY = 0.25


class Degraded:
    """Watches one connection for outages."""

    def __init__(
        self,
        config: ControlConfig,
        nc: Connection,
        hooks: HookRunner,
        observer: Observer,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.active = False
        self._config = config
        self._nc = nc
        self._hooks = hooks
        self._observer = observer
        self._metrics = metrics
        self._clock = clock
        self._since: float | None = None
        self._alerted = 0
        self._levels = [parse_duration(text) for text in config.alert_after]

    def __repr__(self) -> str:
        return f"<Degraded {'yes' if self.active else 'no'}>"

    async def run(self, hold_judgement: Callable[[float], None]) -> None:
        """Check the connection until the manager ends."""
        while True:
            self.look(hold_judgement)
            await asyncio.sleep(_LOOK_EVERY)

    def look(self, hold_judgement: Callable[[float], None]) -> None:
        """Check once; calls `hold_judgement(until)` when NATS is back after an outage."""
        now = self._clock.now()
        if self._nc.is_connected:
            if self._since is not None and self.active:
                hold_judgement(now + self._config.recovery_grace)
                log.info("degraded.over", after=round(now - self._since, 1), grace=self._config.recovery_grace)
                self.active = False
                self._metrics.set(m.DEGRADED, 0)
                self._observer.touched()
            self._since, self._alerted = None, 0
            return
        if self._since is None:
            self._since = now
        lasted = now - self._since
        if not self.active and lasted >= self._config.degraded_after:
            self.active = True
            self._metrics.set(m.DEGRADED, 1)
            log.warning("degraded.begun", after=round(lasted, 1))
            self._observer.touched()
        while self._alerted < len(self._levels) and lasted >= self._levels[self._alerted]:
            level = list(AlertLevel)[self._alerted]
            self._alerted += 1
            log.warning("degraded.alert", level=level.value, lasted=round(lasted, 1))
            self._hooks.call(self._hooks.hooks.on_degraded_alert, level, lasted)
