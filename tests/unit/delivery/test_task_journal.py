"""What counts as done after a crash: exactly what the checkpoint, the journal and the server record as done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parti.delivery.journal import merged

SEQUENCES = st.sets(st.integers(1, 40))


@given(high=st.integers(0, 40), open_=SEQUENCES, said=SEQUENCES, floor=st.integers(0, 40))
def test_a_message_counts_as_done_when_somebody_knows_it_is_and_never_else(
    high: int, open_: set[int], said: set[int], floor: int
) -> None:
    owed = {sequence for sequence in open_ if sequence <= high}
    top, still = merged(high, owed, said, floor)
    for sequence in range(1, 43):
        known = sequence <= floor or (sequence <= high and sequence not in owed) or sequence in said
        assert (sequence <= top and sequence not in still) == known
    assert all(floor < sequence <= top for sequence in still)
