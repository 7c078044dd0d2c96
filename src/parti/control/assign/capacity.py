"""Capacities: no worker gets more partitions than the capacity it declares, whatever the strategy.

A partition that does not fit where the strategy wants it stays with its previous owner, else it goes to the emptiest
worker with room. If it fits nowhere it is not placed: a regular state that is shown to operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from parti.control.assign.base import Owners
from parti.model import PartitionId, WorkerId


def fit(
    wanted: Owners, capacities: Mapping[WorkerId, int], workers: Sequence[WorkerId], previous: Owners
) -> tuple[dict[PartitionId, WorkerId], tuple[PartitionId, ...]]:
    """The partitions of each worker, and those that cannot be placed. Capacity 0 means no limit.

    Deterministic and stable: with its own result as the previous owners, nothing moves.
    """
    shares: dict[WorkerId, list[PartitionId]] = {worker: [] for worker in workers}
    for partition in sorted(wanted):
        shares[wanted[partition]].append(partition)
    room = {w: float(capacities.get(w) or "inf") - len(shares[w]) for w in shares}
    if min(room.values(), default=0) >= 0:
        return dict(wanted), ()
    owners = dict(wanted)
    excess: list[PartitionId] = []
    for worker, own in shares.items():
        if room[worker] < 0:
            # Partitions that were here before stay: moving them would free nothing.
            own.sort(key=lambda p, w=worker: (previous.get(p) != w, p))  # type: ignore[misc]
            excess += own[int(room[worker]) :]
            room[worker] = 0
    homeless: list[PartitionId] = []
    for partition in sorted(excess, key=lambda p: (p not in previous, p)):
        del owners[partition]
        before = previous.get(partition)
        if before in room and room[before] > 0:
            owners[partition] = before
            room[before] -= 1
        else:
            homeless.append(partition)
    counts = dict.fromkeys(shares, 0)
    for worker in owners.values():
        counts[worker] += 1
    emptiest = [(counts[w], w) for w in shares if room[w] > 0]
    heapify(emptiest)
    unplaced: list[PartitionId] = []
    for partition in homeless:
        if not emptiest:
            unplaced.append(partition)
            continue
        count, worker = heappop(emptiest)
        owners[partition] = worker
        room[worker] -= 1
        if room[worker] > 0:
            heappush(emptiest, (count + 1, worker))
    return owners, tuple(sorted(unplaced))
