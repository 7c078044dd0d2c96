"""A circuit breaker per host: a failing host gets no calls for a while, then one probe. Pure: time is a parameter."""

from __future__ import annotations

from collections import deque

from parti.config.deliver import DeliverSection

_BUCKETS = 6


class Breaker:
    """Closed: every call passes. Open: no call passes. After that, one probe decides.

    Opens when, within the window, at least `breaker_calls` calls ended and `breaker_ratio` of them failed.
    """

    __slots__ = ("_calls", "_failed", "_open_for", "_open_until", "_probing", "_ratio", "_recent", "_resting", "_span")

    def __init__(self, config: DeliverSection) -> None:
        self._calls = config.breaker_calls
        self._ratio = config.breaker_ratio
        self._open_for = config.breaker_open
        self._span = config.breaker_window / _BUCKETS
        self._recent: deque[list[float]] = deque(maxlen=_BUCKETS)  # start, calls, failures
        self._failed = 0  # in a row: a host that never answers is judged before a whole window is full
        self._open_until = 0.0
        self._probing = False
        self._resting = False  # paused because of a local problem: the host has not failed

    def __repr__(self) -> str:
        state = "closed" if not self._open_until else "probing" if self._probing else "open"
        state = "resting" if self._resting and state == "open" else state
        return f"<Breaker {state}>"

    @property
    def is_open(self) -> bool:
        return self._open_until > 0

    @property
    def open_until(self) -> float:
        """When the host may be called again; 0 while it is not down."""
        return self._open_until

    def wants_probe(self, now: float) -> bool:
        """Whether a probe is due and none is in flight."""
        return 0 < self._open_until <= now and not self._probing

    @property
    def idle(self) -> bool:
        """Whether this breaker holds no state that must be kept."""
        return not self._open_until and not self._failed

    def ask(self, now: float) -> float:
        """0 when a call may start; else the seconds to wait before asking again. A probe must be `record`ed."""
        if not self._open_until:
            return 0.0
        if now < self._open_until:
            return self._open_until - now
        if self._probing:
            return self._open_for / 4
        self._probing = True
        return 0.0

    def forget_probe(self) -> None:
        """Take back a call that was allowed but never took place."""
        self._probing = False

    def rest(self, now: float, wait: float) -> None:
        """Pause the host, which is not at fault: afterwards one call probes it, as after a failure."""
        self._resting = self._resting or not self._open_until
        self._open_until = max(self._open_until, now + wait)

    def record(self, now: float, *, failed: bool) -> bool:
        """Count a call that ended; True when this call made the host count as down."""
        if self._resting:  # the host could be called after all: judge it by its answer, as if there had been no pause
            self._resting = self._probing = False
            self._open_until = 0.0
        if self._open_until:
            self._probing = False
            if failed:
                self._open_until = now + self._open_for
            else:
                self._open_until = 0.0
                self._failed = 0
                self._recent.clear()
            return False
        self._failed = self._failed + 1 if failed else 0
        if not self._recent or now - self._recent[-1][0] >= self._span:
            self._recent.append([now, 0, 0])
        self._recent[-1][1] += 1
        self._recent[-1][2] += failed
        oldest = now - self._span * _BUCKETS
        calls = sum(bucket[1] for bucket in self._recent if bucket[0] > oldest)
        failures = sum(bucket[2] for bucket in self._recent if bucket[0] > oldest)
        if failed and calls >= self._calls and failures >= calls * self._ratio:
            self._open_until = now + self._open_for
            self._recent.clear()
            return True
        return False
