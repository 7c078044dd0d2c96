"""One request and its answer over a real socket: the bytes sent and received, and the fate of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from yarl import URL

from parti.clock import SystemClock
from parti.delivery import AddressGuard, DeliverSection, HttpTransport, Request, Response
from parti.delivery.courier import Courier
from parti.delivery.errors import LeaseLost
from parti.delivery.order import RuleBook
from parti.delivery.pending import TaskReader
from parti.delivery.policy import AttemptOutcome
from parti.delivery.secrets import SecretStore
from parti.delivery.transport import SendFailed
from parti.testing import eventually

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def endpoint(
    serve: Serve, create: Callable[[int, int, int], socket.socket] = socket.socket
) -> AsyncIterator[tuple[str, HttpTransport]]:
    """A url that is answered by `serve`, and a transport that may go there and nowhere else."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = HttpTransport(DeliverSection(), AddressGuard((f"127.0.0.1/32@{port}",), create=create))
    await transport.open()
    try:
        yield f"http://127.0.0.1:{port}/hook?a=%20b", transport
    finally:
        await transport.close()
        server.close()


def request(url: str, body: bytes = b"{}", **changes: object) -> Request:
    return msgspec.structs.replace(Request(URL(url), {"webhook-id": "m1"}, body, 10.0), **changes)


async def take(reader: asyncio.StreamReader) -> bytes:
    """One request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def test_a_request_leaves_exactly_as_it_was_made_and_the_connection_is_used_again() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await take(reader))
            writer.write(OK)

    async with endpoint(serve) as (url, transport):
        for _ in range(2):
            response = await transport.post(request(url))
            assert (response.status, response.head) == (200, b"ok")
        host = URL(url).host_port_subcomponent
        head = f"POST /hook?a=%20b HTTP/1.1\r\nHost: {host}\r\nwebhook-id: m1\r\nContent-Length: 2\r\n\r\n"
        assert seen == [head.encode() + b"{}"] * 2
        assert transport.guard.opened == 1


async def test_answers_that_announce_another_are_passed_over() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take(reader)
        writer.write(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK)
        await reader.read()

    async with endpoint(serve) as (url, transport):
        assert (await transport.post(request(url))).status == 200


async def test_nothing_leaves_once_the_right_to_send_is_lost() -> None:
    heard = bytearray()
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read())
        closed.set()

    def refuse() -> None:
        raise LeaseLost("not ours")

    async with endpoint(serve) as (url, transport):
        with pytest.raises(LeaseLost):
            await transport.post(request(url, may_send=refuse))
        await closed.wait()
        assert not heard


@pytest.mark.parametrize("headers", [{"a": "b\r\nx: y"}, {"a\r\nx": "y"}, {"a": "b\n"}, {"a": "b\r"}, {"a": "\0"}])
async def test_a_header_with_a_line_break_opens_no_connection(headers: dict[str, str]) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nothing may come")

    async with endpoint(serve) as (url, transport):
        with pytest.raises(SendFailed):
            await transport.post(request(url, headers=headers))
        assert transport.guard.opened == 0


LARGE = b"x" * (32 << 20)  # more than the kernel buffers


async def test_an_endpoint_that_answers_before_it_has_heard_everything_gets_a_new_connection() -> None:
    sockets: list[socket.socket] = []
    release = asyncio.Event()

    def create(family: int, kind: int, protocol: int) -> socket.socket:
        sockets.append(socket.socket(family, kind, protocol))
        return sockets[-1]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if len(sockets) < 3:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await release.wait()  # never reads the rest

    async with endpoint(serve, create) as (url, transport):
        for _ in range(2):
            assert (await transport.post(request(url, LARGE))).status == 413
        assert transport.guard.opened == 2
        with pytest.raises(SendFailed):
            await transport.post(request(url, LARGE, timeout=0.2))
        # None of them waits for the endpoint to take the rest.
        await eventually(lambda: all(made.fileno() == -1 for made in sockets))
        release.set()


@pytest.mark.parametrize("answer", [b"no http at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000, b""])
async def test_what_is_no_answer_is_a_failure_of_the_network(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await take(reader)
        writer.write(answer)

    async with endpoint(serve) as (url, transport):
        with pytest.raises(SendFailed) as failed:
            await transport.post(request(url))
        assert failed.value.outcome is AttemptOutcome.NETWORK
        assert "hook" not in str(failed.value)


async def test_no_answer_in_time_is_a_timeout_and_a_late_one_reaches_nobody() -> None:
    late = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            if b"POST /slow" in await take(reader):
                await late.wait()
                writer.write(OK.replace(b"200", b"202"))
            else:
                writer.write(OK)

    async with endpoint(serve) as (url, transport):
        with pytest.raises(SendFailed) as failed:
            await transport.post(request(url.replace("/hook", "/slow"), timeout=0.05))
        assert failed.value.outcome is AttemptOutcome.TIMEOUT
        late.set()
        assert (await transport.post(request(url))).status == 200, "on a connection of its own"


class Right:
    """A right to send that always holds."""

    partition, epoch = "3", 7

    def check(self) -> float:
        return 1.0


async def test_a_header_of_the_task_takes_the_place_of_ours_however_it_is_written() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await take(reader))
        writer.write(OK)
        await reader.read()

    async with endpoint(serve) as (url, transport):
        config, clock = DeliverSection(), SystemClock()
        task = {
            "triggerId": "t1",
            "database": "shop",
            "collection": "orders",
            "documentId": "d1",
            "event": "update",
            "url": url,
            "headers": {"content-TYPE": "application/cloudevents+json"},
        }
        held = TaskReader(config, RuleBook((), "block")).read(
            json.dumps(task).encode(), {}, stream="S", subject="S.x", sequence=1, time=0.0
        )
        courier = Courier(config, transport, transport.guard, SecretStore(clock), clock)
        assert (await courier.attempt(held, Right())).outcome is AttemptOutcome.DELIVERED
        head = seen[0].partition(b"\r\n\r\n")[0].lower().split(b"\r\n")[1:]
        names = [line.partition(b":")[0] for line in head]
        assert len(names) == len(set(names))
        assert b"content-type: application/cloudevents+json" in head
        assert {b"x-parti-partition: 3", b"x-parti-epoch: 7", b"user-agent: parti-deliver/1"} <= set(head)


async def test_of_two_authorizations_the_token_is_sent_and_the_other_is_not() -> None:
    config = DeliverSection(token_hosts=("a.test",))
    posted: list[Request] = []

    class Kept:
        async def post(self, request: Request) -> Response:
            posted.append(request)
            return Response(200, None, b"")

    task = {
        "triggerId": "t1",
        "database": "shop",
        "collection": "orders",
        "documentId": "d1",
        "event": "update",
        "url": "https://a.test/x",
        "headers": {"authorization": "Basic x", "X-A": "y"},
        "preIssuedToken": "jwt",
    }
    held = TaskReader(config, RuleBook((), "block")).read(
        json.dumps(task).encode(), {}, stream="S", subject="S.x", sequence=1, time=0.0
    )
    clock = SystemClock()
    courier = Courier(config, Kept(), AddressGuard(), SecretStore(clock), clock)  # type: ignore[arg-type]
    assert (await courier.attempt(held, Right())).outcome is AttemptOutcome.DELIVERED
    names = [name for name in posted[0].headers if name.lower() == "authorization"]
    assert [posted[0].headers[name] for name in names] == ["Bearer jwt"]
