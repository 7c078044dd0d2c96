"""What every part of one worker is given: its settings, and how it looks at time, failures and its lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parti.backoff import Backoff
from parti.clock import Clock
from parti.config.worker import WorkerConfig
from parti.wire.api import JetStreamApi
from parti.worker.handler import Handler
from parti.worker.info import Fence
from parti.worker.recorder import Recorder


@dataclass(frozen=True, slots=True)
class ExpectedStream:
    """The stream that somebody else's positions speak of. Nothing is touched on another one: that is told instead."""

    created: str
    replaced: Callable[[str], None]
    """Told why."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """One worker's, in either layout."""

    js: JetStreamApi
    config: WorkerConfig
    handler: Handler
    recorder: Recorder
    fence: Fence
    backoff: Backoff
    clock: Clock
    namespace: str = ""
    on_blocked: Callable[[str], None] | None = None
    """Called from a thread when a handler blocks the event loop beyond `unhealthy_limit`."""
    expected_stream: ExpectedStream | None = None
    """None when positions are the worker's own."""
