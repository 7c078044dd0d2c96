"""Capacities hold for every strategy, every partition that fits is assigned, and none moves without a reason."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parti.control.assign import STRATEGIES, owners_of, strategy_named
from parti.control.assign.capacity import fit
from parti.model import Partition, WorkerId

WORKERS = [WorkerId(f"worker-{n}") for n in range(5)]


@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.integers(1, 5),
    st.integers(0, 40),
    st.lists(st.integers(0, 12), min_size=5, max_size=5),
    st.randoms(use_true_random=False),
)
def test_capacities_hold_and_the_rest_is_named(
    name: str, count: int, parts: int, capacities: list[int], rng: object
) -> None:
    workers = WORKERS[:count]
    given_capacities = dict(zip(workers, capacities, strict=False))
    partitions = [Partition((f"p{n}",)) for n in range(parts)]
    choice = rng.choice  # type: ignore[attr-defined]
    previous = {p.id: choice(WORKERS) for p in partitions if choice((True, False))}
    wanted = owners_of(strategy_named(name).assign(workers, partitions, previous))
    owners, unplaced = fit(wanted, given_capacities, workers, previous)
    assert set(owners) | set(unplaced) == {p.id for p in partitions}
    assert not set(owners) & set(unplaced)
    carried = {w: sum(1 for owner in owners.values() if owner == w) for w in workers}
    assert all(not given_capacities[w] or carried[w] <= given_capacities[w] for w in workers)
    if unplaced:
        assert all(given_capacities[w] and carried[w] == given_capacities[w] for w in workers), "nobody has room"
    again, left = fit(
        owners_of(strategy_named(name).assign(workers, partitions, owners)), given_capacities, workers, owners
    )
    assert len(left) == len(unplaced)
    if name == "sticky":
        assert again == owners, "what was decided is not decided differently the next time"
