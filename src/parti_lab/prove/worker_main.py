"""The program of a worker process in a proof: a manager and a consumer that sends its effects to the proof's sink."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from prometheus_client import write_to_textfile

from parti.config.sections import LogFormat, LogLevel, ObserveSection
from parti.manager import ControlConfig, Hooks, Manager
from parti.model import Lease
from parti.observe.logs import configure_logging
from parti.observe.metrics import NO_METRICS
from parti.observe.prometheus import PrometheusMetrics
from parti.testing.history import Effect
from parti.waiting import first_of, stop_signals
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, WorkerConfig, WorkerConsumer
from parti_lab.prove.fleet import STREAM
from parti_lab.prove.sink import SinkClient
from parti_lab.prove.traffic import value_of

_PAGE = 1.0  # seconds between two saved pages of metrics


class StaleEffect(Exception):
    """The sink refused the effect: another worker owns the partition by now."""


def say(word: str, **fields: Any) -> None:
    """Send one line to the proof."""
    print(json.dumps({"say": word, **fields}), flush=True)


async def save_pages(metrics: PrometheusMetrics, folder: Path) -> None:
    """Save this process's /metrics page periodically until cancelled, so that it outlives the process."""
    while True:
        await asyncio.to_thread(write_to_textfile, str(folder / f"{os.getpid()}.prom"), metrics.registry)
        await asyncio.sleep(_PAGE)


async def work(settings: dict[str, Any]) -> None:
    """Run until SIGTERM, then hand over and leave."""
    options = ConnectOptions(servers=tuple(settings["urls"]), request_timeout=5.0, name="prove-worker")
    connection = await connect(options)
    sink = await SinkClient.open(int(settings["sink"]))
    config = WorkerConfig(stream=STREAM, subject_template=f"{STREAM}.{{partition}}", **settings["worker"])
    metrics = PrometheusMetrics() if settings["metrics"] else None
    consumer = WorkerConsumer(JetStreamApi(connection), config, metrics=metrics or NO_METRICS)
    owner, takes = f"pid-{os.getpid()}", float(settings["takes"])

    @consumer.handler
    async def handle(message: Message) -> None:
        began = time.time()
        key, producer, counter = value_of(message)
        if takes:
            await asyncio.sleep(takes)
        origin = (message.sequence, message.timestamp, message.attempt, began)
        effect = Effect(message.partition.id, key, producer, counter, owner, message.lease.epoch)
        if not await sink.effect(effect, origin):
            raise StaleEffect("the sink knows a newer epoch")

    def granted(lease: Lease) -> None:
        say("granted", partition=lease.partition, epoch=lease.epoch)

    def revoked(lease: Lease) -> None:
        say("revoked", partition=lease.partition, epoch=lease.epoch)

    hooks = Hooks(
        on_partition_granted=granted,
        on_partition_revoked=revoked,
        on_state_changed=lambda old, new: say("state", state=new.value, leader=manager.is_leader),  # noqa: ARG005
    )
    manager = Manager(
        ControlConfig(**settings["control"]), connection, settings["partitions"], consumer=consumer, hooks=hooks
    )
    with stop_signals(signal.SIGTERM) as asked:
        await manager.start(120.0)
        say("live", worker=manager.worker_id)
        pages = metrics and asyncio.create_task(save_pages(metrics, Path(settings["metrics"])))
        await first_of(asked.wait(), manager.ended())
    if not asked.is_set():
        await manager.ended()  # a bug: end with its traceback instead of idling silently
    if pages:
        pages.cancel()
        await asyncio.gather(pages, return_exceptions=True)
    await manager.stop(returning=bool(settings["returning"]))
    await sink.close()
    await connection.close()
    say("stopped")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    configure_logging(ObserveSection(log_format=LogFormat.JSON, log_level=LogLevel(given["log_level"])))
    asyncio.run(work(given))
