"""The compact layout: few filters that match exactly the owned partitions, as the server computes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.groups.compact import block_order, cover, depth, transform
from parti.groups.distribution import assignment, next_mapping, partition_filters, partition_subject
from parti.groups.errors import BadMaxMembers
from parti.groups.records import CompactRecord, PartitioningFilter
from parti.groups.rules import check_elastic_record
from parti.subjects import matches, overlaps

sizes = st.integers(0, 6).map(lambda bits: 2**bits)


def subject(partition: int, partitions: int) -> str:
    """What the work queue's transform makes of a message of this partition."""
    if partitions == 1:
        return "0.x"
    return ".".join([*(str(partition % 2**level) for level in range(1, depth(partitions) + 1)), "x"])


@given(sizes, st.data())
def test_the_filters_match_exactly_the_owned_partitions_and_never_overlap(partitions: int, data: st.DataObject) -> None:
    owned = data.draw(st.sets(st.integers(0, partitions - 1)))
    filters = cover(owned, partitions)
    for partition in range(partitions):
        hits = [each for each in filters if matches(each, subject(partition, partitions))]
        assert len(hits) == (1 if partition in owned else 0)
    assert not any(overlaps(a, b) for a in filters for b in filters if a != b)


@given(sizes, st.integers(1, 9))
def test_members_own_everything_once_with_few_filters(partitions: int, members: int) -> None:
    names = tuple(f"m{n}" for n in range(members))
    record = CompactRecord(max_members=partitions, members=names)
    owned = assignment(record)
    assert sorted(p for mine in owned.values() for p in mine) == list(range(partitions))
    for name in names:
        assert len(partition_filters(record, name)) <= 2 * depth(partitions) + 1


def test_a_member_of_two_four_or_all_has_one_filter() -> None:
    for members, expected in ((("a",), "*.*.*.*.>"), (("a", "b"), "0.*.*.*.>"), (("a", "b", "c", "d"), "0.0.*.*.>")):
        record = CompactRecord(max_members=16, members=members)
        assert partition_filters(record, "a") == (expected,)


@given(sizes, st.integers(1, 6), st.integers(1, 6))
def test_a_new_mapping_is_complete(partitions: int, before: int, after: int) -> None:
    record = CompactRecord(max_members=partitions, members=tuple(f"m{n}" for n in range(before)))
    mapping = next_mapping(record, [f"m{n}" for n in range(after)])
    assert sorted(p for each in mapping for p in each.partitions) == list(range(partitions))


def test_the_transform_nests_the_residues_of_one_hash() -> None:
    assert transform(PartitioningFilter("a.*.*", (2, 1)), 8) == {
        "src": "a.*.*",
        "dest": "{{Partition(2,2,1)}}.{{Partition(4,2,1)}}.{{Partition(8,2,1)}}.a.{{Wildcard(1)}}.{{Wildcard(2)}}",
    }
    assert transform(PartitioningFilter(">"), 1)["dest"] == "{{Partition(1)}}.>"


def test_the_number_of_partitions_is_a_power_of_two() -> None:
    assert block_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    with pytest.raises(BadMaxMembers, match="power of two"):
        check_elastic_record(CompactRecord(max_members=6))
    assert partition_subject(CompactRecord(max_members=4), 3) == "1.3.>"
