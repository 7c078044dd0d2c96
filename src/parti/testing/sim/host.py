"""The interface that the shipped planes need from a member (`parti.manager.host.Host`), for a simulated process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control.election import LeaderRecord
from parti.control.membership import Membership
from parti.errors import PartiError
from parti.manager.kv_store import ClaimGone
from parti.model import Assignment, Checkpoint, Claim, Lease, Member, PartitionId, WorkerId
from parti.observe.metrics import NO_METRICS
from parti.testing.sim.kv import Entry, Key
from parti.testing.sim.server import CREATED
from parti.worker.ledger import PartitionState

if TYPE_CHECKING:
    from parti.testing.sim.process import Process

CONTROL = ControlConfig(namespace="sim", heartbeat_interval=0.3, heartbeat_ttl=1.2, lease_margin=0.1)


class ProcessClock:
    """The clock of one machine, with its own origin and pace."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        return self._process.clock()

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SimStore:
    """The calls of `parti.manager.kv_store.Store` that a member makes, on the simulated bucket."""

    kv = SimpleNamespace(stream="KV_sim")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._kv = process.cluster.kv

    async def claim(self, partition: PartitionId) -> tuple[Claim | ClaimGone | None, int]:
        found, revision = await self._get(("claim", partition))
        return found or ClaimGone(partition, revision, revision), revision

    async def write_claim(self, claim: Claim, expected: int) -> int | None:
        self._process.log(f"writes {claim}")
        self._process.reached("claim")
        return await self._cas(("claim", claim.partition), claim, expected)

    async def checkpoint(self, worker: WorkerId) -> tuple[Checkpoint | None, int]:
        return await self._get(("checkpoint", worker))

    async def write_checkpoint(self, checkpoint: Checkpoint, expected: int) -> int | None:
        return await self._cas(("checkpoint", checkpoint.member.worker), checkpoint, expected)

    async def _get(self, key: Key) -> Entry:
        found: Entry = await self._process.network.ask(lambda: self._kv.get(key))
        return found

    async def _cas(self, key: Key, value: Any, expected: int) -> int | None:
        try:
            entry: Entry | None = await self._process.network.ask(lambda: self._kv.cas(key, value, expected))
        except PartiError:
            return None
        if entry is None:
            return None
        self._process.wrote(key, entry[1])
        return entry[1]


class SimHost:
    """One member's lifetime, as its plane sees it."""

    config = CONTROL
    metrics = NO_METRICS
    lives = None
    stream_created = CREATED

    def __init__(self, process: Process) -> None:
        self._process = process
        self.clock: Clock = ProcessClock(process)
        self.store: Any = SimStore(process)
        self.assignment = Assignment()

    @property
    def members(self) -> Membership | None:
        return self._process.members

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.watched(self._process.loop.create_task(work, name=name))

    def watched(self, task: asyncio.Task[None]) -> None:
        """An unexpected end of this task would end the member: it fails the run."""
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        process = self._process
        if not task.cancelled() and (error := task.exception()) is not None and not process.loop.ending:
            process.world.bug(process, f"{task.get_name()} ended: {error!r}", error)

    def may_act(self) -> bool:
        return self._process.may_act()

    def may_pull(self) -> bool:
        return self._process.may_act()

    def may_start(self, lease: Lease) -> bool:
        plane = self._process.plane
        return plane is not None and self._process.may_act() and plane.allows(lease)

    def heard_claim(self, claim: Claim, revision: int) -> None:
        self._process.heard(("claim", claim.partition), claim, revision)

    def heard_claim_gone(self, partition: PartitionId, revision: int, expected: int) -> None:
        del revision
        self._process.heard(("claim", partition), None, expected)

    def heard_leader(self, record: LeaderRecord | None, revision: int) -> None:
        self._process.heard(("leader", ""), record, revision)

    def set_well(self, well: bool, reason: str = "") -> None:
        """A simulated process is healthy or does not exist."""

    def begun(self, lease: Lease, state: PartitionState, previous: Member | None) -> None:
        """Partition lifetimes are not recorded here."""

    def granted(self, lease: Lease) -> None:
        self._process.log(f"granted {lease.partition}@{lease.epoch}")

    def revoked(self, lease: Lease) -> None:
        self._process.log(f"revoked {lease.partition}@{lease.epoch}")

    def stream_replaced(self, reason: str) -> None:
        self._process.world.bug(self._process, f"the stream was taken for another one: {reason}")

    def failed(self, error: Exception) -> None:
        self._process.log(f"failed: {type(error).__name__}")
