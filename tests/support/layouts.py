"""A handler in a fleet of either layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parti.wire.api import JetStreamApi
from parti.worker import Message, WorkerConfig, WorkerConsumer
from support.fleet import Fleet

LAYOUTS = ["per-worker", "per-partition"]


FAST: dict[str, Any] = {"retry_delays": ("10ms",), "max_deliver": 50}


async def consumer_of(fleet: Fleet, handler: Callable[[Message], Any], **changes: Any) -> WorkerConsumer:
    settings: dict[str, Any] = {
        "stream": fleet.stream,
        "subject_template": f"{fleet.stream}.{{partition}}",
        "pull_timeout": 1.0,
        "idle_heartbeat": 0.25,
        "min_update_interval": 0.05,
    }
    js = JetStreamApi(await fleet.connection())
    return WorkerConsumer(js, WorkerConfig(**(settings | changes)), handler, metrics=fleet.metrics)
