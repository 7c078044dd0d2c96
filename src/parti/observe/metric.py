"""What one metric is: name, type, help, labels with all values they may take.

Labels are bounded: a label value must be one of those declared here, so the number of time series is known before the
first message. What is unbounded (subjects, worker ids, keys, error texts) belongs into logs, never into a label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from parti.errors import UsageError

MAX_SERIES: Final = 200
"""Series one metric may have (product of its label values): a page of /metrics stays readable and cheap to store."""


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


OTHER: Final = "other"
"""The label value of everything that came after the first ones."""


@dataclass(frozen=True, slots=True)
class FirstSeen:
    """Label values that only the data tells: the first `count` keep their name, all later ones become "other"."""

    count: int

    def __len__(self) -> int:
        return self.count + 1


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Malformed declarations are refused when the module is imported, not when a message arrives."""

    name: str
    kind: MetricKind
    help: str
    labels: Mapping[str, tuple[str, ...] | FirstSeen] = field(default_factory=dict)
    """Label name -> every value it may take, or how many."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in the unit that the name ends with."""

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
        """How many time series this metric can have at most."""
        return math.prod(len(values) for values in self.labels.values())

    def check(self, labels: dict[str, str]) -> None:
        """Refuse labels that were not declared: they would grow without bound."""
        if labels.keys() != self.labels.keys():
            raise UsageError(f"metric {self.name} has the labels {sorted(self.labels)}, not {sorted(labels)}")
        for name, value in labels.items():
            allowed = self.labels[name]
            if not isinstance(allowed, FirstSeen) and value not in allowed:
                raise UsageError(f"metric {self.name}: {name}={value!r} is not one of {', '.join(allowed)}")
