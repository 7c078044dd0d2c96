"""Order and ownership: reads the effects of some partitions in the order they took effect, and judges them in one pass.

An inversion is the first effect of a message below the highest message of its key that took effect before. A repeat
counts as a repeat, never as an inversion (a lag window counts both, docs/evidence/pipeline.md#p11). Memory is bounded
by one bit per message and by the numbers of keys and partitions, whatever their skew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from parti.audit.effects import NOWHERE
from parti.audit.measures import Spread, Tempo
from parti.audit.presence import EXAMPLES, Ints, SeenSequences

_RUNS: Final = 64  # runs of an owner kept for the ownership chart of one partition
_EPOCHS: Final = 16  # owners remembered per partition; older epochs are stale anyway
_BIG: Final = 1 << 45  # larger than any sequence


class Run(msgspec.Struct, array_like=True):
    """Consecutive effects of one owner in one epoch of a partition."""

    epoch: int
    owner: int
    first: int
    last: int
    count: int


class Course(msgspec.Struct):
    """The history of one partition."""

    partition: int
    effects: int = 0
    key_inversions: int = 0
    inversions: int = 0
    two_owners: int = 0
    stale: int = 0
    latency_sum: int = 0
    latency_max: int = 0
    runs: list[Run] = msgspec.field(default_factory=list)
    newest: int = 0
    owners: dict[int, int] = msgspec.field(default_factory=dict)


class Judged(msgspec.Struct):
    """The findings of one task."""

    courses: list[Course] = msgspec.field(default_factory=list)
    latency: Spread = msgspec.field(default_factory=Spread)
    tempo: Tempo = msgspec.field(default_factory=Tempo)
    examples: dict[str, list[tuple[int, int]]] = msgspec.field(default_factory=dict)
    """Kind of fault -> (time, sequence)."""

    def add(self, other: Judged) -> None:
        self.courses += other.courses
        self.latency.add(other.latency)
        self.tempo.add(other.tempo)
        for kind, found in other.examples.items():
            self.examples[kind] = sorted(self.examples.get(kind, []) + found)[:EXAMPLES]


class Highest:
    """The highest value of each group so far."""

    def __init__(self) -> None:
        self._groups: Ints = np.empty(0, dtype=np.int64)
        self._values: Ints = np.empty(0, dtype=np.int64)

    def before(self, groups: Ints, values: Ints) -> Ints:
        """For each row the highest value of its group in all earlier rows, or -1; then adds these rows."""
        if not len(groups):
            return np.empty(0, dtype=np.int64)
        order = np.argsort(groups, kind="stable")
        ordered, sequence = groups[order], values[order]
        starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        segment = np.cumsum(starts) - 1
        names = ordered[starts]
        known, at, hit = self._find(names)
        # One running maximum over all groups: an offset puts each group above the previous one.
        running = np.maximum.accumulate(segment * _BIG + sequence) - segment * _BIG
        previous = np.concatenate(([-1], running[:-1]))
        previous[starts] = -1
        found = np.empty(len(groups), dtype=np.int64)
        found[order] = np.maximum(previous, known[segment])
        ends = np.concatenate((np.flatnonzero(starts)[1:] - 1, [len(order) - 1]))
        self._store(names, np.maximum(running[ends], known), at, hit)
        return found

    def _find(self, names: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        at = np.searchsorted(self._groups, names)
        if not len(self._groups):
            return np.full(len(names), -1), at, np.zeros(len(names), dtype=bool)
        inside = np.minimum(at, len(self._groups) - 1)
        hit = self._groups[inside] == names
        return np.where(hit, self._values[inside], -1), at, hit

    def _store(self, names: Ints, values: Ints, at: Ints, hit: npt.NDArray[np.bool_]) -> None:
        self._values[at[hit]] = values[hit]
        if not hit.all():
            self._groups = np.insert(self._groups, at[~hit], names[~hit])
            self._values = np.insert(self._values, at[~hit], values[~hit])


class Judge:
    """Takes effects in order, and returns its findings at the end."""

    def __init__(self) -> None:
        self._seen = SeenSequences()
        self._keys = Highest()
        self._partitions = Highest()
        self._courses: dict[int, Course] = {}
        self.found = Judged()

    def feed(self, columns: dict[str, Ints]) -> None:
        sequence, partition = columns["sequence"], columns["partition"]
        first = self._seen.add_first(sequence)
        of_key = np.zeros(len(first), dtype=bool)
        of_partition = np.zeros(len(first), dtype=bool)
        values = sequence[first]
        of_key[first] = values < self._keys.before(columns["key"][first], values)
        of_partition[first] = values < self._partitions.before(partition[first], values)
        of_partition &= partition != NOWHERE
        self.found.latency.feed(columns["latency"][first])
        self.found.tempo.feed(columns["finished"][first])
        faults = {"key_inversions": of_key, "inversions": of_partition}
        for kind, mask in {"duplicated": ~first, **faults}.items():
            self._note(kind, columns, np.flatnonzero(mask))
        self._follow(columns, faults)

    def finish(self) -> Judged:
        self.found.courses = list(self._courses.values())
        for course in self.found.courses:
            course.owners = {}
        return self.found

    def _follow(self, columns: dict[str, Ints], faults: dict[str, npt.NDArray[np.bool_]]) -> None:
        """Follow each partition's owners, one step per run of effects of the same owner."""
        partition, epoch, owner = columns["partition"], columns["epoch"], columns["owner"]
        order = np.argsort(partition, kind="stable")
        changed = np.zeros(len(order), dtype=bool)
        for column in (partition, epoch, owner):
            ordered = column[order]
            changed[1:] |= ordered[1:] != ordered[:-1]
        changed[0] = True
        starts = np.flatnonzero(changed)
        sums = {kind: np.add.reduceat(mask[order].astype(np.int64), starts) for kind, mask in faults.items()}
        latency = np.maximum(columns["latency"][order], 0)
        finished = columns["finished"][order]
        at = order[starts]
        facts = zip(
            partition[at].tolist(),
            epoch[at].tolist(),
            owner[at].tolist(),
            np.diff(starts, append=len(order)).tolist(),
            np.minimum.reduceat(finished, starts).tolist(),
            np.maximum.reduceat(finished, starts).tolist(),
            np.add.reduceat(latency, starts).tolist(),
            np.maximum.reduceat(latency, starts).tolist(),
            sums["key_inversions"].tolist(),
            sums["inversions"].tolist(),
            starts.tolist(),
            strict=True,
        )
        for name, of, by, count, begin, end, total, most, in_key, inverted, start in facts:
            course = self._courses.get(name)
            if course is None:
                course = self._courses[name] = Course(partition=name)
            course.effects += count
            course.latency_sum += total
            course.latency_max = max(course.latency_max, most)
            course.key_inversions += in_key
            course.inversions += inverted
            for kind in _owned(course, Run(of, by, begin, end, count)):
                self._note(kind, columns, order[start : start + min(count, EXAMPLES)])

    def _note(self, kind: str, columns: dict[str, Ints], where: Ints) -> None:
        known = self.found.examples.setdefault(kind, [])
        for index in where[: EXAMPLES - len(known)].tolist():
            known.append((int(columns["at"][index]), int(columns["sequence"][index])))


def _owned(course: Course, run: Run) -> Iterator[str]:
    """Add a run to the partition's history; returns the names of the promises that its effects broke."""
    last = course.runs[-1] if course.runs else None
    if last is not None and (last.epoch, last.owner) == (run.epoch, run.owner):
        last.first, last.last = min(last.first, run.first), max(last.last, run.last)
        last.count += run.count
    else:
        course.runs.append(run)
        del course.runs[:-_RUNS]
    if run.epoch <= 0:  # no leases in use: a restarted consumer continues in the same epoch
        return
    owner = course.owners.setdefault(run.epoch, run.owner)
    if len(course.owners) > _EPOCHS:
        del course.owners[min(course.owners)]
    if owner != run.owner:
        course.two_owners += run.count
        yield "two_owners"
    if run.epoch < course.newest:
        course.stale += run.count
        yield "stale"
    course.newest = max(course.newest, run.epoch)
