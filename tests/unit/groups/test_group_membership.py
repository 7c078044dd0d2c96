"""The membership that the leader writes: live and foreign members, with as few moves as possible."""

from __future__ import annotations

from parti.groups.automatic import next_membership
from parti.groups.records import ElasticRecord, MemberMapping, PartitioningFilter
from parti.groups.store import NewMembership


def owned(membership: NewMembership) -> dict[str, tuple[int, ...]]:
    return {mapping.member: mapping.partitions for mapping in membership.mappings}


def test_live_members_are_added_and_gone_ones_dropped() -> None:
    record = ElasticRecord(max_members=4, mappings=(MemberMapping("a", (0, 1)), MemberMapping("b", (2, 3))))
    assert owned(next_membership(record, {"a", "c"}, {"a", "b", "c"})) == {"a": (0, 1), "c": (2, 3)}
    assert next_membership(record, set(), {"a", "b"}) == NewMembership()


def test_members_that_never_registered_stay_whatever_happens() -> None:
    mapped = ElasticRecord(max_members=4, mappings=(MemberMapping("go", (0, 1)), MemberMapping("py", (2, 3))))
    assert owned(next_membership(mapped, set(), {"py"})) == {"go": (0, 1, 2, 3)}
    assert set(owned(next_membership(mapped, {"py", "new"}, {"py", "new"}))) == {"go", "py", "new"}


def test_a_list_with_foreign_members_stays_a_list_so_that_others_can_be_added_to_it() -> None:
    record = ElasticRecord(max_members=4, members=("go", "py"))
    assert next_membership(record, set(), {"py"}) == NewMembership(members=("go",))
    assert next_membership(record, {"py", "new"}, {"py", "new"}) == NewMembership(members=("go", "new", "py"))
    reordered = ElasticRecord(max_members=4, members=("py", "go"))  # Go adds in any order; it compares in order too
    assert next_membership(reordered, {"py"}, {"py"}) == NewMembership(members=("py", "go"))


def test_a_listed_group_is_always_a_list() -> None:
    record = ElasticRecord(max_members=4, mappings=(MemberMapping("a", (0, 1, 2, 3)),))
    assert next_membership(record, {"a", "b"}, {"a", "b"}, listed=True) == NewMembership(members=("a", "b"))


def test_with_two_filters_and_a_foreign_member_a_plain_list_is_written() -> None:
    filters = (PartitioningFilter("a.*", (1,)), PartitioningFilter("b.*", (1,)))
    record = ElasticRecord(max_members=4, partitioning_filters=filters, members=("go",))
    assert next_membership(record, {"py"}, {"py"}) == NewMembership(members=("go", "py"))
    alone = ElasticRecord(max_members=4, partitioning_filters=filters)
    assert owned(next_membership(alone, {"py"}, {"py"})) == {"py": (0, 1, 2, 3)}


def test_when_there_are_more_members_than_partitions_the_owners_stay() -> None:
    record = ElasticRecord(max_members=2, mappings=(MemberMapping("x", (0,)), MemberMapping("y", (1,))))
    assert owned(next_membership(record, {"a", "x", "y"}, {"a", "x", "y"})) == {"x": (0,), "y": (1,)}


def test_a_settled_group_is_not_written_again() -> None:
    record = ElasticRecord(max_members=3, mappings=(MemberMapping("a", (0, 2)), MemberMapping("b", (1,))))
    assert next_membership(record, {"a", "b"}, {"a", "b"}) == NewMembership((), record.mappings)
