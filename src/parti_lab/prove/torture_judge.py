"""The judge of a torture scenario, from published messages, effects and the dead-letter stream. Pure.

Besides lost, reordered, stale and doubly owned it counts repeats that no fault explains: a repeat is explained only
if a fault that may cause repeats hit the first effect's owner (or all owners) at about the time of that effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

NEVER: Final = float("inf")
MAY_BE_BURIED: Final = ("reject", "poison")
_EXAMPLES: Final = 12


@dataclass(frozen=True, slots=True)
class Posted:
    """A message that the server acknowledged."""

    unit: str
    """The unit of order: its partition, or its key within the partition."""
    counter: int
    partition: str
    generation: int
    """The generation of the stream: a recreated stream counts from 1 again."""
    sequence: int
    fate: str
    at: float

    @property
    def value(self) -> str:
        return f"{self.unit}#{self.counter}"

    def __str__(self) -> str:
        return f"{self.value} (seq {self.sequence} of {self.partition}{', ' + self.fate if self.fate else ''})"


@dataclass(frozen=True, slots=True)
class Happened:
    """One effect, as the sink accepted it."""

    at: float
    owner: str
    """`pid-<n>`, or `pid-<n>.<life>` for a worker that returned in the same process."""
    epoch: int
    began: float
    sequence: int
    attempt: int

    def __str__(self) -> str:
        return f"by {self.owner}@{self.epoch} at {self.at:.2f}"


@dataclass(slots=True)
class Disturbance:
    """A fault as it really happened: when, to whom (empty: to all), and whether it may repeat what was in flight."""

    kind: str
    start: float
    owner: str
    explains: bool
    end: float = NEVER
    ends_leases: bool = False
    """It does not explain a repeat by itself, but explains a lease that ended early."""
    lease: bool = False
    """A lease that ended early; from `start` to `end` it was not renewed."""

    def ended(self, lease: Disturbance) -> bool:
        """Whether this is why that lease ended early."""
        ttl = lease.end - lease.start
        hit = self.ends_leases and self.owner in ("", lease.owner)
        return hit and self.start <= lease.end and lease.end - 2 * ttl <= self.end

    def covers(self, first: Happened, again: Happened, before: float, after: float) -> bool:
        hit = self.explains and self.owner in ("", first.owner.partition(".")[0])
        return hit and self.start - before <= first.at <= self.end + after and self.start - before <= again.at

    def __str__(self) -> str:
        return f"{self.kind} {self.owner or 'all'} {self.start:.2f}-{self.end:.2f}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Counts of violations, and a few of each as text."""

    messages: int
    effects: int
    lost: int
    lost_gone: int
    """Lost messages that are no longer in the stream."""
    inversions: int
    stale_started: int
    """Handlers started by an owner after its successor's first effect."""
    stale_refused: int
    """All effects that the checking sink refused; an effect in flight when its process froze is no violation."""
    two_owners: int
    repeats: int
    unexplained: int
    letters: int
    letters_unexpected: int
    examples: dict[str, tuple[str, ...]]


@dataclass
class TortureLedger:
    """The history of one namespace's work on the stream. All times are from one monotonic clock."""

    posted: dict[str, Posted] = field(default_factory=dict)
    effects: dict[str, list[Happened]] = field(default_factory=dict)
    letters: dict[str, str] = field(default_factory=dict)
    disturbances: list[Disturbance] = field(default_factory=list)
    excused: set[str] = field(default_factory=set)
    """Values that no client could handle: their stream was deleted."""
    done: set[int] = field(default_factory=set)
    """Sequences of this generation that had an effect or a dead letter."""
    generation: int = 0
    times: dict[str, list[float]] = field(default_factory=dict)
    """Partition -> times of its effects, ascending."""
    _highest: dict[str, int] = field(default_factory=dict)
    _open: dict[str, dict[int, str]] = field(default_factory=dict)
    _owners: dict[tuple[str, int], str] = field(default_factory=dict)
    _newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _examples: dict[str, list[str]] = field(default_factory=dict)

    def post(self, posted: Posted) -> None:
        """Record an acknowledged publish; the effect may have come before the acknowledgement."""
        self.posted[posted.value] = posted
        if posted.value not in self.effects and posted.value not in self.letters:
            self._open.setdefault(posted.partition, {})[posted.sequence] = posted.value

    def happen(self, partition: str, unit: str, counter: int, effect: Happened) -> bool:
        """Record an effect; False if the sink must refuse it as stale."""
        value = f"{unit}#{counter}"
        newest, since = self._newest.get(partition, (effect.epoch, effect.at))
        if effect.epoch < newest:
            self._count("stale_refused", f"{value} {effect}, newest {newest}")
            if effect.began > since:
                self._count("stale_started", f"{value} {effect}, {effect.began - since:.3f} s after epoch {newest}")
            return False
        if effect.epoch > newest:
            since = effect.at
        self._newest[partition] = (effect.epoch, since)
        owner = self._owners.setdefault((partition, effect.epoch), effect.owner)
        if owner != effect.owner:
            self._count("two_owners", f"{value} in {partition} {effect}, before {owner}")
        seen = self.effects.setdefault(value, [])
        if not seen:
            if counter < self._highest.get(unit, -1):
                later = f"{unit}#{self._highest[unit]}"
                words = f"{value} {effect} (seq {effect.sequence}, attempt {effect.attempt}, began {effect.began:.2f})"
                first = self.effects[later][0]
                self._count("inversions", f"{words}, after {later} {first} (seq {first.sequence})")
            self._highest[unit] = max(counter, self._highest.get(unit, -1))
        seen.append(effect)
        self.times.setdefault(partition, []).append(effect.at)
        posted = self.posted.get(value)
        if posted is None or posted.generation == self.generation:
            self._close(partition, effect.sequence)
        return True

    def letter(self, value: str, reason: str) -> None:
        """Record a letter of the dead-letter stream."""
        if value in self.letters:
            return
        self.letters[value] = reason
        posted = self.posted.get(value)
        if posted is not None and posted.generation == self.generation:
            self._close(posted.partition, posted.sequence)

    def lettered(self, sequence: int) -> None:
        """Record the letter of a message whose publish is not acknowledged yet."""
        self.done.add(sequence)

    def outstanding(self) -> int:
        """Messages without an effect or a letter."""
        return sum(map(len, self._open.values()))

    def lowest_open(self, partition: str) -> tuple[int, str] | None:
        """The first message of a partition without an effect or letter: no position may be at or above it."""
        return min(self._open.get(partition, {}).items(), default=None)

    def made_anew(self) -> None:
        """Record that the stream was deleted, together with its unhandled messages."""
        for values in self._open.values():
            self.excused.update(values.values())
        self._open.clear()
        self.done.clear()
        self.generation += 1

    def disturb(self, kind: str, at: float, owner: str, *, explains: bool) -> Disturbance:
        found = Disturbance(kind, at, owner, explains)
        self.disturbances.append(found)
        return found

    def judge(self, present: Collection[int], *, before: float, after: float) -> Judgement:
        """Judge the whole run; `present` are the sequences still in the stream."""
        lost = [p for v, p in self.posted.items() if not self._had(v)]
        gone = [p for p in lost if p.generation != self.generation or p.sequence not in present]
        repeats = unexplained = 0
        words: list[str] = []
        # Only now: a slow server is known when it answers at last, and the lease ended before.
        for lease in (d for d in self.disturbances if d.lease):
            lease.explains = any(cause.ended(lease) for cause in self.disturbances)
        for value, effects in self.effects.items():
            for again in effects[1:]:
                repeats += 1
                if not any(d.covers(effects[0], again, before, after) for d in self.disturbances):
                    unexplained += 1
                    words.append(f"{value} {effects[0]}, again {again}")
        odd = [v for v in self.letters if v in self.posted and not self.posted[v].fate.startswith(MAY_BE_BURIED)]
        examples = {
            **{name: tuple(found) for name, found in self._examples.items()},
            **_some("lost_gone", map(str, gone)),
            **_some("lost_waiting", (str(p) for p in lost if p not in gone)),
            **_some("unexplained", words),
            **_some("letters_unexpected", (f"{v}: {self.letters[v]}" for v in odd)),
        }
        counts = {name: self._counts.get(name, 0) for name in _COUNTED}
        return Judgement(
            messages=len(self.posted),
            effects=sum(map(len, self.effects.values())),
            lost=len(lost),
            lost_gone=len(gone),
            repeats=repeats,
            unexplained=unexplained,
            letters=len(self.letters),
            letters_unexpected=len(odd),
            examples=examples,
            **counts,
        )

    def _had(self, value: str) -> bool:
        return value in self.effects or value in self.letters or value in self.excused

    def _close(self, partition: str, sequence: int) -> None:
        self.done.add(sequence)
        self._open.get(partition, {}).pop(sequence, None)

    def _count(self, name: str, words: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1
        found = self._examples.setdefault(name, [])
        if len(found) < _EXAMPLES:
            found.append(words)


_COUNTED: Final = ("inversions", "stale_started", "stale_refused", "two_owners")


def _some(name: str, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    found = tuple(word for word, _ in zip(words, range(_EXAMPLES), strict=False))
    return {name: found} if found else {}
