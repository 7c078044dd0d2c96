"""Range reads on three nodes: replicas lag and nodes die, but no read is short."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from parti.testing import NatsCluster, insist_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti.wire.ranges import BehindLeader, Path, RangeReader
from support.stored_input import Message, create, publish, publish_acked

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

BOTH: list[Path] = ["consumer", "direct"]
ROUNDS = 320
COUNT = 60_000  # 20 MB: more than the sockets' buffers and two pulls hold, so that a fault meets an unfinished read
SIZE = 250


@pytest.fixture
def connections(cluster: NatsCluster) -> Iterator[list[BlockingConnection]]:
    opened = [BlockingConnection.open(ConnectOptions(servers=(url,))) for url in cluster.urls]
    yield opened
    for connection in opened:
        connection.close()


def replicated(connection: BlockingConnection, name: str, **config: Any) -> None:
    create(connection, name, num_replicas=3, **config)


def filled(connection: BlockingConnection, name: str) -> list[bytes]:
    """A replicated stream with `COUNT` messages; the first one is acknowledged, so that the stream hears the others."""
    replicated(connection, name)
    messages = [Message(f"{name}.k", b"%d " % index + bytes(SIZE)) for index in range(COUNT)]
    publish_acked(connection, messages[0])
    publish(connection, name, messages[1:])
    return [message.data for message in messages]


@pytest.mark.parametrize("path", BOTH)
def test_no_read_right_after_a_publish_through_another_node_is_short(
    cluster: NatsCluster, connections: list[BlockingConnection], name: str, path: Path
) -> None:
    """With load beside it a replica lags behind the acknowledgement in 10 to 20 % of such reads (measured)."""
    replicated(connections[0], name)
    leader = cluster.wait_for_leader(name)
    readers = [RangeReader(ConnectOptions(servers=(url,))) for url in cluster.urls]
    chance = random.Random(7)
    position, data, short = 0, list[bytes](), list[Any]()
    with busy(cluster.urls[leader], f"{name}load"):
        for round_ in range(ROUNDS):
            writer = leader if round_ % 2 else chance.randrange(3)
            reader = readers[(writer + chance.randint(1, 2)) % 3]
            for _ in range(chance.randint(1, 4)):
                data.append(b"%d" % len(data))
                end = publish_acked(connections[writer], Message(f"{name}.k", data[-1]))
            assert end == len(data)
            read = [
                value
                for batch in reader.read(name, position, end, path=path, columns=("data",))
                for value in batch.column("data").to_pylist()
            ]
            if read != data[position:end]:
                short.append((round_, position, end, len(read)))
            position = end
    assert short == []
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("chosen", ["all", "some"])
def test_what_the_leader_has_deleted_does_not_come_from_a_replica_that_has_it_still(
    cluster: NatsCluster, connections: list[BlockingConnection], name: str, path: Path, chosen: str
) -> None:
    """Each read begins right after a deletion was acknowledged, on any node, beside a mirror and with load."""
    replicated(connections[0], name)
    for index in range(300):
        publish_acked(connections[0], Message(f"{name}.k{index % 3}", b"%d" % index))
    body = {"name": f"{name}M", "mirror": {"name": name, "filter_subject": f"{name}.k1"}}
    insist_blocking(lambda: connections[1].api(f"STREAM.CREATE.{name}M", body))
    readers = [RangeReader(ConnectOptions(servers=(url,)), patience=60) for url in cluster.urls]
    chance, left = random.Random(11), set(range(1, 301))
    subjects = (f"{name}.k2",) if chosen == "some" else ()
    with busy(cluster.urls[cluster.wait_for_leader(name)], f"{name}load"):
        for round_ in range(60):
            gone = chance.choice(sorted(left))
            connections[round_ % 3].api(f"STREAM.MSG.DELETE.{name}", {"seq": gone, "no_erase": True})
            left.remove(gone)
            batches = readers[chance.randrange(3)].read(name, 0, 300, path=path, subjects=subjects, allow_gone=True)
            read = [sequence for batch in batches for sequence in batch.column("sequence").to_pylist()]
            assert read == [sequence for sequence in sorted(left) if not subjects or sequence % 3 == 0]
    for reader in readers:
        reader.close()


@contextlib.contextmanager
def busy(url: str, stream: str) -> Iterator[None]:
    """Give the replicas other work to do: a thread publishes to another replicated stream for the time of the block."""
    enough = threading.Event()

    def work() -> None:
        with BlockingConnection.open(ConnectOptions(servers=(url,))) as connection:
            message = Message(f"{stream}.k", bytes(20_000))
            while not enough.is_set():
                connection.send(message.frame() * 20)
                publish_acked(connection, message)

    with BlockingConnection.open(ConnectOptions(servers=(url,))) as connection:
        replicated(connection, stream, max_msgs=200)
    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        yield
    finally:
        enough.set()
        worker.join()


def test_a_range_end_that_the_leader_does_not_know_is_given_time_and_then_refused(
    cluster: NatsCluster, connections: list[BlockingConnection], name: str
) -> None:
    replicated(connections[0], name)
    publish_acked(connections[0], Message(f"{name}.k", b"1"))
    reader = RangeReader(ConnectOptions(servers=tuple(cluster.urls)), patience=0.5)
    with pytest.raises(BehindLeader, match="ends beyond its last sequence 1"):
        list(reader.read(name, 0, 2))
    reader.close()


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("victim", ["stream leader", "our node"])
def test_a_node_killed_mid_read_loses_nothing(
    cluster: NatsCluster, connections: list[BlockingConnection], name: str, path: Path, victim: str
) -> None:
    stored = filled(connections[0], name)
    reader = RangeReader(ConnectOptions(servers=tuple(cluster.urls), request_timeout=2.0), patience=60)
    batches = reader.read(name, 0, COUNT, path=path)
    read = [next(batches)]
    if victim == "stream leader":
        index = cluster.wait_for_leader(name)
    else:
        index = cluster.urls.index(reader.connection.address.url)
    cluster.kill(index)
    try:
        read += batches
    finally:
        cluster.restart(index)
    table = pa.Table.from_batches(read)
    assert table.column("sequence").to_pylist() == list(range(1, COUNT + 1))
    assert table.column("data").to_pylist() == stored
    reader.close()


@pytest.mark.parametrize("path", BOTH)
def test_leader_changes_during_reads_lose_nothing(
    cluster: NatsCluster, connections: list[BlockingConnection], name: str, path: Path
) -> None:
    filled(connections[0], name)
    reader = RangeReader(ConnectOptions(servers=tuple(cluster.urls)), patience=60)
    for _ in range(3):
        sequences: list[int] = []
        for number, batch in enumerate(reader.read(name, 0, COUNT, path=path)):
            sequences += batch.column("sequence").to_pylist()
            if number == 0:
                insist_blocking(lambda: connections[1].api(f"STREAM.LEADER.STEPDOWN.{name}", {}), what="a step-down")
        assert sequences == list(range(1, COUNT + 1))
    reader.close()
