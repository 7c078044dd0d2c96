"""Who owns which partition, as pure functions: the reference's cut, filter subjects, and moves that are minimal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parti.groups.records import ElasticRecord, MemberMapping, Membership, PartitioningFilter, StaticRecord
from parti.subjects import matches, partition_of


def balanced(members: Sequence[str], max_members: int) -> dict[str, tuple[int, ...]]:
    """The reference's cut: blocks of equal size in the order of names, then the rest one each (section 5)."""
    names = sorted(set(members))[:max_members]
    if not names:
        return {}
    size = max_members // len(names)
    owned: dict[str, list[int]] = {name: list(range(k * size, (k + 1) * size)) for k, name in enumerate(names)}
    for offset, partition in enumerate(range(len(names) * size, max_members)):
        owned[names[offset]].append(partition)
    return {name: tuple(partitions) for name, partitions in owned.items()}


def assignment(record: Membership) -> dict[str, tuple[int, ...]]:
    """Each member's partitions in the order of its filters; members beyond the number of partitions own none."""
    if record.members:
        return {**dict.fromkeys(record.members, ()), **balanced(record.members, record.max_members)}
    owned: dict[str, tuple[int, ...]] = {}
    for mapping in record.mappings:
        owned[mapping.member] = owned.get(mapping.member, ()) + mapping.partitions
    return owned


def partitions_of(record: Membership, member: str) -> tuple[int, ...]:
    """The partitions of one member, in the order of its filters."""
    return assignment(record).get(member, ())


def filters_of(record: Membership) -> tuple[str, ...]:
    """The group's own filters; none means every subject."""
    if isinstance(record, StaticRecord):
        return record.filters
    assert isinstance(record, ElasticRecord)
    return tuple(each.filter for each in record.partitioning_filters or ())


def partition_filters(record: Membership, member: str) -> tuple[str, ...]:
    """The filter subjects of a member's consumer, in text and order exactly as the reference sends them.

    Balanced: `<partition>.<filter>`, all partitions for the first filter, then for the next. Mapped: `<partition>.>`
    whatever the filters are; with two filters the reference lists each of them twice, which the server refuses
    (10138), so that there the repeats are dropped.
    """
    partitions = partitions_of(record, member)
    filters = filters_of(record) or (">",)
    if not record.members:
        filters = (">",)
    return tuple(f"{partition}.{each}" for each in filters for partition in partitions)


def transform(each: PartitioningFilter, max_members: int) -> dict[str, str]:
    """The subject transform of one partitioning filter, as text: the server compares it as such (10058)."""
    indexes = "".join(f",{index}" for index in each.wildcards)
    tokens, star = [], 0
    for token in each.filter.split("."):
        if token == "*":
            star += 1
            token = f"{{{{Wildcard({star})}}}}"
        tokens.append(token)
    return {"src": each.filter, "dest": f"{{{{Partition({max_members}{indexes})}}}}.{'.'.join(tokens)}"}


def transforms(record: ElasticRecord) -> list[dict[str, str]]:
    """The subject transforms of the group's work queue; without filters every subject takes part."""
    filters = record.partitioning_filters or (PartitioningFilter(">"),)
    return [transform(each, record.max_members) for each in filters]


def predict(record: ElasticRecord, subject: str) -> int | None:
    """The partition that the server will give to `subject`; None when the group does not take it."""
    for each in record.partitioning_filters or (PartitioningFilter(">"),):
        if matches(each.filter, subject):
            if not each.wildcards:
                return partition_of([subject], record.max_members)
            stars = [
                given for token, given in zip(each.filter.split("."), subject.split("."), strict=False) if token == "*"
            ]
            return partition_of([stars[index - 1] for index in each.wildcards], record.max_members)
    return None


def least_moves(
    current: Mapping[str, Sequence[int]], members: Sequence[str], max_members: int
) -> tuple[MemberMapping, ...]:
    """An even mapping of all partitions to `members` that takes away from nobody more than it must.

    Members that stay keep what they own up to their share; only the surplus and what nobody owns moves. From 2 to 3
    members over 10 partitions 3 move; the reference's cut moves 6. Members beyond the number of partitions get none.
    """
    names = sorted(set(members))[:max_members]
    if not names:
        return ()
    low, larger = divmod(max_members, len(names))
    kept: dict[str, list[int]] = {}
    taken: set[int] = set()
    for name in names:
        mine = sorted({p for p in current.get(name, ()) if 0 <= p < max_members and p not in taken})
        kept[name] = mine
        taken.update(mine)
    # Those who own most keep the larger shares: any other choice would move one more partition.
    by_size = sorted(names, key=lambda name: (-len(kept[name]), name))
    share = {name: low + (1 if place < larger else 0) for place, name in enumerate(by_size)}
    free = [p for p in range(max_members) if p not in taken]
    for name in names:
        free += kept[name][share[name] :]
        del kept[name][share[name] :]
    free.sort()
    for name in names:
        need = share[name] - len(kept[name])
        kept[name] = sorted(kept[name] + free[:need])
        del free[:need]
    return tuple(MemberMapping(name, tuple(kept[name])) for name in names)
