"""The result of an audit: counts with a few examples, distributions, and whether each promise held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from parti.audit.measures import Spread, Tempo

FINDINGS: Final = {
    "lost": "lost",
    "unknown": "effects of unknown messages",
    "duplicated": "duplicated",
    "out_of_order_key": "out of order in a key",
    "out_of_order_partition": "out of order in a partition",
    "two_owners": "two owners in an epoch",
    "stale_owner": "stale owner after a later epoch",
}
"""Every kind of fault, with its text for the report."""


class Finding(msgspec.Struct, frozen=True):
    """One kind of fault."""

    name: str
    count: int
    allowed: int | None
    """The number that does not break the promise; None: nothing was promised."""
    examples: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return FINDINGS[self.name]

    @property
    def ok(self) -> bool:
        return self.allowed is None or self.count <= self.allowed


class Percentiles(msgspec.Struct, frozen=True):
    """Seconds; percentiles are accurate to 3 %, the largest value is exact."""

    p50: float
    p95: float
    p99: float
    largest: float

    @classmethod
    def of(cls, spread: Spread) -> Percentiles | None:
        if not spread.total:
            return None
        p50, p95, p99 = (round(spread.percentile(share), 6) for share in (0.5, 0.95, 0.99))
        return cls(p50, p95, p99, round(spread.largest / 1e6, 6))


class Lag(msgspec.Struct, frozen=True):
    """Messages published and not done, over the time from the first publish to the last effect."""

    p50: float
    p95: float
    largest: float


class Slo(msgspec.Struct, frozen=True):
    """One objective of the SLO table; `met` is None when there was no measurement."""

    name: str
    target: str
    value: str
    met: bool | None


class Parity(msgspec.Struct, frozen=True):
    """Differences between two consumers, or two runs of one, on the same messages."""

    only_first: int
    only_second: int
    latency_p99_ratio: float | None
    """Second over first."""
    examples: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not (self.only_first or self.only_second)


@dataclass(frozen=True, slots=True)
class Turn:
    """One period in which an owner held a partition."""

    epoch: int
    owner: str
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class PartitionCourse:
    """One partition's data for the report's charts; times in microseconds."""

    name: str
    effects: int
    latency_mean: float
    latency_max: float
    faults: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Details:
    """Data that only the HTML report shows."""

    latency: Spread = field(default_factory=Spread)
    published: Tempo = field(default_factory=Tempo)
    done: Tempo = field(default_factory=Tempo)
    courses: tuple[PartitionCourse, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """One consumer's effects, judged."""

    label: str
    effects: int
    done: int
    """Messages with at least one effect."""
    dead_lettered: int
    waiting: int
    """Messages that are parked, or failed and not retried yet: not done, not lost."""
    redelivery_ratio: float
    partitions: int
    handoffs: int
    findings: tuple[Finding, ...]
    latency: Percentiles | None
    handler: Percentiles | None
    lag: Lag | None
    slos: tuple[Slo, ...]
    details: Details = field(default_factory=Details)

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def count(self, name: str) -> int:
        """The number of faults of this kind."""
        return next(finding.count for finding in self.findings if finding.name == name)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "effects": self.label,
            "ok": self.ok,
            "rows": self.effects,
            "done": self.done,
            "dead_lettered": self.dead_lettered,
            "waiting": self.waiting,
            "redelivery_ratio": self.redelivery_ratio,
            "partitions": self.partitions,
            "handoffs": self.handoffs,
            "findings": {
                f.name: {"count": f.count, "allowed": f.allowed, "ok": f.ok, "examples": list(f.examples)}
                for f in self.findings
            },
            "latency_s": None if self.latency is None else msgspec.structs.asdict(self.latency),
            "handler_s": None if self.handler is None else msgspec.structs.asdict(self.handler),
            "lag_messages": None if self.lag is None else msgspec.structs.asdict(self.lag),
            "slos": [msgspec.structs.asdict(slo) for slo in self.slos],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict over a range of a stream."""

    stream: str
    first: int
    last: int
    published: int
    sides: tuple[Side, ...]
    """One, or two for a comparison."""
    parity: Parity | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Every promise held; objectives (SLOs) are shown beside it and are not promises."""
        return all(side.ok for side in self.sides) and (self.parity is None or self.parity.ok)

    @property
    def slos_met(self) -> bool:
        return all(slo.met is not False for side in self.sides for slo in side.slos)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        parity = None
        if self.parity is not None:
            parity = msgspec.structs.asdict(self.parity) | {"ok": self.parity.ok}
        return {
            "stream": self.stream,
            "first": self.first,
            "last": self.last,
            "published": self.published,
            "ok": self.ok,
            "sides": [side.figures() for side in self.sides],
            "parity": parity,
            "seconds": self.seconds,
        }
