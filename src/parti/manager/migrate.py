"""Migrates from one durable per partition to parti, without loss or repeat: plan, shadow, verify, switch.

See docs/requirements.md#r-015.

A legacy durable is recognised by its filter: exactly the subject of one partition. parti begins at its ack floor. That
is exact when no message above the floor was acked: then the number of its messages between the floor and the last
delivery equals the number of acks that the server still waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from parti.config.worker import WorkerConfig
from parti.errors import FatalError
from parti.manager.kv_store import Store
from parti.model import Claim, Partition, PartitionId
from parti.wire.api import JetStreamApi
from parti.wire.api_consumers import filters_of
from parti.wire.async_ranges import AsyncRangeReader
from parti.wire.errors import ConsumerNotFound
from parti.worker.routing import SubjectTemplate
from parti.worker.seal import Seal


class NotReady(FatalError):
    """Switching now would lose or repeat messages: do what the message says first."""


@dataclass(frozen=True, slots=True)
class Legacy:
    """One legacy durable as the server shows it."""

    partition: PartitionId
    consumer: str
    floor: int
    """Every message of the partition up to this stream sequence is acked."""
    delivered: int
    ack_pending: int
    pending: int
    waiting: int
    """Waiting pulls: above 0, a process still uses the durable."""

    @property
    def remaining(self) -> int:
        """Messages that are not acked yet, as the server counts them."""
        return self.ack_pending + self.pending


@dataclass(frozen=True, slots=True)
class Row:
    """The comparison for one partition."""

    partition: PartitionId
    legacy: Legacy | None
    claim: Claim | None
    ours: int | None = None
    """Messages after parti's start position, counted by reading them; None when not counted."""
    repeats: int = 0
    """Messages above the floor that are already acked: parti would process them again."""
    problem: str = ""

    @property
    def parity(self) -> bool:
        """Both sides have the same number of messages left."""
        return self.legacy is not None and self.ours is not None and self.ours - self.repeats == self.legacy.remaining


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """All partitions, and the legacy durables that match none of them."""

    rows: tuple[Row, ...]
    strangers: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        return [f"{row.partition}: {row.problem}" for row in self.rows if row.problem]


class Migration:
    """Reads the legacy durables of a stream and gives their positions to parti."""

    def __init__(self, js: JetStreamApi, store: Store, worker: WorkerConfig, partitions: Iterable[Partition]) -> None:
        self._js = js
        self._store = store
        self._worker = worker
        template = SubjectTemplate(worker.subject_template)
        self._subjects = {template.subject(p): p.id for p in partitions}

    async def plan(self) -> MigrationPlan:
        """The current state; only reads consumer info, and counts no messages."""
        found: dict[PartitionId, list[Legacy]] = {}
        strangers: list[str] = []
        for info in await self._js.consumer_list(self._worker.stream):
            if Seal.read(info["config"]) is not None or info["name"].startswith(f"{self._worker.consumer_prefix}-"):
                continue  # parti's own, of any namespace
            subjects = filters_of(info["config"])
            partition = self._subjects.get(subjects[0]) if len(subjects) == 1 else None
            if partition is None or info["config"].get("ack_policy") != "explicit":
                strangers.append(info["name"])
            else:
                found.setdefault(partition, []).append(_legacy(partition, info))
        claims = await self._store.claims()
        rows = []
        for partition in self._subjects.values():
            legacy = found.get(partition, [])
            claim, _ = claims.get(partition, (None, 0))
            rows.append(Row(partition, legacy[0] if legacy else None, claim, problem=_problem(legacy, claim)))
        return MigrationPlan(tuple(sorted(rows, key=lambda row: row.partition)), tuple(sorted(strangers)))

    async def shadow(self) -> MigrationPlan:
        """The plan, with parti's remaining messages counted from the stream itself; nothing is created or acked."""
        plan = await self.plan()
        floors = {row.partition: row.legacy.floor for row in plan.rows if row.legacy is not None}
        if not floors:
            return plan
        delivered = {row.partition: row.legacy.delivered for row in plan.rows if row.legacy is not None}
        last = int((await self._js.stream_info(self._worker.stream))["state"]["last_seq"])
        behind: Counter[PartitionId] = Counter()
        in_flight: Counter[PartitionId] = Counter()
        reader = AsyncRangeReader(self._js.connection.connect_options, name="parti-migrate")
        try:
            subjects = tuple(s for s, p in self._subjects.items() if p in floors)
            columns = ("subject", "sequence")
            async for batch in reader.read(
                self._worker.stream, min(floors.values()), last, subjects=subjects, columns=columns, allow_gone=True
            ):
                for subject, sequence in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    partition = self._subjects[subject]
                    if sequence > floors[partition]:
                        behind[partition] += 1
                        in_flight[partition] += sequence <= delivered[partition]
        finally:
            await reader.close()
        return MigrationPlan(tuple(_counted(row, behind, in_flight) for row in plan.rows), plan.strangers)

    async def verify(self) -> MigrationPlan:
        """As `shadow`, but raises NotReady when a partition's counts or positions differ."""
        plan = await self.shadow()
        differ = [row for row in plan.rows if row.legacy is not None and not row.parity]
        if plan.problems or differ:
            texts = plan.problems + [
                f"{row.partition}: {row.legacy.remaining if row.legacy else 0} left by the legacy durable, "
                f"{row.ours} behind its floor"
                for row in differ
            ]
            raise NotReady(f"{len(texts)} partitions are not ready: {'; '.join(texts[:5])}")
        return plan

    async def switch(self, *, execute: bool = False, allow_repeat: bool = False) -> MigrationPlan:
        """Store every partition's position in parti; with `execute`, delete the legacy durables afterwards.

        Refused while a process still pulls from a legacy durable, and when messages would be repeated.
        """
        plan = await self.verify()
        busy = [row.legacy.consumer for row in plan.rows if row.legacy is not None and row.legacy.waiting]
        if busy:
            raise NotReady(f"{len(busy)} legacy durables are still pulled from ({busy[0]}): stop their workers first")
        repeats = sum(row.repeats for row in plan.rows)
        if repeats and not allow_repeat:
            raise NotReady(
                f"{repeats} messages were acked ahead of others and would be done again: let the legacy workers finish "
                "what they hold, or allow it with --allow-repeat"
            )
        for row in plan.rows:
            if row.legacy is not None and row.claim is None:
                claim = Claim(row.partition, cursor=row.legacy.floor)
                if await self._store.write_claim(claim, 0) is None:
                    raise NotReady(f"the claim of {row.partition} could not be written: is a parti worker running?")
        if execute:
            for row in plan.rows:
                if row.legacy is not None:
                    await self._delete(row.legacy.consumer)
        return plan

    async def _delete(self, consumer: str) -> None:
        try:
            await self._js.consumer_delete(self._worker.stream, consumer)
        except ConsumerNotFound:
            return


def _counted(row: Row, behind: Counter[PartitionId], in_flight: Counter[PartitionId]) -> Row:
    if row.legacy is None:
        return row
    repeats = max(0, in_flight[row.partition] - row.legacy.ack_pending)
    return Row(row.partition, row.legacy, row.claim, behind[row.partition], repeats, row.problem)


def _problem(legacy: list[Legacy], claim: Claim | None) -> str:
    if len(legacy) > 1:
        names = ", ".join(item.consumer for item in legacy)
        return f"{len(legacy)} durables filter it ({names}): delete those that are not in use"
    if claim is not None and (not legacy or claim.cursor != legacy[0].floor or claim.owner is not None):
        return f"parti has a position already ({claim.cursor}): it is running, or an earlier switch was interrupted"
    return ""


def _legacy(partition: PartitionId, info: dict[str, Any]) -> Legacy:
    return Legacy(
        partition,
        info["name"],
        int(info["ack_floor"]["stream_seq"]),
        int(info["delivered"]["stream_seq"]),
        int(info["num_ack_pending"]),
        int(info["num_pending"]),
        int(info["num_waiting"]),
    )
