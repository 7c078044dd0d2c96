"""The durable of one partition: made where it is missing, and set to an exact position before anything is pulled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from parti.control.slots import check_subjects
from parti.errors import PartiError
from parti.model import Partition, PartitionId, Retention
from parti.observe import worker_metrics as m
from parti.subjects import validate_subject
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ConsumerDoesNotExist, ConsumerInvalidReset, ConsumerNotFound
from parti.worker.consumer import WorkerParts
from parti.worker.errors import StreamReplacedUnderWorker
from parti.worker.health import Part

_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")


def slot_name(prefix: str, partition: PartitionId) -> str:
    """`<prefix>-slot-<partition>`; what a consumer name may not hold is written as _XX, so that no two are equal."""
    name = "".join(c if c in _PLAIN else "".join(f"_{b:02X}" for b in c.encode()) for c in partition)
    return f"{prefix}-slot-{name}"


def subjects_of(template: str, partition: PartitionId) -> list[str]:
    """The subjects that the template names, with commas between them."""
    texts = [text.strip() for text in template.split(",") if text.strip()]
    checked = Partition(tuple(partition.split(".")))
    return [
        validate_subject(text.replace("{partition}", checked.id), wildcards=True, what=f"subject of {partition}")
        for text in texts
    ]


class SlotDurable:
    """API calls about one partition's consumer."""

    def __init__(
        self,
        parts: WorkerParts,
        partition: PartitionId,
        retention: Retention,
        subjects: Sequence[str],
        *,
        stream_created: str = "",
    ) -> None:
        """`stream_created`: of the stream that positions speak of."""
        self._stream_created = stream_created
        self.name = slot_name(parts.config.consumer_prefix, partition)
        self._parts = parts
        self._retention = retention
        self._known = False
        self._subjects = list(check_subjects(partition, subjects))

    def __repr__(self) -> str:
        return f"<SlotDurable {self.name}>"

    async def set_to(self, sequence: int) -> None:
        """When this returns the next delivery is the first message at or behind `sequence`, with consumer sequence 1.

        Retried until it is answered (CLUSTER.md 3, rule 6): the caller gives up by being cancelled.
        """
        waits = self._parts.backoff.delays()
        while True:
            try:
                return await self._attempt(sequence)
            except PartiError as error:
                wait = next(waits, self._parts.backoff.cap)
                self._parts.recorder.failed(Part.RECREATION, self._parts.clock.now(), error)
                self._parts.recorder.retried("iterate", 1, wait, error)
                await self._parts.clock.sleep(wait)

    async def ensure(self, sequence: int) -> None:
        """When this returns the consumer exists: on an interest stream nothing is kept for one that is to come."""
        waits = self._parts.backoff.delays()
        while not self._known:
            try:
                await self._look(sequence)
            except PartiError as error:
                wait = next(waits, self._parts.backoff.cap)
                self._parts.recorder.retried("create", 1, wait, error)
                await self._parts.clock.sleep(wait)

    async def floor(self) -> int:
        """Everything that was delivered up to this stream sequence is acknowledged, by the consumer's own word."""
        info = await self._parts.js.consumer_info(self._parts.config.stream, self.name)
        return int(info["ack_floor"]["stream_seq"])

    async def _look(self, sequence: int) -> bool:
        """Whether it was there before; it is now, with our subjects."""
        js, stream = self._parts.js, self._parts.config.stream
        try:
            # A missing consumer does not answer a reset at all, so that is asked first.
            info = await js.consumer_info(stream, self.name)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            await self._check_stream()
            metrics = self._parts.recorder.metrics
            if self._known:
                metrics.count(m.RECREATION_ATTEMPTS, reason="not_found")
            await js.consumer_create(stream, self._config(sequence), action="create")
            if self._known:
                metrics.count(m.RECREATIONS, result="success", reason="not_found")
            self._known = True
            return False
        if filters_of(info["config"]) != tuple(sorted(self._subjects)):
            await js.consumer_update(stream, info["config"] | {"filter_subjects": self._subjects})
        self._known = True
        return True

    async def _check_stream(self) -> None:
        """A consumer that is gone may have gone with its stream: our position means nothing on another one."""
        created = (await self._parts.js.stream_info(self._parts.config.stream))["created"]
        if self._stream_created and created != self._stream_created:
            raise StreamReplacedUnderWorker(f"stream {self._parts.config.stream!r} was made anew at {created}")

    async def _attempt(self, sequence: int) -> None:
        js, stream = self._parts.js, self._parts.config.stream
        if not js.can_reset:
            await js.consumer_remake(stream, self._config(sequence), guarded=self._retention is Retention.INTEREST)
            self._known = True
        elif await self._look(sequence) or self._retention is Retention.WORKQUEUE:  # else it was made just there
            try:
                await js.consumer_reset(stream, self.name, max(1, sequence))
            except ConsumerInvalidReset:  # it was made to begin later, for another stream of this name or by hand
                await js.consumer_remake(stream, self._config(sequence), guarded=self._retention is Retention.INTEREST)

    def _config(self, sequence: int) -> dict[str, Any]:
        config = self._parts.config
        start: dict[str, Any] = {"deliver_policy": "all"}
        if self._retention is not Retention.WORKQUEUE and sequence > 1:  # a work queue begins at what is left (10101)
            start = {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
        return {
            "name": self.name,
            "durable_name": self.name,
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "filter_subjects": self._subjects,
            "ack_wait": int(config.ack_wait * 1e9),
            "max_deliver": -1,
            "max_ack_pending": config.max_ack_pending,
            "max_waiting": config.max_waiting,
            "inactive_threshold": int(config.inactive_threshold * 1e9),
            **start,
        }
