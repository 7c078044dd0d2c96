"""Backoff with jitter: waits grow after each failure and differ between workers (docs/requirements.md#r-102)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from parti import defaults
from parti.clock import Clock, Randomness
from parti.errors import ConfigError, PartiError

T = TypeVar("T")


def _own() -> Randomness:
    """A generator seeded from the process's global one, which the simulator seeds to get the same waits again."""
    return random.Random(random.getrandbits(64))


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow by `multiplier` on average up to `cap`, and do not align between workers.

    Decorrelated jitter: each wait is drawn from the previous one, `wait = previous * U(1, 2 * multiplier - 1)`,
    starting at `base`. The mean factor is `multiplier`; with 1.6 the median grows by 1.56 per step and reaches the cap
    after about seven waits. A draw above the cap is replaced by `U(cap / multiplier, cap)`, so workers that have waited
    for a long time stay spread too. (The usual `U(base, previous * 1.6)` settles at 2.5 x base and never grows.)
    """

    base: float = defaults.RETRY_BASE
    multiplier: float = defaults.RETRY_MULTIPLIER
    cap: float = defaults.RETRY_MAX
    max_tries: int | None = defaults.MAX_TRIES
    """None: retry without limit."""
    rng: Randomness = field(default_factory=_own, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.base <= self.cap:
            raise ConfigError(f"backoff needs 0 < base <= cap, not base {self.base} and cap {self.cap}")
        if self.multiplier <= 1:
            raise ConfigError(f"backoff needs a multiplier above 1 to grow, not {self.multiplier}")
        if self.max_tries is not None and self.max_tries < 1:
            raise ConfigError(f"backoff needs at least one try, not {self.max_tries}")

    def delays(self) -> Iterator[float]:
        """The waits between the tries of one operation: one fewer than `max_tries`, or endless."""
        wait, tries = self.base, 1
        while self.max_tries is None or tries < self.max_tries:
            wait *= self.rng.uniform(1.0, 2.0 * self.multiplier - 1.0)
            if wait > self.cap:
                wait = self.rng.uniform(self.cap / self.multiplier, self.cap)
            yield wait
            tries += 1


def is_retriable(error: PartiError) -> bool:
    """Whether the error's class allows a retry."""
    return error.retriable


async def retry(
    op: Callable[[], Awaitable[T]],
    *,
    backoff: Backoff,
    clock: Clock,
    classify: Callable[[PartiError], bool] = is_retriable,
    on_retry: Callable[[int, float, PartiError], None] | None = None,
) -> T:
    """Return the first success of `op`; raise unchanged an error that `classify` calls final, or the last error.

    `on_retry(tries so far, wait, error)` is called before each wait, for metrics and logs.
    """
    waits = backoff.delays()
    tries = 0
    while True:
        try:
            return await op()
        except PartiError as error:
            tries += 1
            wait = next(waits, None) if classify(error) else None
            if wait is None:
                error.add_note(f"after {tries} {'try' if tries == 1 else 'tries'}")
                raise
            if on_retry is not None:
                on_retry(tries, wait, error)
        await clock.sleep(wait)


def _endless(base: float, cap: float) -> Backoff:
    # The process's global generator: Python reseeds it after a fork, and the simulator seeds it itself.
    return Backoff(base=base, cap=cap, max_tries=None, rng=random)


FAST: Final = _endless(0.02, 0.5)
"""Retry until success, while a caller waits for the result: records under a lease, a read from a replica that lags."""
FOREVER: Final = _endless(0.05, 2.0)
"""Retry until success, in the background."""
PATIENT: Final = _endless(0.1, 5.0)
"""Retry until success, where the failing part is probably down for a long time or is not under parti's control."""
