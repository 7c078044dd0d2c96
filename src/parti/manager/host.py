"""What the parts of one member share: the store, the clock, the fence, and a way to do things beside each other."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control.membership import Membership
from parti.manager.kv_store import Store
from parti.model import Claim, Lease, Member, PartitionId
from parti.observe.metrics import Metrics


class Host(Protocol):
    """One member's life. Everything spawned ends with it."""

    store: Store
    clock: Clock
    config: ControlConfig
    metrics: Metrics
    members: Membership | None
    """Who is here; None before everything that there is has been seen."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this beside everything else; it is cancelled when the member ends."""
        ...

    def may_act(self) -> bool:
        """The fence: checked before every pull, effect, ack and write."""
        ...

    def heard_claim(self, claim: Claim, revision: int) -> None:
        """Tell everybody of a revision of a claim, from whatever way it came."""
        ...

    def granted(self, lease: Lease) -> None: ...

    def revoked(self, lease: Lease) -> None: ...

    def failed(self, error: Exception) -> None:
        """Report what nobody can repair here; the member goes on."""
        ...


class Plane(Protocol):
    """The partitions of one member in one layout: performs what `control.holding` or `control.slot` ask for."""

    def claim_seen(self, claim: Claim, revision: int) -> None:
        """A revision of a claim, newer or not."""
        ...

    def begin(self) -> None:
        """Every claim there is has been seen: consumers may be touched now."""
        ...

    def tick(self, now: float) -> None:
        """Time passed; called some twenty times a second."""
        ...

    def allows(self, lease: Lease) -> bool:
        """Whether this very lease is held."""
        ...

    def holds_nothing(self) -> bool:
        """Nothing is owned, and nothing that was owned still needs us."""
        ...

    def owned(self) -> frozenset[PartitionId]: ...

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        """Partition -> (epoch, cursor) of everything that is owned."""
        ...

    async def stop(self) -> dict[PartitionId, tuple[int, int]]:
        """When this returns nothing runs or will start, acks are sent; the final positions."""
        ...

    async def abandon(self) -> bool:
        """When this returns nothing starts, and nothing more is acked: the member was fenced.

        True when nothing had to be interrupted either, so that no effect can still be on its way.
        """
        ...


class PlaneFactory(Protocol):
    """Makes the plane of a member."""

    def __call__(self, host: Host, member: Member) -> Plane: ...
