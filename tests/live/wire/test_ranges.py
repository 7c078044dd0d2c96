"""The range reader on a real server: every read returns exactly what was published, or raises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest

from parti.errors import ConfigError, DataLoss, UsageError
from parti.subjects import matches
from parti.testing import NatsServer, eventually_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.columns import SCHEMA
from parti.wire.errors import StreamNotFound
from parti.wire.options import ConnectOptions
from parti.wire.ranges import Path, RangeReader
from support.stored_input import Message, consumers, create, delete, numbered, publish, rows, varied

BOTH: list[Path] = ["consumer", "direct"]


@pytest.fixture
def reader(options: ConnectOptions) -> Iterator[RangeReader]:
    opened = RangeReader(options, patience=60)
    yield opened
    opened.close()


@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
def test_a_range_is_read_from_every_kind_of_stream(
    connection: BlockingConnection, reader: RangeReader, name: str, retention: str, storage: str
) -> None:
    create(connection, name, retention=retention, storage=storage)
    if retention == "interest":  # without a consumer the stream keeps nothing
        body = {"stream_name": name, "config": {"durable_name": "d", "ack_policy": "explicit"}}
        connection.api(f"CONSUMER.CREATE.{name}.d", body)
    sent = publish(connection, name, varied(name, 3000))
    assert rows(reader.read(name, 0, 3000)) == numbered(sent)
    assert rows(reader.read(name, 1000, 1200)) == numbered(sent[1000:1200], 1001)


@pytest.mark.parametrize("path", BOTH)
def test_the_batches_have_the_schema_and_rising_sequences(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name)
    publish(connection, name, varied(name, 2000))
    batches = list(reader.read(name, 0, 2000, path=path))
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema == SCHEMA
        assert batch.num_rows > 0
    sequences = [sequence for batch in batches for sequence in batch.column("sequence").to_pylist()]
    assert all(a < b for a, b in pairwise(sequences))


@pytest.mark.parametrize("columns", [tuple(SCHEMA.names), ("data", "sequence"), ("timestamp",)])
def test_both_paths_give_the_same_bytes(
    connection: BlockingConnection, reader: RangeReader, name: str, columns: tuple[str, ...]
) -> None:
    create(connection, name)
    publish(connection, name, varied(name, 3000))
    delete(connection, name, [1, 2, 77, 1500, 1501, 2999])
    tables = [
        pa.Table.from_batches(reader.read(name, 2, 2990, path=path, columns=columns)).combine_chunks() for path in BOTH
    ]
    assert tables[0].num_rows == 2988 - 3
    assert tables[0].equals(tables[1])


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "gone",
    [
        [5],
        [2, 3, 4, 900, 998],
        [*range(950, 1001)],  # the tail of the range
        [*range(900, 1050)],  # ... and what follows it
        [*range(101, 1001)],  # all but its start
    ],
    ids=["one", "some", "tail", "beyond", "most"],
)
def test_deleted_messages_are_holes_and_no_loss(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path, gone: list[int]
) -> None:
    create(connection, name)
    sent = publish(connection, name, varied(name, 1100))
    delete(connection, name, gone)
    expected = [row for row in numbered(sent[:1000]) if row[0] not in gone]
    assert rows(reader.read(name, 0, 1000, path=path)) == expected


@pytest.mark.parametrize("path", BOTH)
def test_a_range_of_which_nothing_is_left_is_empty(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name)
    sent = publish(connection, name, varied(name, 100))
    delete(connection, name, range(41, 61))
    assert rows(reader.read(name, 40, 60, path=path)) == []
    delete(connection, name, range(61, 101))  # now also nothing follows
    assert rows(reader.read(name, 40, 100, path=path)) == []
    assert rows(reader.read(name, 38, 100, path=path)) == numbered(sent[38:40], 39)


@pytest.mark.parametrize("path", BOTH)
def test_the_edges_of_a_range_are_after_exclusive_and_to_inclusive(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name)
    sent = publish(connection, name, varied(name, 10))
    for after, to in [(0, 10), (0, 1), (9, 10), (4, 5), (-3, 2)]:
        start = max(after, 0)
        assert rows(reader.read(name, after, to, path=path)) == numbered(sent[start:to], start + 1)
    for after, to in [(0, 0), (5, 5), (7, 3), (10, 10)]:
        assert rows(reader.read(name, after, to, path=path)) == []


@pytest.mark.parametrize("path", BOTH)
def test_an_end_beyond_the_stream_is_refused_with_both_numbers(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name)
    publish(connection, name, varied(name, 10))
    with pytest.raises(UsageError, match=rf"up to 11 of stream '{name}' ends beyond its last sequence 10"):
        rows(reader.read(name, 0, 11, path=path))


@pytest.mark.parametrize("path", BOTH)
def test_an_aged_out_start_is_data_loss_unless_allowed(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name, max_msgs=60)
    sent = publish(connection, name, varied(name, 100))
    with pytest.raises(DataLoss, match=r"no longer holds sequences 11 to 40: its first is 41, 30 are gone") as caught:
        rows(reader.read(name, 10, 100, path=path))
    assert (caught.value.first_missing, caught.value.first_available, caught.value.count) == (11, 41, 30)
    assert caught.value.stream == name
    assert rows(reader.read(name, 10, 100, path=path, allow_gone=True)) == numbered(sent[40:], 41)
    assert rows(reader.read(name, 40, 100, path=path)) == numbered(sent[40:], 41)
    assert rows(reader.read(name, 0, 30, path=path, allow_gone=True)) == []


def test_messages_that_age_out_during_the_read_are_data_loss(
    connection: BlockingConnection, reader: RangeReader, name: str
) -> None:
    """The read has begun; the rest of its range is purged before it gets there."""
    create(connection, name)
    publish(connection, name, (Message(f"{name}.k", bytes(1000)) for _ in range(60_000)))
    batches = reader.read(name, 0, 60_000, path="consumer")
    seen: list[int] = []
    seen += next(batches).column("sequence").to_pylist()
    connection.api(f"STREAM.PURGE.{name}", {"seq": 59_990})
    with pytest.raises(DataLoss) as caught:
        seen.extend(sequence for batch in batches for sequence in batch.column("sequence").to_pylist())
    assert caught.value.first_available == 59_990
    assert caught.value.first_missing < 59_990
    assert set(range(1, caught.value.first_missing)) <= set(seen)


def test_on_a_work_queue_a_missing_start_is_work_done(
    connection: BlockingConnection, reader: RangeReader, name: str
) -> None:
    create(connection, name, retention="workqueue")
    sent = publish(connection, name, varied(name, 1000))
    connection.api(f"STREAM.PURGE.{name}", {"seq": 301})
    assert rows(reader.read(name, 0, 1000)) == numbered(sent[300:], 301)


def test_a_work_queue_without_direct_get_says_how_to_enable_it(
    connection: BlockingConnection, reader: RangeReader, name: str
) -> None:
    create(connection, name, retention="workqueue", allow_direct=False)
    publish(connection, name, varied(name, 5))
    with pytest.raises(UsageError, match="allow-direct"):
        rows(reader.read(name, 0, 5))


def test_a_stream_without_direct_get_is_read_through_a_consumer_also_if_small(
    connection: BlockingConnection, reader: RangeReader, name: str
) -> None:
    create(connection, name, allow_direct=False)
    sent = publish(connection, name, varied(name, 5))
    assert rows(reader.read(name, 0, 5)) == numbered(sent)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "subjects",
    [
        ("k3",),
        ("k3", "k7", "nowhere"),
        ("*",),
        (">",),
        ("k1", ">"),
        ("rare",),  # one filter of few matches: the server applies it
        ("rare", "k1"),
        ("nowhere",),
        ("*.deep",),
    ],
    ids="+".join,
)
def test_a_filtered_read_gives_exactly_the_matching_messages(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path, subjects: tuple[str, ...]
) -> None:
    create(connection, name)
    mixed = [
        Message(
            f"{name}.rare" if index in (5, 700, 1200) else f"{name}.a.deep" if index % 50 == 2 else message.subject,
            message.data,
        )
        for index, message in enumerate(varied(name, 1500))
    ]
    sent = publish(connection, name, mixed)
    filters = tuple(f"{name}.{subject}" for subject in subjects)
    expected = [row for row in numbered(sent) if any(matches(pattern, row[1].subject) for pattern in filters)]
    assert rows(reader.read(name, 0, 1500, subjects=filters, path=path)) == expected
    some = [row for row in expected if 600 < row[0] <= 1100]
    assert rows(reader.read(name, 600, 1100, subjects=filters, path=path)) == some


@pytest.mark.parametrize("path", BOTH)
def test_subjects_may_be_unusual(connection: BlockingConnection, reader: RangeReader, name: str, path: Path) -> None:
    create(connection, name, subjects=[f"{name}.>", f"$x.{name}.>"])
    tokens = ["käse", "🧀.brie", "a-b_c/d", "x" * 2000, "a*b", "b>", "MSG", "\\d+", "'\"", "{}", "%s"]
    messages = [Message(f"{name}.{token}", token.encode()) for token in tokens]
    messages.append(Message(f"$x.{name}.$JS.ACK", b"dollar"))
    sent = publish(connection, name, messages)
    assert rows(reader.read(name, 0, len(sent), path=path)) == numbered(sent)
    for index, message in enumerate(sent):
        found = rows(reader.read(name, 0, len(sent), subjects=(message.subject,), path=path))
        assert found == [(index + 1, message)]


@pytest.mark.parametrize("path", BOTH)
def test_a_subject_that_is_no_utf8_does_not_hide_the_messages_around_it(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    """The server stores it as it is; a string column cannot."""
    create(connection, name)
    connection.send(
        Message(f"{name}.a", b"1").frame()
        + b"PUB %s.\xff\xfe 1\r\n2\r\n" % name.encode()
        + Message(f"{name}.b", b"3").frame()
    )
    eventually_blocking(lambda: reader.state(name).last_seq == 3)
    read = rows(reader.read(name, 0, 3, path=path))
    assert read == numbered(
        [
            Message(f"{name}.{end}", data)
            for end, data in zip(("a", "\ufffd\ufffd", "b"), (b"1", b"2", b"3"), strict=True)
        ]
    )


@pytest.mark.parametrize("path", BOTH)
def test_republished_messages_keep_their_own_nats_headers(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name, subjects=[f"{name}.in.>"], republish={"src": ">", "dest": f"{name}.out.>"})
    target = f"{name}o"
    create(connection, target, subjects=[f"{name}.out.>"])
    sent = publish(connection, name, [Message(f"{name}.in.{i}", b"%d" % i, (("own", "1"),)) for i in range(20)])
    eventually_blocking(lambda: reader.state(target).last_seq == 20)
    read = rows(reader.read(target, 0, 20, path=path))
    assert [message.data for _, message in read] == [message.data for message in sent]
    for sequence, message in read:
        headers = dict(message.headers)
        assert headers["Nats-Stream"] == name
        assert headers["Nats-Sequence"] == str(sequence)
        assert headers["Nats-Subject"] == f"{name}.in.{sequence - 1}"
        assert headers["own"] == "1"


@pytest.mark.parametrize("path", BOTH)
def test_payloads_of_the_servers_maximum_are_read(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name)
    largest = connection.max_payload
    assert largest == 1 << 20
    sizes = [largest, 0, largest - 1, 10, largest, largest, 1]
    sent = [Message(f"{name}.k", bytes([index]) * size) for index, size in enumerate(sizes)]
    for message in sent:
        publish(connection, name, [message])
    assert rows(reader.read(name, 0, len(sent), path=path)) == numbered(sent)


@pytest.mark.parametrize("path", BOTH)
def test_payloads_of_a_raised_maximum_are_read_with_bounded_memory(name: str, path: Path) -> None:
    with NatsServer(config="max_payload: 8388608") as server:
        options = ConnectOptions(servers=(server.url,))
        with BlockingConnection.open(options) as connection:
            create(connection, name)
            sent = [Message(f"{name}.k", bytes([index]) * (8 << 20)) for index in range(6)]
            sent[3] = Message(f"{name}.k", b"small")
            for message in sent:
                publish(connection, name, [message])
        reader = RangeReader(options, patience=60)
        assert rows(reader.read(name, 0, len(sent), path=path)) == numbered(sent)
        assert len(reader.connection._buffer) <= (2 * 8 + 1) << 20
        reader.close()


def test_a_stream_that_does_not_exist_is_a_typed_error(reader: RangeReader, name: str) -> None:
    with pytest.raises(StreamNotFound):
        rows(reader.read(name, 0, 1))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"stream": "a.b"}, ConfigError),
        ({"stream": "a b"}, ConfigError),
        ({"stream": ""}, ConfigError),
        ({"columns": ("subject", "colour")}, UsageError),
        ({"path": "carrier-pigeon"}, UsageError),
        ({"subjects": ("a..b",)}, ConfigError),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    reader: RangeReader, wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        reader.read(**{"stream": "S", "after": 0, "to": 1, **wrong})


@pytest.mark.parametrize("path", BOTH)
def test_closing_the_iterator_early_leaves_the_connection_usable_and_no_consumer(
    connection: BlockingConnection, reader: RangeReader, name: str, path: Path
) -> None:
    create(connection, name)
    sent = publish(connection, name, varied(name, 60_000, size=20))
    for _ in range(3):
        batches = reader.read(name, 0, 60_000, path=path)
        used = reader.connection
        first = next(batches)
        assert first.num_rows < 60_000
        batches.close()
        assert rows(reader.read(name, 59_000, 60_000)) == numbered(sent[59_000:], 59_001)
        assert reader.connection is used
    eventually_blocking(lambda: consumers(connection, name) == [], what="no consumer left")


def test_a_read_that_ended_leaves_no_consumer(connection: BlockingConnection, reader: RangeReader, name: str) -> None:
    create(connection, name)
    sent = publish(connection, name, varied(name, 1000))
    assert rows(reader.read(name, 0, 1000, path="consumer")) == numbered(sent)
    assert rows(reader.read(name, 0, 1000, path="consumer", subjects=(f"{name}.none",))) == []
    eventually_blocking(lambda: consumers(connection, name) == [], what="no consumer left")


def test_small_messages_beyond_one_pull_are_all_read(
    connection: BlockingConnection, reader: RangeReader, name: str
) -> None:
    """Several pulls, refilled while others are under way."""
    create(connection, name, storage="memory")
    publish(connection, name, (Message(f"{name}.k", b"%d" % index) for index in range(100_000)))
    delete(connection, name, range(500, 600))
    read = [
        value.as_py()
        for batch in reader.read(name, 0, 100_000, path="consumer", columns=("data",))
        for value in batch.column("data")
    ]
    assert read == [b"%d" % index for index in range(100_000) if not 500 <= index + 1 < 600]


def test_messages_far_larger_than_the_streams_average_are_all_read(
    connection: BlockingConnection, reader: RangeReader, name: str
) -> None:
    """Pulls are sized by the average; here most of them end at their byte limit instead."""
    create(connection, name, storage="memory")
    publish(connection, name, (Message(f"{name}.k", b"") for _ in range(20_000)))
    large = publish(connection, name, (Message(f"{name}.k", bytes([i % 256]) * 50_000) for i in range(1000)))
    assert rows(reader.read(name, 20_000, 21_000, path="consumer")) == numbered(large, 20_001)
