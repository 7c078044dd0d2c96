"""One metric: name, type, help, and labels with all their possible values.

Labels are bounded: a label value must be one of those declared here, so the number of time series is known before the
first message. Unbounded values (subjects, worker ids, keys, error texts) belong in logs, never in a label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from parti.errors import UsageError

MAX_SERIES: Final = 200
"""Maximum series of one metric (product of its label values): a page of /metrics stays readable and cheap to store."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OTHER: Final = "other"
"""The label value for all values after the first ones."""


@dataclass(frozen=True, slots=True)
class FirstSeen:
    """Label values known only from the data: the first `count` keep their name, all later ones become "other"."""

    count: int

    def __len__(self) -> int:
        return self.count + 1


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. A malformed declaration is refused when the module is imported, not when a message arrives."""

    name: str
    kind: MetricKind
    help: str
    labels: Mapping[str, tuple[str, ...] | FirstSeen] = field(default_factory=dict)
    """Label name -> all its possible values, or how many."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in the unit at the end of the metric's name."""

    def __post_init__(self) -> None:
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise UsageError(f"metric {self.name}: a histogram needs buckets, and nothing else takes them")
        if list(self.buckets) != sorted(set(self.buckets)):
            raise UsageError(f"metric {self.name}: buckets must rise")
        if (self.kind is MetricKind.COUNTER) != self.name.endswith("_total"):
            raise UsageError(f"metric {self.name}: a counter, and only a counter, ends with _total")
        if self.series > MAX_SERIES:
            raise UsageError(f"metric {self.name}: {self.series} series are more than {MAX_SERIES}; drop a label")

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def series(self) -> int:
        """The maximum number of time series of this metric."""
        return math.prod(len(values) for values in self.labels.values())

    def check(self, labels: dict[str, str]) -> None:
        """Refuse undeclared labels: they would grow without bound."""
        if labels.keys() != self.labels.keys():
            raise UsageError(f"metric {self.name} has the labels {sorted(self.labels)}, not {sorted(labels)}")
        for name, value in labels.items():
            allowed = self.labels[name]
            if not isinstance(allowed, FirstSeen) and value not in allowed:
                raise UsageError(f"metric {self.name}: {name}={value!r} is not one of {', '.join(allowed)}")
