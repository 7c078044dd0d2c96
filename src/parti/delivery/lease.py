"""The right to deliver one partition: a lease on its key in the bucket, checked before every effect."""

from __future__ import annotations

from typing import Protocol

from parti.control.lease import LeaseTerms
from parti.delivery.errors import LeaseLost
from parti.wire.kv_lease import KvLease

_MARGIN = 0.5  # seconds: for clocks that run at slightly different speeds


def slot_terms(ttl: int) -> LeaseTerms:
    """How long a partition's lease lasts; for the shortest lease the margin is a fifth of it."""
    return LeaseTerms(ttl, ttl / 3, min(_MARGIN, ttl / 5))


class SendRight(Protocol):
    """The right to send tasks of a partition: checked right before a request is sent."""

    @property
    def partition(self) -> str:
        """The partition's name; the epochs of one name only increase."""
        ...

    @property
    def epoch(self) -> int:
        """0 when there are no epochs: then a request carries neither partition nor epoch."""
        ...

    def check(self) -> float:
        """The seconds left; raises `LeaseLost` when there are none."""
        ...


class SlotLease:
    """Partition `slot`, held by its key. Every step with an effect checks it first."""

    def __init__(self, slot: int, held: KvLease) -> None:
        self.slot = slot
        self.epoch = held.epoch
        self.held = held

    def __repr__(self) -> str:
        return f"<SlotLease {self.slot} {self.held!r}>"

    @property
    def partition(self) -> str:
        return str(self.slot)

    @property
    def remaining(self) -> float:
        return self.held.remaining

    @property
    def valid(self) -> bool:
        return self.held.remaining > 0

    def check(self) -> float:
        """The seconds left; raises `LeaseLost` when there are none."""
        remaining = self.held.remaining
        if remaining <= 0:
            raise LeaseLost(f"partition {self.slot} is not ours any more (epoch {self.epoch})")
        return remaining
