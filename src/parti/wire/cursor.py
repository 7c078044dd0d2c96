"""Where a range read stands: what was delivered, what belongs to the range, and which sequences did not come."""

from __future__ import annotations

import numpy as np

from parti.errors import DataLoss
from parti.wire.columns import Deliveries
from parti.wire.filters import SubjectFilter
from parti.wire.witness import Witness, gaps


class Cursor:
    """Everything at or below `position` was handed on in order, or does not match, or was not in the stream.

    It outlives the attempts of a read, so that a message is handed on once although connections and consumers come
    and go: a consumer created on a lagging replica starts at that replica's end, which may lie before the position.
    """

    def __init__(self, after: int, to: int, chosen: SubjectFilter, witness: Witness) -> None:
        self.position = max(after, 0)
        self.to = to
        self.chosen = chosen
        self.witness = witness
        self.withheld: int | None = None
        """A sequence that the leader holds and that did not come: nothing behind it may be handed on."""
        self.loss: DataLoss | None = None
        """What is gone behind the position; to be raised when all before it was handed on."""

    def __repr__(self) -> str:
        return f"<Cursor {self.position} of {self.to}, {self.chosen}>"

    @property
    def done(self) -> bool:
        return self.position >= self.to

    def accept(self, deliveries: Deliveries, *, filtered: bool = False) -> Deliveries:
        """The part of a batch, given in order, that is new, in the range and wanted; moves the position past it all.

        `filtered`: the server was asked for some subjects only.
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
        """Another attempt begins at the position."""
        self.withheld = None

    def skip_to(self, position: int) -> None:
        """Move on to a position up to which the leader holds nothing; what was lost there is reported."""
        position = min(position, self.to)
        if position > self.position:
            self.witness.examine(np.array([[self.position + 1], [position]]), filtered=True)
            self.position = position

    def begin_at(self, first: int) -> None:
        """Move on to the stream's first sequence, if it lies behind the position; what was lost is reported."""
        if first - 1 > self.position:
            self.witness.gone_at_start(self.position, self.to)
            self.position = min(first - 1, self.to)
