"""Delivery on Spark: the tasks of a stream to their endpoints, in order per document, as a pipeline.

For fan-out and for bulk replay. Tasks that must wait are parked in the checkpoint; the others continue.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from parti.config.deliver import DeliverSection
from parti.delivery.engine_lock import spark_claim
from parti.delivery.feed import FeedCheckpoint, made_at
from parti.delivery.guard import AddressGuard
from parti.delivery.journal import Journal
from parti.delivery.names import DeliveryNames
from parti.delivery.order import RuleBook
from parti.delivery.storage import ensure_consumer, ensure_streams
from parti.errors import UsageError
from parti.spark.delivery.engine import Announcer, check_parked, refuse_consumers
from parti.spark.delivery.task import Before, Deliver
from parti.spark.pipeline.driver.definition import Outcomes, Pipeline
from parti.spark.pipeline.driver.lease import Standby
from parti.spark.pipeline.executor.policy import Retries
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.errors import ConsumerNotFound
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

_ONE_ATTEMPT = Retries(attempts=1, then="park")
"""One attempt per batch, then the document waits for the time that the delivery policy sets."""


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a stream, both ends included; an end is a sequence or a time such as 2026-11-15T12:00:00Z."""

    start: str
    end: str

    @property
    def last(self) -> int | None:
        return int(self.end) if self.end.isdecimal() else None

    @property
    def until(self) -> float:
        """Seconds since 1970 after the end."""
        if self.end.isdecimal():
            return math.inf
        try:
            moment = datetime.fromisoformat(self.end)
        except ValueError:
            raise UsageError(f"{self.end!r} is no sequence and no time such as 2026-11-15T12:00:00Z") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() + 1e-6


def delivery_pipeline(
    config: DeliverSection,
    nats: ConnectOptions,
    *,
    checkpoint: str,
    span: Span | None = None,
    trigger: str = "0s",
    outcomes: str | None = None,
    master: str = "local[*]",
) -> Pipeline:
    """The pipeline that delivers a stream's present and future tasks, or with `span` redelivers that part of it.

    Creates what delivery needs on the server. Drivers of one stream share a lease: one delivers, the others stand by. A
    replay has no lease. Refuses a stream that the TaskConsumer delivers or has parked documents of.
    """
    # A malformed entry is reported here, and not by every task.
    AddressGuard(config.allow_addresses, config.allow_ports)
    RuleBook(config.triggers, config.order)
    start, commit, replicas, before = asyncio.run(_prepare(config, nats, checkpoint if span is None else None))
    name = f"deliver-{config.stream}" if span is None else f"replay-{config.stream}"
    handler = Deliver(
        name,
        config,
        nats.self_contained(),
        replay=span is not None,
        last=span.last if span is not None else None,
        until=span.until if span is not None else math.inf,
        before=before,
    )
    fields = "database,collection,documentId" + (",triggerId" if config.lane_per_trigger else "")
    return Pipeline(
        name=name,
        stream=config.stream,
        handler=handler,
        key=f"payload:{fields}",
        start_at=start if span is None else span.start,
        checkpoint=checkpoint,
        trigger=trigger,
        grace=config.shutdown,
        batch_size=40_000,  # some seconds of work: failed tasks are retried between batches, and each costs 0.3 s CPU
        concurrency=config.concurrency,
        retries=_ONE_ATTEMPT,
        outcomes=Outcomes(parquet=outcomes),
        commit=commit if span is None else "none",
        durable=config.durable if commit == "durable" and span is None else None,
        standby=Standby(replicas=replicas) if span is None else None,
        companion=Announcer() if span is None else None,
        nats=nats,
        master=master,
    )


async def _prepare(
    config: DeliverSection, nats: ConnectOptions, checkpoint: str | None
) -> tuple[str, Literal["durable", "purge"], int, Before]:
    """Where to start, how to commit to the server, its replicas, and what the TaskConsumer has already done.

    Streams and durable exist afterwards. A replay has no `checkpoint` here: it needs none of this.
    """
    connection = await connect(nats, name="parti-deliver")
    try:
        js = JetStreamApi(connection)
        bucket = await ensure_streams(js, msgspec.structs.replace(config, partitions=1))
        stream = await js.stream_info(config.stream)
        replicas = int(stream["config"]["num_replicas"])
        if checkpoint is None:
            return "earliest", "durable", replicas, Before()
        names = DeliveryNames(config.stream)
        await _refuse_others(js, bucket, names, checkpoint)
        if stream["config"]["retention"] == "workqueue":
            return "earliest", "purge", replicas, Before()
        try:
            info = await js.consumer_info(config.stream, config.durable)
        except ConsumerNotFound:
            await ensure_consumer(js, config.stream, config.durable, [f"{config.stream}.>"], config)
            return "earliest", "durable", replicas, Before()
        before = await _done_before(bucket, Journal(js, names, 0), made_at(stream, info))
        return str(info["ack_floor"]["stream_seq"] + 1), "durable", replicas, before
    finally:
        await connection.close()


async def _done_before(bucket: KeyValue, journal: Journal, created: str) -> Before:
    """What the TaskConsumer has done above the durable's position: a change of engines must not send it again.

    The position alone is not enough: once this engine has moved it, the tasks that this engine parked lie below it.
    """
    saved = await FeedCheckpoint.load(bucket, 0)
    checkpoint = saved if saved is not None and saved.created == created else FeedCheckpoint()
    said, tries = await journal.read(created)
    tries = {tried.sequence: tried for tried in checkpoint.tries} | tries
    return Before(checkpoint.high, frozenset(checkpoint.open), frozenset(said), tries)


async def _refuse_others(js: JetStreamApi, bucket: KeyValue, names: DeliveryNames, checkpoint: str) -> None:
    if names.lanes in await js.stream_names():
        raise UsageError(
            f"{names.stream} is delivered in partitions, and what is done stands in {names.lanes}: go on with the "
            "engine async, or use `parti deliver replay` for a part of the stream"
        )
    await refuse_consumers(bucket, names.stream)
    if (found := await spark_claim(bucket)) is not None:
        check_parked(found[0], names.stream, checkpoint, bucket.bucket)
    for kind in "qts":
        async for page in js.stream_subjects(names.park, f"{names.park}.{kind}.>"):
            if page:
                raise UsageError(
                    f"documents are parked in {names.park}: let `parti deliver run` deliver them first, or later tasks "
                    "would pass them"
                )
