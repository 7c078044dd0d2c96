"""Runs one seed, judges it, and prints its event log when it fails."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Final

from parti.model import Layout, Retention
from parti.observe.logs import muted
from parti.testing.history import HistoryVerdict
from parti.testing.sim.cluster import Cluster, ClusterShape
from parti.testing.sim.faults import FaultPlan, SimFaults
from parti.testing.sim.world import World

PATIENCE: Final = 12.0  # virtual seconds after the last fault within which everything must be done
_LINES: Final = 60

SHAPES: Final = (
    (Layout.PER_WORKER, Retention.LIMITS),
    (Layout.PER_PARTITION, Retention.LIMITS),
    (Layout.PER_WORKER, Retention.INTEREST),
    (Layout.PER_WORKER, Retention.WORKQUEUE),
    (Layout.PER_PARTITION, Retention.INTEREST),
    (Layout.PER_PARTITION, Retention.WORKQUEUE),
)


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """The result of one seed."""

    seed: int
    shape: ClusterShape
    digest: str
    """Digest of the whole event log: the same seed gives the same digest."""
    steps: int
    verdict: HistoryVerdict
    broken: tuple[str, ...]
    """The broken promises as text; empty when all held."""
    handoffs: dict[str, int]
    cas_writes: int
    """Writes of claims, the only records with several writers."""
    cas_conflicts: int
    unclean: frozenset[str] = frozenset()
    """Members whose last effects may be repeated: they crashed, were fenced, or their positions were removed when they
    had gone."""
    log: tuple[str, ...] = field(repr=False, default=())

    @property
    def ok(self) -> bool:
        return not self.broken

    def story(self) -> str:
        """The failure on one page: what broke, and the events around the affected partition."""
        if self.ok:
            return f"seed {self.seed}: all promises held ({self.steps} steps)"
        about = re.search(r"\bp\d+\b", self.broken[0])
        word = about.group() if about else ""
        loud = ("CRASH", "FROZEN", "CUT OFF", "FENCED", "network", " is ", "leads", "leaves", "stops", "starts", "gap")
        found = [line for line in self.log if (word and word in line) or any(mark in line for mark in loud)]
        if len(found) > _LINES:  # the cause matters more than the hundredth effect
            found = [line for line in found if "effect" not in line or line in found[-_LINES // 3 :]]
        cut = ["   ..."] if len(found) > _LINES else []
        return "\n".join(
            [
                f"seed {self.seed} ({self.shape.layout}, {self.shape.retention}) broke a promise:",
                *(f"  {reason}" for reason in self.broken[:5]),
                f"what happened to {word or 'the cluster'}:",
                *cut,
                *found[-_LINES:],
            ]
        )


def simulate(seed: int, *, shape: ClusterShape | None = None, plan: FaultPlan | None = None) -> SimOutcome:
    """One cluster from start to rest. The seed determines layout, retention, size and faults unless they are given."""
    world = World(seed)
    shape = shape or _shape(seed, world.rng)
    plan = plan or FaultPlan(crashes=seed % 5 != 0)
    before = random.getstate()
    random.seed(seed)  # the shipped code draws its waits from the process's global randomness
    cluster = Cluster(world, shape)
    with muted():
        try:
            _run(cluster, plan, shape.workers)
        finally:
            cluster.end()
            random.setstate(before)
    reasons = [*world.bugs, *cluster.broken]
    verdict = cluster.history.verdict()
    if not reasons and not cluster.settled():
        lost = ", ".join(verdict.examples.get("lost", ()))
        reasons.append(f"lost or late: {lost}" if verdict.lost else f"stuck: {_stuck(cluster)}")
    return SimOutcome(
        seed=seed,
        shape=shape,
        digest=world.digest,
        steps=world.steps,
        verdict=verdict,
        broken=tuple(reasons),
        handoffs=dict(cluster.results),
        cas_writes=cluster.kv.writes["claim"],
        cas_conflicts=cluster.kv.conflicts["claim"],
        unclean=frozenset(cluster.unclean),
        log=tuple(world.story),
    )


def _shape(seed: int, rng: random.Random) -> ClusterShape:
    layout, retention = SHAPES[seed % len(SHAPES)]
    return ClusterShape(
        layout,
        retention,
        workers=rng.randrange(2, 5),
        partitions=rng.choice((3, 4, 5, 6, 10)),
        lanes=rng.choice(("partition", "key")),
        failing=rng.choice((0.0, 0.0, 0.05, 0.15)),
        max_ack_pending=rng.choice((64, 64, 12)),
    )


def _run(cluster: Cluster, plan: FaultPlan, workers: int) -> None:
    world = cluster.world
    for _ in range(workers):
        cluster.start()
    faults = SimFaults(cluster, plan)

    def broken() -> bool:
        return bool(cluster.broken or world.bugs)

    world.run(faults.quiet_from, broken)
    deadline = faults.quiet_from + PATIENCE
    while not broken() and world.now < deadline and not cluster.settled():
        world.run(min(deadline, world.now + 0.25), broken)


def _stuck(cluster: Cluster) -> str:
    return "; ".join(str(entry[0]) for entry in cluster.kv.list("claim").values())
