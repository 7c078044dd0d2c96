"""The right to deliver one partition: held by renewing a key, and lost by the clock alone.

Time is counted from before the renewal was sent, on a clock that also runs while the process is frozen: so the holder
gives up before anybody else can take over, whatever the network does.
"""

from __future__ import annotations

from typing import Protocol

from parti.clock import Clock
from parti.delivery.errors import LeaseLost

_MARGIN = 0.5  # seconds: for clocks that run at slightly different speeds


class SendRight(Protocol):
    """The right to send tasks of a partition: asked at the last moment before a request leaves."""

    @property
    def partition(self) -> str:
        """Its name; epochs of one name only ever grow."""
        ...

    @property
    def epoch(self) -> int:
        """0 when nobody counts them: then a request carries neither partition nor epoch."""
        ...

    def check(self) -> float:
        """The seconds left; `LeaseLost` when there are none."""
        ...


class SlotLease:
    """Partition `slot` in epoch `epoch`. Everything with an effect asks it first."""

    def __init__(self, clock: Clock, slot: int, revision: int, asked_at: float, ttl: float) -> None:
        self._clock = clock
        self._until = asked_at + ttl - _MARGIN
        self.slot = slot
        self.epoch = revision
        """The revision of the key when it was taken: each owner has a higher one than the owner before."""
        self.revision = revision
        self.lost = False

    def __repr__(self) -> str:
        return f"<SlotLease {self.slot} epoch={self.epoch} {'valid' if self.valid else 'lost'}>"

    @property
    def partition(self) -> str:
        return str(self.slot)

    @property
    def remaining(self) -> float:
        """Seconds for which it surely holds; never negative."""
        return 0.0 if self.lost else max(0.0, self._until - self._clock.now())

    @property
    def valid(self) -> bool:
        return self.remaining > 0

    def renewed(self, revision: int, asked_at: float, ttl: float) -> None:
        self.revision = revision
        self._until = asked_at + ttl - _MARGIN

    def check(self) -> float:
        """The seconds left; `LeaseLost` when there are none."""
        remaining = self.remaining
        if remaining <= 0:
            raise LeaseLost(f"partition {self.slot} is not ours any more (epoch {self.epoch})")
        return remaining
