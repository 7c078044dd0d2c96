"""Attempts that failed, by message: the count goes with the message, so that `max_deliver` holds for all its owners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from parti.model import Tried

_TOLD: Final = 64  # messages of one partition; those further behind in the stream begin anew elsewhere
_KEPT: Final = 1024


class Tries:
    """The messages of one partition that failed, until it has passed them.

    `changed` is called when there is something new to tell those after us.
    """

    __slots__ = ("changed", "failed")

    def __init__(self) -> None:
        self.failed: dict[int, Tried] = {}
        self.changed: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Tries {len(self.failed)}>"

    def count(self, sequence: int, attempts: int, timed_out: bool) -> None:
        """An attempt failed."""
        if len(self.failed) >= _KEPT and sequence not in self.failed:
            del self.failed[min(self.failed)]
        self.failed[sequence] = Tried(sequence, attempts, timed_out)
        if self.changed is not None:
            self.changed()

    def done(self, sequence: int) -> None:
        self.failed.pop(sequence, None)

    def heard(self, tried: Iterable[Tried]) -> None:
        """Others failed so often. Whoever has the higher count came later."""
        for each in tried:
            known = self.failed.get(each.sequence)
            if known is None or known.attempts < each.attempts:
                self.count(*each)

    def to_tell(self, cursor: int) -> tuple[Tried, ...]:
        """Those that still count, the first in the stream first; what lies at or below the cursor is done."""
        self.passed(cursor)
        return tuple(self.failed[sequence] for sequence in sorted(self.failed)[:_TOLD])

    def passed(self, cursor: int) -> None:
        """Everything up to here is done, and never comes again."""
        for sequence in [each for each in self.failed if each <= cursor]:
            del self.failed[sequence]
