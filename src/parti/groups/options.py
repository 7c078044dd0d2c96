"""Options for joining a group of any kind."""

from __future__ import annotations

from dataclasses import dataclass, field

from parti.clock import Clock
from parti.groups.errors import BadTemplate
from parti.groups.events import Listener
from parti.groups.in_flight import HandlerOptions
from parti.groups.template import ConsumerTemplate
from parti.observe.metrics import NO_METRICS, Metrics


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options common to every join, with defaults that suit most."""

    template: ConsumerTemplate = field(default_factory=ConsumerTemplate)
    handlers: HandlerOptions = field(default_factory=HandlerOptions)
    on_event: Listener | None = None
    """Called for every event: partitions gained and lost, pinned and unpinned, problems and recoveries."""
    drain_timeout: float = 30.0  # seconds; longer than most handlers, short enough for a waiting operator
    """How long a planned membership change, a deletion of the group or a lost pin waits for running handlers; then they
    are cancelled, and their messages handed back. `stop()` has its own limit."""
    metrics: Metrics = NO_METRICS
    clock: Clock | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.drain_timeout < 1e9:
            raise BadTemplate(f"drain_timeout is {self.drain_timeout}: use seconds, 0 or more")
