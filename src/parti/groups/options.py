"""How an instance joins, whatever the kind of its group."""

from __future__ import annotations

from dataclasses import dataclass, field

from parti.clock import Clock
from parti.groups.events import Listener
from parti.groups.template import ConsumerTemplate
from parti.groups.work import HandlerOptions
from parti.observe.metrics import NO_METRICS, Metrics


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """What every join has in common, with defaults that fit most."""

    template: ConsumerTemplate = field(default_factory=ConsumerTemplate)
    handlers: HandlerOptions = field(default_factory=HandlerOptions)
    on_event: Listener | None = None
    """Told of every event: partitions gained and lost, pinned and unpinned, troubles and their end."""
    metrics: Metrics = NO_METRICS
    clock: Clock | None = None
