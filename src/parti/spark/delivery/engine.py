"""The Spark engine never delivers beside the other one: it announces itself and what it parks, and checks for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import msgspec

from parti.backoff import Backoff, retry
from parti.clock import SystemClock
from parti.delivery.engine_lock import KEY, SparkClaim, spark_claim
from parti.delivery.names import DeliveryNames
from parti.errors import PartiError, UnknownOutcome, UsageError
from parti.spark.pipeline.driver.definition import Pipeline
from parti.spark.pipeline.driver.lease import lease_key
from parti.spark.pipeline.executor.outcomes import Counts
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.kv import KeyValue


def told_checkpoint(folder: str) -> str:
    """The checkpoint as an absolute address, valid in every process on the machine."""
    return folder if "://" in folder else os.path.abspath(folder)


def check_parked(word: SparkClaim, stream: str, folder: str, bucket: str) -> None:
    """Raise `UsageError` when tasks are parked in another checkpoint than this one."""
    if word.parked and word.checkpoint != told_checkpoint(folder):
        raise UsageError(
            f"{word.parked} tasks of {stream} wait in the checkpoint {word.checkpoint}, and later ones would pass "
            f"them: go on with that folder. If it is gone for good, delete the key {KEY} of the bucket {bucket}"
        )


async def refuse_consumers(bucket: KeyValue, stream: str) -> None:
    """Raise `UsageError` while a TaskConsumer delivers."""
    if owned := await bucket.keys("slot.*"):
        raise UsageError(f"`parti deliver run` delivers {stream} ({', '.join(owned)}): stop it first")


class Announcer:
    """Runs beside a delivery pipeline; its drivers share a lease, so that one of them writes at a time."""

    def __init__(self) -> None:
        self._parked: int | None = None

    def __repr__(self) -> str:
        return f"<Announcer parked={self._parked}>"

    def begins(self, pipeline: Pipeline) -> None:
        """The lease is held and nothing is sent yet: write the claim, then look for the other engine."""

        async def speak(bucket: KeyValue) -> None:
            before = await spark_claim(bucket)
            parked = before[0].parked if before is not None else 0
            await _word(pipeline, parked).put(bucket)
            self._parked = parked
            try:
                await refuse_consumers(bucket, pipeline.stream)
            except UsageError:
                if before is None:
                    await bucket.delete(KEY)
                raise

        self._with_bucket(pipeline, speak)

    def stored(self, pipeline: Pipeline, counts: Counts) -> None:
        """A batch is stored and not committed: record what it parked before the durable moves past it."""
        if counts.parked != self._parked:
            self._with_bucket(pipeline, _word(pipeline, counts.parked).put)
            self._parked = counts.parked

    def closes(self, pipeline: Pipeline) -> None:
        """Request a stop: the tasks of the running batch check for it every second."""
        word = msgspec.structs.replace(_word(pipeline, self._parked or 0), closing=True)
        self._with_bucket(pipeline, word.put)
        self._parked = None  # record the next batch's count in any case

    def _with_bucket(self, pipeline: Pipeline, work: Callable[[KeyValue], Awaitable[None]]) -> None:
        async def once() -> None:
            connection = await connect(pipeline.nats, name="parti-deliver")
            try:
                await work(await KeyValue.open(JetStreamApi(connection), DeliveryNames(pipeline.stream).bucket))
            finally:
                await connection.close()

        asyncio.run(retry(once, backoff=Backoff(), clock=SystemClock(), classify=_again))


def _again(error: PartiError) -> bool:
    return error.retriable or isinstance(error, UnknownOutcome)  # writing it twice does no harm


def _word(pipeline: Pipeline, parked: int) -> SparkClaim:
    assert pipeline.standby is not None, "delivery runs behind a lease; only a replay has none"
    standby = pipeline.standby
    return SparkClaim(
        told_checkpoint(pipeline.checkpoint), parked, standby.bucket, lease_key(pipeline.name), standby.ttl
    )
