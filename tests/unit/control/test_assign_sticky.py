"""The default strategy: a partition that need not move stays, and no worker is overloaded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.control.assign import STRATEGIES, NoWorkers, Sticky, owners_of, strategy_named
from parti.control.assign.base import lowest_peak, quality
from parti.errors import ConfigError
from parti.model import Partition, PartitionId, WorkerId
from parti_lab.bench.assign import SCENARIOS, AssignScenario, measure


def workers(count: int) -> list[WorkerId]:
    return [WorkerId(f"worker-{i}") for i in range(count)]


def equal(count: int) -> list[Partition]:
    return [Partition((f"p-{i}",)) for i in range(count)]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
@pytest.mark.parametrize("seed", range(5))
def test_the_go_librarys_scenarios_stay_within_bound_and_budget(scenario: AssignScenario, seed: int) -> None:
    result = measure(scenario, Sticky(), seed)
    assert result["peak_best"] <= 1.10
    assert result["moves_over_minimum"] <= 1.2


def test_an_unchanged_cluster_moves_nothing() -> None:
    rng = random.Random(7)
    partitions = [Partition((f"p-{i}",), rng.randrange(1, 100)) for i in range(500)]
    first = owners_of(Sticky().assign(workers(9), partitions, {}))
    shuffled = rng.sample(workers(9), 9)
    assert owners_of(Sticky().assign(shuffled, rng.sample(partitions, 500), first)) == first


def test_a_leaving_worker_moves_only_its_own_partitions() -> None:
    first = owners_of(Sticky().assign(workers(10), equal(1000), {}))
    second = owners_of(Sticky().assign(workers(9), equal(1000), first))
    assert {p for p in first if first[p] != second[p]} == {p for p, w in first.items() if w == "worker-9"}


def test_one_dies_while_another_joins_and_only_the_dead_ones_partitions_move() -> None:
    first = owners_of(Sticky().assign(workers(4), equal(400), {}))
    members = [*workers(3), WorkerId("worker-7")]
    second = owners_of(Sticky().assign(members, equal(400), first))
    assert {first[p] for p in first if first[p] != second[p]} == {"worker-3"}


def test_a_restarted_worker_gets_its_partitions_back_when_the_map_is_kept() -> None:
    first = owners_of(Sticky().assign(workers(5), equal(100), {}))
    assert owners_of(Sticky().assign(workers(5), equal(100), first)) == first


def test_removed_partitions_vanish_and_new_ones_are_spread() -> None:
    first = owners_of(Sticky().assign(workers(10), equal(100), {}))
    shares = Sticky().assign(workers(10), equal(1000)[50:], first)
    assert sorted(len(own) for own in shares.values()) == [95] * 10


def test_five_workers_with_two_partitions_leave_three_without_work_but_listed() -> None:
    shares = Sticky().assign(workers(5), equal(2), {})
    assert sorted(len(own) for own in shares.values()) == [0, 0, 0, 1, 1]


def test_four_heavy_partitions_over_four_workers_land_one_on_each() -> None:
    heavy = [Partition((f"h-{i}",), 10_000) for i in range(4)]
    shares = Sticky().assign(workers(4), [*heavy, *equal(40)], {})
    assert all(sum(p.weight == 10_000 for p in own) == 1 for own in shares.values())


def test_weights_are_honoured_when_they_change() -> None:
    first = owners_of(Sticky().assign(workers(4), equal(400), {}))
    on_first = [p for p, w in first.items() if w == "worker-0"]
    heavier = [Partition((str(i),), 5 if i in on_first else 1) for i in first]
    shares = Sticky().assign(workers(4), heavier, first)
    assert quality(shares, first).peak_over_mean <= 1.10


def test_the_lowest_peak_knows_that_partitions_are_whole() -> None:
    assert lowest_peak([100] * 150, 110) == 200
    assert lowest_peak([50, 1, 1], 2) == 50
    assert lowest_peak([1] * 100, 10) == 10


def test_no_workers_is_an_error() -> None:
    with pytest.raises(NoWorkers):
        Sticky().assign([], equal(3), {})


def test_a_strategy_is_found_by_name_and_a_wrong_name_lists_the_right_ones() -> None:
    assert {strategy_named(name).name for name in STRATEGIES} == set(STRATEGIES)
    with pytest.raises(ConfigError, match="round-robin"):
        strategy_named("random")


def test_a_bound_below_an_exact_balance_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 1\.0"):
        Sticky(bound=0.9)


@settings(max_examples=150, deadline=None)
@given(
    before=st.integers(1, 12),
    after=st.sets(st.integers(0, 15), min_size=1, max_size=12),
    loads=st.lists(st.integers(0, 1000), max_size=120),
    name=st.sampled_from(sorted(STRATEGIES)),
    seed=st.integers(0, 2**16),
)
def test_every_partition_has_exactly_one_owner_and_the_result_ignores_input_order(
    before: int, after: set[int], loads: list[int], name: str, seed: int
) -> None:
    strategy = strategy_named(name)
    partitions = [Partition((f"p-{i}",), load) for i, load in enumerate(loads)]
    previous = owners_of(strategy.assign(workers(before), partitions, {}))
    members = [WorkerId(f"worker-{i}") for i in sorted(after)]
    shares = strategy.assign(members, partitions, previous)
    assert sorted(shares) == sorted(members)
    flat = [p.id for own in shares.values() for p in own]
    assert sorted(flat) == sorted(p.id for p in partitions)
    if name == "sticky":
        rng = random.Random(seed)
        again = strategy.assign(
            rng.sample(members, len(members)), rng.sample(partitions, len(partitions)), dict(previous)
        )
        assert again == shares
        assert owners_of(strategy.assign(members, partitions, owners_of(shares))) == owners_of(shares)


@settings(max_examples=100, deadline=None)
@given(before=st.integers(1, 30), after=st.integers(1, 30), count=st.integers(0, 300))
def test_equal_partitions_end_within_one_of_each_other_with_the_fewest_moves(
    before: int, after: int, count: int
) -> None:
    first = owners_of(Sticky().assign(workers(before), equal(count), {}))
    shares = Sticky().assign(workers(after), equal(count), first)
    counts = sorted(len(own) for own in shares.values())
    assert counts[-1] - counts[0] <= 1
    quota, extra = divmod(count, after)
    held = sorted((sum(w == x for w in first.values()) for x in workers(after)), reverse=True)
    kept_at_most = sum(min(h, quota + (1 if i < extra else 0)) for i, h in enumerate(held))
    kept = sum(first[PartitionId(p)] == w for p, w in owners_of(shares).items())
    assert kept == kept_at_most
