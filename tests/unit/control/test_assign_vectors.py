"""The ring strategies against vectors taken from the Go library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parti.control.assign import ConsistentHash, NoWorkers, RoundRobin, Strategy, WeightedConsistentHash
from parti.control.assign.consistent_hash import hash_keys
from parti.errors import ConfigError
from parti.model import Partition, WorkerId

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "assignment-vectors.json").read_text())
KINDS = {
    "consistent_hash": ConsistentHash,
    "round_robin": RoundRobin,
    "weighted_consistent_hash": WeightedConsistentHash,
}


def strategy_of(case: dict[str, Any]) -> Strategy:
    made: Strategy = KINDS[case["strategy"]](**(case["options"] or {}))
    return made


@pytest.mark.parametrize("case", VECTORS["hash"], ids=lambda case: repr(case["keys"]))
def test_keys_hash_as_in_the_go_library(case: dict[str, Any]) -> None:
    assert hash_keys(case["keys"]) == int(case["hash_id"])
    assert hash_keys(case["keys"], 12345) == int(case["hash_id_seed_12345"])


@pytest.mark.parametrize("case", [c for c in VECTORS["assign"] if "result" in c], ids=lambda case: case["name"])
def test_a_ring_assigns_as_in_the_go_library(case: dict[str, Any]) -> None:
    partitions = [Partition(tuple(p["keys"]), p["weight"]) for p in case["partitions"]]
    shares = strategy_of(case).assign([WorkerId(w) for w in case["workers"]], partitions, {})
    assert {worker: [str(p.id) for p in own] for worker, own in shares.items()} == case["result"]


@pytest.mark.parametrize("kind", KINDS.values())
def test_no_workers_is_an_error_that_says_so(kind: type[Strategy]) -> None:
    with pytest.raises(NoWorkers, match="no workers available"):
        kind().assign([], [Partition(("p",))], {})


def test_a_partition_without_keys_is_refused_before_it_can_fail_a_whole_rebalance() -> None:
    with pytest.raises(ConfigError, match="without keys"):
        Partition(())


@pytest.mark.parametrize("key", ["a.b", "*", ">", "a b", "", "a\tb"])
def test_a_key_that_would_widen_or_break_the_filter_is_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        Partition(("ok", key))


@pytest.mark.parametrize(
    "quality", [q for q in VECTORS["quality"] if q["weights"] == "equal"], ids=lambda q: f"{q['strategy']}-{q['to']}"
)
def test_movement_on_a_scale_up_is_that_of_the_go_library(quality: dict[str, Any]) -> None:
    partitions = [Partition((f"p-{i}",), 100) for i in range(quality["partitions"])]
    strategy = strategy_of({"strategy": quality["strategy"], "options": None})

    def owners(count: int) -> dict[str, str]:
        shares = strategy.assign([WorkerId(f"worker-{i}") for i in range(count)], partitions, {})
        return {str(p.id): str(worker) for worker, own in shares.items() for p in own}

    before, after = owners(quality["workers"]), owners(quality["to"])
    moved = 100 * sum(before[p] != after[p] for p in before) / len(before)
    assert moved == pytest.approx(float(quality["moved_pct"]), abs=0.2)
