"""Assignment strategies: which worker should own which partition. Pure, deterministic, pluggable.

    workers, partitions, previous owners -> partitions per worker

Every strategy gives each partition to exactly one worker and lists every worker, even without partitions. Input order
does not matter for `sticky`; the other three match the Go library bit for bit, so that its users can compare.

Promises: every partition has exactly one worker; nothing moves without need (`sticky`).

Flow: `base` checks -> one strategy -> `capacity` removes what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from parti.control.assign.base import NoWorkers, Owners, Strategy, owners_of
from parti.control.assign.consistent_hash import ConsistentHash
from parti.control.assign.round_robin import RoundRobin
from parti.control.assign.sticky import Sticky
from parti.control.assign.weighted import WeightedConsistentHash
from parti.errors import ConfigError

STRATEGIES: Final[Mapping[str, Callable[[], Strategy]]] = {
    "sticky": Sticky,
    "consistent-hash": ConsistentHash,
    "weighted-consistent-hash": WeightedConsistentHash,
    "round-robin": RoundRobin,
}


def strategy_named(name: str) -> Strategy:
    """The strategy of this name with its defaults; ConfigError lists the valid names."""
    try:
        return STRATEGIES[name]()
    except KeyError:
        raise ConfigError(f"no assignment strategy {name!r}: choose one of {', '.join(STRATEGIES)}") from None


__all__ = [
    "STRATEGIES",
    "ConsistentHash",
    "NoWorkers",
    "Owners",
    "RoundRobin",
    "Sticky",
    "Strategy",
    "WeightedConsistentHash",
    "owners_of",
    "strategy_named",
]
