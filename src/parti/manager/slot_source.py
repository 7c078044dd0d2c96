"""Many explicit subjects in few partitions: each is a slot of up to ten subjects with one durable (per-partition).

For a stream whose subjects carry no partition token. Where they do, or where a subject mapping can add one
(`orders.*` to `orders.{{partition(64,1)}}.{{wildcard(1)}}`), a template with one wildcard is simpler and has no limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from typing import Final

from parti.control.subject_buckets import check_subjects, group, slot_of
from parti.errors import ConfigError
from parti.model import MAX_SUBJECTS_PER_PARTITION, Partition, PartitionId

_MOST_SLOTS: Final = 1000  # consumers per stream, the server's default limit
_HASHES: Final = 1 << 32


class SlotSource:
    """Partitions `slot-<n>`; a subject's slot is its FNV-1a hash modulo `slots`, and weighs one.

    Configure every worker of a namespace with the same subjects and number of slots. A subject added later begins with
    the messages after its slot's position; another number of slots needs another namespace.
    """

    def __init__(self, subjects: Iterable[str], slots: int, *, prefix: str = "slot") -> None:
        literal = {Partition(tuple(subject.split("."))) for subject in subjects}
        if not literal:
            raise ConfigError("a SlotSource needs at least one subject")
        self._subjects: dict[PartitionId, tuple[str, ...]] = {}
        found = []
        for slot, members in group(literal, slots, prefix=prefix).items():
            named = tuple(str(member.id) for member in members)
            if len(named) > MAX_SUBJECTS_PER_PARTITION:
                raise ConfigError(
                    f"{slot.id} would have {len(named)} subjects, at most {MAX_SUBJECTS_PER_PARTITION} are allowed: "
                    f"{_advice(literal, slots)}"
                )
            check_subjects(slot.id, named)
            self._subjects[slot.id] = named
            found.append(slot)
        self._partitions = tuple(sorted(found))

    def __repr__(self) -> str:
        subjects = sum(map(len, self._subjects.values()))
        return f"<SlotSource subjects={subjects} slots={len(self._partitions)}>"

    def subjects_of(self, partition: PartitionId) -> tuple[str, ...]:
        """The subjects of one slot, sorted."""
        found = self._subjects.get(partition)
        if found is None:
            raise ConfigError(f"slot {partition} has no subject here: every worker needs the same subjects and slots")
        return found

    async def partitions(self) -> tuple[Partition, ...]:
        return self._partitions

    async def changes(self) -> AsyncGenerator[tuple[Partition, ...], None]:
        """Never changes."""
        nothing: tuple[tuple[Partition, ...], ...] = ()
        for each in nothing:
            yield each


def _advice(subjects: set[Partition], slots: int) -> str:
    if len(subjects) <= _MOST_SLOTS * MAX_SUBJECTS_PER_PARTITION:
        hashes = [slot_of(subject, _HASHES) for subject in subjects]
        for more in range(slots + 1, _MOST_SLOTS + 1):
            if max(Counter(value % more for value in hashes).values()) <= MAX_SUBJECTS_PER_PARTITION:
                return f"use {more} slots"
    return "publish through a subject mapping with a partition token, and use one wildcard"
