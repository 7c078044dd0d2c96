"""Scenarios of `parti prove torture`: the seed decides everything, and nothing impossible is drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import UsageError
from parti_lab.prove.torture_scenario import LAYOUTS, PLANNED, RETENTIONS, Restrict, TortureKind, draw, possible
from parti_lab.prove.torture_traffic import fate_of

seeds = st.integers(0, 2**31)


@given(seeds)
def test_the_same_seed_is_the_same_scenario(seed: int) -> None:
    assert draw(seed) == draw(seed)
    assert draw(seed, Restrict(quick=True)) == draw(seed, Restrict(quick=True))


def test_seeds_differ_and_reach_every_shape_and_fault() -> None:
    drawn = [draw(seed) for seed in range(400)]
    assert len({scenario.schedule() for scenario in drawn}) > 390
    assert {(s.retention, s.layout, s.lanes) for s in drawn} == {
        (r, y, n) for r in RETENTIONS for y in LAYOUTS for n in ("partition", "key")
    }
    assert {s.replicas for s in drawn} == {1, 3}
    assert {kind for s in drawn for kind in s.kinds} == set(TortureKind)
    assert 40 < sum(s.planned_only for s in drawn) < 200


@given(seeds)
def test_a_scenario_holds_only_what_its_shape_can_be_held_to(seed: int) -> None:
    scenario = draw(seed)
    assert scenario.bouts
    assert scenario.kinds <= possible(scenario.retention, scenario.storage, scenario.replicas)
    assert not scenario.kinds >= {TortureKind.HANG, TortureKind.HANG_STOP}
    assert (scenario.timeout > 0) == (TortureKind.HANG in scenario.kinds)
    assert not scenario.literal or scenario.lanes == "partition"


@given(seeds)
def test_a_quick_scenario_is_short(seed: int) -> None:
    scenario = draw(seed, Restrict(quick=True))
    assert scenario.replicas == 1
    assert scenario.workers <= 4
    assert sum(max(f.offset + f.seconds for f in bout) for bout in scenario.bouts) <= 16.0


@given(seeds)
def test_restrictions_hold_and_leave_the_rest_of_the_shape(seed: int) -> None:
    free = draw(seed)
    bound = draw(seed, Restrict.parse(retention="workqueue", layout="per-worker", faults="planned", ttl=6.0))
    assert (bound.retention, bound.layout, bound.ttl) == ("workqueue", "per-worker", 6.0)
    assert bound.planned_only
    assert bound.kinds <= PLANNED
    assert (bound.lanes, bound.storage, bound.keys) == (free.lanes, free.storage, free.keys)


@pytest.mark.parametrize(
    "given", [{"retention": "queue"}, {"layout": "x"}, {"faults": "restart,nap"}, {"replicas": 2}, {"lanes": "k"}]
)
def test_a_word_that_means_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="choose"):
        Restrict.parse(**given)


def test_faults_that_the_shape_cannot_have_are_refused() -> None:
    with pytest.raises(UsageError, match="possible"):
        draw(1, Restrict.parse(retention="interest", faults="durable-delete"))


def test_fates_are_rare_and_fixed() -> None:
    fates = [fate_of(7, "p1", counter) for counter in range(20_000)]
    assert fates == [fate_of(7, "p1", counter) for counter in range(20_000)]
    assert 100 < fates.count("retry") + fates.count("raise") < 300
    assert 15 < fates.count("reject") < 80
