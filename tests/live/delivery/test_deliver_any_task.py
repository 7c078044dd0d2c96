"""Any published task is delivered or becomes a dead letter, and the tasks after it arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parti.dead_letters import DeadLetter, DeadLetterReader
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer
from parti.wire.frames import Frames
from parti.wire.live import LiveConnection
from support.delivery import Scene, scene

RULES = ("block: order=block", "park: order=park", "skip: order=skip")
LONG = "9" * 5_000

# JSON texts, as no encoder would write some of them.
NUMBERS = st.sampled_from(["0", "-1", "1.5", "1e308", "1e999", "1" + "0" * 400, LONG, "NaN", "-0", "0x1"])
TEXTS = st.one_of(
    st.sampled_from(
        ["", "\0", "9" * 400 + "s", LONG + "s", "1s" * 60, "²s", "µs", "-1s", "\ud800", "\uffff", "a" * 2_000]
    ),
    st.text(max_size=20),
).map(json.dumps)
VALUES = st.one_of(NUMBERS, TEXTS, st.sampled_from(["null", "true", "{}", "[]", "[" * 3_000, '{"a":', '"\\ud800"']))
URLS = st.one_of(
    st.sampled_from(
        ["http://x[]@", "http://127.0.0.2/", "http://", "ftp://x", "http://user@127.0.0.1/", "http://[::1"]
    ),
    st.sampled_from(["http://127.0.0.1:99999/", "http://127.0.0.1:0/", "http://127.0.0.1:1/", f"http://{'a' * 300}/"]),
    st.sampled_from(
        ["http://127.0.0.1\\@x/", "http://\u2100/", "http://%31%32/", "http://x:y/", "http://-/", "http://./"]
    ),
    st.text(alphabet="[]@:/?#%\\ .!", max_size=12).map(lambda text: "http://" + text),
).map(json.dumps)
HEADERS = st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=3).map(json.dumps)
POLICIES = st.dictionaries(
    st.sampled_from(["maxAttempts", "initialBackoff", "maxBackoff"]), st.one_of(NUMBERS, TEXTS), min_size=1
).map(lambda fields: "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}")
FIELDS = st.one_of(
    st.tuples(st.just("url"), URLS),
    st.tuples(st.just("headers"), HEADERS),
    st.tuples(st.just("retryPolicy"), POLICIES),
    st.tuples(st.sampled_from(["secretsRef", "timeout", "lsn", "seq", "ts", "preIssuedToken", "extra"]), VALUES),
    st.tuples(st.sampled_from(["triggerId", "documentId", "collection", "event", "payload", "before"]), VALUES),
)
LINES = st.one_of(
    st.sampled_from([b"Parti-Attempts: inf", b"Parti-Attempts: nan", b"Parti-Attempts: " + b"9" * 400]),
    st.sampled_from([b"parti-attempts: 7", b"Parti-First-Seen: nan", b"Parti-Origin: x:1", b"Parti-Subject: a b"]),
    st.sampled_from([b"Parti-History: [{}]", b"Parti-History: " + b"[" * 4_000, b"Parti-History: " + b"9" * 9_000]),
    st.sampled_from([b"Parti-Reason: fence", b"a blank: x", b"\xff\xfe: x", b"X: \xff", b"X: a\rb", b"X: a\nb"]),
    st.sampled_from([b"X: \0", b"no colon", b": no name", b"X:" + b"y" * 5_000, b"K\xc3\xa4se: x"]),
    st.binary(max_size=20).filter(lambda line: b"\r\n" not in line and not line.lower().startswith(b"nats-")),
)


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]], bytes, list[bytes]]:
    """A path and fields that replace those of a task, or bytes of any kind; and header lines."""
    lines = draw(st.lists(LINES, max_size=3))
    if draw(st.integers(0, 9)) == 0:
        return "", [], draw(st.binary(max_size=40)), lines
    path = draw(st.sampled_from(["/well", "/down", "/refused"]))
    trigger = json.dumps(draw(st.sampled_from(["block", "park", "skip"])))
    return path, [("triggerId", trigger), *draw(st.lists(FIELDS, max_size=3))], b"", lines


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(batch=st.lists(messages(), min_size=20, max_size=30))
def test_any_message_is_delivered_or_rests_and_the_good_one_behind_it_arrives(
    server: NatsServer, batch: list[tuple[str, list[tuple[str, str]], bytes, list[bytes]]]
) -> None:
    asyncio.run(_play(server, batch))


async def _play(server: NatsServer, batch: list[tuple[str, list[tuple[str, str]], bytes, list[bytes]]]) -> None:
    async with scene(server, f"t{secrets.token_hex(6)}") as stage, publisher(stage) as publish:
        stage.endpoint.on("/down", Answer(503))
        stage.endpoint.on("/refused", Answer(422))
        stored = goods = 0
        for number, (path, fields, raw, lines) in enumerate(batch):
            document = f"d{number % 4}"
            data = raw if not path else _encoded(stage, document, path, fields)
            if number % 7 == 3 and path:
                data = data[: len(data) // 2] + bytes([0xFF]) + data[len(data) // 2 :]
            stored += await publish(data, lines)
            await stage.publish(stage.task(document, "/good", triggerId="block"))
            goods += 1
        config = stage.config(schedule=("10ms", "10ms"), triggers=RULES, breaker_calls=10_000, max_ack_pending=16)
        async with stage.delivering(config) as consumer:
            await stage.endpoint.wait_for(goods, path="/good")

            async def accounted() -> bool:
                accepted = sum(not r.path.startswith(("/down", "/refused")) for r in stage.endpoint.received)
                return accepted + len(await letters(stage)) == stored + goods

            await eventually(accounted)
            assert await stage.settled()
            assert consumer.health() is None
        assert all(numbers == sorted(numbers) for numbers in stage.order("/good").values())
        found = await letters(stage)
        assert len({letter.origin for letter in found}) == len(found)
        assert all(letter.origin.startswith(f"{stage.stream}:") for letter in found)


def _encoded(stage: Scene, document: str, path: str, fields: list[tuple[str, str]]) -> bytes:
    whole = {name: json.dumps(value) for name, value in stage.task(document, path).items()} | dict(fields)
    return ("{" + ",".join(f'"{name}":{value}' for name, value in whole.items()) + "}").encode(errors="surrogatepass")


async def letters(stage: Scene) -> list[DeadLetter]:
    return [letter async for letter in DeadLetterReader(stage.js, stage.stream).walk()]


@contextlib.asynccontextmanager
async def publisher(stage: Scene) -> AsyncIterator:  # type: ignore[type-arg]
    """Publishes bytes under header lines of any kind; says whether the server has stored them."""
    connection = await LiveConnection.open(stage.options)
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    def answered(frames: Frames) -> None:
        for index in range(len(frames)):
            at, end = int(frames.positions[6][index]), int(frames.payload_end[index])
            answers.put_nowait(frames.data[at:end].tobytes())

    inbox = connection.new_inbox()
    connection.subscribe(inbox, answered)

    async def publish(data: bytes, lines: list[bytes]) -> bool:
        head = b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
        sizes = b"%d %d" % (len(head), len(head) + len(data))
        subject = f"{stage.stream}.shop.orders.x".encode()
        connection.write(b"HPUB %s %s %s\r\n%s%s\r\n" % (subject, inbox.encode(), sizes, head, data))
        async with asyncio.timeout(30):
            return b'"error"' not in await answers.get()

    try:
        yield publish
    finally:
        await connection.close()


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


@pytest.mark.parametrize("order", ["block", "park", "skip"])
async def test_a_task_of_nearly_the_servers_limit_is_no_danger(stage: Scene, order: str) -> None:
    """Beside it, our headers have no room: the server would cut the connection of everybody."""
    limit = stage.js.connection.max_payload
    stage.endpoint.on("/down", Answer(503, body=b"x" * 4_096))
    sizes = [limit, limit - 300, limit - 2_000, limit - 8_000]
    async with publisher(stage) as publish:
        for number, size in enumerate(sizes):
            for path in ("/down", "/down?body"):
                task = stage.task(f"d{number}", path) | {"extra": "", "payload": ""}
                field = "extra" if path == "/down" else "payload"  # too large for a request, or for the park alone
                room = size - len(json.dumps(task)) - len("NATS/1.0\r\n\r\n")
                assert await publish(json.dumps(task | {field: "x" * room}).encode(), [])
                await stage.publish(stage.task(f"d{number}", "/good"))
    config = stage.config(schedule=("10ms",), order=order, max_task=limit, breaker_calls=10_000)
    async with stage.delivering(config):
        await stage.endpoint.wait_for(2 * len(sizes), path="/good")

        async def rested() -> bool:
            return len(await letters(stage)) == 2 * len(sizes)

        await eventually(rested)
    found = await letters(stage)
    assert {letter.reason for letter in found} <= {"too_large", "exhausted"}
    assert sum(bool(letter.data) for letter in found) >= 4  # only where there is no room for both is the data cut


async def test_headers_of_ours_that_somebody_else_wrote_mean_nothing(stage: Scene) -> None:
    stage.endpoint.on("/down", Answer(503))
    headers = {
        "Parti-Attempts": "7",
        "Parti-First-Seen": "1",
        "Parti-Origin": f"{stage.stream}:999",
        "Parti-Subject": "elsewhere",
        "parti-attempts": "9",
        "Parti-Reason": "fence",
        "Parti-Task-Id": "chosen",
        "X-Own": "kept",
    }
    sequence = await stage.publish(stage.task("a", "/down"), headers=headers)
    async with stage.delivering(stage.config(schedule=("10ms",), order="park")):
        await stage.endpoint.wait_for(2, path="/down")

        async def rested() -> bool:
            return bool(await letters(stage))

        await eventually(rested)
    (letter,) = await letters(stage)
    assert (letter.extension.id, letter.attempts, letter.reason) == ("chosen", 2, "exhausted")
    assert letter.origin == f"{stage.stream}:{sequence}"
    assert letter.subject.startswith(f"{stage.stream}.shop")
    assert letter.headers["X-Own"] == "kept"
    assert "parti-attempts" not in letter.headers
    assert [request.headers["x-parti-attempt"] for request in stage.endpoint.received] == ["1", "2"]
