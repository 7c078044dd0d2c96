"""Chunks with a marker on a real server: each is stored once, whichever process repeats it and however late."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from parti.errors import ConnectionFailed
from parti.testing import NatsServer
from parti.wire.blocking import BlockingConnection
from parti.wire.errors import AtomicPublishDisabled, StreamNotFound
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import HEADERS, Rows, chunk_id, chunks
from parti.wire.progress import PROGRESS_ROWS, ProgressPublisher, RowsChanged
from parti.wire.publisher import PublishResult
from parti.wire.ranges import RangeReader


@pytest.fixture
def options(server: NatsServer) -> ConnectOptions:
    return ConnectOptions(servers=(server.url,), request_timeout=2.0)


@pytest.fixture
def stream(options: ConnectOptions, name: str) -> Iterator[str]:
    with BlockingConnection.open(options) as connection:
        config = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "allow_atomic": True}
        # The server remembers no id for longer than this: whatever is recognised later is recognised by its marker.
        connection.api(f"STREAM.CREATE.{name}", config | {"duplicate_window": 100_000_000})
        yield name


def rows(stream: str, count: int, first: int = 0) -> Rows:
    values = pa.array([b"%d" % n for n in range(first, first + count)], pa.binary())
    return Rows(values, pa.array([f"{stream}.data".encode()] * count, pa.binary()))


def write(options: ConnectOptions, stream: str, step: int, given: Rows, patience: float = 10.0) -> PublishResult:
    subject = f"{stream}.progress.q.0.0"
    settings = {"stream": stream, "subject": subject, "step": step, "patience": patience, "name": "test"}
    with ProgressPublisher(options, **settings) as publisher:  # type: ignore[arg-type]
        for number, chunk in enumerate(chunks([given], PROGRESS_ROWS)):
            publisher.publish(chunk, chunk_id(f"q-{step}", number, chunk))
        return publisher.flush()


def found(options: ConnectOptions, stream: str) -> tuple[list[int], int]:
    """The rows in their order, and how many markers there are."""
    reader = RangeReader(options)
    try:
        last = reader.state(stream).last_seq
        messages = [row for batch in reader.read(stream, 0, last, allow_gone=True) for row in batch.to_pylist()]
    finally:
        reader.close()
    data = [int(row["data"]) for row in messages if row["subject"].endswith(".data")]
    return data, len(messages) - len(data)


def test_a_step_is_stored_once_however_often_it_is_repeated(options: ConnectOptions, stream: str) -> None:
    assert write(options, stream, 0, rows(stream, 2500)) == PublishResult(2500, 0)
    assert write(options, stream, 0, rows(stream, 2500)) == PublishResult(2500, 2500)
    assert write(options, stream, 1, rows(stream, 10, 2500)) == PublishResult(10, 0)
    assert write(options, stream, 0, rows(stream, 2500)) == PublishResult(
        2500, 2500
    )  # a stale writer finds itself behind
    assert found(options, stream) == (list(range(2510)), 1)


def test_a_step_that_was_cut_off_goes_on_behind_its_last_chunk(options: ConnectOptions, stream: str) -> None:
    whole = rows(stream, 3000)
    write(options, stream, 0, whole.slice(0, PROGRESS_ROWS))
    assert write(options, stream, 0, whole) == PublishResult(3000, PROGRESS_ROWS)
    assert found(options, stream)[0] == list(range(3000))


def test_a_repeat_with_other_rows_is_refused(options: ConnectOptions, stream: str) -> None:
    write(options, stream, 0, rows(stream, 50))
    with pytest.raises(RowsChanged, match="sort the rows"):
        write(options, stream, 0, rows(stream, 50, 1))
    assert found(options, stream)[0] == list(range(50))


def test_headers_of_rows_are_stored_and_the_marker_has_none(options: ConnectOptions, stream: str) -> None:
    given = rows(stream, 2)
    headers = pa.array([[("a", b"1")], None], HEADERS)
    write(options, stream, 0, Rows(given.value, given.subject, headers))
    reader = RangeReader(options)
    (batch,) = list(reader.read(stream, 0, 3))
    reader.close()
    assert ("a", b"1") in [(entry["key"], entry["value"]) for entry in batch.to_pylist()[0]["headers"]]


def test_what_cannot_succeed_is_refused_at_once(options: ConnectOptions, stream: str, name: str) -> None:
    with pytest.raises(StreamNotFound):
        write(options, "no_such_stream", 0, rows(stream, 3))
    with BlockingConnection.open(options) as connection:
        config = connection.api(f"STREAM.INFO.{name}")["config"]
        connection.api(f"STREAM.UPDATE.{name}", config | {"allow_atomic": False})
    with pytest.raises(AtomicPublishDisabled):
        write(options, stream, 0, rows(stream, 3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_writers_that_race_and_lose_their_connections_store_every_row_once_and_in_order(
    options: ConnectOptions, stream: str, seed: Any
) -> None:
    """As speculation, zombies and retries do: the same steps at the same time, cut off at random, begun again."""
    steps = [rows(stream, 1500, 1500 * step) for step in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        try:
            for step, given in enumerate(steps):
                while True:
                    try:
                        write_cut_off(step, given, dice)
                        break
                    except ConnectionFailed:
                        continue
        except BaseException as error:
            failures.append(error)

    def write_cut_off(step: int, given: Rows, dice: random.Random) -> None:
        settings = {"stream": stream, "subject": f"{stream}.progress.q.0.0", "step": step, "patience": 20.0}
        with ProgressPublisher(options, **settings, name="test") as publisher:  # type: ignore[arg-type]
            for number, chunk in enumerate(chunks([given], 250)):
                if dice.random() < 0.1:
                    publisher.close()  # the next chunk opens a new connection
                if dice.random() < 0.05:
                    raise ConnectionFailed("the process died here")
                publisher.publish(chunk, chunk_id(f"q-{step}", number, chunk))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert found(options, stream)[0] == list(range(6000))
