"""The bulk publisher against a real server: everything acknowledged is stored, once, and every refusal is typed."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from parti.errors import AuthFailed
from parti.testing import Direction, FaultProxy, NatsCluster, NatsServer, eventually_blocking, insist_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.errors import MessageTooLarge, StreamMismatch, StreamNotFound, StreamStoreFailed
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import HEADERS, Rows, chunk_id, chunks
from parti.wire.publisher import NotAcknowledged, Publisher, PublishResult
from parti.wire.ranges import RangeReader


def numbered(subject: str, count: int, first: int = 0, msg_id: list[bytes] | None = None) -> Rows:
    values = pa.array([b"%d" % n for n in range(first, first + count)], pa.binary())
    ids = None if msg_id is None else pa.array(msg_id, pa.binary())
    return Rows(values, pa.array([subject.encode()] * count, pa.binary()), None, ids)


def publish(options: ConnectOptions, rows: Rows, scope: str = "q-0-0", **settings: object) -> PublishResult:
    with Publisher(options, **settings) as publisher:  # type: ignore[arg-type]
        for number, chunk in enumerate(chunks([rows])):
            publisher.publish(chunk, chunk_id(scope, number, chunk))
        return publisher.flush()


@pytest.fixture
def options(server: NatsServer) -> ConnectOptions:
    return ConnectOptions(servers=(server.url,), request_timeout=2.0)


def create(connection: BlockingConnection, name: str, **config: object) -> None:
    settings = {"name": name, "subjects": [f"{name}.>"], "storage": "memory", "allow_direct": True}
    connection.api(f"STREAM.CREATE.{name}", settings | config)


def values(options: ConnectOptions, name: str) -> list[int]:
    reader = RangeReader(options)
    try:
        batches = reader.read(name, 0, reader.state(name).last_seq, columns=("data",), allow_gone=True)
        return [int(value) for batch in batches for value in batch.column("data").to_pylist()]
    finally:
        reader.close()


@pytest.mark.parametrize("atomic", [False, True])
def test_every_row_is_stored_in_order_and_a_second_time_is_recognised(
    options: ConnectOptions, connection: BlockingConnection, name: str, atomic: Any
) -> None:
    create(connection, name, allow_atomic=atomic)
    rows = numbered(f"{name}.a", 4321)
    assert publish(options, rows) == PublishResult(4321, 0)
    assert publish(options, rows) == PublishResult(4321, 4321)
    assert values(options, name) == list(range(4321))


@pytest.mark.parametrize("atomic", [False, True])
def test_the_same_rows_of_another_batch_are_stored_again(
    options: ConnectOptions, connection: BlockingConnection, name: str, atomic: Any
) -> None:
    create(connection, name, allow_atomic=atomic)
    rows = numbered(f"{name}.a", 10)
    publish(options, rows, "q-0-0")
    assert publish(options, rows, "q-1-0") == PublishResult(10, 0)
    assert values(options, name) == [*range(10), *range(10)]


@pytest.mark.parametrize("atomic", [False, True])
def test_ids_of_the_rows_own_are_kept_and_only_new_rows_of_a_chunk_are_stored(
    options: ConnectOptions, connection: BlockingConnection, name: str, atomic: Any
) -> None:
    create(connection, name, allow_atomic=atomic)
    publish(options, numbered(f"{name}.a", 3, 0, [b"a", b"b", b"c"]))
    done = publish(options, numbered(f"{name}.a", 3, 10, [b"c", b"d", b"d"]), "other-0-0")
    assert done == PublishResult(3, 2)
    assert values(options, name) == [0, 1, 2, 11]


def test_chunks_of_several_streams_are_published_one_by_one_where_one_batch_cannot_hold_them(
    options: ConnectOptions, connection: BlockingConnection, name: str
) -> None:
    create(connection, f"{name}A", allow_atomic=True)
    create(connection, f"{name}B", allow_atomic=True)
    subjects = [f"{name}{'AB'[n % 2]}.x".encode() for n in range(100)]
    rows = Rows(pa.array([b"%d" % n for n in range(100)], pa.binary()), pa.array(subjects, pa.binary()))
    assert publish(options, rows).messages == 100
    assert values(options, f"{name}A") == list(range(0, 100, 2))
    assert values(options, f"{name}B") == list(range(1, 100, 2))


def test_headers_arrive_as_they_were(options: ConnectOptions, connection: BlockingConnection, name: str) -> None:
    create(connection, name)
    headers = pa.array([[{"key": "a", "value": b"1"}, {"key": "a", "value": b"\xc3\xa9"}]], HEADERS)
    publish(options, Rows(pa.array([b"x"]), pa.array([f"{name}.a".encode()]), headers))
    reader = RangeReader(options)
    (batch,) = reader.read(name, 0, 1)
    reader.close()
    found = [(entry["key"], entry["value"]) for entry in batch.column("headers")[0].as_py()]
    assert found[1:] == [("a", b"1"), ("a", b"\xc3\xa9")]
    assert found[0][0] == "Nats-Msg-Id"


@pytest.mark.parametrize("atomic", [False, True])
def test_a_subject_without_a_stream_is_a_clear_error_at_once(options: ConnectOptions, name: str, atomic: Any) -> None:
    with pytest.raises(StreamNotFound, match=f"no stream takes subject '{name}.a'"):
        publish(options, numbered(f"{name}.a", 3), atomic=atomic)


def test_a_subject_of_another_stream_is_refused_when_one_is_expected(
    options: ConnectOptions, connection: BlockingConnection, name: str
) -> None:
    create(connection, f"{name}A")
    create(connection, f"{name}B")
    with pytest.raises(StreamMismatch, match=f"row 0 to '{name}A.a'"):
        publish(options, numbered(f"{name}A.a", 3), stream=f"{name}B")


def test_a_message_above_max_payload_is_refused_before_it_is_sent(
    options: ConnectOptions, connection: BlockingConnection, name: str
) -> None:
    create(connection, name)
    rows = Rows(pa.array([b"x", b"x" * (connection.max_payload + 1)]), pa.array([f"{name}.a".encode()] * 2))
    with pytest.raises(MessageTooLarge, match=r"row 1 .*max_payload"):
        publish(options, rows)
    assert connection.api(f"STREAM.INFO.{name}")["state"]["messages"] == 0


@pytest.mark.parametrize("atomic", [False, True])
def test_a_message_above_the_streams_limit_is_a_typed_error(
    options: ConnectOptions, connection: BlockingConnection, name: str, atomic: Any
) -> None:
    create(connection, name, max_msg_size=200, allow_atomic=atomic)
    rows = Rows(pa.array([b"x", b"x" * 300]), pa.array([f"{name}.a".encode()] * 2))
    with pytest.raises(MessageTooLarge, match="row"):
        publish(options, rows)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_full_stream_is_an_error_after_patience_and_no_error_when_room_comes(
    options: ConnectOptions, connection: BlockingConnection, name: str, atomic: Any
) -> None:
    create(connection, name, max_msgs=5, discard="new", allow_atomic=atomic)
    with pytest.raises(StreamStoreFailed, match="maximum messages"):
        publish(options, numbered(f"{name}.a", 8), patience=0.3)
    connection.api(f"STREAM.PURGE.{name}")

    with Publisher(options, patience=60) as publisher:
        publisher.publish(numbered(f"{name}.a", 4), "a")
        publisher.flush()
        blocked = numbered(f"{name}.a", 3, 100)
        publisher.publish(blocked, "b")
        ending = threading.Thread(target=publisher.flush)
        ending.start()
        connection.api(f"STREAM.PURGE.{name}")
        ending.join(60)
        assert not ending.is_alive()
    assert publisher.published.messages == 7
    assert {101, 102} <= set(values(options, name))  # of single rows the first found room before the purge


def test_a_publish_that_is_not_permitted_is_refused_at_once() -> None:
    config = """
    authorization { users = [
      { user: admin, password: pw }
      { user: app, password: pw, permissions: { publish: ["mine.>"], subscribe: ["_INBOX.>"] } }
    ] }
    """
    with NatsServer(config=config) as server:
        url = server.client_url(user="admin", password="pw")
        with BlockingConnection.open(ConnectOptions(servers=(url,))) as admin:
            create(admin, "S", subjects=["mine.>", "theirs.>"])
            app = ConnectOptions(servers=(server.client_url(user="app", password="pw"),))
            # No right to ask for the stream either: publishing works all the same, without atomic batches.
            assert publish(app, numbered("mine.a", 3)).messages == 3
            with pytest.raises(AuthFailed, match=r"(?i)permissions violation for publish to .theirs.a"):
                publish(app, numbered("theirs.a", 3))


@pytest.mark.parametrize("atomic", [False, True])
def test_acknowledgements_that_never_arrive_cost_no_row_and_no_duplicate(
    server: NatsServer, connection: BlockingConnection, name: str, atomic: Any
) -> None:
    create(connection, name, allow_atomic=atomic)
    with FaultProxy(server.url) as proxy:
        options = ConnectOptions(servers=(proxy.url,), request_timeout=1.0)
        with Publisher(options, atomic=atomic) as publisher:
            for number, chunk in enumerate(chunks([numbered(f"{name}.a", 6000)])):
                if number in (1, 3):
                    # The server stores the chunk, its answers die with the connection.
                    proxy.cut_after(100, Direction.TO_CLIENT)
                publisher.publish(chunk, chunk_id("q-0-0", number, chunk))
            done = publisher.flush()
    assert done.messages == 6000
    assert sorted(values(ConnectOptions(servers=(server.url,)), name)) == list(range(6000))


@pytest.mark.slow
@pytest.mark.parametrize("atomic", [False, True])
def test_a_server_killed_and_brought_back_costs_no_row_and_no_duplicate(
    own_server: NatsServer, name: str, atomic: Any
) -> None:
    options = ConnectOptions(servers=(own_server.url,), request_timeout=2.0)
    with BlockingConnection.open(options) as connection:
        create(connection, name, storage="file", allow_atomic=atomic)
    with Publisher(options, atomic=atomic) as publisher:
        for number, chunk in enumerate(chunks([numbered(f"{name}.a", 10_000)])):
            publisher.publish(chunk, chunk_id("q-0-0", number, chunk))
            if number == 4:
                own_server.kill()
                revive = threading.Timer(0.5, own_server.start)
                revive.start()
        done = publisher.flush()
        revive.join()
    assert done.messages == 10_000
    assert sorted(values(options, name)) == list(range(10_000))


@pytest.mark.slow
def test_silence_is_an_error_after_patience_and_says_what_is_not_acknowledged(
    own_server: NatsServer, name: str
) -> None:
    with FaultProxy(own_server.url) as proxy:
        options = ConnectOptions(servers=(proxy.url,), request_timeout=1.0, connect_timeout=5.0)
        with BlockingConnection.open(options) as connection:
            create(connection, name)
        with Publisher(options, patience=3.0) as publisher:
            publisher.publish(numbered(f"{name}.a", 10), "a")
            publisher.flush()
            proxy.half_open()
            publisher.publish(numbered(f"{name}.a", 5, 10), "b")
            with pytest.raises(NotAcknowledged, match=f"5 messages, from row 10 to '{name}.a'"):
                publisher.flush()


@pytest.mark.cluster
def test_a_leader_killed_while_we_publish_costs_no_row_and_no_duplicate(cluster: NatsCluster, name: str) -> None:
    options = ConnectOptions(servers=tuple(cluster.urls), request_timeout=2.0)
    with BlockingConnection.open(options) as connection:
        insist_blocking(lambda: create(connection, name, storage="file", num_replicas=3))
    victim = cluster.wait_for_leader(name)
    try:
        with Publisher(options) as publisher:
            for number, chunk in enumerate(chunks([numbered(f"{name}.a", 10_000)])):
                publisher.publish(chunk, chunk_id("q-0-0", number, chunk))
                if number == 4:
                    cluster.kill(victim)
            assert publisher.flush().messages == 10_000
    finally:
        cluster.restart(victim)

    def readable() -> bool:
        with BlockingConnection.open(options) as connection:
            info = insist_blocking(lambda: connection.api(f"STREAM.INFO.{name}"))
            return int(info["state"]["messages"]) == 10_000

    eventually_blocking(readable, 60, "10,000 messages in the stream")
    assert sorted(values(options, name)) == list(range(10_000))
