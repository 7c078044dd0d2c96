"""The interface of a strategy, and the metrics by which strategies are compared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from parti.errors import Category, FatalError
from parti.model import Partition, PartitionId, WorkerId

Owners = Mapping[PartitionId, WorkerId]
"""The previous owner of each partition."""

Shares = dict[WorkerId, tuple[Partition, ...]]
"""The partitions of each worker; every worker is listed."""


class NoWorkers(FatalError):
    """There is no worker to assign to: wait for a member before assigning."""

    category: ClassVar[Category] = Category.POLICY

    def __init__(self) -> None:
        super().__init__("no workers available for assignment")


class Strategy(Protocol):
    """A pluggable assignment. The same input gives the same output on every member, whichever leads."""

    @property
    def name(self) -> str:
        """Its name in logs and in the assignment record."""
        ...

    def assign(self, workers: Sequence[WorkerId], partitions: Sequence[Partition], previous: Owners) -> Shares:
        """Every partition to exactly one of `workers`; raises NoWorkers when there are none."""
        ...


def owners_of(shares: Shares) -> dict[PartitionId, WorkerId]:
    """The inverse view: partition -> worker."""
    return {partition.id: worker for worker, own in shares.items() for partition in own}


@dataclass(frozen=True, slots=True)
class Quality:
    """How good an assignment is, and how much it moved."""

    peak_over_mean: float
    """Load of the fullest worker over the mean load."""
    peak_over_best: float
    """The same over the lowest peak that whole partitions allow; equals `peak_over_mean` unless some are very heavy."""
    moved: int
    """Partitions whose previous owner is another worker."""
    minimum: int
    """The moves that no strategy can avoid for an even spread by count."""


def quality(shares: Shares, previous: Owners) -> Quality:
    """Compare `shares` with the previous owners."""
    loads = [sum(p.load for p in own) for own in shares.values()]
    partitions = [p for own in shares.values() for p in own]
    mean = sum(loads) / len(loads)
    now = owners_of(shares)
    moved = sum(1 for partition, worker in now.items() if previous.get(partition, worker) != worker)
    peak = max(loads)
    best = lowest_peak([p.load for p in partitions], len(loads))
    return Quality(
        peak_over_mean=peak / mean if mean else 1.0,
        peak_over_best=peak / best if best else 1.0,
        moved=moved,
        minimum=minimum_moves(shares.keys(), len(partitions), previous),
    )


def minimum_moves(workers: Collection[WorkerId], count: int, previous: Owners) -> int:
    """Moves that an even spread by count requires: partitions of workers that left, and the joiners' shares."""
    present = set(workers)
    before = set(previous.values())
    orphans = sum(1 for owner in previous.values() if owner not in present)
    return max(orphans, round(count * len(present - before) / len(present))) if before else 0


def lowest_peak(loads: Sequence[int], workers: int) -> float:
    """A lower bound of the peak for any assignment of whole partitions.

    It is the mean, or higher: of the k*n+1 heaviest partitions, k+1 must share a worker, and weigh at least as much as
    the lightest k+1 of them (150 partitions of weight 100 over 110 workers cannot peak below 200, whatever the mean).
    """
    if not loads or not workers:
        return 0.0
    heavy = sorted(loads, reverse=True)
    best = sum(heavy) / workers
    k = 0
    while k * workers < len(heavy):
        first = k * workers
        best = max(best, float(sum(heavy[first - k : first + 1])))
        k += 1
    return best
