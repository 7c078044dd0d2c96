"""Messages about as large as the server takes: dead-lettered whole by every consumer, and replayed as they were."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import pytest
from click.testing import CliRunner

from live.dead_letters.test_writer import NO, message
from parti.backoff import Backoff
from parti.cli import main
from parti.clock import SystemClock
from parti.dead_letters import (
    ChosenLetters,
    DeadLetter,
    DeadLetterReader,
    DeadLetterWriter,
    ensure_stream,
    until_stored,
)
from parti.errors import PartiError, RequestTimeout, UsageError
from parti.groups import (
    ElasticGroups,
    GroupMessage,
    MemberOptions,
    PartitioningFilter,
    StaticGroups,
    elastic_consume,
    static_consume,
)
from parti.outcomes import Reject
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi, PubAck, expectations
from parti.wire.connect import connect
from parti.wire.errors import WrongLastSequence
from parti.wire.options import ConnectOptions
from parti.wire.requests import headers_size
from parti.worker import Message, WorkerConfig, WorkerConsumer
from support.fleet import fleet_on

LIMIT = 60_000
HEADERS = 65_535  # the most bytes of headers that a stream takes
FINE = b"fine"
Content = tuple[bytes, dict[str, str]]


@pytest.fixture(scope="module")
def small() -> Iterator[NatsServer]:
    """A server that takes little: messages at its limit are quick to send."""
    with NatsServer(config=f"max_payload: {LIMIT}") as running:
        yield running


@pytest.fixture
async def js(small: NatsServer, name: str) -> AsyncIterator[JetStreamApi]:
    async with await connect(ConnectOptions(servers=(small.url,))) as connection:
        api = JetStreamApi(connection)
        await api.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
        yield api


def contents(seed: str, count: int = 8, limit: int = LIMIT) -> list[Content]:
    """Messages of up to 2,000 bytes less than the limit: without headers, with many, and with as much as fits."""
    rng = random.Random(seed)
    made = []
    for below in (0, 1, *(rng.randrange(2_000) for _ in range(count))):
        for kind in ("none", "many", "huge"):
            room = limit - below
            headers = {f"X-{n}": "v" * rng.randrange(1, 90) for n in range(200)} if kind == "many" else {}
            if kind == "huge":
                headers = {"X-Huge": ""}
                most = min(room, HEADERS) - headers_size(headers)
                headers["X-Huge"] = "h" * (most - rng.choice([0, 0, 10, 500, 1_000]))
            data = rng.randbytes(room - headers_size(headers))
            made.append((data, headers))
    return made


def content(found: Any) -> Content:
    """Data and headers, as the publisher gave them."""
    return found.data, {name: value for name, value in found.headers.items() if not name.startswith("Nats-")}


async def all_letters(js: JetStreamApi, stream: str) -> list[DeadLetter]:
    return [letter async for letter in DeadLetterReader(js, stream).walk()]


class Choosy:
    """A handler that rejects what is not fine, until it `takes` everything."""

    def __init__(self) -> None:
        self.takes = False
        self.handled: list[Content] = []

    async def __call__(self, message: Message | GroupMessage) -> Reject | None:
        if not self.takes and message.data != FINE:
            return Reject("no good")
        self.handled.append(content(message))
        return None


async def buried_and_replayed(
    js: JetStreamApi, stream: str, subject: str, handler: Choosy, sent: list[Content]
) -> None:
    """All are dead-lettered whole, what is behind them in their lane is handled, and a replay brings them back."""
    for data, headers in sent:
        await js.publish(subject, data, headers=headers)
        await js.publish(subject, FINE)
    await eventually(lambda: len(handler.handled) >= len(sent), 90, "every message behind a rejected one is handled")
    letters = DeadLetterReader(js, stream)
    assert [content(letter) async for letter in letters.walk()] == sent
    assert await letters.count() == len(sent)
    handler.takes = True
    handler.handled.clear()
    assert len([None async for _ in letters.replay_all(clock=SystemClock())]) == len(sent)
    await eventually(lambda: len(handler.handled) >= len(sent), 90, "the replayed messages are handled")
    assert handler.handled == sent
    state = (await js.stream_info(letters.name))["state"]
    assert (await letters.count(), state["messages"]) == (0, 0), "no part stays behind"


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
async def test_a_worker_buries_a_message_of_any_size_whole(
    small: NatsServer, name: str, layout: str, retention: str
) -> None:
    async with fleet_on(small, name, count=1, retention=retention) as fleet:
        handler = Choosy()
        config = WorkerConfig(
            stream=name, subject_template=f"{name}.{{partition}}", pull_timeout=1.0, idle_heartbeat=0.25
        )
        consumer = WorkerConsumer(JetStreamApi(await fleet.connection()), config, handler)
        manager = await fleet.worker(consumer=consumer, layout=layout)
        await manager.wait_for("converged", 60)
        sent = contents(f"{layout} {retention}")
        await buried_and_replayed(fleet.js, name, f"{name}.p0", handler, sent)


async def test_headers_of_as_many_bytes_as_a_stream_takes_are_kept(server: NatsServer, name: str) -> None:
    """Where the message itself is far from the server's limit and where it is near, and with a fence."""
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        js = JetStreamApi(connection)
        await js.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
        await ensure_stream(js, name)
        fence = f"{name}_DLQ.parti-fence.p"
        marker = await js.publish(fence, b"1", headers={"Parti-Reason": "fence"})
        expected = expectations(last_subject_seq=marker.seq, last_subject_filter=fence)
        writer = DeadLetterWriter(js, name, "c", fence=expected)
        sent = [*contents("headers", 4, 200_000), *contents("headers", 2, connection.max_payload)]
        sent += [(b"", {"X": "h" * (HEADERS - headers_size({"X": ""}) - less)}) for less in range(0, 1_500, 100)]
        for number, (data, headers) in enumerate(sent, 1):
            await writer.bury(message(name, number, data=data, headers=headers), NO)
        assert [content(letter) for letter in await all_letters(js, name)] == sent
        replays = DeadLetterReader(js, name).replay_all(clock=SystemClock())
        assert len([None async for _ in replays]) == len(sent)
        assert [content(await js.msg_get(name, seq=n)) for n in range(1, len(sent) + 1)] == sent


@pytest.mark.parametrize("kind", ["static", "elastic"])
async def test_a_group_member_buries_a_message_of_any_size_whole(small: NatsServer, name: str, kind: str) -> None:
    async with await connect(ConnectOptions(servers=(small.url,))) as connection:
        js, handler = JetStreamApi(connection), Choosy()
        subjects, subject = ([f"0.{name}.>"], f"0.{name}.a") if kind == "static" else ([f"{name}.*"], f"{name}.a")
        await js.stream_create({"name": name, "subjects": subjects, "storage": "memory"})
        if kind == "static":
            await StaticGroups(connection).create(name, "g", max_members=1, members=["m"])
            member: Any = await static_consume(connection, name, "g", "m", handler, MemberOptions())
        else:
            groups = ElasticGroups(connection)
            await groups.create(name, "g", max_members=1, filters=[PartitioningFilter(f"{name}.*", (1,))])
            await groups.add_members(name, "g", ["m"])
            member = await elastic_consume(connection, name, "g", "m", handler, MemberOptions())
        try:
            await buried_and_replayed(js, name, subject, handler, contents(kind))
        finally:
            await member.stop()


class Lossy(JetStreamApi):
    """Loses the acknowledgement of every publish once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lost: set[str] = set()

    async def publish(
        self, subject: str, data: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> PubAck:
        ack = await super().publish(subject, data, headers=headers, timeout=timeout)
        if (name := (headers or {})["Nats-Msg-Id"]) not in self.lost:
            self.lost.add(name)
            raise RequestTimeout("the acknowledgement was lost")
        return ack


async def test_a_lost_acknowledgement_stores_no_part_twice(js: JetStreamApi, name: str) -> None:
    lossy, failed = Lossy(js.connection), list[PartiError]()
    writer, (data, headers) = DeadLetterWriter(lossy, name, "c"), contents("lossy")[1]
    await until_stored(
        lambda: writer.bury(message(name, data=data, headers=headers), NO),
        clock=SystemClock(),
        backoff=Backoff(base=0.001, cap=0.002),
        on_failure=lambda error, _: failed.append(error),
    )
    (letter,) = await all_letters(js, name)
    assert content(letter) == (data, headers)
    assert len(failed) == letter.extension.parts + 1
    assert (await js.stream_info(f"{name}_DLQ"))["state"]["messages"] == letter.extension.parts + 1


async def test_letters_of_the_same_message_have_parts_of_their_own(js: JetStreamApi, name: str) -> None:
    """Stored again after the duplicate window, or by another reader of the stream: one may leave without the other."""
    await ensure_stream(js, name, duplicate_window=100_000_000)
    large, letters = message(name, data=b"d" * LIMIT), DeadLetterReader(js, name)
    for count, consumer in enumerate(("one", "one", "two", "one", "two"), 1):
        writer = DeadLetterWriter(js, name, consumer)

        async def one_more(writer: DeadLetterWriter = writer, count: int = count) -> bool:
            await writer.bury(large, NO)
            return await letters.count() == count

        await eventually(one_more, 60, "the duplicate window is over, and the letter is stored again")
    found = await all_letters(js, name)
    for leaving in (found[3], found[0], found[4], found[2], found[1]):
        assert (await letters.get(leaving.sequence)).data == large.data
        await letters.purge(ChosenLetters(sequences=(leaving.sequence,)))


async def test_a_letter_that_left_with_its_parts_is_stored_again_with_parts(js: JetStreamApi, name: str) -> None:
    writer, letters = DeadLetterWriter(js, name, "c"), DeadLetterReader(js, name)
    large = message(name, data=b"d" * LIMIT, headers={})
    await writer.bury(large, NO)
    (letter,) = await all_letters(js, name)
    await js.msg_delete(f"{name}_DLQ", letter.sequence)  # somebody is removing it: the parts leave a moment later
    await writer.bury(large, NO)
    for sequence in range(1, letter.sequence):
        await js.msg_delete(f"{name}_DLQ", sequence)
    (again,) = await all_letters(js, name)
    assert (again.data, again.extension.cut) == (large.data, 0)
    await letters.replay(again)
    assert (await js.stream_info(f"{name}_DLQ"))["state"]["last_seq"] > 0
    assert (await js.msg_get(name, last_by_subj=f"{name}.a")).data == large.data


async def test_a_letter_whose_part_is_gone_says_so_and_stays(small: NatsServer, js: JetStreamApi, name: str) -> None:
    await DeadLetterWriter(js, name, "c").bury(message(name, data=b"d" * LIMIT), NO)
    await js.msg_delete(f"{name}_DLQ", 1)
    letters = DeadLetterReader(js, name)
    (letter,) = await all_letters(js, name)
    assert (letter.data, letter.reason) == (b"", "rejected")
    with pytest.raises(UsageError, match="parts is gone"):
        await letters.replay(letter)
    words = ["dlq", "show", name, f"{letter.sequence}", "--server", small.url, "--json"]
    shown = await asyncio.to_thread(CliRunner().invoke, main, words)
    assert json.loads(shown.stdout)["missing"] > LIMIT
    assert (await js.stream_info(name))["state"]["messages"] == 0
    assert await letters.purge(ChosenLetters()) == 1
    assert (await js.stream_info(f"{name}_DLQ"))["state"]["messages"] == 0


async def test_a_limit_of_the_dead_letter_stream_itself_is_kept(js: JetStreamApi, name: str) -> None:
    await ensure_stream(js, name, max_msg_size=2_000)
    sent = contents("stream limit", 1)
    for number, (data, headers) in enumerate(sent, 1):
        await DeadLetterWriter(js, name, "c").bury(message(name, number, data=data, headers=headers), NO)
    assert [content(letter) for letter in await all_letters(js, name)] == sent


async def test_the_parts_of_an_owner_that_was_followed_are_refused(js: JetStreamApi, name: str) -> None:
    await ensure_stream(js, name)
    fence = f"{name}_DLQ.parti-fence.p"
    marker = await js.publish(fence, b"1", headers={"Parti-Reason": "fence"})
    expected = expectations(last_subject_seq=marker.seq, last_subject_filter=fence)
    writer = DeadLetterWriter(js, name, "c", fence=expected)
    sent = contents("fence", 2)
    for number, (data, headers) in enumerate(sent, 1):
        await writer.bury(message(name, number, data=data, headers=headers), NO)
    await js.publish(fence, b"2", headers={"Parti-Reason": "fence"})
    before = (await js.stream_info(f"{name}_DLQ"))["state"]["last_seq"]
    with pytest.raises(WrongLastSequence):
        await writer.bury(message(name, 99, data=b"d" * LIMIT), NO)
    assert (await js.stream_info(f"{name}_DLQ"))["state"]["last_seq"] == before
    assert [content(letter) for letter in await all_letters(js, name)] == sent


async def test_a_purge_of_all_spares_the_parts_of_a_letter_that_is_being_stored(js: JetStreamApi, name: str) -> None:
    class Meanwhile(JetStreamApi):
        """Everything is purged between the parts and the letter."""

        async def publish(self, subject: str, data: bytes = b"", **more: Any) -> PubAck:
            if "parti-part" not in subject:
                assert await DeadLetterReader(js, name).purge(ChosenLetters()) == 1
            return await super().publish(subject, data, **more)

    await DeadLetterWriter(js, name, "c").bury(message(name, 1), NO)
    large = message(name, 2, data=b"d" * LIMIT)
    await DeadLetterWriter(Meanwhile(js.connection), name, "c").bury(large, NO)
    (letter,) = await all_letters(js, name)
    assert (letter.data, letter.original_sequence) == (large.data, 2)
