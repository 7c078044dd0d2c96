"""The rules for a group's settings (docs/evidence/groups.md#g3), each with its own error."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from parti.errors import ConfigError
from parti.groups.errors import (
    BadFilter,
    BadLimit,
    BadMaxMembers,
    FiltersOverlap,
    FilterWithoutWildcard,
    MappingIncomplete,
    MappingOutOfRange,
    MappingRepeatsMember,
    MappingRepeatsPartition,
    MembersAndMappings,
    TooManyMappings,
    TooManyWildcards,
    WildcardOutOfRange,
    WildcardRepeated,
)
from parti.groups.records import (
    CompactRecord,
    ElasticRecord,
    GroupMembership,
    MemberMapping,
    PartitioningFilter,
    StaticRecord,
)
from parti.subjects import overlaps, validate_subject


def check_membership(record: GroupMembership) -> None:
    """The reference's checks on every record it reads."""
    if record.max_members < 1:
        raise BadMaxMembers(f"max_members is {record.max_members}: a group has at least one partition")
    if record.members and record.mappings:
        raise MembersAndMappings("members and mappings are both set: keep one of them")
    if record.mappings:
        check_mappings(record.mappings, record.max_members)


def check_mappings(mappings: Sequence[MemberMapping], max_members: int) -> None:
    if len(mappings) > max_members:
        raise TooManyMappings(f"{len(mappings)} mappings for {max_members} partitions: drop some")
    seen: set[str] = set()
    owner: dict[int, str] = {}
    for mapping in mappings:
        if mapping.member in seen:
            raise MappingRepeatsMember(f"member {mapping.member!r} is mapped twice: join its partitions")
        seen.add(mapping.member)
        for partition in mapping.partitions:
            if not 0 <= partition < max_members:
                raise MappingOutOfRange(f"{mapping.member!r} maps partition {partition}: use 0 to {max_members - 1}")
            if partition in owner:
                raise MappingRepeatsPartition(
                    f"partition {partition} is mapped to {owner[partition]!r} and {mapping.member!r}: keep one"
                )
            owner[partition] = mapping.member
    if len(owner) < max_members:
        missing = next(partition for partition in range(max_members) if partition not in owner)
        raise MappingIncomplete(f"partition {missing} is not mapped: every one of {max_members} needs a member")


def check_static(record: StaticRecord) -> None:
    """The rules for a new static group; the reference does not check the filters at all."""
    check_membership(record)
    for each in record.filters:
        _check_filter(each)
    _check_overlap(record.filters)


def check_elastic_record(record: ElasticRecord) -> None:
    """The reference's checks on every elastic record."""
    check_membership(record)
    if isinstance(record, CompactRecord) and record.max_members & (record.max_members - 1):
        raise BadMaxMembers(f"max_members is {record.max_members}: the compact layout needs a power of two")
    for each in record.partitioning_filters or ():
        check_partitioning(each)


def check_elastic(record: ElasticRecord) -> None:
    """The rules for a new elastic group: the record's rules, and whatever the server would refuse only later."""
    check_elastic_record(record)
    for each in record.partitioning_filters or ():
        _check_filter(each.filter)
    _check_overlap([each.filter for each in record.partitioning_filters or ()])
    for what, limit in (("messages", record.max_buffered_msgs), ("bytes", record.max_buffered_bytes)):
        if limit < -1 or limit >= 1 << 63:
            raise BadLimit(f"the limit of buffered {what} is {limit}: use a positive number, or 0 for none")


def check_partitioning(each: PartitioningFilter) -> None:
    if not each.filter:
        raise BadFilter("a partitioning filter is empty: give a subject, or no filter at all for every subject")
    tokens = each.filter.split(".")
    stars = tokens.count("*")
    if not stars and tokens[-1] != ">":
        raise FilterWithoutWildcard(f"filter {each.filter!r} has neither '*' nor '>' at its end: nothing makes a key")
    if len(each.wildcards) > stars:
        raise TooManyWildcards(f"filter {each.filter!r} has {stars} '*', and {len(each.wildcards)} indexes are given")
    for index in each.wildcards:
        if each.wildcards.count(index) > 1:
            raise WildcardRepeated(f"wildcard index {index} of filter {each.filter!r} is given twice")
        if not 1 <= index <= stars:
            raise WildcardOutOfRange(f"wildcard index {index} of filter {each.filter!r}: use 1 to {stars}")


def _check_filter(subject: str) -> None:
    try:
        validate_subject(subject, wildcards=True, what="filter")
    except ConfigError as error:
        raise BadFilter(str(error)) from None


def _check_overlap(filters: Sequence[str]) -> None:
    for first, second in combinations(filters, 2):
        if overlaps(first, second):
            raise FiltersOverlap(f"filters {first!r} and {second!r} match the same subjects: narrow or drop one")
