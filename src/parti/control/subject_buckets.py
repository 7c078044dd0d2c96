"""Groups many logical partitions into few slots, each with one durable (the per-partition layout).

The number of slots is fixed: a key's slot is its hash modulo that number, so changing it moves nearly every key. 64-256
slots stay within what a stream can serve (1,000 consumers at most, and many idle ones cost CPU on R3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parti.errors import ConfigError
from parti.model import MAX_SUBJECTS_PER_PARTITION, Partition, PartitionId
from parti.subjects import partition_of


def slot_of(partition: Partition, slots: int) -> int:
    """The slot of a partition: the server's own FNV-1a over its keys, so that a subject mapping agrees with it."""
    return partition_of(partition.keys, slots)


def group(
    partitions: Iterable[Partition], slots: int, *, prefix: str = "slot"
) -> dict[Partition, tuple[Partition, ...]]:
    """Non-empty slots, as partitions with the total weight of their members; members are sorted."""
    if slots < 1:
        raise ConfigError(f"the number of slots must be at least 1, not {slots}")
    members: dict[int, list[Partition]] = {}
    for partition in partitions:
        members.setdefault(slot_of(partition, slots), []).append(partition)
    return {
        Partition((f"{prefix}-{n}",), sum(p.load for p in own)): tuple(sorted(own))
        for n, own in sorted(members.items())
    }


def check_subjects(partition: PartitionId, subjects: Sequence[str]) -> Sequence[str]:
    """The subjects of one partition's durable: up to ten literals, or one wildcard. ConfigError says what is wrong."""
    if not subjects:
        raise ConfigError(f"partition {partition} has no subject: an empty filter would match the whole stream")
    wild = [s for s in subjects if "*" in s.split(".") or s.endswith(">")]
    if wild and len(subjects) > 1:
        raise ConfigError(f"partition {partition}: a wildcard ({wild[0]}) must be the only subject of its partition")
    if len(subjects) > MAX_SUBJECTS_PER_PARTITION:
        raise ConfigError(
            f"partition {partition} has {len(subjects)} subjects, at most {MAX_SUBJECTS_PER_PARTITION} are allowed: "
            "publish through a subject mapping with a partition token, and use one wildcard"
        )
    return subjects
