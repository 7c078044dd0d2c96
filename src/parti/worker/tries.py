"""Attempts that failed, by message: the count goes with the message, so that `max_deliver` holds for all its owners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from typing import Final

from parti.model import Member, Tried

_TOLD: Final = 64  # messages of one partition; those further behind in the stream begin anew elsewhere
_KEPT: Final = 1024


class Tries:
    """The messages of one partition that failed, until it has passed them.

    Each process tells its own attempts only, and they are added up: two owners that tried the same message without
    knowing of each other are two attempts.
    """

    __slots__ = ("_others", "_own", "changed", "failed", "tell")

    def __init__(self) -> None:
        self.failed: dict[int, Tried] = {}
        """By sequence: what all owners together have spent. Read only."""
        self.changed: Callable[[], object] | None = None
        """Called when there is something new to tell those after us."""
        self.tell: Callable[[], Awaitable[object]] | None = None
        """Returns when those after us will know what is counted, or when that cannot be had."""
        self._own: dict[int, Tried] = {}
        self._others: dict[Member, dict[int, Tried]] = {}

    def __repr__(self) -> str:
        return f"<Tries {len(self.failed)}>"

    def count(self, sequence: int, *, timed_out: bool = False) -> int:
        """One more attempt; how many that makes."""
        if len(self._own) >= _KEPT and sequence not in self._own:
            del self._own[min(self._own)]
        known = self._own.get(sequence)
        self._own[sequence] = Tried(sequence, known.attempts + 1 if known is not None else 1, timed_out)
        self._tell_of(sequence)
        return self.failed[sequence].attempts

    def timed_out(self, sequence: int, timed_out: bool) -> int:
        """How an attempt that is counted already has ended; how many there are."""
        known = self._own.get(sequence)
        if known is None:  # given up, because there are too many
            return self.count(sequence, timed_out=timed_out)
        self._own[sequence] = known._replace(timed_out=timed_out)
        self._tell_of(sequence)
        return self.failed[sequence].attempts

    def take_back(self, sequence: int) -> None:
        """An attempt that was counted was not one, or was cut short through no fault of its own."""
        known = self._own.pop(sequence, None)
        if known is not None and known.attempts > 1:
            self._own[sequence] = known._replace(attempts=known.attempts - 1)
        self._tell_of(sequence)

    def done(self, sequence: int) -> None:
        self._own.pop(sequence, None)
        self.failed.pop(sequence, None)

    def resume(self, tried: Iterable[Tried]) -> None:
        """This process counted so many when it had the partition before."""
        _merge(self._own, tried)
        self._add_up(self._own)

    def heard(self, member: Member, tried: Iterable[Tried]) -> None:
        """Somebody else spent so many."""
        theirs = {each.sequence: each for each in tried}
        if theirs:
            _merge(self._others.setdefault(member, {}), theirs.values())
            self._add_up(theirs)

    def to_tell(self, cursor: int) -> tuple[Tried, ...]:
        """Our own that still count, the first in the stream first; what lies at or below the cursor is done."""
        self.passed(cursor)
        return tuple(self._own[sequence] for sequence in sorted(self._own)[:_TOLD])

    def passed(self, cursor: int) -> None:
        """Everything up to here is done, and never comes again."""
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
    """Who told more of the same process came later."""
    for each in tried:
        known = counted.get(each.sequence)
        if known is None or known.attempts < each.attempts:
            counted[each.sequence] = each
