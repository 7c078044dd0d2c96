"""Two engines can deliver the same streams, but never at once: the Spark engine writes a claim that the other checks.

Each engine first announces itself and then looks for the other. The Spark engine announces itself by its driver lease
and its claim in the bucket, the TaskConsumer by the lease of a partition. So when both start at once, at least one sees
the other. The claim also says how much is parked in the Spark checkpoint, which the other engine cannot read.
"""

from __future__ import annotations

import contextlib

import msgspec

from parti.clock import Clock
from parti.errors import UsageError
from parti.wire.api import JetStreamApi
from parti.wire.errors import StreamNotFound, WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_election import LeaderKey, renewing_leader
from parti.wire.kv_model import KeyNotFound

KEY = "engine.spark"


class SparkClaim(msgspec.Struct, frozen=True):
    """Where the Spark engine keeps its positions, what is parked there, and the lease of its drivers."""

    checkpoint: str
    parked: int
    bucket: str
    lease: str
    ttl: float
    closing: bool = False
    """Whether the tasks of a batch should finish what is in flight and hand back the rest."""

    async def put(self, bucket: KeyValue) -> None:
        await bucket.put(KEY, msgspec.json.encode(self))


async def spark_claim(bucket: KeyValue) -> tuple[SparkClaim, int] | None:
    """The claim and its revision; None when the Spark engine has written none."""
    try:
        entry = await bucket.get(KEY)
    except KeyNotFound:
        return None
    try:
        return msgspec.json.decode(entry.value, type=SparkClaim), entry.revision
    except msgspec.DecodeError as error:
        raise UsageError(f"the key {KEY} of the bucket {bucket.bucket} is not ours: {error}") from None


class OtherEngine:
    """For the TaskConsumer: refuses to deliver while a Spark driver runs, or before tasks that Spark has parked."""

    def __init__(self, js: JetStreamApi, bucket: KeyValue, stream: str, clock: Clock) -> None:
        self._js = js
        self._bucket = bucket
        self._stream = stream
        self._clock = clock

    async def refuse(self) -> None:
        """Return when this engine may deliver. Waits for one lease length when a driver ended without releasing it."""
        while (found := await spark_claim(self._bucket)) is not None:
            word, revision = found
            if await self._lives(word):
                raise UsageError(
                    f"a driver of the engine spark delivers {self._stream} (its checkpoint is {word.checkpoint}): stop "
                    "it first"
                )
            if word.parked:
                raise UsageError(
                    f"{word.parked} tasks of {self._stream} wait in the checkpoint {word.checkpoint}, and later ones "
                    f"would pass them: let `parti deliver run --engine spark --available-now` deliver them first. If "
                    f"that folder is gone for good, delete the key {KEY} of the bucket {self._bucket.bucket}"
                )
            with contextlib.suppress(WrongLastSequence):  # it has spoken again: look again
                await self._bucket.delete(KEY, revision=revision)

    async def _lives(self, word: SparkClaim) -> bool:
        """Whether a driver holds the lease."""
        try:
            kv = await KeyValue.open(self._js, word.bucket)
        except StreamNotFound:
            return False
        return await renewing_leader(LeaderKey(kv, word.lease), self._clock, word.ttl) is not None
