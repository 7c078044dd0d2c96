"""What every component of one worker shares: settings, clock, failure recording and the fence."""

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
    """The stream that the manager's positions belong to. On another one nothing is changed: `replaced` is called."""

    created: str
    replaced: Callable[[str], None]
    """Called with the reason."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """The shared objects of one worker, in either layout."""

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
    """None when the worker keeps its own positions."""
