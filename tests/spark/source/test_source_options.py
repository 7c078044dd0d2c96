"""Options of the reader: what is refused, with which message, and what the docs say about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from parti.errors import ConfigError
from parti.spark.source.options import SOURCE_OPTIONS, SourceOptions
from parti.spark.source.tasks import split

DOCS = Path(__file__).parents[3] / "docs" / "spark.md"


def parse(**given: Any) -> SourceOptions:
    streaming = given.pop("streaming", True)
    return SourceOptions.parse({"stream": "S", "servers": "nats://127.0.0.1:1"} | given, streaming=streaming)


def test_names_are_found_without_regard_to_case() -> None:
    assert parse(maxoffsetspertrigger="7").max_offsets == 7
    assert parse(MAXOFFSETSPERTRIGGER="7").max_offsets == 7


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("maxOffsetPerTrigger", "maxOffsetsPerTrigger"), ("server", "servers"), ("failOnDataloss_", "failOnDataLoss")],
)
def test_an_unknown_option_is_refused_with_the_nearest_known_name(name: Any, nearest: Any) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'.*did you mean '{nearest}'"):
        parse(**{name: "1"})


def test_an_unknown_connection_option_is_refused_with_the_nearest_known_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'creds_file'"):
        parse(**{"nats.credfile": "x"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stream": ""}, "stream"),
        ({"stream": "a.b"}, "'a.b' is no stream name"),
        ({"subjects": "a..b"}, "token 2 is empty"),
        ({"startingOffsets": "middle"}, "neither earliest nor latest"),
        ({"startingOffsets": "0"}, "from 1 on"),
        ({"startingTimestamp": "yesterday"}, "ISO 8601"),
        ({"startingTimestamp": "5", "startingOffsets": "5"}, "exclude each other"),
        ({"endingOffsets": "5"}, "no meaning for a streaming"),
        ({"endingTimestamp": "5"}, "no meaning for a streaming"),
        ({"maxOffsetsPerTrigger": "-1"}, "whole number"),
        ({"minOffsetsPerTrigger": "5", "maxOffsetsPerTrigger": "4"}, "larger than"),
        ({"maxTriggerDelay": "15"}, "no unit"),
        ({"maxBytesPerTrigger": "much"}, "size"),
        ({"failOnDataLoss": "yes"}, "neither true nor false"),
        ({"keyTokens": "0"}, "counted from 1"),
        ({"keyTokens": "orders.>"}, "write subject, positions"),
        ({"partitionBy": "token:x"}, "partitionBy.*token:N"),
        ({"numPartitions": "0"}, "whole number from 1"),
        ({"commit": "ack"}, "none, durable, purge"),
        ({"commit": "durable"}, "belong together"),
        ({"durable": "d"}, "belong together"),
        ({"commit": "purge", "startingOffsets": "latest"}, "must start at earliest"),
        ({"retryBudget": "soon"}, "duration"),
        ({"jsDomain": "a", "apiPrefix": "b"}, "exclude each other"),
    ],
)
def test_a_wrong_value_is_refused_in_words(given: Any, words: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endingOffsets": "earliest"}, "cannot end at earliest"),
        ({"maxOffsetsPerTrigger": "5"}, "no meaning for a batch"),
        ({"commit": "purge"}, "no meaning for a batch"),
        ({"endingTimestamp": "5", "endingOffsets": "5"}, "exclude each other"),
    ],
)
def test_a_batch_refuses_what_only_a_streaming_query_can_do(given: Any, words: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(streaming=False, **given)


def test_the_stream_must_be_named() -> None:
    with pytest.raises(ConfigError, match="option stream is missing"):
        SourceOptions.parse({"servers": "nats://127.0.0.1:1"}, streaming=True)


def test_subjects_are_a_list_with_commas_or_in_json() -> None:
    assert parse(subjects="b.*, a.>").subjects == ("a.>", "b.*")
    assert parse(subjects='["a,1", "b"]').subjects == ("a,1", "b")


def test_starts_are_those_of_the_kafka_source_except_for_purge() -> None:
    assert parse().starting.at == "latest"
    assert parse(streaming=False).starting.at == "earliest"
    assert parse(commit="purge").starting.at == "earliest"


def test_connection_options_reach_the_connection_and_hold_the_credentials_themselves(tmp_path: Path) -> None:
    seed = tmp_path / "user.nk"
    seed.write_text("SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4")
    options = parse(**{"nats.nkeyfile": str(seed), "jsdomain": "hub", "nats.requesttimeout": "9s"}).connect
    assert (options.domain, options.request_timeout, options.nkey_file) == ("hub", 9.0, None)
    assert options.nkey_seed == seed.read_text()
    assert "SUAI" not in repr(options)
    assert parse(apiPrefix="JS.hub.API").connect.js_prefix == "JS.hub.API"


@pytest.mark.parametrize(
    ("count", "given", "sizes"),
    [
        (10, {}, [10]),
        (19_999, {"minPartitions": "8"}, [19_999]),
        (40_000, {"minPartitions": "8"}, [20_000, 20_000]),
        (80_000, {"minPartitions": "2"}, [40_000, 40_000]),
        (30, {"minPartitions": "3", "minRecordsPerPartition": "1"}, [10, 10, 10]),
        (10, {"maxRecordsPerPartition": "4"}, [3, 3, 4]),
        (0, {}, []),
    ],
)
def test_tasks_have_a_minimum_and_a_maximum_size_and_cover_the_range(count: Any, given: Any, sizes: Any) -> None:
    parts = split("t", 100, 100 + count, parse(**given))
    assert [part.to - part.after for part in parts] == sizes
    if parts:
        assert (parts[0].after, parts[-1].to) == (100, 100 + count)
        assert [part.to for part in parts[:-1]] == [part.after for part in parts[1:]]


def test_the_table_in_the_docs_says_what_the_code_says() -> None:
    section = DOCS.read_text().split("<!-- source options -->")[1].split("<!-- end of source options -->")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert rows == [
        (option.name, f"`{option.default}`" if option.default else "", option.doc) for option in SOURCE_OPTIONS
    ]
