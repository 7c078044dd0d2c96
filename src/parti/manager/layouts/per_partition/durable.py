"""The durable of one partition: created if missing, and set to an exact position before anything is pulled."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from parti.control.subject_buckets import check_subjects
from parti.errors import PartiError
from parti.manager.layouts.conflicts import OwnDurables, clear_conflicts
from parti.manager.old_names import OldNames
from parti.model import Partition, PartitionId, Retention
from parti.observe import worker_metrics as m
from parti.subjects import validate_subject
from parti.wire.api_consumers import filters_of
from parti.wire.errors import (
    ConsumerDoesNotExist,
    ConsumerFilesGone,
    ConsumerInvalidReset,
    ConsumerNotFound,
    WorkQueueFilterNotUnique,
)
from parti.worker.errors import ForeignDurable, StreamReplacedUnderWorker
from parti.worker.health import Part
from parti.worker.recorder import Op
from parti.worker.routing import consumer_stem
from parti.worker.runtime import Runtime
from parti.worker.seal import Seal, foreign

_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_LONGEST: Final = 255  # characters in a consumer name, the server's limit


def slot_name(prefix: str, partition: PartitionId, namespace: str = "") -> str:
    """`<prefix>-<namespace>-slot-<partition>`; earlier versions used no namespace.

    Characters that a consumer name must not contain are written as _XX, so that all names stay distinct; a name that
    would be too long ends in a digest instead.
    """
    name = "".join(c if c in _PLAIN else "".join(f"_{b:02X}" for b in c.encode()) for c in partition)
    whole = f"{consumer_stem(prefix, namespace)}-slot-{name}"
    if namespace and len(whole) > _LONGEST:
        digest = hashlib.sha256(partition.encode()).hexdigest()[:32]
        return f"{whole[: _LONGEST - 34]}_h{digest}"
    return whole


def subjects_of(template: str, partition: PartitionId) -> list[str]:
    """The subjects in the template, which separates them by commas."""
    texts = [text.strip() for text in template.split(",") if text.strip()]
    checked = Partition(tuple(partition.split(".")))
    return [
        validate_subject(text.replace("{partition}", checked.id), wildcards=True, what=f"subject of {partition}")
        for text in texts
    ]


class SlotIdentity:
    """What the durables of one member's slots share: their seal, and the durables of earlier versions."""

    def __init__(self, runtime: Runtime, bucket: str, stream_created: str) -> None:
        """`bucket`: the stream of the namespace's bucket; `stream_created`: when the positions' stream was created."""
        self.stream_created = stream_created
        self.old = OldNames(runtime.js, runtime.config.stream, bucket)
        self.refused: set[str] = set()
        """Durables with this namespace's names that belong to another namespace."""
        self._runtime = runtime
        self._created = ""

    async def seal(self, *, again: bool = False) -> Seal:
        """`again`: one of our durables is missing, maybe because its stream was deleted; read the stream again."""
        if again or not self._created:
            self._created = (await self._runtime.js.stream_info(self._runtime.config.stream))["created"]
        return Seal(self._runtime.namespace, self._created)

    async def seal_for(self, config: Mapping[str, Any]) -> Seal:
        """The seal that an existing durable should have: its present one, unless that names another stream."""
        found, ours = Seal.read(config), await self.seal()
        if found is not None and found.stream != ours.stream:
            ours = await self.seal(again=True)
        return found if found is not None and found.stream == ours.stream else ours


class SlotDurable:
    """API calls about one partition's consumer."""

    def __init__(
        self,
        runtime: Runtime,
        partition: PartitionId,
        retention: Retention,
        subjects: Sequence[str],
        identity: SlotIdentity,
    ) -> None:
        self.name = slot_name(runtime.config.consumer_prefix, partition, runtime.namespace)
        self._old_name = slot_name(runtime.config.consumer_prefix, partition)
        self._runtime = runtime
        self._retention = retention
        self._known = False
        self._subjects = list(check_subjects(partition, subjects))
        self._identity = identity

    def __repr__(self) -> str:
        return f"<SlotDurable {self.name}>"

    @property
    def filters(self) -> tuple[str, ...]:
        """Its filter subjects, in order."""
        return tuple(sorted(self._subjects))

    async def set_to(self, sequence: int) -> None:
        """When this returns, the next delivery is the first message at or after `sequence`, with consumer sequence 1.

        Retried until the server replies (docs/evidence/cluster.md#c8); cancel the call to give up.
        """
        await self._until_done("iterate", lambda: self._attempt(sequence))

    async def ensure(self, sequence: int) -> None:
        """When this returns, the consumer exists: an interest stream keeps no messages for a missing consumer."""
        if not self._known:
            await self._until_done("create", lambda: self._look(sequence))

    async def floor(self) -> int:
        """The consumer's ack floor: every message delivered up to this stream sequence is acknowledged."""
        info = await self._runtime.js.consumer_info(self._runtime.config.stream, self.name)
        return int(info["ack_floor"]["stream_seq"])

    async def _until_done(self, op: Op, call: Callable[[], Awaitable[object]]) -> None:
        recorder, refused = self._runtime.recorder, self._identity.refused
        waits = self._runtime.backoff.delays()
        while True:
            try:
                await call()
                break
            except PartiError as error:
                if isinstance(error, ForeignDurable):
                    refused.add(self.name)
                    recorder.failed(Part.UPDATE, self._runtime.clock.now(), error)
                elif op == "iterate":
                    recorder.failed(Part.RECREATION, self._runtime.clock.now(), error)
                wait = next(waits, self._runtime.backoff.cap)
                recorder.retried(op, 1, wait, error)
                await self._runtime.clock.sleep(wait)
        if self.name in refused:
            refused.discard(self.name)
            if not refused:
                recorder.worked(Part.UPDATE, self._runtime.clock.now())

    async def _look(self, sequence: int) -> bool:
        """Ensure it exists with our subjects, delete an earlier version's durable; returns whether it existed before.

        The claim's position counts, whichever of the two durables kept the messages: another namespace that used the
        old name too may have moved the ack floor.
        """
        js, stream = self._runtime.js, self._runtime.config.stream
        old = None
        if self._old_name != self.name:
            old = await self._identity.old.find(self._old_name, self._runtime.clock.now())
        if old is not None and filters_of(old["config"]) != tuple(sorted(self._subjects)):
            old = None  # other subjects: not a durable of this partition
        info = await self._info()
        if info is None:
            seal = await self._identity.seal(again=self._known)
            if self._identity.stream_created and seal.stream != self._identity.stream_created:
                # It may have been deleted with its stream: our position is invalid on another stream.
                raise StreamReplacedUnderWorker(f"stream {stream!r} was recreated at {seal.stream}")
            if old is not None and self._retention is Retention.WORKQUEUE:
                await self._retire_old()  # it blocks ours (10100); a work queue keeps its messages
                old = None
            metrics = self._runtime.recorder.metrics
            if self._known:
                metrics.count(m.RECREATION_ATTEMPTS, reason="not_found")
            await self._create(self._config(sequence, seal))
            if self._known:
                metrics.count(m.RECREATIONS, result="success", reason="not_found")
        else:
            seal = await self._identity.seal_for(info["config"])
            if filters_of(info["config"]) != tuple(sorted(self._subjects)) or seal != Seal.read(info["config"]):
                metadata = (info["config"].get("metadata") or {}) | seal.metadata()
                changes = {"filter_subjects": self._subjects, "metadata": metadata}
                if js.can_reset:  # an ack floor moved under other filters would count for ours (decision 9)
                    with contextlib.suppress(ConsumerInvalidReset):
                        await js.consumer_reset(stream, self.name, max(1, sequence))
                try:
                    await js.consumer_update(stream, info["config"] | changes)
                except ConsumerFilesGone:  # it can no longer be updated
                    await self._remake(sequence, seal)
        self._known = True
        if old is not None:
            await self._retire_old()
        return info is not None

    async def _info(self) -> dict[str, Any] | None:
        """A missing consumer never answers a reset, so check first that it exists, and who owns it."""
        stream = self._runtime.config.stream
        try:
            info = await self._runtime.js.consumer_info(stream, self.name)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            return None
        if why := foreign(info["config"], self._runtime.namespace):
            raise ForeignDurable(self.name, stream, why)
        return info

    async def _create(self, config: dict[str, Any]) -> None:
        runtime = self._runtime
        try:
            await runtime.js.consumer_create(runtime.config.stream, config, action="create")
        except WorkQueueFilterNotUnique:
            await clear_conflicts(
                runtime.js,
                runtime.config.stream,
                self._subjects,
                OwnDurables(runtime.config.consumer_prefix, runtime.namespace, self._identity.old, own=self.name),
                in_use=lambda _: True,  # the former owner is not known here: only foreign durables are reported
            )
            raise

    async def _retire_old(self) -> None:
        """Delete the earlier version's durable: ours exists, or no message depends on a consumer."""
        with contextlib.suppress(ConsumerNotFound, ConsumerDoesNotExist):
            await self._runtime.js.consumer_delete(self._runtime.config.stream, self._old_name)
        recorder = self._runtime.recorder
        recorder.event("durable.renamed", op="create", result="success", old=self._old_name, new=self.name)

    async def _attempt(self, sequence: int) -> None:
        js, stream = self._runtime.js, self._runtime.config.stream
        if not js.can_reset:
            if await self._look(sequence):
                await self._remake(sequence, await self._identity.seal())
        elif await self._look(sequence) or self._retention is Retention.WORKQUEUE:  # else it was just created there
            try:
                await js.consumer_reset(stream, self.name, max(1, sequence))
            except ConsumerInvalidReset:  # it starts later: made for another stream of this name, or manually
                await self._remake(sequence, await self._identity.seal())

    async def _remake(self, sequence: int, seal: Seal) -> None:
        config = self._config(sequence, seal)
        guarded = self._retention is Retention.INTEREST
        await self._runtime.js.consumer_remake(self._runtime.config.stream, config, guarded=guarded)

    def _config(self, sequence: int, seal: Seal) -> dict[str, Any]:
        config = self._runtime.config
        start: dict[str, Any] = {"deliver_policy": "all"}
        if self._retention is not Retention.WORKQUEUE and sequence > 1:  # a work queue starts at its first (10101)
            start = {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
        return {
            "name": self.name,
            "durable_name": self.name,
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "filter_subjects": self._subjects,
            "metadata": seal.metadata(),
            "ack_wait": int(config.ack_wait * 1e9),
            "max_deliver": -1,
            "max_ack_pending": config.max_ack_pending,
            "max_waiting": config.max_waiting,
            "inactive_threshold": int(config.inactive_threshold * 1e9),
            **start,
        }
