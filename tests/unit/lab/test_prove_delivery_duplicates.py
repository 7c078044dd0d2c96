"""Which second acceptances a fault explains, and which ones no fault explains."""

from __future__ import annotations

import pytest

from parti_lab.prove.delivery_duplicates import KINDS, Accepted, explain
from parti_lab.prove.delivery_faults import DeliveryFault

KILL = DeliveryFault("kill", 100.0, 100.1)
FREEZE = DeliveryFault("freeze", 100.0, 100.1)
SERVER = DeliveryFault("server", 100.0, 104.0)


def explained(
    *times: Accepted,
    faults: tuple[DeliveryFault, ...] = (),
    unheard: tuple[tuple[str, int], ...] = (),
    in_flight: int = 32,
) -> str:
    """What explains the one duplicate."""
    found = explain({"a": times}, faults, unheard, in_flight=in_flight)
    (kind,) = [kind for kind in KINDS if found[kind]]
    assert sum(found.values()) == 1
    return kind


def test_what_was_accepted_once_needs_no_explanation() -> None:
    assert not any(explain({"a": [Accepted(1.0, 1, 1)]}, [KILL], (), in_flight=32).values())


@pytest.mark.parametrize("fault", [KILL, FREEZE, SERVER])
def test_what_was_in_flight_at_a_fault_is_explained_by_it(fault: DeliveryFault) -> None:
    assert explained(Accepted(99.8, 1, 1), Accepted(103.0, 2, 1), faults=(fault,)) == fault.kind


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (Accepted(90.0, 1, 1), Accepted(103.0, 2, 1)),  # told long before
        (Accepted(98.0, 1, 1), Accepted(99.0, 2, 1)),  # both before it
        (Accepted(106.0, 1, 1), Accepted(107.0, 2, 1)),  # both after it
        (Accepted(99.8, 1, 1), Accepted(100.2, 1, 1)),  # the same owner, which was not killed
    ],
)
def test_a_kill_explains_nothing_else(first: Accepted, again: Accepted) -> None:
    assert explained(first, again, faults=(KILL,)) == "unexplained"


def test_a_planned_stop_explains_nothing() -> None:
    assert explained(Accepted(99.8, 1, 1), Accepted(103.0, 2, 1)) == "unexplained"


def test_what_was_delivered_while_the_server_was_away_is_explained() -> None:
    assert explained(Accepted(103.0, 1, 1), Accepted(107.0, 2, 1), faults=(SERVER,)) == "server"


def test_one_process_repeats_no_more_than_it_had_in_flight() -> None:
    accepted = {f"t{n}": [Accepted(99.9, 1, 1), Accepted(103.0, 2, 1)] for n in range(40)}
    found = explain(accepted, [KILL], (), in_flight=32)
    assert (found["kill"], found["unexplained"]) == (32, 8)


def test_an_answer_that_was_not_heard_is_explained_when_the_worker_said_so() -> None:
    first, again = Accepted(99.8, 1, 1), Accepted(100.9, 1, 2)
    assert explained(first, again, unheard=(("a", 1),)) == "unheard"
    assert explained(first, again, unheard=(("a", 2), ("b", 1))) == "unexplained"
    assert explained(first, Accepted(100.9, 1, 1), unheard=(("a", 1),)) == "unexplained"
    assert explained(first, again, faults=(SERVER,)) == "server"  # its word may have got lost


def test_each_repetition_needs_an_explanation_of_its_own() -> None:
    times = [Accepted(99.9, 1, 1), Accepted(106.0, 2, 1), Accepted(110.0, 3, 1)]
    found = explain({"a": times}, [KILL], (), in_flight=32)
    assert (found["kill"], found["unexplained"]) == (1, 1)
