"""Counts failed attempts per message, across owners, so that `max_deliver` holds for all owners together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Final

from parti.model import Member, Tried

_TOLD: Final = 64  # messages of one partition; for later ones in the stream the next owner counts from 0
_KEPT: Final = 1024


class Tries:
    """The failed messages of one partition, until its position has passed them.

    Each process reports only its own attempts, and they are summed: if two owners tried the same message without
    knowing of each other, that is two attempts.
    """

    __slots__ = ("_others", "_own", "changed", "failed", "tell")

    def __init__(self) -> None:
        self.failed: dict[int, Tried] = {}
        """By sequence: the attempts of all owners together. Read only."""
        self.changed: Callable[[], object] | None = None
        """Called when there is something new to report to later owners."""
        self.tell: Callable[[], Awaitable[object]] | None = None
        """Returns when later owners can read the counts, or when that is impossible."""
        self._own: dict[int, Tried] = {}
        self._others: dict[Member, dict[int, Tried]] = {}

    def __repr__(self) -> str:
        return f"<Tries {len(self.failed)}>"

    def count(self, sequence: int, *, timed_out: bool = False) -> int:
        """Count one more attempt; returns the new total."""
        if len(self._own) >= _KEPT and sequence not in self._own:
            del self._own[min(self._own)]
        known = self._own.get(sequence)
        self._own[sequence] = Tried(sequence, known.attempts + 1 if known is not None else 1, timed_out)
        self._tell_of(sequence)
        return self.failed[sequence].attempts

    def timed_out(self, sequence: int, timed_out: bool) -> int:
        """Record how an already counted attempt ended; returns the total."""
        known = self._own.get(sequence)
        if known is None:  # dropped, because there are too many
            return self.count(sequence, timed_out=timed_out)
        self._own[sequence] = known._replace(timed_out=timed_out)
        self._tell_of(sequence)
        return self.failed[sequence].attempts

    def take_back(self, sequence: int) -> None:
        """Undo a counted attempt that did not happen, or was cut short through no fault of its own."""
        known = self._own.pop(sequence, None)
        if known is not None and known.attempts > 1:
            self._own[sequence] = known._replace(attempts=known.attempts - 1)
        self._tell_of(sequence)

    def done(self, sequence: int) -> None:
        self._own.pop(sequence, None)
        self.failed.pop(sequence, None)

    def resume(self, tried: Iterable[Tried]) -> None:
        """Restore the attempts that this process counted when it owned the partition before."""
        _merge(self._own, tried)
        self._add_up(self._own)

    def heard(self, member: Member, tried: Iterable[Tried]) -> None:
        """Add the attempts that another member reported."""
        theirs = {each.sequence: each for each in tried}
        if theirs:
            _merge(self._others.setdefault(member, {}), theirs.values())
            self._add_up(theirs)

    def to_tell(self, cursor: int) -> tuple[Tried, ...]:
        """Our own attempts that still count, in stream order; messages at or below the cursor are done."""
        self.passed(cursor)
        return tuple(self._own[sequence] for sequence in sorted(self._own)[:_TOLD])

    def passed(self, cursor: int) -> None:
        """Everything up to here is done and is never delivered again."""
        for counted in (self.failed, self._own, *self._others.values()):
            for sequence in [each for each in counted if each <= cursor]:
                del counted[sequence]
        self._others = {member: theirs for member, theirs in self._others.items() if theirs}

    def _tell_of(self, sequence: int) -> None:
        self._add_up((sequence,))
        if self.changed is not None:
            self.changed()

    def _add_up(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            spent = [c[sequence] for c in chain((self._own,), self._others.values()) if sequence in c]
            if not spent:
                self.failed.pop(sequence, None)
                continue
            self.failed[sequence] = Tried(
                sequence,
                sum(each.attempts for each in spent),
                any(each.timed_out for each in spent),
                any(each.ended for each in spent),
            )


def _merge(counted: dict[int, Tried], tried: Iterable[Tried]) -> None:
    """Of two reports by the same process, the one with more attempts is newer."""
    for each in tried:
        known = counted.get(each.sequence)
        if known is None or known.attempts < each.attempts:
            counted[each.sequence] = each
