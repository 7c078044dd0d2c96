"""Every rule of section 9 has its own error, and the consumer configuration is the reference's."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from parti.errors import ConfigError
from parti.groups import errors
from parti.groups.elastic_groups import work_queue_config
from parti.groups.names import GroupKind, check_group, check_member, check_members, check_stream, split_key
from parti.groups.records import ElasticRecord, MemberMapping, PartitioningFilter, StaticRecord
from parti.groups.rules import check_elastic, check_elastic_record, check_membership, check_static
from parti.groups.store import bucket_config
from parti.groups.template import ConsumerTemplate

DATA = Path(__file__).parents[2] / "data" / "groups"


def dump(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


def mapped(*mappings: tuple[str, tuple[int, ...]], count: int = 2) -> ElasticRecord:
    return ElasticRecord(max_members=count, mappings=tuple(MemberMapping(m, p) for m, p in mappings))


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (ElasticRecord(max_members=0), errors.BadMaxMembers),
        (ElasticRecord(max_members=-1), errors.BadMaxMembers),
        (
            ElasticRecord(max_members=1, members=("a",), mappings=(MemberMapping("a", (0,)),)),
            errors.MembersAndMappings,
        ),
        (mapped(("a", (0,)), ("b", (1,)), ("c", ())), errors.TooManyMappings),
        (mapped(("a", (0,)), ("a", (1,))), errors.MappingRepeatsMember),
        (mapped(("a", (0, 2))), errors.MappingOutOfRange),
        (mapped(("a", (-1, 0))), errors.MappingOutOfRange),
        (mapped(("a", (0, 0, 1))), errors.MappingRepeatsPartition),
        (mapped(("a", (0, 1)), ("b", (1,))), errors.MappingRepeatsPartition),
        (mapped(("a", (1,))), errors.MappingIncomplete),
    ],
)
def test_a_broken_membership_has_an_error_of_its_own(record: ElasticRecord, error: type[ConfigError]) -> None:
    with pytest.raises(error):
        check_membership(record)


def test_a_mapping_without_partitions_and_odd_member_lists_are_fine() -> None:
    check_membership(mapped(("a", (1, 0)), ("b", ())))
    check_membership(ElasticRecord(max_members=1, members=("a", "a", "b", "")))


def partitioned(subject: str, *wildcards: int) -> ElasticRecord:
    return ElasticRecord(max_members=2, partitioning_filters=(PartitioningFilter(subject, wildcards),))


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (partitioned(""), errors.BadFilter),
        (partitioned("a.b"), errors.FilterWithoutWildcard),
        (partitioned("a.b", 1), errors.FilterWithoutWildcard),
        (partitioned("a.*", 1, 2), errors.TooManyWildcards),
        (partitioned("a.>", 1), errors.TooManyWildcards),
        (partitioned("a.*.*", 1, 1), errors.WildcardRepeated),
        (partitioned("a.*", 2), errors.WildcardOutOfRange),
        (partitioned("a.*", 0), errors.WildcardOutOfRange),
    ],
)
def test_a_broken_partitioning_filter_has_an_error_of_its_own(record: ElasticRecord, error: type[ConfigError]) -> None:
    with pytest.raises(error):
        check_elastic_record(record)


def test_what_the_server_would_refuse_later_is_refused_before_anything_is_written() -> None:
    overlapping = ElasticRecord(
        max_members=2, partitioning_filters=(PartitioningFilter("a.*", (1,)), PartitioningFilter("a.>"))
    )
    check_elastic_record(overlapping)  # somebody else's record is judged by the reference's rules only
    with pytest.raises(errors.FiltersOverlap):
        check_elastic(overlapping)
    with pytest.raises(errors.BadFilter):
        check_elastic(partitioned("a..*"))
    with pytest.raises(errors.BadLimit):
        check_elastic(ElasticRecord(max_members=1, max_buffered_msgs=-2))
    with pytest.raises(errors.FiltersOverlap):
        check_static(StaticRecord(max_members=1, members=("a",), filters=("x.*", "x.>")))
    with pytest.raises(errors.BadFilter):
        check_static(StaticRecord(max_members=1, members=("a",), filters=("",)))


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a/b", "ü", "x" * 256])
def test_a_name_that_cannot_work_is_refused(name: str) -> None:
    for check in (check_stream, check_group):
        with pytest.raises(errors.BadName):
            check(name)
    if name not in ("ü",):
        with pytest.raises(errors.BadName):
            check_member(name)


def test_members_are_written_sorted_and_once() -> None:
    assert check_members(["m2", "m10", "m1", "m2"]) == ("m1", "m10", "m2")


def test_everything_behind_the_first_dot_of_a_key_is_the_group() -> None:
    assert split_key("stream.a.b") == ("stream", "a.b")


def sent(dumped: str, subject: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r["body"] for r in dump(dumped) if r["subject"] == subject)
    return found


def test_the_work_queue_is_asked_for_as_the_reference_does() -> None:
    record = ElasticRecord(max_members=10, partitioning_filters=(PartitioningFilter("efoo.*", (1,)),))
    source = dump("source_stream_elastic")["config"]
    expected = sent("elastic_create_api_requests", "$JS.API.STREAM.CREATE.efoo-ecg")
    assert json.dumps(work_queue_config("efoo", "ecg", record, source)) == json.dumps(expected)


def test_a_start_position_is_added_to_the_source() -> None:
    record = ElasticRecord(max_members=1)
    source = {"storage": "file", "num_replicas": 1}
    by_seq = work_queue_config("s", "g", record, source, start_sequence=7)
    assert by_seq["sources"][0]["opt_start_seq"] == 7
    by_time = work_queue_config("s", "g", record, source, start_time=datetime(2026, 1, 2, tzinfo=UTC))
    assert by_time["sources"][0]["opt_start_time"] == "2026-01-02T00:00:00Z"


def test_a_members_consumer_is_asked_for_as_the_reference_does() -> None:
    template = ConsumerTemplate(ack_wait=2)
    elastic = sent("elastic_consume_join_api_requests", "$JS.API.CONSUMER.CREATE.efoo-ecg.m1")["config"]
    filters = tuple(f"{p}.efoo.*" for p in range(10))
    assert template.config(GroupKind.ELASTIC, "m1", filters) == elastic
    static = sent("static_consume_api_requests", "$JS.API.CONSUMER.CREATE.sfoo.scg-m1")["config"]
    assert template.config(GroupKind.STATIC, "scg-m1", ("0.>", "1.>", "2.>", "9.>")) == static


def test_the_pins_time_to_live_is_never_below_a_second() -> None:
    config = ConsumerTemplate(ack_wait=0.3).config(GroupKind.ELASTIC, "m", ("0.>",))
    assert (config["ack_wait"], config["priority_timeout"]) == (300_000_000, 1_000_000_000)
    assert config["inactive_threshold"] == 300_000_000


@pytest.mark.parametrize(
    "options",
    [
        {"ack_wait": 0},
        {"max_ack_pending": 0},
        {"max_ack_pending": -1},
        {"start_sequence": 0},
        {"start_sequence": 3, "new_only": True},
    ],
)
def test_a_template_that_cannot_work_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(errors.BadTemplate):
        ConsumerTemplate(**options)


@pytest.mark.parametrize(
    "options", [{"ack_policy": "none"}, {"start_sequence": 3}, {"new_only": True}, {"inactive_threshold": 9.0}]
)
def test_a_template_that_an_elastic_group_cannot_follow_is_refused_before_any_traffic(options: dict[str, Any]) -> None:
    template = ConsumerTemplate(**options)
    template.check_kind(GroupKind.STATIC)
    with pytest.raises(errors.BadTemplate):
        template.check_kind(GroupKind.ELASTIC)


def test_the_optional_parts_of_a_template_are_sent() -> None:
    template = ConsumerTemplate(
        max_deliver=5,
        backoff=(0.5,),
        headers_only=True,
        mem_storage=True,
        inactive_threshold=60,
        start_time=datetime(2026, 1, 2, tzinfo=UTC),
    )
    config = template.config(GroupKind.STATIC, "g-m", ("0.>",))
    assert (
        config
        | {
            "max_deliver": 5,
            "backoff": [500_000_000],
            "headers_only": True,
            "mem_storage": True,
            "inactive_threshold": 60_000_000_000,
            "deliver_policy": "by_start_time",
            "opt_start_time": "2026-01-02T00:00:00Z",
        }
        == config
    )


@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_the_bucket_is_asked_for_as_the_reference_does(kind: str) -> None:
    expected = sent(f"{kind}_create_api_requests", f"$JS.API.STREAM.CREATE.KV_{kind}-consumer-groups")
    assert json.dumps(bucket_config(f"{kind}-consumer-groups", 1)) == json.dumps(expected)
