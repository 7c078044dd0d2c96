"""Partition i to worker i mod n: an even count, and nearly everything moves when n changes."""

from __future__ import annotations

from collections.abc import Sequence

from parti.control.assign.base import NoWorkers, Owners, Shares
from parti.model import Partition, WorkerId


class RoundRobin:
    """Counts differ by at most one; weights and previous owners are ignored.

    The order of the workers matters, as in the Go library. The control plane always passes them sorted: in heartbeat
    order an unchanged set would reshuffle everything (docs/evidence/go-library.md#w10).
    """

    name = "round-robin"

    def assign(self, workers: Sequence[WorkerId], partitions: Sequence[Partition], previous: Owners) -> Shares:  # noqa: ARG002 - the protocol's signature
        if not workers:
            raise NoWorkers
        return {worker: tuple(partitions[i :: len(workers)]) for i, worker in enumerate(workers)}
