"""Assigns partitions to members with pure functions: the reference's split, filter subjects, and minimal moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parti.groups import compact
from parti.groups.records import (
    CompactRecord,
    ElasticRecord,
    GroupMembership,
    MemberMapping,
    PartitioningFilter,
    StaticRecord,
)
from parti.subjects import matches, partition_of


def balanced(
    members: Sequence[str], max_members: int, order: Sequence[int] | None = None
) -> dict[str, tuple[int, ...]]:
    """The reference's split: equal blocks in the order of names, then the remainder one by one (section 5).

    `order` is the order in which partitions are split; the reference uses 0, 1, 2 and so on.
    """
    names = sorted(set(members))[:max_members]
    if not names:
        return {}
    order = order or range(max_members)
    size = max_members // len(names)
    owned: dict[str, list[int]] = {name: list(order[k * size : (k + 1) * size]) for k, name in enumerate(names)}
    for offset, partition in enumerate(order[len(names) * size :]):
        owned[names[offset]].append(partition)
    return {name: tuple(partitions) for name, partitions in owned.items()}


def assignment(record: GroupMembership) -> dict[str, tuple[int, ...]]:
    """Each member's partitions in the order of its filters; members beyond the number of partitions own none."""
    if record.members:
        owned = balanced(record.members, record.max_members, _order(record))
        return {name: owned.get(name, ()) for name in {**dict.fromkeys(record.members), **owned}}
    mapped: dict[str, tuple[int, ...]] = {}
    for mapping in record.mappings:
        mapped[mapping.member] = mapped.get(mapping.member, ()) + mapping.partitions
    return mapped


def _order(record: GroupMembership) -> list[int] | None:
    return compact.block_order(record.max_members) if isinstance(record, CompactRecord) else None


def partitions_of(record: GroupMembership, member: str) -> tuple[int, ...]:
    """The partitions of one member, in the order of its filters."""
    return assignment(record).get(member, ())


def filters_of(record: GroupMembership) -> tuple[str, ...]:
    """The group's own filters; none means every subject."""
    if isinstance(record, StaticRecord):
        return record.filters
    assert isinstance(record, ElasticRecord)
    return tuple(each.filter for each in record.partitioning_filters or ())


def partition_filters(record: GroupMembership, member: str) -> tuple[str, ...]:
    """The filter subjects of a member's consumer, in text and order exactly as the reference sends them.

    Balanced: `<partition>.<filter>`, all partitions for the first filter, then for the next. Mapped: `<partition>.>`,
    whatever the filters are; with two filters the reference lists each of them twice, which the server refuses (10138),
    so the repeats are dropped here.
    """
    partitions = partitions_of(record, member)
    if isinstance(record, CompactRecord):
        return compact.cover(partitions, record.max_members)
    filters = filters_of(record) or (">",)
    if not record.members:
        filters = (">",)
    return tuple(f"{partition}.{each}" for each in filters for partition in partitions)


def transform(each: PartitioningFilter, max_members: int) -> dict[str, str]:
    """The subject transform of one partitioning filter; the server compares it as text (10058)."""
    indexes = "".join(f",{index}" for index in each.wildcards)
    tokens, star = [], 0
    for token in each.filter.split("."):
        if token == "*":
            star += 1
            token = f"{{{{Wildcard({star})}}}}"
        tokens.append(token)
    return {"src": each.filter, "dest": f"{{{{Partition({max_members}{indexes})}}}}.{'.'.join(tokens)}"}


def transforms(record: ElasticRecord) -> list[dict[str, str]]:
    """The subject transforms of the group's work queue; without filters every subject is included."""
    filters = record.partitioning_filters or (PartitioningFilter(">"),)
    if isinstance(record, CompactRecord):
        return [compact.transform(each, record.max_members) for each in filters]
    return [transform(each, record.max_members) for each in filters]


def predict(record: ElasticRecord, subject: str) -> int | None:
    """The partition that the server will assign to `subject`; None when the group excludes it."""
    for each in record.partitioning_filters or (PartitioningFilter(">"),):
        if matches(each.filter, subject):
            if not each.wildcards:
                return partition_of([subject], record.max_members)
            stars = [
                given for token, given in zip(each.filter.split("."), subject.split("."), strict=False) if token == "*"
            ]
            return partition_of([stars[index - 1] for index in each.wildcards], record.max_members)
    return None


def partition_subject(record: GroupMembership, partition: int) -> str:
    """The filter of one partition, in the stream that the group's members read."""
    if isinstance(record, CompactRecord):
        return compact.cover([partition], record.max_members)[0]
    return f"{partition}.>"


def partition_depth(record: GroupMembership) -> int:
    """The number of leading subject tokens that encode the partition; the last one is its number."""
    return compact.depth(record.max_members) if isinstance(record, CompactRecord) else 1


def next_mapping(record: GroupMembership, members: Sequence[str]) -> tuple[MemberMapping, ...]:
    """The group's partitions mapped to `members` with the fewest moves from their current owners."""
    return least_moves(assignment(record), members, record.max_members, _order(record))


def least_moves(
    current: Mapping[str, Sequence[int]],
    members: Sequence[str],
    max_members: int,
    order: Sequence[int] | None = None,
) -> tuple[MemberMapping, ...]:
    """An even mapping of all partitions to `members` with the fewest moves.

    Members that stay keep their partitions up to their share; only the surplus and unowned partitions move. From 2 to 3
    members over 10 partitions 3 move; the reference's split moves 6. Members beyond the number of partitions get none.
    """
    names = sorted(set(members))[:max_members]
    if not names:
        return ()
    place = {partition: at for at, partition in enumerate(order or range(max_members))}.__getitem__
    low, larger = divmod(max_members, len(names))
    kept: dict[str, list[int]] = {}
    taken: set[int] = set()
    for name in names:
        mine = sorted({p for p in current.get(name, ()) if 0 <= p < max_members and p not in taken}, key=place)
        kept[name] = mine
        taken.update(mine)
    # The members that own most keep the larger shares: any other choice would move one more partition.
    by_size = sorted(names, key=lambda name: (-len(kept[name]), name))
    share = {name: low + (1 if rank < larger else 0) for rank, name in enumerate(by_size)}
    free = [p for p in range(max_members) if p not in taken]
    for name in names:
        free += kept[name][share[name] :]
        del kept[name][share[name] :]
    free.sort(key=place)
    for name in names:
        need = share[name] - len(kept[name])
        kept[name] = sorted(kept[name] + free[:need], key=place)
        del free[:need]
    return tuple(MemberMapping(name, tuple(kept[name])) for name in names)
