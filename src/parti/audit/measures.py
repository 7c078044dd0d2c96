"""Distributions and time series of constant size, independent of the number of messages; two can be added."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from parti.audit.presence import Ints

_PER_OCTAVE: Final = 32  # bins between a value and its double: a percentile is accurate to 1.1 %
_OCTAVES: Final = 44  # up to 2^44 us, half a year
_FINEST: Final = 100_000  # us: the narrowest bucket of a time series
_MOST: Final = 2_048  # buckets of a time series; above this number two are merged into one


class Spread(msgspec.Struct):
    """A distribution of microseconds in logarithmic bins."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    total: int = 0
    largest: int = 0

    def feed(self, micros: Ints) -> None:
        """Add values; negative values were not measured and are ignored."""
        values = micros[micros >= 0]
        if not len(values):
            return
        # +1 because zero has no logarithm; it only shifts values of about one microsecond, which do not matter.
        bins = (np.log2(values + 1.0) * _PER_OCTAVE).astype(np.int64)
        for place, count in enumerate(np.bincount(bins, minlength=1)):
            if count:
                self.counts[place] = self.counts.get(place, 0) + int(count)
        self.total += len(values)
        self.largest = max(self.largest, int(values.max()))

    def add(self, other: Spread) -> None:
        for place, count in other.counts.items():
            self.counts[place] = self.counts.get(place, 0) + count
        self.total += other.total
        self.largest = max(self.largest, other.largest)

    def percentile(self, share: float) -> float:
        """Seconds; 0 when nothing was measured."""
        wanted, seen = share * self.total, 0
        for place in sorted(self.counts):
            seen += self.counts[place]
            if seen >= wanted:
                return min(self._upper(place), self.largest) / 1e6
        return 0.0

    def share_below(self, seconds: float) -> float:
        """The share of values at or below this value."""
        below = sum(count for place, count in self.counts.items() if self._upper(place) <= seconds * 1e6 * 1.0001)
        return below / self.total if self.total else 0.0

    def bars(self) -> list[tuple[float, float, int]]:
        """(from, to, count) in seconds, four bars per octave, including empty ones in between."""
        if not self.counts:
            return []
        wide = _PER_OCTAVE // 4
        grouped: dict[int, int] = {}
        for place, count in self.counts.items():
            grouped[place // wide] = grouped.get(place // wide, 0) + count
        first, last = min(grouped), max(grouped)
        return [
            ((2 ** (n / 4) - 1) / 1e6, (2 ** ((n + 1) / 4) - 1) / 1e6, grouped.get(n, 0))
            for n in range(first, last + 1)
        ]

    @staticmethod
    def _upper(place: int) -> float:
        return float(2 ** (min(place + 1, _OCTAVES * _PER_OCTAVE) / _PER_OCTAVE) - 1)


class Tempo(msgspec.Struct):
    """Counts over time, in buckets that double in width when there are too many."""

    width: int = _FINEST
    counts: dict[int, int] = msgspec.field(default_factory=dict)

    def feed(self, micros: Ints) -> None:
        """Add times."""
        numbers, counts = np.unique(micros // self.width, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.counts[number] = self.counts.get(number, 0) + count
        while len(self.counts) > _MOST:
            self._widen()

    def add(self, other: Tempo) -> None:
        while self.width < other.width:
            self._widen()
        factor = self.width // other.width
        for number, count in other.counts.items():
            self.counts[number // factor] = self.counts.get(number // factor, 0) + count
        while len(self.counts) > _MOST:
            self._widen()

    def between(self, start: int, end: int, buckets: int) -> npt.NDArray[np.float64]:
        """Counts in a number of equal parts of [start, end) microseconds; a bucket counts where its middle lies."""
        made = np.zeros(buckets)
        for number, count in self.counts.items():
            at = int((number * self.width + self.width / 2 - start) / max(1, end - start) * buckets)
            made[min(max(at, 0), buckets - 1)] += count
        return made

    @property
    def span(self) -> tuple[int, int] | None:
        """From the start of the first bucket to the end of the last, in microseconds."""
        if not self.counts:
            return None
        return min(self.counts) * self.width, (max(self.counts) + 1) * self.width

    def _widen(self) -> None:
        self.width *= 2
        old, self.counts = self.counts, {}
        for number, count in old.items():
            self.counts[number // 2] = self.counts.get(number // 2, 0) + count
