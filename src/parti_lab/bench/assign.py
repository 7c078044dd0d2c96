"""How even and how sticky parti's strategies are, next to the measurements of the Go library."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from parti.control.assign import STRATEGIES, Strategy, owners_of
from parti.control.assign.base import Owners, quality
from parti.model import Partition, WorkerId
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext


@dataclass(frozen=True, slots=True)
class AssignScenario:
    """One row: workers before and after, partitions, and their weights."""

    name: str
    before: int
    after: int
    partitions: int
    weigh: Callable[[int, random.Random], int]


def _equal(index: int, rng: random.Random) -> int:  # noqa: ARG001 - one signature for all
    return 100


def _one_in_twenty(index: int, rng: random.Random) -> int:  # noqa: ARG001 - one signature for all
    return 10_000 if index % 20 == 0 else 100


def _extremes(index: int, rng: random.Random) -> int:
    return rng.randrange(10_000, 50_001) if index % 20 == 0 else 100


SCENARIOS = (
    AssignScenario("10_11_1000_equal", 10, 11, 1000, _equal),
    AssignScenario("25_26_2000_equal", 25, 26, 2000, _equal),
    AssignScenario("100_110_3000_equal", 100, 110, 3000, _equal),
    AssignScenario("25_26_2000_5pct_x100", 25, 26, 2000, _one_in_twenty),
    AssignScenario("100_110_3000_5pct_x100", 100, 110, 3000, _one_in_twenty),
    AssignScenario("100_110_3000_150_extremes", 100, 110, 3000, _extremes),
)


def partitions_of(scenario: AssignScenario, seed: int) -> list[Partition]:
    """The partitions of a scenario; the same seed gives the same weights."""
    rng = random.Random(seed)
    return [Partition((f"p-{i}",), scenario.weigh(i, rng)) for i in range(scenario.partitions)]


def workers(count: int) -> list[WorkerId]:
    return [WorkerId(f"worker-{i}") for i in range(count)]


def measure(scenario: AssignScenario, strategy: Strategy, seed: int) -> dict[str, float]:
    """Peak load and moves of a scale-up, in the units of the Go library's table."""
    partitions = partitions_of(scenario, seed)
    nobody: Owners = {}
    before = owners_of(strategy.assign(workers(scenario.before), partitions, nobody))
    after = strategy.assign(workers(scenario.after), partitions, before)
    judged = quality(after, before)
    return {
        "peak": round(judged.peak_over_mean, 3),
        "peak_best": round(judged.peak_over_best, 3),
        "moved_pct": round(100 * judged.moved / scenario.partitions, 2),
        "moves_over_minimum": round(judged.moved / judged.minimum, 3),
    }


def speed_ms(strategy: Strategy, worker_count: int, partition_count: int, seed: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of a first assignment and of a join, with random weights."""
    rng = random.Random(seed)
    partitions = [Partition((f"p-{i}",), rng.randrange(1, 101)) for i in range(partition_count)]
    members = workers(worker_count)
    first: list[float] = []
    join: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        shares = strategy.assign(members, partitions, {})
        first.append(time.perf_counter() - started)
        owners = owners_of(shares)
        started = time.perf_counter()
        strategy.assign([*members, WorkerId("worker-new")], partitions, owners)
        join.append(time.perf_counter() - started)
    return {"first": 1000 * statistics.median(first), "join": 1000 * statistics.median(join)}


def run(ctx: RunContext) -> dict[str, Figure]:
    """Every scenario with every strategy, then the speed at 128 workers x 10,000 partitions."""
    figures: dict[str, Figure] = {}
    worst_peak, worst_moves = 0.0, 0.0
    with ctx.progress("scenarios", total=len(SCENARIOS)) as advance:
        for scenario in SCENARIOS:
            for name, build in STRATEGIES.items():
                result = measure(scenario, build(), ctx.seed)
                figures[f"{scenario.name}.{name}.peak"] = result["peak"]
                figures[f"{scenario.name}.{name}.moved_pct"] = result["moved_pct"]
                if name == "sticky":
                    figures[f"{scenario.name}.{name}.peak_over_best"] = result["peak_best"]
                    worst_peak = max(worst_peak, result["peak_best"])
                    worst_moves = max(worst_moves, result["moves_over_minimum"])
            advance(1)
    figures["sticky_worst_peak_over_best"] = worst_peak
    figures["sticky_worst_moves_over_minimum"] = worst_moves
    repeats = 3 if ctx.quick else int(ctx.options["repeats"])
    for name, build in STRATEGIES.items():
        for what, taken in speed_ms(build(), 128, 10_000, ctx.seed, repeats).items():
            figures[f"128x10000_{name}_{what}_ms"] = round(taken, 2)
    return figures


BENCH = Benchmark(
    name="assign",
    help="Balance, movement and speed of the assignment strategies, beside the Go library's.",
    run=run,
    goals={
        "sticky_worst_peak_over_best": "<= 1.10",
        "sticky_worst_moves_over_minimum": "<= 1.2",
        "128x10000_sticky_first_ms": "< 50",
        "128x10000_sticky_join_ms": "< 50",
    },
    options=(ExperimentOption("repeats", 9, "timings per figure; the median counts"),),
)
