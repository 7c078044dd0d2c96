"""The fast live path on a real server: deliveries, acks, and everything that can end a pull."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parti.errors import AuthFailed, ConnectionFailed, PartiError, ProtocolError
from parti.testing import FaultProxy, NatsServer, eventually
from parti.wire.blocking import BlockingConnection
from parti.wire.columns import Deliveries
from parti.wire.errors import ConsumerDeleted, NoResponder
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions
from parti.wire.pull import DeliveryLost, HeartbeatMissed, LivePull, PullOwner, PullSettings, ack_frames
from parti_lab.bench.load import create_stream, fill


class Collector:
    """A consumer's owner: keeps the sequences it saw, acknowledges them, and remembers troubles."""

    def __init__(self, connection: LiveConnection, stream: str, durable: str, **options: Any) -> None:
        self.connection = connection
        self.sequences: list[int] = []
        self.troubles: list[PartiError] = []
        self.largest_ask = 0
        self.room = 1_000
        self.pull = LivePull(
            connection,
            stream,
            durable,
            PullOwner(self._batch, self.troubles.append, capacity=lambda: self.room),
            options.pop("settings", PullSettings()),
            **options,
        )

    def _batch(self, deliveries: Deliveries) -> None:
        self.sequences += deliveries.stream_seq.tolist()
        self.connection.write(ack_frames(deliveries))


def add_durable(server: NatsServer, stream: str, durable: str, **config: Any) -> None:
    with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
        body = {"durable_name": durable, "ack_policy": "explicit"} | config
        connection.api(f"CONSUMER.CREATE.{stream}.{durable}", {"stream_name": stream, "config": body})


def info_of(server: NatsServer, stream: str, durable: str) -> dict[str, Any]:
    with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
        return connection.api(f"CONSUMER.INFO.{stream}.{durable}")


def filled_stream(server: NatsServer, name: str, count: int) -> str:
    options = ConnectOptions(servers=(server.url,))
    create_stream(options, name, "memory")
    if count:
        fill(options, name, count, 64, subjects=20)
    return name


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[LiveConnection]:
    opened = await LiveConnection.open(ConnectOptions(servers=(server.url,)))
    yield opened
    await opened.close()


async def test_every_message_comes_once_in_order_and_its_ack_reaches_the_server(
    server: NatsServer, connection: LiveConnection, name: str
) -> None:
    filled_stream(server, name, 5_000)
    add_durable(server, name, "d", filter_subjects=[f"{name}.{n}" for n in range(20)])
    owner = Collector(connection, name, "d")
    owner.pull.start()
    await eventually(lambda: len(owner.sequences) == 5_000, what="all deliveries")
    await connection.ping()
    assert owner.sequences == list(range(1, 5_001))
    info = info_of(server, name, "d")
    assert (info["num_ack_pending"], info["num_pending"], info["ack_floor"]["stream_seq"]) == (0, 0, 5_000)


async def test_no_more_is_asked_for_than_the_owner_can_hold(
    server: NatsServer, connection: LiveConnection, name: str
) -> None:
    filled_stream(server, name, 500)
    add_durable(server, name, "d")
    owner = Collector(connection, name, "d")
    owner.room = 7
    owner.pull.start()
    assert owner.pull.outstanding == 7
    owner.room = 0
    await eventually(lambda: len(owner.sequences) == 7, what="the seven")
    await connection.ping()
    assert owner.sequences == list(range(1, 8))
    owner.room = 1_000
    owner.pull.kick()
    await eventually(lambda: len(owner.sequences) == 500, what="the rest")


async def test_nothing_reaches_the_owner_after_stop(server: NatsServer, connection: LiveConnection, name: str) -> None:
    filled_stream(server, name, 0)
    add_durable(server, name, "d")
    owner = Collector(connection, name, "d")
    owner.pull.start()
    await connection.ping()
    owner.pull.stop()
    fill(ConnectOptions(servers=(server.url,)), name, 10, 16)
    await connection.ping()
    assert owner.sequences == []
    assert repr(owner.pull) == "<LivePull d stopped>"


async def test_a_deleted_consumer_is_told_by_name(server: NatsServer, connection: LiveConnection, name: str) -> None:
    filled_stream(server, name, 3)
    add_durable(server, name, "d")
    owner = Collector(connection, name, "d")
    owner.pull.start()
    await eventually(lambda: len(owner.sequences) == 3, what="deliveries")
    with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as other:
        other.api(f"CONSUMER.DELETE.{name}.d")
    await eventually(lambda: owner.troubles, what="trouble")
    assert isinstance(owner.troubles[0], ConsumerDeleted)


async def test_pulling_from_no_consumer_is_told(server: NatsServer, connection: LiveConnection, name: str) -> None:
    filled_stream(server, name, 0)
    owner = Collector(connection, name, "nobody")
    owner.pull.start()
    await eventually(lambda: owner.troubles, what="trouble")
    owner.pull.stop()
    assert isinstance(owner.troubles[0], NoResponder)


async def test_a_jump_in_the_consumer_sequence_stops_the_flow_before_anything_is_handed_over(
    server: NatsServer, connection: LiveConnection, name: str
) -> None:
    filled_stream(server, name, 10)
    add_durable(server, name, "d")
    first = Collector(connection, name, "d")
    first.room = 4
    first.pull.start()
    first.room = 0
    await eventually(lambda: len(first.sequences) == 4, what="the first four")
    first.pull.stop()
    # Deliveries 1 to 4 are gone; an owner that expects 4 next has missed none, one that expects 3 has.
    late = Collector(connection, name, "d", next_sequence=3)
    late.pull.start()
    await eventually(lambda: late.troubles, what="trouble")
    assert isinstance(late.troubles[0], DeliveryLost)
    assert late.sequences == []


async def test_silence_is_noticed_when_the_connection_is_half_open(server: NatsServer, name: str) -> None:
    filled_stream(server, name, 1)
    add_durable(server, name, "d")
    with FaultProxy(server.url) as proxy:
        connection = await LiveConnection.open(ConnectOptions(servers=(proxy.url,)))
        owner = Collector(connection, name, "d", settings=PullSettings(heartbeat=0.2))
        owner.pull.start()
        await eventually(lambda: owner.sequences == [1], what="the delivery")
        proxy.half_open()
        await eventually(lambda: owner.troubles, what="the missed heartbeat")
        assert isinstance(owner.troubles[0], HeartbeatMissed)
        connection.abort()


async def test_a_cut_connection_is_lost_for_good_and_says_so(server: NatsServer, name: str) -> None:
    with FaultProxy(server.url) as proxy:
        connection = await LiveConnection.open(ConnectOptions(servers=(proxy.url,)))
        proxy.cut()
        async with asyncio.timeout(60):
            error = await connection.lost
        assert isinstance(error, ConnectionFailed)
        with pytest.raises(ConnectionFailed):
            await connection.ping()
        assert "lost" in repr(connection)


async def test_a_pinned_consumer_delivers_to_its_group(
    server: NatsServer, connection: LiveConnection, name: str
) -> None:
    filled_stream(server, name, 50)
    add_durable(
        server, name, "d", priority_groups=["g"], priority_policy="pinned_client", priority_timeout=5_000_000_000
    )
    owner = Collector(connection, name, "d", settings=PullSettings(group="g"))
    owner.pull.start()
    await eventually(lambda: len(owner.sequences) == 50, what="deliveries")
    assert owner.troubles == []
    assert owner.pull.pin


async def test_wrong_credentials_and_no_server_are_told_apart() -> None:
    with NatsServer(config='authorization { user: "u", password: "right" }') as server:
        with pytest.raises(AuthFailed) as refused:
            await LiveConnection.open(ConnectOptions(servers=(server.url,), user="u", password="wrong-one"))
        assert "wrong-one" not in str(refused.value)
        good = await LiveConnection.open(ConnectOptions(servers=(server.url,), user="u", password="right"))
        await good.close()
        url = server.url
    with pytest.raises(ConnectionFailed, match="is nats-server running there"):
        await LiveConnection.open(ConnectOptions(servers=(url,)))


async def test_a_peer_that_speaks_no_nats_is_refused() -> None:
    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    peer = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = peer.sockets[0].getsockname()[1]
    with pytest.raises(ProtocolError):
        await LiveConnection.open(ConnectOptions(servers=(f"nats://127.0.0.1:{port}",)))
    peer.close()
    await peer.wait_closed()
