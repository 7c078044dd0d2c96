"""Sticky bounded-load assignment, the default: partitions move only if they must, and no worker is overloaded."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from parti.control.assign.base import NoWorkers, Owners, Shares, lowest_peak, minimum_moves
from parti.errors import ConfigError
from parti.model import Partition, PartitionId, WorkerId

_Item = tuple[int, PartitionId]
"""(load, id): sorts by load, in the same order on every member."""

_FULL: Final = 0.9  # with mixed weights, no partition moves to a worker above 0.9 x the mean just to even out
_BUDGET: Final = 1.15  # of the unavoidable moves; the promise is 1.2, the rest is for rounding


class Sticky:
    """Peak <= `bound` x the best possible, moves <= 1.2 x the unavoidable, and none when nothing changed.

    Live owners keep their partitions. Orphans go, heaviest first, to the worker with the least load. Then load moves
    from the fullest to the emptiest worker: to exact quotas when all weights are equal, otherwise until the peak is
    within the bound and joiners have their share. The bound has priority over the budget of moves.
    """

    name = "sticky"

    def __init__(self, *, bound: float = 1.05) -> None:
        if bound < 1.0:
            raise ConfigError(f"bound must be at least 1.0 (an exact balance), not {bound}")
        self._bound = bound  # 1.05 leaves room under the promised 1.10 for rounding to whole partitions

    def assign(self, workers: Sequence[WorkerId], partitions: Sequence[Partition], previous: Owners) -> Shares:
        if not workers:
            raise NoWorkers
        ordered = sorted(set(workers))
        index = {worker: i for i, worker in enumerate(ordered)}
        by_id = {partition.id: partition for partition in partitions}
        shares: list[list[_Item]] = [[] for _ in ordered]
        orphans: list[_Item] = []
        for identity in sorted(by_id):
            owner = index.get(previous.get(identity, WorkerId("")))
            item = (by_id[identity].load, identity)
            if owner is None:
                orphans.append(item)
            else:
                shares[owner].append(item)
        loads = [sum(load for load, _ in own) for own in shares]
        _place(orphans, shares, loads)
        for own in shares:
            own.sort()
        if len({partition.load for partition in by_id.values()}) <= 1:
            _even_out(shares, loads)
        else:
            budget = round(_BUDGET * minimum_moves(ordered, len(by_id), previous)) - len(orphans)
            _relieve(shares, loads, self._bound, budget)
        return {
            worker: tuple(by_id[identity] for identity in sorted(identity for _, identity in own))
            for worker, own in zip(ordered, shares, strict=True)
        }


def _place(orphans: list[_Item], shares: list[list[_Item]], loads: list[int]) -> None:
    """Heaviest first to the least loaded worker: at most 4/3 of the best possible peak when all start empty."""
    emptiest = [(load, i) for i, load in enumerate(loads)]
    heapify(emptiest)
    for item in sorted(orphans, key=lambda item: (-item[0], item[1])):
        load, i = heappop(emptiest)
        shares[i].append(item)
        loads[i] = load + item[0]
        heappush(emptiest, (loads[i], i))


def _even_out(shares: list[list[_Item]], loads: list[int]) -> None:
    """Equal weights: final counts differ by at most one, and only partitions above quota move."""
    fullest = [(-len(own), i) for i, own in enumerate(shares)]
    emptiest = [(len(own), i) for i, own in enumerate(shares)]
    heapify(fullest)
    heapify(emptiest)
    while True:
        giver, taker = fullest[0][1], emptiest[0][1]
        if -fullest[0][0] - emptiest[0][0] <= 1:
            return
        heappop(fullest)
        heappop(emptiest)
        item = shares[giver].pop()
        insort(shares[taker], item)
        loads[giver] -= item[0]
        loads[taker] += item[0]
        # Givers only give and takers only take until counts meet, so neither heap needs the other's changes.
        heappush(fullest, (-len(shares[giver]), giver))
        heappush(emptiest, (len(shares[taker]), taker))


def _relieve(shares: list[list[_Item]], loads: list[int], bound: float, budget: int) -> None:
    """Mixed weights: bring the peak under the bound, then give the emptiest workers their share within the budget."""
    total, count = sum(loads), len(loads)
    limit = bound * lowest_peak([load for own in shares for load, _ in own], count)
    enough = _FULL * total / count
    # Each move brings two loads closer together, so this terminates; the cap only guards against a bug.
    for moves in range(4 * sum(len(own) for own in shares)):
        by_load = sorted(range(count), key=loads.__getitem__)
        taker = by_load[0]
        peak = loads[by_load[-1]]
        if peak <= limit and (loads[taker] >= enough or moves >= budget):
            return
        for giver in reversed(by_load):
            must = loads[giver] > limit
            if not must and (loads[taker] >= enough or moves >= budget):
                return
            item = _best_item(shares[giver], loads[giver] - loads[taker])
            if item is not None:
                break
        else:
            return
        shares[giver].remove(item)
        insort(shares[taker], item)
        loads[giver] -= item[0]
        loads[taker] += item[0]


def _best_item(own: list[_Item], gap: int) -> _Item | None:
    """The partition that brings giver and taker closest: the heaviest of at most half the difference between them.

    If all are heavier than half, the lightest still helps if it does not just swap the roles.
    """
    at = bisect_right(own, gap / 2, key=lambda item: item[0])
    if at:
        return own[at - 1]
    return own[0] if own and own[0][0] < gap else None
