"""The fault proxy with plain sockets (which bytes pass) and with a real server (what a client sees)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from functools import partial

import nats
import pytest

from parti.errors import UsageError
from parti.testing import Direction, FaultProxy, NatsServer, NeverHappened, eventually, eventually_blocking


class Echo:
    """A server that sends back what it gets, and knows how its connections ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.received = 0
        self.ends: list[str] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    self.received += len(data)
                    connection.sendall(data)
                self.ends.append("eof")
            except ConnectionResetError:
                self.ends.append("reset")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    running = Echo()
    yield running
    running.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.port) as running:
        yield running


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with dial(proxy) as connected:
        yield connected


def dial(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = connection.recv(count - len(data))
        if not got:
            break
        data += got
    return data


def roundtrip(connection: socket.socket, data: bytes = b"ping") -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def test_a_healthy_proxy_passes_everything_and_counts_it(echo: Echo, proxy: FaultProxy, client: socket.socket) -> None:
    data = bytes(range(256)) * 4096
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert receive(client, len(data)) == data
    sender.join()
    assert (proxy.connections, proxy.live) == (1, 1)
    assert proxy.bytes_to_server == proxy.bytes_to_client == len(data)
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    eventually_blocking(lambda: proxy.live == 0, what="the proxy forgot the ended connection")
    assert echo.ends == ["eof"]


def test_cut_resets_both_sides_and_lets_new_connections_in(
    echo: Echo, proxy: FaultProxy, client: socket.socket
) -> None:
    assert roundtrip(client) == b"ping"
    assert proxy.cut() == 1
    assert proxy.live == 0
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    eventually_blocking(lambda: echo.ends == ["reset"], what="the server's side was reset")
    with dial(proxy) as again:
        assert roundtrip(again) == b"ping"
    assert proxy.connections == 2


def test_cut_with_refuse_refuses_connections_until_healed_on_the_same_port(
    proxy: FaultProxy, client: socket.socket
) -> None:
    assert roundtrip(client) == b"ping"
    port = proxy.port
    proxy.cut(refuse=True)
    assert "refusing" in repr(proxy)
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    proxy.heal()
    assert proxy.port == port
    with dial(proxy) as again:
        assert roundtrip(again) == b"ping"


def test_cut_after_lets_exactly_that_many_bytes_through_once(proxy: FaultProxy, client: socket.socket) -> None:
    assert roundtrip(client) == b"ping"
    proxy.cut_after(10)
    assert roundtrip(client, b"12345") == b"12345"
    client.sendall(b"6789abcdefgh")
    assert receive(client, 5) == b"6789a"
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert proxy.bytes_to_client == 4 + 10
    with dial(proxy) as again:
        assert roundtrip(again, b"x" * 100_000) == b"x" * 100_000


def test_cut_after_can_count_what_goes_to_the_server(echo: Echo, proxy: FaultProxy, client: socket.socket) -> None:
    proxy.cut_after(7, Direction.TO_SERVER)
    client.sendall(b"0123456789")
    eventually_blocking(lambda: echo.ends == ["reset"], what="the server's side was reset")
    assert echo.received == 7


def test_a_black_hole_keeps_sockets_open_and_gives_everything_back_when_healed(
    echo: Echo, proxy: FaultProxy, client: socket.socket
) -> None:
    assert roundtrip(client) == b"ping"
    proxy.half_open()
    client.sendall(b"lost in space")
    with dial(proxy) as late:
        late.sendall(b"hello")
        proxy.wait_for_connection(2)
        late.shutdown(socket.SHUT_WR)
        assert (echo.received, echo.ends) == (4, [])
        assert proxy.live == 2
        proxy.heal()
        assert receive(client, 13) == b"lost in space"
        assert receive(late, 5) == b"hello"
        assert late.recv(1) == b""


def test_a_black_hole_in_one_direction_lets_the_other_pass(
    echo: Echo, proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.half_open(Direction.TO_CLIENT)
    client.sendall(b"one way")
    eventually_blocking(lambda: echo.received == 7, what="the server got the bytes")
    assert proxy.bytes_to_client == 0
    proxy.heal()
    assert receive(client, 7) == b"one way"


def test_dropped_bytes_never_arrive_and_later_ones_do(echo: Echo, proxy: FaultProxy, client: socket.socket) -> None:
    assert roundtrip(client) == b"ping"
    proxy.drop(direction=Direction.TO_CLIENT)
    client.sendall(b"gone")
    eventually_blocking(lambda: proxy.swallowed >= 4, what="the answer was swallowed")
    proxy.heal()
    assert roundtrip(client, b"here") == b"here"
    assert echo.received == 12


def test_a_share_of_chunks_is_dropped_the_same_way_for_the_same_seed(echo: Echo) -> None:
    def survivors(seed: int) -> list[int]:
        with FaultProxy(echo.port, seed=seed) as proxy, dial(proxy) as client:
            proxy.drop(0.5, Direction.TO_CLIENT)
            for value in range(40):
                client.sendall(bytes([value]))
                eventually_blocking(
                    partial(lambda seen: proxy.swallowed + proxy.bytes_to_client == seen, value + 1),
                    what="the byte was judged",
                )
            passed = proxy.bytes_to_client
            return list(receive(client, passed))

    first = survivors(1)
    assert survivors(1) == first
    assert survivors(2) != first
    assert 0 < len(first) < 40


def test_delayed_bytes_arrive_whole_and_in_order_and_at_once_when_healed(
    proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.delay(0.02)
    assert roundtrip(client, b"abc" * 50_000) == b"abc" * 50_000
    proxy.delay(3600.0)
    client.sendall(b"next year")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(10)
    proxy.heal()
    assert receive(client, 9) == b"next year"


def test_a_throttled_proxy_hands_on_little_by_little_and_all_of_it_when_healed(
    proxy: FaultProxy, client: socket.socket
) -> None:
    proxy.throttle(1000, Direction.TO_CLIENT)
    client.sendall(b"z" * 50_000)
    client.recv(1)
    assert proxy.bytes_to_client < 10_000  # 50 s worth of bytes: nothing but a wrong rate lets them through
    proxy.heal()
    assert len(receive(client, 49_999)) == 49_999


def test_a_dead_target_resets_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    # The reset may come while connecting or while reading, whichever the kernel is at.
    with FaultProxy(port) as proxy, pytest.raises(ConnectionResetError), dial(proxy) as client:
        client.recv(1)


def test_stop_ends_connections_thread_and_port(echo: Echo) -> None:
    before = threading.active_count()
    proxy = FaultProxy(f"nats://127.0.0.1:{echo.port}")
    with proxy, dial(proxy) as client:
        assert roundtrip(client) == b"ping"
        assert proxy.url == f"nats://127.0.0.1:{proxy.port}"
        proxy.stop()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            dial(proxy)
    eventually_blocking(lambda: threading.active_count() <= before, what="no thread is left")
    with pytest.raises(UsageError, match="not running"):
        proxy.cut()


def test_waiting_for_a_connection_that_never_comes_says_so(proxy: FaultProxy) -> None:
    with pytest.raises(NeverHappened, match="0 of 1 connections"):
        proxy.wait_for_connection(timeout=0.01)


@pytest.mark.parametrize("target", ["nats://user:hush@host-without-port", "nonsense"])
def test_a_target_without_a_port_is_refused_without_telling_its_password(target: str) -> None:
    with pytest.raises(UsageError) as caught:
        FaultProxy(target)
    assert "hush" not in str(caught.value)


async def test_a_nats_client_reconnects_through_the_proxy_after_a_cut(server: NatsServer, name: str) -> None:
    async with FaultProxy(server.url) as proxy:
        reconnected = asyncio.Event()

        async def on_reconnect() -> None:
            reconnected.set()

        connection = await nats.connect(proxy.url, reconnect_time_wait=0.01, reconnected_cb=on_reconnect)
        await asyncio.to_thread(proxy.wait_for_connection)
        stream = connection.jetstream()
        await stream.add_stream(name=name, subjects=[name])
        await stream.publish(name, b"before")
        proxy.cut()
        await asyncio.wait_for(reconnected.wait(), 60)
        await stream.publish(name, b"after")
        assert (await stream.stream_info(name)).state.messages == 2
        assert proxy.connections >= 2
        await connection.close()
        await eventually(lambda: proxy.live == 0, what="the closed client left the proxy")


async def test_a_nats_client_behind_a_black_hole_gets_its_answer_after_healing(server: NatsServer) -> None:
    async with FaultProxy(server.url) as proxy:
        connection = await nats.connect(proxy.url)
        proxy.half_open()
        flushed = asyncio.create_task(connection.flush(timeout=60))
        done, _ = await asyncio.wait([flushed], timeout=0.1)
        assert not done
        proxy.heal()
        await flushed
        await connection.close()
