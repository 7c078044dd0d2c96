"""What a strategy is, and the figures strategies are judged by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from parti.errors import Category, FatalError
from parti.model import Partition, PartitionId, WorkerId

Owners = Mapping[PartitionId, WorkerId]
"""Who owned each partition before."""

Shares = dict[WorkerId, tuple[Partition, ...]]
"""The partitions of each worker, every worker listed."""


class NoWorkers(FatalError):
    """There is nobody to assign to: wait for a member before assigning."""

    category: ClassVar[Category] = Category.POLICY

    def __init__(self) -> None:
        super().__init__("no workers available for assignment")


class Strategy(Protocol):
    """A pluggable assignment. The same input gives the same output on every member, whoever leads."""

    @property
    def name(self) -> str:
        """What logs and the assignment record call it."""
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
    """The same over the lowest peak that whole partitions allow; equals the former unless some are very heavy."""
    moved: int
    """Partitions whose previous owner is another worker."""
    minimum: int
    """The moves that no strategy can avoid for an even spread by count."""


def quality(shares: Shares, previous: Owners) -> Quality:
    """Judge `shares` against what was before."""
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
    """Moves that an even spread by count needs: those of workers that are gone, and what joiners have to be given."""
    present = set(workers)
    before = set(previous.values())
    orphans = sum(1 for owner in previous.values() if owner not in present)
    return max(orphans, round(count * len(present - before) / len(present))) if before else 0


def lowest_peak(loads: Sequence[int], workers: int) -> float:
    """A peak that no assignment of whole partitions can beat.

    Besides the mean: of the k*n+1 heaviest, k+1 must share a worker, and weigh at least what the lightest k+1 of them
    weigh (150 partitions of weight 100 over 110 workers cannot peak below 200, whatever the mean).
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
