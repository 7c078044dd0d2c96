"""Which request an answer belongs to, and the cost of a connection: endless bodies, unexpected bytes, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from parti.delivery import AddressGuard, DeliverSection, HttpTransport, Request
from parti.delivery import transport as module
from parti.delivery.guard import AddrInfo
from parti.delivery.policy import AttemptOutcome
from parti.delivery.pool import affordable
from parti.delivery.response_head import head_of
from parti.delivery.transport import SendFailed
from parti.testing import eventually

MANNERS = ["whole", "split", "cut", "endless", "broken chunks", "no length", "huge"]
MANNERS += ["second answer", "second answer later"]


class Endpoint:
    """Answers by a plan: a status, and in which manner. `Retry-After` says which request the answer is for."""

    def __init__(self, plan: list[tuple[int, str]]) -> None:
        self.plan = plan
        self.asked = 0
        self.quiet = asyncio.Event()
        """Set when nothing more will be written before the next request."""
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._answer(reader, writer):
                    pass
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        self.asked += 1
        status, manner = self.plan[self.asked - 1]
        head = f"HTTP/1.1 {status} X\r\nRetry-After: {self.asked}\r\n".encode()
        lie = b"HTTP/1.1 200 X\r\nRetry-After: 999\r\nContent-Length: 0\r\n\r\n"
        match manner:
            case "whole":
                writer.write(head + b"Content-Length: 2\r\n\r\nok")
            case "split":
                writer.write(head)
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(b"Content-Length: 2\r\n\r\nok")
            case "cut":
                writer.write(head + b"Content-Length: 9\r\n\r\nok")
                await writer.drain()
            case "endless":
                writer.write(head + b"Content-Length: 9\r\n\r\nok")
            case "broken chunks":
                writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n")
            case "no length":
                writer.write(head + b"\r\nok")
            case "second answer":
                writer.write(head + b"Content-Length: 2\r\n\r\nok" + lie)
            case "second answer later":
                writer.write(head + b"Content-Length: 2\r\n\r\nok")
                await writer.drain()
                await asyncio.sleep(0.01)  # behind the answer, before the next request
                writer.write(lie)
            case "huge":
                writer.write(head + b"Content-Length: 200000\r\n\r\n" + b"x" * 200_000)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        self.quiet.set()
        return manner != "cut"


@contextlib.asynccontextmanager
async def reached(endpoint: Endpoint) -> AsyncIterator[tuple[URL, HttpTransport]]:
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = HttpTransport(DeliverSection(), AddressGuard((f"127.0.0.1/32@{port}",)))
    await transport.open()
    try:
        yield URL(f"http://127.0.0.1:{port}/hook"), transport
    finally:
        await transport.close()
        server.close()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([200, 201, 404, 500, 503]), st.sampled_from(MANNERS)), max_size=6))
def test_each_request_is_judged_by_the_status_of_its_own_answer(plan: list[tuple[int, str]]) -> None:
    async def play() -> None:
        endpoint = Endpoint([*plan, (503, "whole")])
        async with reached(endpoint) as (url, transport):
            for number, (status, _) in enumerate(endpoint.plan, start=1):
                endpoint.quiet.clear()
                response = await transport.post(Request(url, {}, b"{}", 10.0))
                marked = str(number) if status == 503 else response.retry_after
                assert (response.status, response.retry_after) == (status, marked)
                assert response.retry_after != "999"
                await endpoint.quiet.wait()
        assert transport.guard.alive == 0

    with mock.patch.object(module, "_BODY_WITHIN", 0.05):
        asyncio.run(play())


class Watched(AddressGuard):
    """Remembers how many sockets there were at most."""

    most = 0

    def socket(self, info: AddrInfo) -> socket.socket:
        made = super().socket(info)
        self.most = max(self.most, self.alive)
        return made


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_connections_stay_within_their_bound_and_the_longest_idle_is_closed_first(loop: str) -> None:
    factory = pytest.importorskip(loop).new_event_loop  # each closes sockets in its own way
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_stays_within_its_bound())


async def _stays_within_its_bound() -> None:
    endpoints = [Endpoint([(200, "whole")] * 100) for _ in range(12)]
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(await asyncio.start_server(endpoint.serve, "127.0.0.1", 0))
            for endpoint in endpoints
        ]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        guard = Watched(tuple(f"127.0.0.1/32@{port}" for port in ports))
        transport = HttpTransport(DeliverSection(), guard, connections=4)
        await transport.open()

        async def post(place: int) -> None:
            response = await transport.post(Request(URL(f"http://127.0.0.1:{ports[place]}/"), {}, b"{}", 10.0))
            assert response.status == 200
            assert guard.most <= 4

        try:
            for place in range(12):
                await post(place)
            opened = guard.opened
            assert opened == 12
            for place in (11, 10, 9):
                await post(place)  # used last: still there
            assert guard.opened == opened
            await asyncio.gather(*(post(place % 12) for place in range(60)))  # more at once than there may be
        finally:
            await transport.close()
        await eventually(lambda: guard.alive == 0)


def failing(code: int) -> Callable[[int, int, int], socket.socket]:
    def create(family: int, kind: int, protocol: int) -> socket.socket:
        raise OSError(code, "no")

    return create


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (errno.EMFILE, AttemptOutcome.LOCAL),
        (errno.ENFILE, AttemptOutcome.LOCAL),
        (errno.ENOBUFS, AttemptOutcome.LOCAL),
        (errno.ENOMEM, AttemptOutcome.LOCAL),
        (errno.EADDRNOTAVAIL, AttemptOutcome.LOCAL),
        (errno.ECONNREFUSED, AttemptOutcome.NETWORK),
        (errno.EHOSTUNREACH, AttemptOutcome.NETWORK),
    ],
)
async def test_what_this_machine_lacks_is_not_the_hosts_fault(code: int, outcome: AttemptOutcome) -> None:
    def two_families(host: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        kinds = ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in kinds]

    guard = AddressGuard(("127.0.0.1/32@9", "::1/128@9"), create=failing(code))
    transport = HttpTransport(DeliverSection(), guard, lookup=two_families)
    await transport.open()
    try:
        for url in ("http://127.0.0.1:9/", "http://two.test:9/"):
            with pytest.raises(SendFailed) as failed:
                await transport.post(Request(URL(url), {}, b"{}", 5.0))
            assert failed.value.outcome is outcome
    finally:
        await transport.close()


def test_the_bound_leaves_descriptors_to_the_rest_of_the_process() -> None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 0 < affordable() < limit


@given(st.binary(max_size=60), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 102 X\r\n\r\n"]))
def test_a_head_is_read_whole_or_not_at_all(data: bytes, prefix: bytes) -> None:
    found = head_of(prefix + data)
    if found is not None:
        assert 200 <= found[0] <= 999
        assert b"\r\n\r\n" in prefix + data


def test_the_head_of_an_answer_decides_behind_those_that_announce_it() -> None:
    late = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Later\r\nretry-AFTER: 7\r\nA:b\r\n\r\nzz"
    assert head_of(late) == (503, "7")
    assert head_of(late.replace(b"A:b", b"A b")) is None
    assert head_of(b"HTTP/1.1 200\r\n\r\n") == (200, None)
