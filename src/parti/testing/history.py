"""The judge of every proof. It uses only what was published and what took effect.

Feed it each publish that the server acknowledged and each effect that the sink accepted, in the sink's order. `verdict`
counts what was lost, duplicated, out of order per key, done by two owners within one epoch, or accepted from a stale
owner. Memory is bounded by the number of keys, producers and partitions, not of messages: values are `(producer,
counter)`, the counters of a key only grow, and runs of them are stored as intervals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_EXAMPLES: Final = 10  # of each kind of violation: enough to investigate, few enough to print
_EPOCHS: Final = 16  # remembered per partition; older ones are stale anyway


class Intervals:
    """A set of integers, compact when they come in runs."""

    __slots__ = ("_ends", "_starts", "count")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # inclusive
        self.count = 0

    def add(self, value: int) -> bool:
        """Add the value; True when it is new."""
        at = bisect_right(self._starts, value) - 1
        if at >= 0 and value <= self._ends[at]:
            return False
        self.count += 1
        joins_left = at >= 0 and self._ends[at] == value - 1
        joins_right = at + 1 < len(self._starts) and self._starts[at + 1] == value + 1
        if joins_left and joins_right:
            self._ends[at] = self._ends.pop(at + 1)
            self._starts.pop(at + 1)
        elif joins_left:
            self._ends[at] = value
        elif joins_right:
            self._starts[at + 1] = value
        else:
            self._starts.insert(at + 1, value)
            self._ends.insert(at + 1, value)
        return True

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._starts, value) - 1
        return at >= 0 and value <= self._ends[at]

    def missing_from(self, other: Intervals) -> Iterator[int]:
        """Values of this set that `other` lacks, ascending; runs that both have cost nothing."""
        for start, end in zip(self._starts, self._ends, strict=True):
            at = max(0, bisect_right(other._starts, start) - 1)
            value = start
            while value <= end:
                while at < len(other._starts) and other._ends[at] < value:
                    at += 1
                until = other._starts[at] if at < len(other._starts) else end + 1
                yield from range(value, min(until, end + 1))
                value = other._ends[at] + 1 if at < len(other._starts) else end + 1

    @property
    def runs(self) -> int:
        return len(self._starts)


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect that the sink accepted."""

    partition: str
    key: str
    producer: str
    counter: int
    owner: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.producer}-{self.counter} of {self.key} by {self.owner} in {self.partition}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class HistoryVerdict:
    """Counts of each violation, and a few examples of each as text."""

    published: int
    effects: int
    lost: int
    duplicated: int
    inversions: int
    two_owners: int
    stale_accepted: int
    phantom: int
    """Effects of values that were never published."""
    examples: dict[str, tuple[str, ...]]

    def ok(self, *, duplicates: int = 0) -> bool:
        """Whether every promise held; `duplicates` is the allowed number of repeats after crashes (at least once)."""
        broken = self.lost + self.inversions + self.two_owners + self.stale_accepted + self.phantom
        return broken == 0 and self.duplicated <= duplicates

    def __str__(self) -> str:
        counts = ", ".join(
            f"{name} {getattr(self, name)}"
            for name in ("lost", "duplicated", "inversions", "two_owners", "stale_accepted", "phantom")
        )
        return f"{self.effects} effects of {self.published} published: {counts}"


@dataclass(slots=True)
class _Lane:
    """One key of one producer."""

    published: Intervals = field(default_factory=Intervals)
    maybe: Intervals = field(default_factory=Intervals)
    done: Intervals = field(default_factory=Intervals)
    highest: int = -1
    last: int = -1
    epoch: int = -1


class History:
    """Collects a run and judges it. Feed effects in the order in which the sink accepted them."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._owners: dict[str, OrderedDict[int, str]] = {}
        self._newest: dict[str, int] = {}
        self._counts = dict.fromkeys(("duplicated", "inversions", "two_owners", "stale_accepted"), 0)
        self._examples: dict[str, list[str]] = {}
        self._effects = 0

    def published(self, key: str, producer: str, counter: int) -> None:
        """The server acknowledged this publish."""
        self._lane(key, producer).published.add(counter)

    def maybe_published(self, key: str, producer: str, counter: int) -> None:
        """The outcome of this publish is unknown: its effect may or may not come."""
        self._lane(key, producer).maybe.add(counter)

    def effect(self, effect: Effect) -> list[str]:
        """Record one effect; returns the names of the promises that it broke."""
        self._effects += 1
        broken = [*self._judge_owner(effect), *self._judge_order(effect)]
        for name in broken:
            self._note(name, str(effect))
        return broken

    @property
    def effects(self) -> int:
        """Effects fed so far, repeats included."""
        return self._effects

    def verdict(self) -> HistoryVerdict:
        """Judge everything fed so far; call it at the end, when everything has had time to arrive."""
        lost = phantom = published = 0
        for (key, producer), lane in self._lanes.items():
            published += lane.published.count
            for counter in lane.published.missing_from(lane.done):
                lost += 1
                self._example("lost", f"{producer}-{counter} of {key}")
            for counter in lane.done.missing_from(lane.published):
                if counter not in lane.maybe:
                    phantom += 1
                    self._example("phantom", f"{producer}-{counter} of {key}")
        return HistoryVerdict(
            published=published,
            effects=self._effects,
            lost=lost,
            phantom=phantom,
            examples={name: tuple(found) for name, found in self._examples.items()},
            **self._counts,
        )

    def _judge_owner(self, effect: Effect) -> Iterator[str]:
        owners = self._owners.setdefault(effect.partition, OrderedDict())
        owner = owners.setdefault(effect.epoch, effect.owner)
        while len(owners) > _EPOCHS:
            owners.popitem(last=False)
        if owner != effect.owner:
            yield "two_owners"
        newest = self._newest.get(effect.partition, effect.epoch)
        if effect.epoch < newest:
            yield "stale_accepted"
        self._newest[effect.partition] = max(newest, effect.epoch)

    def _judge_order(self, effect: Effect) -> Iterator[str]:
        lane = self._lane(effect.key, effect.producer)
        fresh = lane.done.add(effect.counter)
        if not fresh:
            yield "duplicated"
        # A new owner may repeat what was in flight, from an earlier point on. Within an epoch, or for a message never
        # done before, going backwards is an inversion.
        backwards = effect.counter < lane.highest if fresh else effect.counter < lane.last
        if backwards and (fresh or effect.epoch == lane.epoch):
            yield "inversions"
        lane.highest = max(lane.highest, effect.counter)
        lane.last, lane.epoch = effect.counter, effect.epoch

    def _lane(self, key: str, producer: str) -> _Lane:
        return self._lanes.setdefault((key, producer), _Lane())

    def _note(self, name: str, what: str) -> None:
        self._counts[name] += 1
        self._example(name, what)

    def _example(self, name: str, what: str) -> None:
        found = self._examples.setdefault(name, [])
        if len(found) < _EXAMPLES and what not in found:
            found.append(what)
