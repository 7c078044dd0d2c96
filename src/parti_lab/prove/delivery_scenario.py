"""One random delivery scenario: hosts, triggers with their rules, sizes, policies, and faults, all from a seed.

Pure, so the same seed gives the same scenario. Each trigger has its own documents, so its policy alone decides in
which order they have to arrive.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

HostKind = Literal["well", "slow", "flaky", "throttling", "hanging", "dead", "resetting", "no_dns"]
ILL: tuple[HostKind, ...] = ("slow", "flaky", "throttling", "hanging", "dead", "resetting", "no_dns")
ORDERS = ("block", "park", "skip", "latest")
_HUNGRY = 0.1
FAULTS = ("kill", "server", "freeze", "stop")


@dataclass(frozen=True, slots=True)
class Trigger:
    """One trigger: its rules, its hosts, and the shape of its tasks."""

    name: str
    order: str
    host: HostKind
    rate: float = 0.0
    concurrency: int = 0
    documents: int = 4
    tasks: int = 20
    size: int = 0
    """Bytes of payload."""
    attempts: int = 0
    """Attempts that the task's own policy allows; 0 means no limit."""
    backoff: float = 0.0
    hosts: int = 1
    """Servers of this kind; a document belongs to one of them."""

    @property
    def rules(self) -> str:
        words = [f"order={self.order}"]
        words += [f"rate={self.rate:g}"] if self.rate else []
        words += [f"concurrency={self.concurrency}"] if self.concurrency else []
        return f"{self.name}: {' '.join(words)}"


@dataclass(frozen=True, slots=True)
class DeliveryScenario:
    """Everything that a run does; failing hosts recover after `heals` seconds."""

    seed: int
    partitions: int
    processes: int
    triggers: tuple[Trigger, ...]
    faults: tuple[str, ...]
    heals: float
    block_for: str
    max_ack_pending: int
    descriptors: int = 0
    """The number of descriptors that a process may open; 0 means no limit."""

    @property
    def tasks(self) -> int:
        return sum(trigger.tasks for trigger in self.triggers)

    @property
    def crowded(self) -> bool:
        """Whether the healthy host has to wait for requests in flight to failing hosts.

        It has to where tasks of other hosts may be all that is in flight (some wait behind a task being tried, or for a
        rate), and where partitions move because another process joins: what is in flight ends first.
        """
        others = self.tasks - self.triggers[-1].tasks
        moves = self.processes > 1 and self.partitions > 1
        return moves or self.max_ack_pending // self.partitions <= others

    def __str__(self) -> str:
        parts = [f"{t.rules.partition(': ')[2]} -> {t.host} x{t.tasks}" for t in self.triggers]
        faults = " ".join(self.faults) or "calm"
        faults += f" {self.descriptors} descriptors" if self.descriptors else ""
        return f"seed {self.seed}: {self.partitions}p {self.processes}w {faults}; {'; '.join(parts)}"


def draw(seed: int, *, spark: bool = False, hungry: bool = False) -> DeliveryScenario:
    """The scenario of this seed; `hungry`: more hosts than a process has descriptors for, as in one of ten scenarios.

    (Not on Spark, whose processes are shared by all scenarios.)
    """
    rng = random.Random(f"delivery {seed}")
    hungry = not spark and (hungry or random.Random(f"hungry {seed}").random() < _HUNGRY)
    faults = tuple(rng.choice(FAULTS) for _ in range(rng.choice((0, 0, 1, 2))))
    triggers = [_trigger(rng, number, spark) for number in range(rng.randint(1, 4))]
    if hungry:
        triggers.append(Trigger(f"t{len(triggers)}", "block", "well", documents=200, tasks=200, hosts=80))
    triggers.append(Trigger(f"t{len(triggers)}", "block", "well", tasks=40))  # the others must not disturb this one
    return DeliveryScenario(
        seed=seed,
        partitions=1 if spark else rng.choice((1, 1, 2, 4)),
        processes=2 if not spark and (faults or rng.random() < 0.4) else 1,
        triggers=tuple(triggers),
        faults=faults[:1] if spark else faults,
        heals=rng.choice((1.5, 3.0) if spark else (3.0, 6.0)),  # a Spark batch takes about as long as a recovery here
        block_for=rng.choice(("200ms", "2s", "1m")),
        max_ack_pending=rng.choice((64, 2000)),
        descriptors=100 if hungry else 0,
    )


def _trigger(rng: random.Random, number: int, spark: bool) -> Trigger:
    limited = rng.random() < 0.6
    rate = rng.choice((0.0, 5.0, 20.0, 100.0)) if limited else 0.0
    return Trigger(
        name=f"t{number}",
        order=rng.choice(ORDERS),
        host=rng.choice((*ILL, "well")),
        rate=rate,
        concurrency=rng.choice((0, 1, 2, 4)) if limited else 0,
        documents=rng.choice((1, 3, 20)),
        tasks=rng.choice((10, 40)) if rate == 5.0 or spark else rng.choice((20, 80)),
        size=rng.choice((0, 0, 2_000, 100_000)),
        attempts=rng.choice((0, 0, 0, 3)),
        backoff=rng.choice((0.0, 0.3)),
    )
