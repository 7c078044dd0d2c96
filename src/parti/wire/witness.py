"""Classifies missing sequences: deleted, lost, or still stored but missing at the replica that answered.

No reply of the server says which. A replica that lags, or that lost a block, answers without an error, and a message
that aged out during a read looks like one that was deleted long ago. So the stream's leader decides: by its list of
deleted sequences from before the read, and its state after the gap was seen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from parti.errors import DataLoss
from parti.wire.digits import Ints
from parti.wire.state import StreamState

LISTED = 10_000  # deleted sequences requested in one reply: 80 KB of JSON

_NONE: Ints = np.empty(0, dtype=np.int64)

OnLoss = Callable[[int, int], None]
"""Called with the first and last sequence of a lost run, both included."""


def gaps(sequence: Ints, position: int, to: int) -> Ints:
    """The runs (2 x n: first, last) of sequences after `position`, up to the last of `sequence` or `to`, not in it."""
    steps = np.diff(sequence, prepend=position)
    at = np.flatnonzero(steps != 1)
    first, last = sequence[at] - steps[at] + 1, np.minimum(sequence[at] - 1, to)
    found = np.stack([first, last])
    return found[:, first <= last]


def without(runs: Ints, known: Ints) -> Ints:
    """The runs, without the sequences that are `known` (in order)."""
    if not runs.size or not known.size:
        return runs
    low, high = np.searchsorted(known, runs[0]), np.searchsorted(known, runs[1], side="right")
    left = high - low < runs[1] - runs[0] + 1
    rest = [np.empty((2, 0), dtype=np.int64)]
    for (first, last), a, b in zip(runs.T[left].tolist(), low[left].tolist(), high[left].tolist(), strict=True):
        inside = np.concatenate([known[a:b], [last + 1]])
        rest.append(gaps(inside, first - 1, last))
    return np.concatenate(rest, axis=1)


def below(runs: Ints, first: int) -> Ints:
    """The part of the runs before `first`."""
    found = np.stack([runs[0], np.minimum(runs[1], first - 1)])
    return found[:, found[0] <= found[1]]


def above(runs: Ints, first: int) -> Ints:
    """The part of the runs from `first` on."""
    found = np.stack([np.maximum(runs[0], first), runs[1]])
    return found[:, found[0] <= found[1]]


class Witness:
    """Classifies the gaps of one read. Afterwards each is proven to be a deletion, or was reported as lost.

    With `open_start` a read begins at the first message present when its first messages arrive; earlier ones are not
    lost.
    """

    def __init__(
        self,
        ask: Callable[[], StreamState],
        *,
        allow_gone: bool = False,
        open_start: bool = False,
        on_loss: OnLoss | None = None,
    ) -> None:
        self._ask = ask
        self._allow_gone = allow_gone
        self._on_loss = on_loss
        self.open = open_start
        self.begins_behind = 0
        """With an open start: the last sequence found to be gone. All sequences before it are gone too."""
        self._state: StreamState | None = None
        self._deleted = _NONE  # all that the leader ever listed: its list omits sequences below its first one

    def know(self, state: StreamState) -> None:
        """Store the leader's state from before the next messages are requested."""
        self._state = state
        if state.deleted is not None:
            self._deleted = np.union1d(self._deleted, state.deleted) if self._deleted.size else state.deleted

    def wants_deleted(self, state: StreamState) -> bool:
        """Whether the list of deleted sequences is worth a request."""
        needed = state.replicas > 1 or (state.loses and not self._allow_gone)
        return needed and 0 < state.num_deleted <= LISTED

    def stale(self, sequence: Ints) -> npt.NDArray[np.bool_] | None:
        """True for messages that the leader has deleted, but the sending replica has not; None if there are none."""
        if self._state is None or self._state.replicas == 1 or not self._deleted.size:
            return None
        found = np.isin(sequence, self._deleted, assume_unique=True)
        return found if found.any() else None

    def gone_at_start(self, position: int, to: int) -> None:
        """Handle a stream that begins after the start position of a read."""
        assert self._state is not None
        first = self._state.first_seq
        if first > position + 1 and self._state.loses:
            self._lost(np.array([[position + 1], [min(first - 1, to)]]), first)

    def examine(self, runs: Ints, *, filtered: bool = False) -> int | None:
        """Classify gaps; returns the first sequence in them that the leader holds, which makes them invalid.

        `filtered`: the server omitted messages that do not match, so most gaps are normal, and only losses count.
        """
        state = self._state
        assert state is not None
        loses = state.loses and not self._allow_gone
        replicated = state.replicas > 1 and not filtered and (state.num_deleted <= LISTED)
        if not runs.size or not (loses or replicated):
            return None
        runs = without(runs, self._deleted)
        if not runs.size:
            return None
        fresh = self._ask()
        self.know(fresh)
        if loses:
            self._lost(below(runs, fresh.first_seq), fresh.first_seq)
        if not replicated or fresh.num_deleted > LISTED:
            return None
        held = without(above(runs, fresh.first_seq), self._deleted)
        held = held[:, held[0] <= fresh.last_seq]
        return int(held[0, 0]) if held.size else None

    def _lost(self, runs: Ints, first_available: int) -> None:
        if not runs.size or self._allow_gone:
            return
        if self.open:
            self.begins_behind = int(runs[1, -1])
            return
        if self._on_loss is not None:
            for first, last in runs.T.tolist():
                self._on_loss(first, last)
            return
        assert self._state is not None
        raise data_loss(self._state.name, runs, first_available)


def data_loss(stream: str, runs: Ints, first_available: int) -> DataLoss:
    """The error that names exactly which sequences are gone."""
    count, first, last = int((runs[1] - runs[0] + 1).sum()), int(runs[0, 0]), int(runs[1, -1])
    whole = count == last - first + 1
    which = f"sequence {first}" if count == 1 else f"sequences {first} to {last}"
    which += "" if whole else f" in {runs.shape[1]} gaps"
    return DataLoss(
        f"stream {stream!r} no longer holds {which}: its first is {first_available}, {count} are gone; "
        "raise the stream's limits, read sooner, or allow the loss",
        stream=stream,
        first_missing=first,
        first_available=first_available,
        count=count,
    )
