"""The progress of a range read: what was delivered, what belongs to the range, and which sequences are missing."""

from __future__ import annotations

import numpy as np

from parti.errors import DataLoss
from parti.wire.columns import Deliveries
from parti.wire.filters import SubjectFilter
from parti.wire.witness import Witness, gaps


class Cursor:
    """Every message at or below `position` was yielded in order, or does not match, or was not in the stream.

    It outlives the attempts of a read, so that a message is yielded once even if connections and consumers change: a
    consumer created on a lagging replica starts at that replica's end, which may be before the position.
    """

    def __init__(self, after: int, to: int, chosen: SubjectFilter, witness: Witness) -> None:
        self.position = max(after, 0)
        self.to = to
        self.chosen = chosen
        self.witness = witness
        self.withheld: int | None = None
        """A missing sequence that the leader holds: nothing after it may be yielded."""
        self.loss: DataLoss | None = None
        """The loss after the position; raised when everything before it was yielded."""

    def __repr__(self) -> str:
        return f"<Cursor {self.position} of {self.to}, {self.chosen}>"

    @property
    def done(self) -> bool:
        return self.position >= self.to

    def accept(self, deliveries: Deliveries, *, filtered: bool = False) -> Deliveries:
        """The part of an ordered batch that is new, in the range and wanted; moves the position past the whole batch.

        `filtered`: only some subjects were requested from the server.
        """
        if not len(deliveries) or self.withheld is not None or self.loss is not None:
            return deliveries.select(np.zeros(len(deliveries), dtype=bool))
        if deliveries.stream_seq[0] <= self.position:
            deliveries = deliveries.select(deliveries.stream_seq > self.position)
        if (stale := self.witness.stale(deliveries.stream_seq)) is not None:
            deliveries = deliveries.select(~stale)
        if not len(deliveries):
            return deliveries
        sequence = deliveries.stream_seq
        end = min(int(sequence[-1]), self.to)
        missed = gaps(sequence, self.position, self.to)
        if missed.size:
            try:
                self.withheld = self.witness.examine(missed, filtered=filtered)
                end = end if self.withheld is None else self.withheld - 1
            except DataLoss as loss:
                self.loss, end = loss, loss.first_missing - 1
        if end < sequence[-1] or (self.witness.open and self.witness.begins_behind >= sequence[0]):
            deliveries = deliveries.select((sequence <= end) & (sequence > self.witness.begins_behind))
        self.position = max(self.position, end)
        self.witness.open = self.witness.open and not len(deliveries)
        if self.chosen.matches_all or not len(deliveries):
            return deliveries
        return deliveries.select(self.chosen.mask(deliveries.subjects()))

    def resume(self) -> None:
        """Start another attempt at the position."""
        self.withheld = None

    def skip_to(self, position: int) -> None:
        """Advance to a position up to which the leader holds nothing; losses on the way are reported."""
        position = min(position, self.to)
        if position > self.position:
            self.witness.examine(np.array([[self.position + 1], [position]]), filtered=True)
            self.position = position

    def begin_at(self, first: int) -> None:
        """Advance to the stream's first sequence if it is after the position; losses are reported."""
        if first - 1 > self.position:
            self.witness.gone_at_start(self.position, self.to)
            self.position = min(first - 1, self.to)
