"""The streams, consumers and the bucket that delivery needs: created if missing, never changed.

An operator's tuning survives every start. A setting that would make delivery wrong is refused, with what to change.
"""

from __future__ import annotations

import contextlib
from typing import Any

from parti.config.deliver import DeliverSection
from parti.dead_letters import ensure_stream
from parti.delivery.names import DeliveryNames
from parti.errors import ConfigError
from parti.wire.api import JetStreamApi
from parti.wire.api_consumers import RESET_SINCE
from parti.wire.errors import ConsumerNotFound, StreamNameExists
from parti.wire.kv import KeyValue

_NANOSECONDS = 1_000_000_000
_DEDUP = 3600 * _NANOSECONDS  # longer than any time between a publish and its repetition after a crash
_KEPT_ATTEMPTS = 7 * 86_400 * _NANOSECONDS
_WIDEST = 5
"""Tokens after the stream's name that decide the partition; `<database>.<collection>.<document>` has three, and a
collection with dots in it has more."""


async def ensure_streams(js: JetStreamApi, config: DeliverSection) -> KeyValue:
    """Create everything beside the task stream; returns the bucket. `StreamNotFound` when that stream is missing."""
    js.require(RESET_SINCE, "task delivery (CONSUMER.RESET)")
    names = DeliveryNames(config.stream)
    source = (await js.stream_info(config.stream))["config"]
    common = {"storage": config.storage, "num_replicas": source["num_replicas"], "allow_direct": True}
    park = common | {
        "name": names.park,
        "subjects": [f"{names.park}.>"],
        "retention": "workqueue",
        "allow_msg_schedules": True,
        "duplicate_window": _DEDUP,
        "description": f"documents of {config.stream} that wait for a retry",
    }
    found = await _ensure(js, park)
    if not found.get("allow_msg_schedules") or found["retention"] != "workqueue":
        raise ConfigError(f"the stream {names.park} must be a work queue with allow_msg_schedules: delete or change it")
    told = f"tasks of {config.stream} that could not be delivered"
    await ensure_stream(js, config.stream, storage=config.storage, duplicate_window=_DEDUP, description=told)
    if config.attempt_log != "off":
        await _ensure(
            js,
            common
            | {
                "name": names.attempts,
                "subjects": [f"{names.attempts}.>"],
                "max_age": _KEPT_ATTEMPTS,
                "description": f"attempts to deliver tasks of {config.stream}",
            },
        )
    if config.partitions > 1:
        await _ensure_lanes(js, config, names, common)
    return await KeyValue.ensure(
        js, names.bucket, storage=config.storage, replicas=source["num_replicas"], description="parti deliver"
    )


async def _ensure_lanes(js: JetStreamApi, config: DeliverSection, names: DeliveryNames, common: dict[str, Any]) -> None:
    """The server copies each task, once and in order, to the subject of its partition.

    If the stream was delivered without partitions before, only tasks that the durable has not passed.
    """
    transforms = partition_transforms(config.stream, names.lanes, config.partitions)
    source: dict[str, Any] = {"name": config.stream, "subject_transforms": transforms}
    with contextlib.suppress(ConsumerNotFound):
        info = await js.consumer_info(config.stream, config.durable)
        if done := int(info["ack_floor"]["stream_seq"]):
            source["opt_start_seq"] = done + 1
    wanted = common | {
        "name": names.lanes,
        "retention": "workqueue",
        "sources": [source],
        "description": f"tasks of {config.stream} by partition",
    }
    found = await _ensure(js, wanted)
    sources = found.get("sources") or [{}]
    if len(sources) != 1 or sources[0].get("subject_transforms") != transforms:
        raise ConfigError(
            f"the stream {names.lanes} was made for another number of partitions than {config.partitions}: let it run "
            f"empty, purge {config.stream} of what was delivered, or it is delivered once more, then delete "
            f"{names.lanes} and start again"
        )


def partition_transforms(stream: str, lanes: str, partitions: int) -> list[dict[str, str]]:
    """Every subject of the stream goes to exactly one partition, by its first tokens; none is left out."""
    transforms = []
    for width in range(1, _WIDEST + 1):
        tokens = ",".join(str(position) for position in range(1, width + 1))
        source = f"{stream}." + ".".join("*" * width)
        transforms.append({"src": source, "dest": f"{lanes}.{{{{partition({partitions},{tokens})}}}}"})
    longer = {"src": f"{transforms[-1]['src']}.>", "dest": f"{transforms[-1]['dest']}.>"}
    return [*transforms, longer]


async def ensure_consumer(
    js: JetStreamApi, stream: str, name: str, filters: list[str], config: DeliverSection, start: int = 0
) -> None:
    """The durable exists, as docs/requirements.md#r-301 requires; an existing one keeps its configuration.

    `start`: where a durable continues that was deleted meanwhile. Without it, it would start the stream again.
    """
    try:
        found = (await js.consumer_info(stream, name))["config"]
    except ConsumerNotFound:
        wanted: dict[str, Any] = {
            "durable_name": name,
            "ack_policy": "explicit",
            "ack_wait": int(config.ack_wait * _NANOSECONDS),
            "max_deliver": -1,
            "max_ack_pending": config.max_ack_pending,
        }
        wanted |= {"filter_subject": filters[0]} if len(filters) == 1 else {"filter_subjects": filters}
        # A work queue holds only what is not done, and accepts no start sequence.
        if start > 1 and (await js.stream_info(stream))["config"]["retention"] != "workqueue":
            wanted |= {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
        found = (await js.consumer_create(stream, wanted, action="create"))["config"]
    if found["ack_policy"] != "explicit" or found.get("max_deliver", -1) != -1:
        raise ConfigError(
            f"the consumer {name} on {stream} needs ack_policy explicit and max_deliver -1, or tasks are lost in "
            f"silence; it has {found['ack_policy']} and {found.get('max_deliver')}"
        )


async def _ensure(js: JetStreamApi, config: dict[str, Any]) -> dict[str, Any]:
    with contextlib.suppress(StreamNameExists):
        await js.stream_create(config)
    found: dict[str, Any] = (await js.stream_info(config["name"]))["config"]
    return found
