"""How far the next batch may go: pure decisions from the stream's state and the user's limits."""

from __future__ import annotations

from dataclasses import dataclass

from parti.spark.source.options import SourceOptions
from parti.wire.ranges import StreamState


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits on one batch."""

    max_offsets: int | None
    max_bytes: int | None
    min_offsets: int | None
    max_delay: float

    @classmethod
    def of(cls, options: SourceOptions) -> Admission:
        return cls(options.max_offsets, options.max_bytes, options.min_offsets, options.max_delay)

    def end(self, state: StreamState, after: int, target: int, begins: int = 0) -> int:
        """The last sequence of a batch that starts after `after` and may go to `target` at most.

        Sequences are counted, not rows: filters and deletions make fewer rows. Messages removed from the front of the
        stream do not count, nor those deleted before `begins`, the first message: a gap of a million would be a
        thousand empty batches.
        """
        first = min(max(after, state.first_seq - 1, begins - 1), target)
        allowed = target - first
        if self.max_offsets is not None:
            allowed = min(allowed, self.max_offsets)
        if self.max_bytes is not None and state.messages:
            allowed = min(allowed, max(self.max_bytes * state.messages // max(state.bytes, 1), 1))
        return max(after, first + allowed)

    def too_few(self, state: StreamState, after: int, target: int, waited: float) -> bool:
        """Whether to hold the messages back for now, to wait for a larger batch."""
        if self.min_offsets is None or waited >= self.max_delay:
            return False
        return target - max(after, state.first_seq - 1) < self.min_offsets
