"""What the parts of one member share: the store, the clock, the fence, and a way to run tasks concurrently."""

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
    """What a member records for later owners of its partitions: see `life_keeper`."""

    async def about_to_write(self, claim: Claim) -> None: ...


class Host(Protocol):
    """One member. Every task it spawned ends with it."""

    store: Store
    clock: Clock
    config: ControlConfig
    metrics: Metrics
    assignment: Assignment
    """All partitions and their intended owners; version 0 while that is unknown."""

    @property
    def lives(self) -> Lives | None:
        """What later owners must know about this member's messages; None before it is a member."""
        ...

    @property
    def members(self) -> Membership | None:
        """The live members; None before the whole current state has been read."""
        ...

    @property
    def stream_created(self) -> str:
        """Creation time of the stream that positions refer to; empty if unknown."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this concurrently; it is cancelled when the member ends."""
        ...

    def may_act(self) -> bool:
        """The fence: checked before every pull, effect, ack and write."""
        ...

    def heard_claim(self, claim: Claim, revision: int) -> None:
        """Pass a revision of a claim, from a watch, a read or a write, to all parts of this member."""
        ...

    def heard_claim_gone(self, partition: PartitionId, revision: int, expected: int) -> None:
        """Report to all parts that a claim was removed or damaged; it is written again by CAS on `expected`."""
        ...

    def heard_leader(self, record: LeaderRecord | None, revision: int) -> None:
        """The record under the leader's key, from a read."""
        ...

    def set_well(self, well: bool, reason: str = "") -> None:
        """Report to the leader whether this worker can do its work; see `Agent.set_well`."""
        ...

    def begun(self, lease: Lease, state: PartitionState, previous: Member | None) -> None:
        """This member is about to continue a partition of `previous`. Called before its first message starts."""
        ...

    def granted(self, lease: Lease) -> None: ...

    def revoked(self, lease: Lease) -> None: ...

    def stream_replaced(self, reason: str) -> None:
        """Positions refer to another stream than the current one: this member ends."""
        ...

    def failed(self, error: Exception) -> None:
        """Report an error that cannot be repaired here; the member continues."""
        ...


class Plane(Protocol):
    """The partitions of one member in one layout: performs the effects of `control.holding` or `control.slot`."""

    def claim_seen(self, claim: Claim, revision: int) -> None:
        """Handle a revision of a claim, which may be older than the known one."""
        ...

    def claim_lost(self, partition: PartitionId, revision: int, expected: int) -> None:
        """The record of a claim is gone: claim the partition again if this member holds it."""
        ...

    def spoken(self, revision: int) -> int:
        """The revision, at most this one, up to which this plane has handled every lost claim."""
        ...

    def begin(self) -> None:
        """All current claims have been read: from now on consumers may be changed."""
        ...

    def tick(self, now: float) -> None:
        """Time passed; called about twenty times per second."""
        ...

    def allows(self, lease: Lease) -> bool:
        """Whether exactly this lease is held."""
        ...

    def holds_nothing(self) -> bool:
        """Nothing is owned, and no former partition still needs this member."""
        ...

    def owned(self) -> frozenset[PartitionId]: ...

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        """Partition -> (epoch, cursor) of every owned partition."""
        ...

    def ahead(self) -> dict[PartitionId, Ahead]:
        """Messages done above the cursors of stopped partitions."""
        ...

    async def stop(self) -> dict[PartitionId, tuple[int, int]]:
        """Return the final positions; no handler runs or will start after that, and all acks are sent."""
        ...

    async def abandon(self) -> bool:
        """The member was fenced: when this returns, nothing more starts and nothing more is acked.

        True when no handler had to be interrupted either, so that no effect can still be in progress.
        """
        ...


class PlaneFactory(Protocol):
    """Makes the plane of a member."""

    def __call__(self, host: Host, member: Member) -> Plane: ...
