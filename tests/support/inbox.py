"""An inbox without a server: the shipped parts as the engine wires them, with the test's own lanes and connection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

from parti.backoff import Backoff
from parti.clock import SystemClock
from parti.config.worker import WorkerConfig
from parti.model import Lease, Partition
from parti.observe.metrics import NO_METRICS
from parti.worker.channel import Channel
from parti.worker.health import HealthTracker
from parti.worker.inbox import Inbox
from parti.worker.info import Unfenced
from parti.worker.lanes import LanePool, Runner
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.message import Message
from parti.worker.recorder import Recorder
from parti.worker.room import Room
from parti.worker.routing import Routes, SubjectTemplate
from parti.worker.runtime import Runtime


async def never(message: Message, runner: Runner) -> float | None:
    raise AssertionError(f"{runner} was given {message}")


@dataclass
class Bare:
    """The parts, and their shared state."""

    runtime: Runtime
    ledger: Ledger
    channel: Channel
    room: Room
    inbox: Inbox


def bare_runtime(config: WorkerConfig, **fields: Any) -> Runtime:
    """A runtime without a server."""
    given: dict[str, Any] = {
        "js": Mock(),
        "handler": print,
        "recorder": Recorder(NO_METRICS, HealthTracker()),
        "fence": Unfenced(),
    }
    return Runtime(config=config, **(given | {"backoff": Backoff(), "clock": SystemClock()} | fields))


def bare_inbox(config: WorkerConfig, partitions: Iterable[Partition] = (), pool: Any = None) -> Bare:
    """An inbox with these partitions, each under its first lease; without a `pool` nothing may be handled."""
    runtime, channel = bare_runtime(config), Channel()
    template, known = SubjectTemplate(config.subject_template), list(partitions)
    ledger = Ledger(Routes(template, ()), lane_per_key=config.lanes == "key")
    for partition in known:
        ledger.states[partition.id] = PartitionState(partition, Lease(partition.id, 1))
    ledger.assign(Routes(template, known))
    room = Room(runtime, ledger, channel)
    inbox = Inbox(runtime, ledger, channel, room, pool or LanePool(never, concurrency=config.concurrency))
    return Bare(runtime, ledger, channel, room, inbox)
