"""The worker's state as shown to operators, and the interface of the fence it checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from parti.model import Lease, Partition
from parti.worker.health import WorkerHealth


class Fence(Protocol):
    """Whether this process may still act; checked before every pull and before every start of a handler."""

    def may_pull(self) -> bool: ...

    def may_start(self, lease: Lease) -> bool: ...


class Unfenced:
    """The fence of a worker that shares its partitions with no other worker."""

    def may_pull(self) -> bool:
        return True

    def may_start(self, lease: Lease) -> bool:  # noqa: ARG002 - the protocol's signature
        return True


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """One partition as this worker sees it."""

    partition: Partition
    lease: Lease
    cursor: int
    """Up to this stream sequence every message of the partition is done."""
    target: int | None
    """Up to here it is read by range; None when it is live."""
    in_hand: int
    done: int
    retries: int
    dead_letters: int
    stopped: bool
    held: bool
    """Stopped, and waiting for `take_over` to set its start position."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The worker's state for operators."""

    worker_id: str
    consumer: str
    stream: str
    subjects: tuple[str, ...]
    in_hand: int
    batch_size: int
    pulling: bool
    health: WorkerHealth
    partitions: tuple[PartitionInfo, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of `WorkerInfo` that depends on the layout; the rest is the same in both."""

    worker_id: str
    consumer: str
    subjects: tuple[str, ...]
    in_hand: int
    batch_size: int
    pulling: bool
    partitions: tuple[PartitionInfo, ...]
