"""Leases and the fence: the holder stops before any other process may start.

The holder's deadline counts from *before* its renewal was sent and ends a margin early. Observers count from when they
*saw* the renewal, which is later, and wait a margin longer. So the two can overlap only if clocks that count seconds
differ by more than two margins within one TTL; wall clocks are not used. The clock must count while the process is
stopped (CLOCK_BOOTTIME): with CLOCK_MONOTONIC a resumed owner would believe that it still holds the lease
(docs/evidence/cluster.md#c12).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from parti import defaults
from parti.errors import ConfigError

NEVER: Final = float("-inf")
_REMEMBERED_WRITES: Final = 8  # renewals with unknown outcome; older ones are past their deadline anyway


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a lease lasts, in seconds."""

    ttl: float = defaults.LEASE_TTL
    renew_every: float = defaults.LEASE_RENEWAL
    margin: float = defaults.LEASE_MARGIN

    def __post_init__(self) -> None:
        if not 0 < 2 * self.renew_every <= self.ttl:
            raise ConfigError(f"lease ttl {self.ttl} s must be at least twice renew_every {self.renew_every} s")
        if not 0 <= self.margin < self.ttl / 4:
            raise ConfigError(f"lease margin {self.margin} s must lie between 0 and a quarter of ttl {self.ttl} s")


@dataclass(frozen=True, slots=True)
class Fence:
    """Until when this process may act. Check it before every pull, every effect and every position write."""

    deadline: float = NEVER

    def allows(self, now: float) -> bool:
        return now < self.deadline

    def remaining(self, now: float) -> float:
        return max(0.0, self.deadline - now)


@dataclass(frozen=True, slots=True)
class Sighting:
    """When this observer first saw a revision of another member's lease, on the observer's own clock.

    A missing renewal proves nothing: a watch can be blind for 15-20 s after a server restart
    (docs/evidence/jetstream.md#j21). Only a read from the bucket's leader proves expiry, if it was sent after the
    deadline and still shows this revision.
    """

    revision: int
    since: float
    confirmed: float = NEVER
    """When the last read that still showed this revision was *sent*."""

    def overdue(self, now: float, terms: LeaseTerms) -> bool:
        """The deadline has passed as far as we know: worth a confirming read, or a CAS on this very revision."""
        return now >= self.since + terms.ttl + terms.margin

    def expired(self, terms: LeaseTerms) -> bool:
        """True only when the holder of this revision has certainly stopped by itself."""
        return self.overdue(self.confirmed, terms)

    def seen_again(self, asked: float | None) -> Sighting:
        """The same revision was seen again; `asked` is when that read was sent, None for a watch."""
        return self if asked is None or asked <= self.confirmed else replace(self, confirmed=asked)


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The holder's knowledge of its own lease: the revision to renew, and when each renewal in flight was sent.

    Each write carries a beat. A write whose answer was lost is recognised by its beat when the record is read, so the
    deadline never counts from a later write than the one that took effect.
    """

    terms: LeaseTerms
    revision: int = 0
    fence: Fence = field(default_factory=Fence)
    beat: int = 0
    sent: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    renew_at: float = NEVER
    waiting: bool = False
    """A write is in flight; at most one at a time."""

    def sending(self, now: float) -> HeldLease:
        """A write with beat `beat + 1` is sent now."""
        beat = self.beat + 1
        recent = dict(list(self.sent.items())[-(_REMEMBERED_WRITES - 1) :])
        return replace(self, beat=beat, sent=MappingProxyType({**recent, beat: now}), waiting=True)

    def confirmed(self, beat: int, revision: int) -> HeldLease:
        """The write with this beat is in the bucket at this revision."""
        sent = self.sent.get(beat)
        if sent is None:
            return replace(self, revision=max(self.revision, revision), waiting=False)
        deadline = max(self.fence.deadline, sent + self.terms.ttl - self.terms.margin)
        return replace(
            self,
            revision=max(self.revision, revision),
            fence=Fence(deadline),
            sent=MappingProxyType({b: at for b, at in self.sent.items() if b > beat}),
            renew_at=max(self.renew_at, sent + self.terms.renew_every),
            waiting=False,
        )

    def failed(self, retry_at: float) -> HeldLease:
        """The write was refused or its outcome is unknown: read the record, then try again."""
        return replace(self, renew_at=retry_at, waiting=False)

    def due(self, now: float) -> bool:
        return not self.waiting and now >= self.renew_at
