"""Range reads under faults: with any failure during a read, the result is what was published, once, in order."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from parti.errors import ConnectionFailed, PartiError, UsageError
from parti.testing import Direction, FaultProxy, NatsServer, eventually_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti.wire.ranges import Leaderless, Path, RangeReader, ReadEnded
from support.stored_input import Message, consumers, create, publish

BOTH: list[Path] = ["consumer", "direct"]
COUNT = 20_000
SIZE = 200


def published(name: str, count: int) -> Iterator[Message]:
    return (Message(f"{name}.k{index % 7}", b"%d " % index + bytes(SIZE)) for index in range(count))


def assert_complete(batches: list[pa.RecordBatch], first: int = 1, last: int = COUNT) -> None:
    table = pa.Table.from_batches(batches)
    assert table.column("sequence").to_pylist() == list(range(first, last + 1))
    assert table.column("data").to_pylist() == [b"%d " % index + bytes(SIZE) for index in range(first - 1, last)]


def filled(server: NatsServer, name: str, count: int = COUNT) -> ConnectOptions:
    options = ConnectOptions(servers=(server.url,), request_timeout=2.0)
    with BlockingConnection.open(options) as connection:
        create(connection, name)
        publish(connection, name, published(name, count))
    return options


@pytest.fixture
def proxied(server: NatsServer, name: str) -> Iterator[tuple[FaultProxy, RangeReader]]:
    """A stream of `COUNT` messages, read through a proxy."""
    filled(server, name)
    with FaultProxy(server.url) as proxy:
        reader = RangeReader(ConnectOptions(servers=(proxy.url,), request_timeout=1.0), patience=60)
        yield proxy, reader
        reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("after", [0, 1, 700, 5_000, 100_000, 1_000_000, 3_000_000])
def test_a_connection_cut_at_any_byte_loses_nothing(
    proxied: tuple[FaultProxy, RangeReader], name: str, path: Path, after: int
) -> None:
    proxy, reader = proxied
    proxy.cut_after(after)
    assert_complete(list(reader.read(name, 0, COUNT, path=path)))
    assert proxy.connections >= 2


@pytest.mark.parametrize("path", BOTH)
def test_connections_cut_again_and_again_lose_nothing(
    proxied: tuple[FaultProxy, RangeReader], name: str, path: Path
) -> None:
    proxy, reader = proxied
    batches = []
    for batch in reader.read(name, 0, COUNT, path=path):
        batches.append(batch)
        if len(batches) < 8:
            proxy.cut_after(300_000)
    assert_complete(batches)


@pytest.mark.parametrize("path", BOTH)
def test_requests_cut_on_their_way_to_the_server_lose_nothing(
    proxied: tuple[FaultProxy, RangeReader], name: str, path: Path
) -> None:
    proxy, reader = proxied
    for after in (10, 300, 700, 1100):
        proxy.cut_after(after, Direction.TO_SERVER)
        assert_complete(list(reader.read(name, 0, COUNT, path=path)))
        proxy.heal()


@pytest.mark.slow
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("where", ["between frames", "inside a frame"])
def test_a_connection_that_falls_silent_is_replaced(
    proxied: tuple[FaultProxy, RangeReader], name: str, path: Path, where: str
) -> None:
    """Half-open: no byte comes any more, and no end of the connection either."""
    proxy, reader = proxied
    reader.check()
    batches = reader.read(name, 0, COUNT, path=path)
    # Slow enough that the first batch is not all of it; at the lower rate chunks end anywhere.
    proxy.throttle(2_000_000 if where == "between frames" else 200_000, Direction.TO_CLIENT)
    read = [next(batches)]
    proxy.half_open()
    healer = threading.Thread(target=_heal_when_given_up, args=(proxy, proxy.connections))
    healer.start()
    read += batches
    healer.join()
    assert_complete(read)
    assert proxy.connections >= 2


def _heal_when_given_up(proxy: FaultProxy, before: int) -> None:
    proxy.wait_for_connection(before + 1, timeout=60)
    proxy.heal()


@pytest.mark.slow
def test_a_server_that_stays_unreachable_ends_the_read_with_the_reason(
    proxied: tuple[FaultProxy, RangeReader], name: str
) -> None:
    proxy, reader = proxied
    reader.patience = 1.0
    batches = reader.read(name, 0, COUNT, path="direct")
    next(batches)
    proxy.cut(refuse=True)
    with pytest.raises(ConnectionFailed, match=r"is nats-server running there|broke"):
        list(batches)
    proxy.heal()
    assert_complete(list(reader.read(name, 0, COUNT)))


@pytest.mark.parametrize("path", BOTH)
def test_a_slow_line_is_waited_for(proxied: tuple[FaultProxy, RangeReader], name: str, path: Path) -> None:
    proxy, reader = proxied
    proxy.throttle(2_000_000, Direction.TO_CLIENT)
    assert_complete(list(reader.read(name, 0, 5_000, path=path)), last=5_000)


@pytest.mark.slow
@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_server_that_dies_mid_read_and_comes_back_loses_nothing(
    own_server: NatsServer, name: str, path: Path, how: str
) -> None:
    many = 80_000  # 20 MB: more than the sockets' buffers and two pulls hold
    reader = RangeReader(filled(own_server, name, many), patience=60)
    batches = reader.read(name, 0, many, path=path)
    read = [next(batches)]
    getattr(own_server, how)()
    own_server.start()
    read += batches
    assert_complete(read, last=many)
    reader.close()


def test_a_consumer_deleted_mid_read_is_replaced(
    own_server: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = filled(own_server, name)
    reader = RangeReader(options, patience=60)
    with BlockingConnection.open(options) as connection:
        monkeypatch.setattr("parti.wire.attempt._PULL_BATCH", 1000)  # so that the read needs many pulls
        batches = reader.read(name, 0, COUNT, path="consumer")
        read = [next(batches)]
        deleted = 0
        for batch in batches:
            read.append(batch)
            for consumer in consumers(connection, name) if deleted < 3 else ():
                connection.api(f"CONSUMER.DELETE.{name}.{consumer}")
                deleted += 1
        assert_complete(read)
        assert deleted == 3
    reader.close()


def test_a_filtered_read_survives_cuts_too(
    proxied: tuple[FaultProxy, RangeReader], server: NatsServer, name: str
) -> None:
    proxy, reader = proxied
    proxy.cut_after(50_000)
    batches = list(reader.read(name, 0, COUNT, subjects=(f"{name}.k3",), path="consumer"))
    sequences = [sequence for batch in batches for sequence in batch.column("sequence").to_pylist()]
    assert sequences == [index + 1 for index in range(COUNT) if index % 7 == 3]


def test_an_idle_connection_that_died_is_replaced_at_the_next_use(
    proxied: tuple[FaultProxy, RangeReader], name: str
) -> None:
    proxy, reader = proxied
    assert_complete(list(reader.read(name, 0, 100)), last=100)
    proxy.cut()
    assert_complete(list(reader.read(name, 0, 100)), last=100)
    proxy.cut()
    reader.check()
    assert_complete(list(reader.read(name, 0, 100)), last=100)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_another_thread_can_end_a_read_that_waits_for_the_network(
    proxied: tuple[FaultProxy, RangeReader], name: str, end: str
) -> None:
    proxy, reader = proxied
    batches = reader.read(name, 0, COUNT, path="direct")
    next(batches)
    proxy.half_open()
    before = proxy.bytes_to_client
    ender = threading.Timer(0.2, getattr(reader, end))
    ender.start()
    with pytest.raises(ReadEnded, match=f"of {COUNT}"):
        list(batches)
    ender.join()
    assert proxy.bytes_to_client == before
    proxy.heal()
    if end == "close":
        with pytest.raises(UsageError, match="closed"):
            list(reader.read(name, 0, 10))
    else:
        assert_complete(list(reader.read(name, 0, 10)), last=10)


@pytest.mark.slow
@pytest.mark.parametrize("path", BOTH)
def test_a_message_larger_than_the_server_now_allows_ends_in_an_error_and_no_endless_loop(
    name: str, path: Path, tmp_path: pathlib.Path
) -> None:
    """Stored while max_payload was larger: no pull and no buffer of ours is meant for it."""
    with NatsServer(config="max_payload: 33554432", store_dir=tmp_path / "store") as server:
        options = ConnectOptions(servers=(server.url,))
        with BlockingConnection.open(options) as connection:
            create(connection, name)
            publish(connection, name, [Message(f"{name}.k", bytes(30 << 20))])
    with NatsServer(store_dir=tmp_path / "store") as server:
        reader = RangeReader(ConnectOptions(servers=(server.url,)), patience=1)
        with pytest.raises(PartiError, match=r"MaxBytes|larger than its max_payload"):
            list(reader.read(name, 0, 1, path=path))
        reader.close()


def test_what_a_replica_says_of_a_stream_without_a_leader_is_not_taken_for_its_state(
    server: NatsServer, name: str
) -> None:
    """A server answered so for a minute (case 11 of `parti prove spark --seed 102 --replicas 3`)."""
    with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
        create(connection, name)
        info = connection.api(f"STREAM.INFO.{name}")
        info["config"]["num_replicas"] = 3
        clusters = [{"replicas": [{"name": "n0"}]}, {"leader": "n1", "replicas": [{"name": "n0"}]}]
        sid = connection.subscribe(f"{name}-api.STREAM.INFO.{name}")
        connection.ping()

        def answer() -> None:
            while clusters:
                frames = connection.frames(10)
                for index in np.flatnonzero(frames.sid == sid):
                    reply = frames.reply(int(index)).decode()
                    connection.publish(reply, json.dumps(info | {"cluster": clusters.pop(0)}).encode())

        replica = threading.Thread(target=answer)
        replica.start()
        reader = RangeReader(ConnectOptions(servers=(server.url,), api_prefix=f"{name}-api"))
        with pytest.raises(Leaderless, match="has no leader now"):
            reader.state(name)
        assert reader.state(name).leader == "n1"
        reader.close()
        replica.join()


def test_a_crashed_reader_leaves_no_consumer_for_long(
    own_server: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parti.wire.attempt._IDLE", 0.5)
    options = filled(own_server, name)
    reader = RangeReader(options)
    batches = reader.read(name, 0, COUNT, path="consumer")
    next(batches)
    reader.connection.close()  # as if the process had been killed
    with BlockingConnection.open(options) as connection:
        eventually_blocking(lambda: consumers(connection, name) == [], 60.0, "the consumer expires")
    reader.close()
