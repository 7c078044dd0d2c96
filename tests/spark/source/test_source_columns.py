"""Keys and partitions of subject columns: equal to the plain functions, and to what nats-server computes."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from parti.errors import ConfigError
from parti.spark.source.columns import ColumnBuilder
from parti.spark.source.schema import default_schema
from parti.spark.tokens import Partitioning, Tokens
from parti.subjects import partition_of
from parti.testing import NatsServer
from parti.wire.columns import SCHEMA
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
ALL = StructType(
    [
        StructField("key", StringType()),
        StructField("value", BinaryType(), nullable=False),
        StructField("subject", StringType(), nullable=False),
        StructField("partition", IntegerType()),
        StructField("sequence", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("stream", StringType(), nullable=False),
        StructField("headers", HEADERS, nullable=False),
    ]
)
TOKEN = st.text(st.characters(exclude_characters=".*> \t\r\n\0", exclude_categories=["Cs"]), min_size=1, max_size=9)
SUBJECTS = st.lists(st.lists(TOKEN, min_size=1, max_size=5), max_size=20)


@settings(deadline=None)  # the first call imports
@given(SUBJECTS, st.lists(st.integers(1, 5), max_size=3), st.integers(1, 1000))
def test_key_and_partition_of_a_column_are_those_of_each_subject(subjects: Any, positions: Any, count: Any) -> None:
    tokens = Tokens(tuple(positions))
    column = pa.array([".".join(subject) for subject in subjects], pa.string())
    chosen = [
        [subject[position - 1] for position in positions] if all(p <= len(subject) for p in positions) else None
        for subject in subjects
    ]
    if not positions:
        chosen = [[".".join(subject)] for subject in subjects]
    assert tokens.column(column).to_pylist() == [None if key is None else ".".join(key) for key in chosen]
    partitions = Partitioning(count, tokens).column(column)
    assert partitions.type == pa.int32()
    assert partitions.to_pylist() == [None if key is None else partition_of(key, count) for key in chosen]


def test_a_slice_of_a_column_has_the_keys_of_its_own_rows() -> None:
    column = pa.array(["a.1", "b.2", "c.3"]).slice(1)
    assert Tokens((2,)).column(column).to_pylist() == ["2", "3"]


def test_a_token_that_holds_the_partition_is_read_as_a_number_or_is_null() -> None:
    held = Partitioning.parse("token:2", 1, Tokens())
    column = pa.array(["a.7.x", "a.007", "a", "a.x", "a.12345678901", "a.-1"])
    assert held.column(column).to_pylist() == [7, 7, None, None, None, None]


def test_wildcards_of_a_pattern_name_the_tokens() -> None:
    assert Tokens.parse("orders.*.eu.*") == Tokens((2, 4))
    assert Tokens.parse("3, 1") == Tokens((3, 1))
    assert Tokens.parse("subject") == Tokens()


@pytest.mark.parametrize(
    ("call", "by"), [("partition(10,1,2)", "2,3"), ("partition(10,2)", "3"), ("partition(10)", "subject")]
)
def test_partitions_are_those_that_the_server_computes(server: NatsServer, name: str, call: Any, by: Any) -> None:
    reader = RangeReader(ConnectOptions(servers=(server.url,)))
    transform = {"src": f"{name}.*.*", "dest": f"{name}.{{{{{call}}}}}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}"}
    reader.connection.api(
        f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.*.*"], "subject_transform": transform}
    )
    sent = [f"{name}.kä{n}.{n * 7919 % 101}" for n in range(200)]
    for subject in sent:
        reader.connection.request(subject)
    stored = pa.Table.from_batches(reader.read(name, 0, 200, columns=("subject",))).column("subject").combine_chunks()
    by_server = Partitioning.parse("token:2", 1, Tokens()).column(stored).to_pylist()
    assert Partitioning(10, Tokens.parse(by)).column(pa.array(sent)).to_pylist() == by_server
    reader.close()


@pytest.mark.parametrize("nullable", [False, True])
def test_the_arrow_schema_is_exactly_the_one_that_spark_expects(nullable: bool) -> None:
    schema = StructType([StructField(field.name, field.dataType, nullable or field.nullable) for field in ALL])
    built = ColumnBuilder.of(schema, "S", Tokens(), Partitioning()).schema
    assert built.equals(to_arrow_schema(schema, timezone="UTC"))


def test_only_columns_made_of_tokens_may_be_null() -> None:
    assert default_schema(include_headers=True) == ALL


def test_only_what_the_schema_names_is_asked_of_the_wire() -> None:
    def needed(*names: str, count: int = 1) -> tuple[str, ...]:
        schema = StructType([ALL[name] for name in names])
        return ColumnBuilder.of(schema, "S", Tokens(), Partitioning(count)).needed

    assert needed("value") == ("data",)
    assert needed("partition") == ("sequence",)
    assert needed("partition", count=2) == ("subject",)
    assert needed("key", "timestamp") == ("subject", "timestamp")
    assert needed("stream") == ("sequence",)
    assert "headers" not in needed("value", "sequence", "subject")


def test_a_batch_is_built_with_headers_and_microseconds() -> None:
    message = {
        "subject": "a.b",
        "sequence": 3,
        "timestamp": 1_234_567,
        "headers": [{"key": "k", "value": b"v"}],
        "data": b"",
    }
    bare = message | {"headers": None}
    batch = pa.RecordBatch.from_pylist([message, bare], schema=SCHEMA)
    first, second = ColumnBuilder.of(ALL, "S", Tokens((2,)), Partitioning(4)).build(batch).to_pylist()
    assert (first["key"], first["value"], first["stream"]) == ("b", b"", "S")
    assert first["timestamp"].microsecond == 1234
    assert first["headers"] == [{"key": "k", "value": b"v"}]
    assert second["headers"] == [], "never null: SQL users would have to care"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (StructField("offset", LongType()), "no column 'offset': choose from key, value"),
        (StructField("value", StringType()), "value is of type binary, not string: cast it after reading"),
        (StructField("headers", StringType()), "headers is of type array"),
    ],
)
def test_a_schema_that_is_not_ours_is_refused_in_words(field: Any, words: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        ColumnBuilder.of(StructType([field]), "S", Tokens(), Partitioning())
