"""The cursor of a range read: which messages it passes on, once, and which gap it remembers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.wire.columns import Deliveries, consumer_deliveries
from parti.wire.cursor import Cursor
from parti.wire.digits import Ints
from parti.wire.filters import SubjectFilter
from parti.wire.frames import scan_plain
from parti.wire.witness import Witness


class Noted(Witness):
    """Remembers the gaps that it was shown, and finds nothing wrong with them."""

    def __init__(self) -> None:
        super().__init__(ask=lambda: pytest.fail("nobody needs to be asked"))
        self.seen: list[tuple[int, int]] = []

    def examine(self, runs: Ints, *, filtered: bool = False) -> int | None:
        self.seen += [(first, last) for first, last in runs.T.tolist()]
        return None


def cursor_of(after: int, to: int, chosen: SubjectFilter | None = None) -> tuple[Cursor, Noted]:
    noted = Noted()
    return Cursor(after, to, chosen or SubjectFilter(), noted), noted


def deliveries(sequences: list[int]) -> Deliveries:
    raw = b"".join(b"MSG s.%d 2 $JS.ACK.S.c.1.%d.1.1.0 0\r\n\r\n" % (s % 3, s) for s in sequences)
    return consumer_deliveries(scan_plain(np.frombuffer(raw, dtype=np.uint8), len(raw)))


def accepted(cursor: Cursor, *batches: list[int]) -> list[int]:
    return [sequence for batch in batches for sequence in cursor.accept(deliveries(batch)).stream_seq.tolist()]


def test_what_was_handed_on_is_never_handed_on_again() -> None:
    """A consumer made on a lagging replica starts at that replica's end, before our position."""
    cursor, noted = cursor_of(0, 100)
    assert accepted(cursor, [1, 2, 3], [2, 3], [3, 4, 5], [1]) == [1, 2, 3, 4, 5]
    assert cursor.position == 5
    assert noted.seen == []


def test_messages_behind_the_end_are_dropped_and_finish_the_read() -> None:
    cursor, noted = cursor_of(4, 7)
    assert accepted(cursor, [5, 6, 9, 10]) == [5, 6]
    assert cursor.done
    assert noted.seen == [(7, 7)]


def test_every_gap_is_judged_also_at_the_start_and_between_batches() -> None:
    cases: tuple[tuple[list[list[int]], list[tuple[int, int]]], ...] = (
        ([[1, 2], [3, 4]], []),
        ([[2, 3]], [(1, 1)]),
        ([[1, 2], [5]], [(3, 4)]),
        ([[1, 3, 6]], [(2, 2), (4, 5)]),
    )
    for batches, expected in cases:
        cursor, noted = cursor_of(0, 10)
        accepted(cursor, *batches)
        assert noted.seen == expected


def test_skipping_the_rest_is_a_hole() -> None:
    cursor, noted = cursor_of(0, 10)
    accepted(cursor, [1, 2])
    cursor.skip_to(99)
    assert cursor.position == 10
    assert noted.seen == [(3, 10)]
    cursor.skip_to(5)
    assert cursor.position == 10


def test_a_message_that_does_not_match_moves_the_position_and_is_no_hole() -> None:
    cursor, noted = cursor_of(0, 10, SubjectFilter(["s.0"]))
    assert accepted(cursor, [1, 2, 3, 4, 5]) == [3]
    assert cursor.position == 5
    assert noted.seen == []


@given(
    st.sets(st.integers(1, 60)),
    st.integers(-3, 60),
    st.integers(0, 60),
    st.lists(st.integers(1, 15), max_size=10),
    st.data(),
)
@settings(deadline=None)
def test_whatever_the_restarts_each_message_of_the_range_comes_once_in_order(
    stored: set[int], after: int, to: int, sizes: list[int], data: st.DataObject
) -> None:
    stream = sorted(stored)
    cursor, _ = cursor_of(after, to)
    seen: list[int] = []
    for size in [*sizes, 100]:
        start = data.draw(st.integers(0, max(cursor.position, 0)))  # a restart at or before the position
        seen += accepted(cursor, [s for s in stream if s > start][: size + (cursor.position - start)])
    assert seen == [s for s in stream if max(after, 0) < s <= to]
    assert all(a < b for a, b in pairwise(seen))
