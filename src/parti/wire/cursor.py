"""Where a range read stands: what was delivered, what belongs to the range, and which sequences did not come."""

from __future__ import annotations

import numpy as np

from parti.wire.columns import Deliveries
from parti.wire.filters import SubjectFilter
from parti.wire.frames import Ints


class Cursor:
    """Everything at or below `position` was handed on in order, or does not match, or was not in the stream.

    It outlives the attempts of a read, so that a message is handed on once although connections and consumers come
    and go: a consumer created on a lagging replica starts at that replica's end, which may lie before the position.
    """

    def __init__(self, after: int, to: int, chosen: SubjectFilter) -> None:
        self.position = max(after, 0)
        self.to = to
        self.chosen = chosen
        self.first_hole: int | None = None
        """The first sequence that was passed without being seen: deleted, aged out, or kept back by a filter."""

    def __repr__(self) -> str:
        return f"<Cursor {self.position} of {self.to}, {self.chosen}>"

    @property
    def done(self) -> bool:
        return self.position >= self.to

    def accept(self, deliveries: Deliveries) -> Deliveries:
        """The part of a batch, given in order, that is new, in the range and wanted; moves the position past it all."""
        sequence = deliveries.stream_seq
        if len(sequence) == 0:
            return deliveries
        if sequence[0] <= self.position or sequence[-1] > self.to:
            self._note_hole(sequence[sequence > self.position])
            deliveries = deliveries.select((sequence > self.position) & (sequence <= self.to))
        else:
            self._note_hole(sequence)
        self.position = max(self.position, min(int(sequence[-1]), self.to))
        if self.chosen.matches_all or not len(deliveries):
            return deliveries
        return deliveries.select(self.chosen.mask(deliveries.subjects()))

    def skip_to(self, position: int) -> None:
        """Move on to a position up to which nothing is left."""
        position = min(position, self.to)
        if position > self.position:
            self.first_hole = self.first_hole or self.position + 1
            self.position = position

    def _note_hole(self, sequence: Ints) -> None:
        if self.first_hole is not None or len(sequence) == 0:
            return
        steps = np.diff(sequence, prepend=self.position)
        if (steps != 1).any():
            index = int(np.argmax(steps != 1))
            hole = int(sequence[index - 1] if index else self.position) + 1
            self.first_hole = hole if hole <= self.to else None
