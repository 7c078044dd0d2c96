"""What the parts of one member share: the store, the clock, the fence, and a way to do things beside each other."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control.election import LeaderRecord
from parti.control.membership import Membership
from parti.manager.kv_store import Store
from parti.model import Ahead, Assignment, Claim, Lease, Member, PartitionId
from parti.observe.metrics import Metrics
from parti.worker.ledger import PartitionState


class Lives(Protocol):
    """What a member tells those after it: see `life_keeper`."""

    async def about_to_write(self, claim: Claim) -> None: ...


class Host(Protocol):
    """One member's life. Everything spawned ends with it."""

    store: Store
    clock: Clock
    config: ControlConfig
    metrics: Metrics
    assignment: Assignment
    """Which partitions there are, and whose they should be; of version 0 where nobody knows."""

    @property
    def lives(self) -> Lives | None:
        """What those after us have to know of our messages; None before we are a member."""
        ...

    @property
    def members(self) -> Membership | None:
        """Who is here; None before everything that there is has been seen."""
        ...

    @property
    def stream_created(self) -> str:
        """When the stream was made that positions speak of; empty where nobody knows."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this beside everything else; it is cancelled when the member ends."""
        ...

    def may_act(self) -> bool:
        """The fence: checked before every pull, effect, ack and write."""
        ...

    def heard_claim(self, claim: Claim, revision: int) -> None:
        """Tell everybody of a revision of a claim, from whatever way it came."""
        ...

    def heard_claim_gone(self, partition: PartitionId, revision: int, expected: int) -> None:
        """Tell everybody that a claim was removed or damaged; it is written again by CAS on `expected`."""
        ...

    def heard_leader(self, record: LeaderRecord | None, revision: int) -> None:
        """The record under the leader's key, from a read."""
        ...

    def set_well(self, well: bool, reason: str = "") -> None:
        """Tell the leader whether this worker can do its work; see `Agent.set_well`."""
        ...

    def begun(self, lease: Lease, state: PartitionState, previous: Member | None) -> None:
        """A partition is about to go on here; `previous` had it before. Called before its first message starts."""
        ...

    def granted(self, lease: Lease) -> None: ...

    def revoked(self, lease: Lease) -> None: ...

    def stream_replaced(self, reason: str) -> None:
        """The stream is not the one any more that positions speak of: this member ends."""
        ...

    def failed(self, error: Exception) -> None:
        """Report what nobody can repair here; the member goes on."""
        ...


class Plane(Protocol):
    """The partitions of one member in one layout: performs what `control.holding` or `control.slot` ask for."""

    def claim_seen(self, claim: Claim, revision: int) -> None:
        """A revision of a claim, newer or not."""
        ...

    def claim_lost(self, partition: PartitionId, revision: int, expected: int) -> None:
        """The record of a claim is gone: what is held here is claimed anew."""
        ...

    def spoken(self, revision: int) -> int:
        """Up to which revision, at most this one, all is said here about claims that were lost."""
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

    def ahead(self) -> dict[PartitionId, Ahead]:
        """What is done above the cursors of partitions that were stopped."""
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
