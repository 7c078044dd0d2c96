"""The judge of random delivery runs finds each kind of violation, and excuses what a fault explains."""

from __future__ import annotations

import random
from typing import Any

import pytest

from parti_lab.prove.delivery_faults import DeliveryFault
from parti_lab.prove.delivery_judge import KINDS, Circumstances, PublishedTask, RestedTask, SeenRequest, judge
from parti_lab.prove.delivery_scenario import ORDERS, Trigger, draw

KILL = DeliveryFault("kill", 10.0, 10.1)
AWAY = DeliveryFault("server", 0.5, 4.0)


def request(at: float, number: int = 1, attempt: int = 1, status: int = 200, **more: Any) -> SeenRequest:
    return SeenRequest(at, f"d-{number}", "t", "d", number, attempt, status, ended=at, **more)


def found(
    *seen: SeenRequest,
    published: int = 0,
    letters: tuple[RestedTask, ...] = (),
    faults: tuple[DeliveryFault, ...] = (),
    timeouts: tuple[tuple[str, int], ...] = (),
    forgetful: bool = False,
    **rules: Any,
) -> str:
    """The one kind of wrong that is found; empty for none."""
    trigger = Trigger(**({"name": "t", "order": "block", "host": "flaky"} | rules))
    tasks = [PublishedTask(f"d-{number}", "t", "d", number, 0.0) for number in range(1, published + 1)]
    named: dict[str, Any] = {"timeouts": frozenset(timeouts), "processes": 1, "stall": 0.0, "forgetful": forgetful}
    wrong, words = judge([trigger], tasks, seen, letters, Circumstances(faults, **named))
    assert set(wrong) == set(KINDS)
    assert bool(words) == any(wrong.values())
    return " ".join(kind for kind, count in wrong.items() if count)


@pytest.mark.parametrize(
    ("kind", "seen", "more"),
    [
        ("", [request(1), request(2, 2)], {"published": 2}),
        ("lost", [request(1)], {"published": 2}),
        ("", [request(1, 2)], {"published": 2, "order": "latest"}),
        ("lost", [request(1)], {"published": 2, "order": "latest"}),
        ("inversions", [request(1, 2), request(2, 1)], {}),
        ("", [request(1, 2), request(2, 1)], {"order": "skip"}),
        ("inversions", [request(1, 2), request(2, 1)], {"order": "latest"}),
        # Nobody could be told of the newer one: its owner lost its lease while the server was away.
        ("", [request(1, 2, epoch=1), request(2, 1, epoch=2)], {"order": "latest", "faults": (AWAY,)}),
        ("inversions", [request(1, 2, epoch=1), request(2, 1, epoch=1)], {"order": "latest", "faults": (AWAY,)}),
        ("inversions", [request(1, 2, epoch=1), request(2, 1, epoch=2)], {"order": "block", "faults": (AWAY,)}),
        ("inversions", [request(20, 2, epoch=1), request(30, 1, epoch=2)], {"order": "latest", "faults": (AWAY,)}),
        ("attempts_without_a_request", [request(1, attempt=2)], {}),
        ("", [request(1, attempt=2)], {"host": "dead"}),
        ("", [request(1, attempt=2)], {"timeouts": (("d-1", 1),)}),
        ("attempts_without_a_request", [request(1, attempt=3)], {"timeouts": (("d-1", 1),)}),
        ("", [request(1, status=500), request(2, attempt=2)], {}),
        ("attempts_forgotten", [request(1, status=500), request(2, attempt=1)], {}),
        ("", [request(1, 1, 2), request(2, 2), request(3, 1, 1)], {"timeouts": (("d-1", 1),)}),
        ("", [request(9.9, status=500), request(20, attempt=1)], {"faults": (KILL,)}),
        ("attempts_forgotten", [request(1, status=500), request(4, attempt=1)], {"faults": (KILL,)}),
        ("too_early", [request(1, status=429, wait=2.0), request(2.5, attempt=2)], {}),
        ("too_early", [request(1, status=500), request(1.1, attempt=2)], {"backoff": 0.3}),
        ("", [request(1, status=429, wait=2.0), request(3.0, attempt=2)], {}),
        ("over_rate", [request(1 + n / 100, n) for n in range(20)], {"rate": 10.0}),
        ("", [request(1 + n / 10, n) for n in range(20)], {"rate": 10.0}),
        ("over_rate", [request(10 + n / 100, n) for n in range(20)], {"rate": 10.0, "faults": (KILL,)}),
        ("", [request(10 + n / 100, n) for n in range(20)], {"rate": 10.0, "faults": (KILL,), "forgetful": True}),
        (
            "over_rate",
            [request(1 + n / 100, n) for n in range(20)],
            {"rate": 10.0, "faults": (KILL,), "forgetful": True},
        ),
        (
            "letters_wrong",
            [request(1, status=500)],
            {"letters": (RestedTask("d-1", "t", "rejected", 1),), "attempts": 1},
        ),
        ("attempts_without_a_request", [], {"letters": (RestedTask("d-1", "t", "exhausted", 1),), "attempts": 1}),
        ("", [request(1, status=500)], {"letters": (RestedTask("d-1", "t", "exhausted", 1),), "attempts": 1}),
        (
            "buried_although_accepted",
            [request(1)],
            {"letters": (RestedTask("d-1", "t", "exhausted", 1),), "attempts": 1},
        ),
    ],
)
def test_what_is_wrong_is_found(kind: str, seen: list[SeenRequest], more: dict[str, Any]) -> None:
    assert found(*seen, **more) == kind


def test_more_at_once_than_the_trigger_allows_is_found() -> None:
    seen = [request(1.0, 1), request(1.1, 2)]
    for one in seen:
        one.ended = one.at + 1
    assert found(*seen, concurrency=1) == "over_concurrency"
    assert found(*seen, concurrency=2) == ""


def test_a_seed_is_one_situation_and_seeds_bring_everything() -> None:
    many = [draw(seed) for seed in range(300)]
    assert many == [draw(seed) for seed in range(300)]
    triggers = [trigger for scenario in many for trigger in scenario.triggers]
    assert {trigger.order for trigger in triggers} == set(ORDERS)
    assert {fault for scenario in many for fault in scenario.faults} == {"kill", "server", "freeze", "stop"}
    assert {trigger.host for trigger in triggers} >= {"dead", "hanging", "throttling", "no_dns", "well"}
    assert any(trigger.rate and trigger.concurrency and trigger.order == "park" for trigger in triggers)
    assert draw(1, hungry=True).descriptors < max(trigger.hosts for trigger in draw(1, hungry=True).triggers) + 50
    assert all(draw(random.randrange(999), spark=True).partitions == 1 for _ in range(20))
