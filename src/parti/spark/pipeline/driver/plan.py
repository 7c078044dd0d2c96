"""Which of the two ordered plans is cheaper, and why: decided from the handler, the cores and measurements. Pure.

- fused: one task reads the batch in stream order and runs the handler itself. Nothing is moved, nothing is sorted.
- shuffled: tasks read ranges; messages go to tasks by partition, in stream order, and are handled there in parallel.

A third way, handling rows in the tasks that read the ranges, is faster than both and wrong: it broke the order of
30,900 of 300,000 messages (docs/evidence/pipeline.md#p5).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

READ_US: Final = 1.2
"""Microseconds per message in one task that reads and parses it (docs/evidence/pipeline.md#p2)."""
SHUFFLE_US: Final = 2.3
"""Microseconds per message for reading in ranges, shuffle, sort and the second transfer to Python, on two cores."""
INLINE_US: Final = 0.8
"""Microseconds of a plain handler that does next to nothing, with its outcome row."""
LANE_US: Final = 8.0
"""Processor time of an async handler that waits once, with its lane."""


class PlanKind(StrEnum):
    """How a batch is run."""

    FUSED = "fused"
    SHUFFLED = "shuffled"


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What the choice depends on."""

    cores: int
    handler: Literal["plain", "async", "batch"]
    parking: bool = False
    measured_us: float | None = None
    """Processor microseconds per message in the handler, from earlier batches."""
    wanted: Literal["auto", "fused", "shuffled"] = "auto"

    @property
    def handler_us(self) -> float:
        if self.handler == "async":
            return LANE_US
        return INLINE_US + (self.measured_us or 0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """The choice, with the estimates behind it."""

    kind: PlanKind
    reason: str
    tasks: int
    """Tasks that run the handler in parallel."""
    fused_us: float
    shuffled_us: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def choose(facts: PlanFacts) -> Plan:
    """The cheaper plan, unless the user or the policy decides."""
    fused = READ_US + facts.handler_us
    shuffled = SHUFFLE_US + facts.handler_us / max(facts.cores, 1)

    def made(kind: PlanKind, reason: str) -> Plan:
        return Plan(kind, reason, 1 if kind is PlanKind.FUSED else facts.cores, round(fused, 2), round(shuffled, 2))

    if facts.parking:
        return made(PlanKind.SHUFFLED, "parked messages join the batch, which only the shuffled plan can do")
    if facts.wanted != "auto":
        return made(PlanKind(facts.wanted), "asked for")
    origin = "measured" if facts.measured_us is not None and facts.handler != "async" else "assumed"
    kind = PlanKind.FUSED if fused <= shuffled else PlanKind.SHUFFLED
    return made(kind, f"the cheaper one for a handler of {facts.handler_us:.1f} us ({facts.handler}, {origin})")
