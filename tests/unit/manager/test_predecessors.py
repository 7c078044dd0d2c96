"""The state that a fenced process passes to its next membership."""

from __future__ import annotations

from parti.manager.positions import later
from parti.manager.predecessors import Predecessors
from parti.model import Member, PartitionId, WorkerId

W0, W1 = WorkerId("worker-0"), WorkerId("worker-1")
P, Q, R = PartitionId("p"), PartitionId("q"), PartitionId("r")
LIVES = {Member(W0, "a"): 1.0}


def test_of_two_positions_the_later_epoch_counts_and_within_it_the_higher_cursor() -> None:
    assert later({P: (3, 100), Q: (3, 50)}, {P: (3, 90), Q: (4, 10), R: (1, 1)}) == {
        P: (3, 100),
        Q: (4, 10),
        R: (1, 1),
    }


def test_positions_are_handed_on_to_the_same_worker_id_only() -> None:
    former = Predecessors().and_then(LIVES, W0, {P: (3, 100)}, None)
    assert former.positions_of(W0) == {P: (3, 100)}
    assert former.positions_of(W1) == {}


def test_a_life_that_was_fenced_before_it_owned_anything_hands_on_what_it_was_given() -> None:
    former = Predecessors().and_then(LIVES, W0, {P: (3, 100)}, None).and_then(LIVES, W0, {Q: (5, 7)}, None)
    assert former.positions_of(W0) == {P: (3, 100), Q: (5, 7)}
    assert former.and_then(LIVES, None, {}, None) is former
