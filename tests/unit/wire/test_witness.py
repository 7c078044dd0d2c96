"""The witness of a range read: each gap is classified correctly, be it deleted, lost or withheld."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import DataLoss
from parti.wire.digits import Ints
from parti.wire.state import StreamState
from parti.wire.witness import LISTED, Witness, above, below, gaps, without

PLAIN = StreamState("S", 1, 100, 100, 100, "", "limits", "file", 1, True, ("s.>",), None)
numbers = st.sets(st.integers(1, 60))


def array(values: set[int] | list[int]) -> Ints:
    return np.array(sorted(values), dtype=np.int64)


def flat(runs: Ints) -> set[int]:
    return {value for first, last in runs.T.tolist() for value in range(first, last + 1)}


def runs_of(values: set[int]) -> Ints:
    inside = array({*range(1, 61)} - values)
    return gaps(np.concatenate([inside, [61]]), 0, 60)


@given(numbers, st.integers(0, 30), st.integers(1, 60))
def test_gaps_are_what_is_missing_up_to_the_last_that_came(came: set[int], position: int, to: int) -> None:
    came = {value for value in came if value > position}
    if came:
        expected = {*range(position + 1, min(max(came), to) + 1)} - came
        assert flat(gaps(array(came), position, to)) == expected


@given(numbers, numbers, st.integers(1, 61))
def test_runs_are_sets_of_sequences(missing: set[int], known: set[int], cut: int) -> None:
    runs = runs_of(missing)
    assert flat(runs) == missing
    assert flat(without(runs, array(known))) == missing - known
    assert flat(below(runs, cut)) == {value for value in missing if value < cut}
    assert flat(above(runs, cut)) == {value for value in missing if value >= cut}


def state_of(deleted: set[int], *, first: int = 1, replicas: int = 1, loses: bool = True) -> StreamState:
    inside = {value for value in deleted if value >= first}
    return replace(
        PLAIN, first_seq=first, num_deleted=len(inside), deleted=array(inside), replicas=replicas, loses=loses
    )


@given(numbers, numbers, st.integers(1, 61), st.sampled_from([1, 3]), st.booleans())
def test_what_is_gone_from_the_front_is_told_exactly_and_what_the_leader_holds_is_not_passed(
    before: set[int], missing: set[int], first: int, replicas: int, loses: bool
) -> None:
    """`before`: deleted when the read began. By the time the gaps are seen all below `first` is gone."""
    told: set[int] = set()
    since = {value for value in missing if value % 3 == 0}  # deleted one by one meanwhile
    witness = Witness(
        lambda: state_of(before | since, first=first, replicas=replicas, loses=loses),
        on_loss=lambda low, high: told.update(range(low, high + 1)),
    )
    witness.know(state_of(before, replicas=replicas, loses=loses))
    held = witness.examine(runs_of(missing))
    unexplained = missing - before
    assert told == ({value for value in unexplained if value < first} if loses else set())
    withheld = {value for value in unexplained - since if value >= first}
    if replicas > 1:
        assert held == (min(withheld) if withheld else None)
    else:
        assert held is None  # there is no other copy


def test_a_loss_is_raised_with_its_numbers() -> None:
    witness = Witness(lambda: state_of(set(), first=50))
    witness.know(state_of({5}))
    with pytest.raises(DataLoss, match=r"sequences 4 to 9 in 2 gaps: its first is 50, 5 are gone") as caught:
        witness.examine(runs_of({4, 5, 6, 7, 8, 9}))
    assert (caught.value.first_missing, caught.value.first_available, caught.value.count) == (4, 50, 5)


def test_an_open_start_begins_behind_what_is_gone() -> None:
    witness = Witness(lambda: state_of(set(), first=50), open_start=True)
    witness.know(state_of(set()))
    assert witness.examine(runs_of({4, 5, 6, 20})) is None
    assert witness.begins_behind == 20


def test_messages_that_the_leader_has_deleted_are_not_taken_from_a_replica_that_has_them() -> None:
    witness = Witness(lambda: pytest.fail("nobody needs to be asked"))
    witness.know(state_of({3, 4}, replicas=3))
    stale = witness.stale(array([2, 3, 4, 5]))
    assert stale is not None
    assert stale.tolist() == [False, True, True, False]
    assert witness.stale(array([1, 2, 5])) is None
    witness.know(state_of({3, 4}))
    assert witness.stale(array([2, 3, 4, 5])) is None  # the only copy cannot lag


def test_a_list_of_deletions_is_asked_for_only_where_it_tells_something() -> None:
    witness = Witness(lambda: PLAIN)
    assert not witness.wants_deleted(PLAIN)
    assert witness.wants_deleted(replace(PLAIN, num_deleted=1))
    assert not witness.wants_deleted(replace(PLAIN, num_deleted=LISTED + 1))
    assert not Witness(lambda: PLAIN, allow_gone=True).wants_deleted(replace(PLAIN, num_deleted=1))
    assert Witness(lambda: PLAIN, allow_gone=True).wants_deleted(replace(PLAIN, num_deleted=1, replicas=3))
