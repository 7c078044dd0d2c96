"""The durable of one partition: made where it is missing, and set to an exact position before anything is pulled."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from parti.control.subject_buckets import check_subjects
from parti.errors import PartiError
from parti.manager.conflicts import clear_conflicts
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
_LONGEST: Final = 255  # characters of a consumer's name, by the server


def slot_name(prefix: str, partition: PartitionId, namespace: str = "") -> str:
    """`<prefix>-<namespace>-slot-<partition>`; earlier versions had no namespace in it.

    What a consumer name may not hold is written as _XX, so that no two are equal; a name that would be too long ends
    in a digest instead.
    """
    name = "".join(c if c in _PLAIN else "".join(f"_{b:02X}" for b in c.encode()) for c in partition)
    whole = f"{consumer_stem(prefix, namespace)}-slot-{name}"
    if namespace and len(whole) > _LONGEST:
        digest = hashlib.sha256(partition.encode()).hexdigest()[:32]
        return f"{whole[: _LONGEST - 34]}_h{digest}"
    return whole


def subjects_of(template: str, partition: PartitionId) -> list[str]:
    """The subjects that the template names, with commas between them."""
    texts = [text.strip() for text in template.split(",") if text.strip()]
    checked = Partition(tuple(partition.split(".")))
    return [
        validate_subject(text.replace("{partition}", checked.id), wildcards=True, what=f"subject of {partition}")
        for text in texts
    ]


class SlotIdentity:
    """What the durables of one member's slots share: the seal they carry, and those of earlier versions."""

    def __init__(self, runtime: Runtime, bucket: str, stream_created: str) -> None:
        """`bucket`: the stream of the namespace's bucket; `stream_created`: of the stream that positions speak of."""
        self.stream_created = stream_created
        self.old = OldNames(runtime.js, runtime.config.stream, bucket)
        self.refused: set[str] = set()
        """Durables under our names that are somebody else's."""
        self._runtime = runtime
        self._created = ""

    async def seal(self, *, again: bool = False) -> Seal:
        """`again`: a durable of ours vanished, as all do with their stream."""
        if again or not self._created:
            self._created = (await self._runtime.js.stream_info(self._runtime.config.stream))["created"]
        return Seal(self._runtime.namespace, self._created)

    async def seal_for(self, config: Mapping[str, Any]) -> Seal:
        """The seal that an existing durable should have: its own, unless that is of another stream."""
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
        """What it filters, in order."""
        return tuple(sorted(self._subjects))

    async def set_to(self, sequence: int) -> None:
        """When this returns the next delivery is the first message at or behind `sequence`, with consumer sequence 1.

        Retried until it is answered (docs/evidence/cluster.md#c8): the caller gives up by being cancelled.
        """
        await self._until_done("iterate", lambda: self._attempt(sequence))

    async def ensure(self, sequence: int) -> None:
        """When this returns the consumer exists: on an interest stream nothing is kept for one that is to come."""
        if not self._known:
            await self._until_done("create", lambda: self._look(sequence))

    async def floor(self) -> int:
        """Everything that was delivered up to this stream sequence is acknowledged, by the consumer's own word."""
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
        """Whether it was there before; it is now, with our subjects, and that of an earlier version is not any more.

        The position is that of the claim, whichever of the two kept the messages meanwhile: an ack floor may have been
        moved by another namespace that had the old name too.
        """
        js, stream = self._runtime.js, self._runtime.config.stream
        old = None
        if self._old_name != self.name:
            old = await self._identity.old.find(self._old_name, self._runtime.clock.now())
        if old is not None and filters_of(old["config"]) != tuple(sorted(self._subjects)):
            old = None  # other subjects: not what this partition was
        info = await self._info()
        if info is None:
            seal = await self._identity.seal(again=self._known)
            if self._identity.stream_created and seal.stream != self._identity.stream_created:
                # It may have gone with its stream: our position means nothing on another one.
                raise StreamReplacedUnderWorker(f"stream {stream!r} was made anew at {seal.stream}")
            if old is not None and self._retention is Retention.WORKQUEUE:
                await self._retire_old()  # it refuses ours (10100); a work queue keeps what is left in it
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
                if js.can_reset:  # an ack floor that other filters moved would count for ours (decision 9)
                    with contextlib.suppress(ConsumerInvalidReset):
                        await js.consumer_reset(stream, self.name, max(1, sequence))
                try:
                    await js.consumer_update(stream, info["config"] | changes)
                except ConsumerFilesGone:  # nothing can change it any more
                    await self._remake(sequence, seal)
        self._known = True
        if old is not None:
            await self._retire_old()
        return info is not None

    async def _info(self) -> dict[str, Any] | None:
        """A missing consumer does not answer a reset at all, so that is asked first; and whose it is."""
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
                own=self.name,
                prefix=runtime.config.consumer_prefix,
                namespace=runtime.namespace,
                old=self._identity.old,
                in_use=lambda _: True,  # whose partition it was is not known here: only what is foreign is told
            )
            raise

    async def _retire_old(self) -> None:
        """Ours is there, or nothing depends on a consumer: the one of the earlier version goes."""
        with contextlib.suppress(ConsumerNotFound, ConsumerDoesNotExist):
            await self._runtime.js.consumer_delete(self._runtime.config.stream, self._old_name)
        recorder = self._runtime.recorder
        recorder.event("durable.renamed", op="create", result="success", old=self._old_name, new=self.name)

    async def _attempt(self, sequence: int) -> None:
        js, stream = self._runtime.js, self._runtime.config.stream
        if not js.can_reset:
            if await self._look(sequence):
                await self._remake(sequence, await self._identity.seal())
        elif await self._look(sequence) or self._retention is Retention.WORKQUEUE:  # else it was made just there
            try:
                await js.consumer_reset(stream, self.name, max(1, sequence))
            except ConsumerInvalidReset:  # it was made to begin later, for another stream of this name or by hand
                await self._remake(sequence, await self._identity.seal())

    async def _remake(self, sequence: int, seal: Seal) -> None:
        config = self._config(sequence, seal)
        guarded = self._retention is Retention.INTEREST
        await self._runtime.js.consumer_remake(self._runtime.config.stream, config, guarded=guarded)

    def _config(self, sequence: int, seal: Seal) -> dict[str, Any]:
        config = self._runtime.config
        start: dict[str, Any] = {"deliver_policy": "all"}
        if self._retention is not Retention.WORKQUEUE and sequence > 1:  # a work queue begins at what is left (10101)
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
