"""Records of groups: byte for byte as the reference writes them, and edits that change only what they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.groups.errors import OldRecord, RecordUnreadable
from parti.groups.records import (
    ElasticRecord,
    MemberMapping,
    PartitioningFilter,
    StaticRecord,
    decode_elastic,
    decode_static,
    edit_membership,
    encode,
)

DATA = Path(__file__).parents[2] / "data" / "groups"


def dump(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


ELASTIC = sorted(path.stem for path in DATA.glob("elastic_kv_entry_*.json"))
STATIC = sorted(path.stem for path in DATA.glob("static_kv_entry*.json"))


@pytest.mark.parametrize("name", ELASTIC)
def test_an_elastic_record_of_the_reference_is_read_and_written_again_byte_for_byte(name: str) -> None:
    raw = dump(name)["value_raw"].encode()
    assert encode(decode_elastic(raw)) == raw
    assert decode_elastic(raw).old_names == ()


@pytest.mark.parametrize("name", STATIC)
def test_a_static_record_of_the_reference_is_read_and_written_again_byte_for_byte(name: str) -> None:
    raw = dump(name)["value_raw"].encode()
    assert encode(decode_static(raw)) == raw


def test_the_history_of_the_dumps_is_what_our_edits_make() -> None:
    steps = [
        "created",
        "one_member",
        "three_members",
        "after_drop",
        "after_drop_all",
        "mapping",
        "after_delete_mapping",
    ]
    raw = {name: dump(f"elastic_kv_entry_{name}")["value_raw"].encode() for name in steps}
    one = edit_membership(raw["created"], members=["m1"])
    assert one == raw["one_member"]
    three = edit_membership(one, members=["m1", "m2", "m3"])
    assert three == raw["three_members"]
    dropped = edit_membership(three, members=["m2", "m3"])
    assert dropped == raw["after_drop"]
    empty = edit_membership(dropped)
    assert empty == raw["after_drop_all"] == raw["created"]
    mapped = edit_membership(
        empty, mappings=[MemberMapping("m1", (0, 1, 2, 3, 4)), MemberMapping("m2", (5, 6, 7, 8, 9))]
    )
    assert mapped == raw["mapping"]
    assert edit_membership(mapped) == raw["after_delete_mapping"]


@pytest.mark.parametrize(
    "untouched",
    [
        '"partitioning_filters":null',
        '"partitioning_filters":[]',
        '"partitioning_filters":[{"filter":"a.>","partitioning_wildcards":null}]',
        '"partitioning_filters":[{"filter":"a.\\u003e","partitioning_wildcards":[ ]}]',
        '"partitioning_filters":null,"max_buffered_msg":-1',
        '"partitioning_filters":null,"max_buffered_bytes":1e3',
    ],
)
def test_an_edit_keeps_the_bytes_of_every_other_field(untouched: str) -> None:
    raw = f'{{"max_members":4,{untouched},"from_tomorrow":{{"a": [1.50, null]}}}}'
    edited = edit_membership(raw.encode(), members=["m"]).decode()
    assert untouched in edited
    assert '"from_tomorrow":{"a": [1.50, null]}' in edited
    assert json.loads(edited)["members"] == ["m"]
    assert edit_membership(edited.encode()).decode() == raw


def test_null_and_an_empty_list_of_filters_are_told_apart_and_mean_the_same() -> None:
    null = decode_elastic(b'{"max_members":1,"partitioning_filters":null}')
    empty = decode_elastic(b'{"max_members":1,"partitioning_filters":[]}')
    assert (null.partitioning_filters, empty.partitioning_filters) == (None, ())
    assert null.same_stream(empty)
    assert encode(null) != encode(empty)


def test_field_names_of_the_seed_and_of_the_first_release_are_read_and_named() -> None:
    seed = decode_elastic(
        b'{"max_members":4,"filter":"foo.*.*","partitioning-wildcards":[2,1],"msg-buffer-size":7,'
        b'"member-mappings":[{"member":"m","partitions":[0,1,2,3]}]}'
    )
    assert seed.partitioning_filters == (PartitioningFilter("foo.*.*", (2, 1)),)
    assert (seed.max_buffered_msgs, seed.mappings) == (7, (MemberMapping("m", (0, 1, 2, 3)),))
    assert seed.old_names == ("filter", "partitioning-wildcards", "msg-buffer-size", "member-mappings")
    first = decode_elastic(b'{"max_members":4,"filter":"foo.*","partitioning_wildcards":[1],"members":["m"]}')
    assert first.partitioning_filters == (PartitioningFilter("foo.*", (1,)),)
    assert first.old_names == ("filter", "partitioning_wildcards")
    static = decode_static(b'{"max_members":2,"filter":"foo.>","members":["a"]}')
    assert (static.filters, static.old_names) == (("foo.>",), ("filter",))


def test_a_record_with_old_names_is_not_changed() -> None:
    with pytest.raises(OldRecord, match=r"filter, partitioning-wildcards.*delete the group"):
        edit_membership(b'{"max_members":4,"filter":"a.*","partitioning-wildcards":[1]}', members=["m"])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b"7",
        b'{"max_members":"3"}',
        b'{"max_members":1.5}',
        b'{"max_members":true}',
        b'{"max_members":99999999999}',
        b'{"max_members":1,"members":"m"}',
        b'{"max_members":1,"members":[1]}',
        b'{"max_members":1,"member_mappings":[{"partitions":[0]}]}',
        b'{"max_members":1,"member_mappings":[{"member":"m","partitions":["0"]}]}',
        b'{"max_members":1,"member_mappings":{"m":[0]}}',
        b'{"max_members":1,"partitioning_filters":[{"partitioning_wildcards":[1]}]}',
        b'{"max_members":1,"partitioning_filters":[{"filter":"a.*","partitioning_wildcards":[true]}]}',
        b'{"max_members":1,"members":["\xff"]}',
    ],
)
def test_a_record_of_another_shape_is_a_typed_refusal(raw: bytes) -> None:
    with pytest.raises(RecordUnreadable):
        decode_elastic(raw)


texts = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
mappings = st.builds(MemberMapping, texts, st.lists(st.integers(0, 99), max_size=4).map(tuple))


@given(
    st.integers(0, 1000),
    st.none() | st.lists(st.builds(PartitioningFilter, texts, st.lists(st.integers(-3, 9)).map(tuple))).map(tuple),
    st.lists(texts).map(tuple),
    st.lists(mappings).map(tuple),
)
def test_any_elastic_record_survives_a_round_trip(count: int, filters: Any, members: Any, mapped: Any) -> None:
    record = ElasticRecord(max_members=count, partitioning_filters=filters, members=members, mappings=mapped)
    raw = encode(record)
    assert decode_elastic(raw) == record
    assert b"<" not in raw
    assert b">" not in raw
    assert edit_membership(raw, members=members, mappings=mapped) == raw


@given(st.integers(0, 1000), st.lists(texts).map(tuple), st.lists(texts).map(tuple))
def test_any_static_record_survives_a_round_trip(count: int, filters: Any, members: Any) -> None:
    record = StaticRecord(max_members=count, filters=filters, members=members)
    assert decode_static(encode(record)) == record


@given(st.binary(max_size=80))
def test_garbage_never_crashes_the_reader(raw: bytes) -> None:
    for decode in (decode_elastic, decode_static):
        try:
            decode(raw)
        except RecordUnreadable:
            continue
