"""The owner of each partition: the reference's vectors, the server's hash, and minimal moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.groups.distribution import (
    assignment,
    balanced,
    least_moves,
    partition_filters,
    partitions_of,
    predict,
    transforms,
)
from parti.groups.records import ElasticRecord, MemberMapping, PartitioningFilter, StaticRecord

DATA = Path(__file__).parents[2] / "data" / "groups"
VECTORS = json.loads((DATA / "vectors_distribution.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_a_members_filters_are_those_of_the_reference(vector: dict[str, Any]) -> None:
    given = vector["in"]
    mappings = tuple(MemberMapping(m["member"], tuple(m["partitions"])) for m in given.get("member_mappings") or [])
    record = StaticRecord(
        max_members=given["max_members"],
        members=tuple(given.get("members") or ()),
        mappings=mappings,
        filters=(given["filter"],),
    )
    assert list(partition_filters(record, given["member"])) == vector["out"]


def test_several_filters_are_listed_filter_by_filter() -> None:
    record = StaticRecord(max_members=4, members=("a", "b"), filters=("x.*", "y.>"))
    assert partition_filters(record, "b") == ("2.x.*", "3.x.*", "2.y.>", "3.y.>")


def test_a_mapped_group_with_two_filters_has_filters_that_the_server_takes() -> None:
    # The reference lists "0.>" once per filter, which the server refuses (10138).
    mapping = (MemberMapping("a", (1, 0)), MemberMapping("b", (2,)))
    record = StaticRecord(max_members=3, mappings=mapping, filters=("x.*", "y.>"))
    assert partition_filters(record, "a") == ("1.>", "0.>")


def test_the_predicted_partition_is_the_one_that_the_server_gave() -> None:
    vectors = json.loads((DATA / "vectors_hash.json").read_text())["vectors"]
    shapes = {
        "wildcards [1]": ("*.*", (1,)),
        "wildcards [2,1]": ("*.*", (2, 1)),
        "whole subject": (">", ()),
        "whole subject, with filter": (">", ()),
    }
    for vector in vectors:
        pattern, wildcards = shapes[vector["key"]]
        filter_ = f"{vector['subject'].split('.')[0]}.{pattern}" if wildcards else pattern
        record = ElasticRecord(
            max_members=vector["partitions"], partitioning_filters=(PartitioningFilter(filter_, wildcards),)
        )
        assert predict(record, vector["subject"]) == vector["partition"], vector


def test_a_subject_outside_of_the_filters_has_no_partition() -> None:
    record = ElasticRecord(max_members=4, partitioning_filters=(PartitioningFilter("a.*", (1,)),))
    assert predict(record, "b.1") is None
    assert predict(ElasticRecord(max_members=1), "b.1") == 0


@pytest.mark.parametrize("name", ["", "_two_filters", "_nofilter_limits"])
def test_the_work_queues_transforms_are_those_of_the_reference(name: str) -> None:
    queue = json.loads((DATA / f"elastic_workqueue_stream_info{name}.json").read_text())["config"]
    entry = {"": "created", "_two_filters": "two_filters", "_nofilter_limits": "nofilter_limits"}[name]
    value = json.loads((DATA / f"elastic_kv_entry_{entry}.json").read_text())["value"]
    filters = value["partitioning_filters"]
    record = ElasticRecord(
        max_members=value["max_members"],
        partitioning_filters=filters
        and tuple(PartitioningFilter(f["filter"], tuple(f["partitioning_wildcards"])) for f in filters),
    )
    assert transforms(record) == queue["sources"][0]["subject_transforms"]


names = st.lists(st.text("abcdef0123", min_size=1, max_size=3), min_size=1, max_size=12)


@given(names, st.integers(1, 40))
def test_balanced_partitions_are_all_owned_once_and_evenly(members: list[str], count: int) -> None:
    owned = balanced(members, count)
    assert sorted(p for partitions in owned.values() for p in partitions) == list(range(count))
    sizes = [len(partitions) for partitions in owned.values()]
    assert max(sizes) - min(sizes) <= 1
    record = ElasticRecord(max_members=count, members=tuple(members))
    assert {name for name, partitions in assignment(record).items() if partitions} == set(owned)
    assert all(partitions_of(record, name) == partitions for name, partitions in owned.items())


@given(names, names, st.integers(1, 40))
def test_least_moves_is_even_complete_and_moves_only_what_it_must(
    before: list[str], after: list[str], count: int
) -> None:
    current = balanced(before, count)
    mapping = least_moves(current, after, count)
    owned = {m.member: m.partitions for m in mapping}
    assert sorted(p for partitions in owned.values() for p in partitions) == list(range(count))
    sizes = sorted((len(partitions) for partitions in owned.values()), reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    kept = sum(len(set(current.get(name, ())) & set(partitions)) for name, partitions in owned.items())
    # Nobody can keep more than the fullest shares allow: the largest owners get the largest shares.
    had = sorted((len(current.get(name, ())) for name in owned), reverse=True)
    assert kept == sum(min(h, s) for h, s in zip(had, sizes, strict=True))


def test_from_two_to_three_members_three_of_ten_partitions_move() -> None:
    current = balanced(["a", "b"], 10)
    after = {m.member: m.partitions for m in least_moves(current, ["a", "b", "c"], 10)}
    assert sum(len(set(after[name]) - set(current.get(name, ()))) for name in after) == 3
    assert least_moves(after, ["a", "b", "c"], 10) == tuple(MemberMapping(n, after[n]) for n in ("a", "b", "c"))
    assert least_moves(after, [], 10) == ()
