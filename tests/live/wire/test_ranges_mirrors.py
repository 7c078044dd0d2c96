"""Mirrors answer Direct Get in their origin's name; their answers are never mistaken for the origin's content."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path as Folder

import pytest

from parti.dead_letters import DeadLetterReader
from parti.errors import PartiError
from parti.groups.describe import _lag
from parti.testing import NatsServer, eventually_blocking
from parti.testing.ports import pick_port
from parti.wire.api import JetStreamApi
from parti.wire.blocking import BlockingConnection
from parti.wire.connect import connect
from parti.wire.kv import KeyValue
from parti.wire.kv_model import KeyNotFound
from parti.wire.options import ConnectOptions
from parti.wire.ranges import Path, RangeReader
from parti.wire.stored import AnsweredElsewhere
from support.stored_input import Message, create, delete, numbered, publish, rows

PATHS: list[Path] = ["auto", "consumer", "direct"]
REPLAYS = 12


def mirror(connection: BlockingConnection, name: str, origin: str, last: int, **config: object) -> None:
    """A mirror that has come as far as its origin."""
    connection.api(f"STREAM.CREATE.{name}", {"name": name, "mirror": {"name": origin} | config, "storage": "memory"})
    caught_up(connection, name, last)


def caught_up(connection: BlockingConnection, name: str, last: int) -> None:
    eventually_blocking(
        lambda: connection.api(f"STREAM.INFO.{name}")["state"]["last_seq"] == last, what="the mirror is current"
    )


def mirrored(connection: BlockingConnection, name: str, count: int = 900) -> list[Message]:
    """A stream with a full and a filtered mirror; some messages were deleted in the stream, and stay in the mirrors."""
    create(connection, name)
    sent = publish(connection, name, [Message(f"{name}.k{i % 3}", b"%d" % i) for i in range(count - 1)])
    sent += publish(connection, name, [Message(f"{name}.k0", b"last")])
    mirror(connection, f"{name}F", name, count)
    mirror(connection, f"{name}P", name, count, filter_subject=f"{name}.k0")
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_range_of_a_mirrored_stream_is_read_alike_every_time(
    connection: BlockingConnection, server: NatsServer, name: str, path: Path
) -> None:
    sent = mirrored(connection, name)
    gone = {*range(100, 180), 301, 303, 899}
    delete(connection, name, gone)
    reader = RangeReader(ConnectOptions(servers=(server.url,)), patience=60)
    expected = [row for row in numbered(sent) if row[0] not in gone]
    for after, to in ((0, 300), (90, 410), (600, 900)):
        wanted = [row for row in expected if after < row[0] <= to]
        for _ in range(REPLAYS):
            assert rows(reader.read(name, after, to, path=path)) == wanted
    reader.close()


async def test_batches_of_direct_get_are_the_streams_own(
    connection: BlockingConnection, server: NatsServer, name: str
) -> None:
    sent = mirrored(connection, name, 300)
    delete(connection, name, range(1, 100))
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        api = JetStreamApi(opened)
        for _ in range(REPLAYS):
            try:
                found = await api.direct_get_batch(name, batch=50, seq=1)
            except AnsweredElsewhere:
                continue  # eight times in a row: rare, and told
            if found.messages:
                assert [message.seq for message in found.messages] == list(range(100, 150))
                assert found.messages[0].data == sent[99].data


async def test_the_lag_of_a_partition_is_counted_in_the_stream_itself(
    connection: BlockingConnection, server: NatsServer, name: str
) -> None:
    mirrored(connection, name, 300)
    delete(connection, name, range(1, 100))
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        known = 0
        for _ in range(REPLAYS):
            lag = await _lag(JetStreamApi(opened), name, [f"{name}.k1"], 1)
            if lag is not None:  # only mirrors answered, which is told as "not known"
                assert (lag.count, lag.last_seq) == (len(range(101, 300, 3)), 299)
                known += 1
    assert known >= 1


async def test_the_letters_of_a_mirrored_stream_are_all_listed(
    connection: BlockingConnection, server: NatsServer, name: str
) -> None:
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        letters = DeadLetterReader(JetStreamApi(opened), name)
        create(connection, letters.name, subjects=[f"dlq.{name}.>"])
        head = (("Parti-Stream", name), ("Parti-Subject", f"{name}.a"), ("Parti-Sequence", "1"))
        publish(connection, letters.name, [Message(f"dlq.{name}.{i % 2}", b"%d" % i, head) for i in range(40)])
        mirror(connection, f"{name}F", letters.name, 40)
        mirror(connection, f"{name}P", letters.name, 40, filter_subject=f"dlq.{name}.1")
        delete(connection, letters.name, range(5, 15))
        for _ in range(REPLAYS):
            found = [letter.sequence async for letter in letters.walk()]
            assert found == [*range(1, 5), *range(15, 41)]


async def test_a_key_of_a_mirrored_bucket_is_what_was_written_last(
    connection: BlockingConnection, server: NatsServer, name: str
) -> None:
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        bucket = await KeyValue.ensure(JetStreamApi(opened), name, storage="memory")
        for round_ in range(5):
            await bucket.put("b", b"%d" % round_)
            await bucket.put("a", b"%d" % round_)
        mirror(connection, f"{name}P", bucket.stream, 10, filter_subject=f"$KV.{name}.a")
        connection.api(f"STREAM.PURGE.{bucket.stream}", {"filter": f"$KV.{name}.a"})  # the mirror has it still
        for _ in range(REPLAYS):
            assert (await bucket.get("b")).value == b"4"
            with pytest.raises(KeyNotFound):
                await bucket.get("a")
        assert await bucket.keys() == ["b"]


def test_a_mirror_in_another_domain_does_not_answer_for_its_origin(name: str, tmp_path: Folder) -> None:
    """A leaf node whose domain mirrors a stream of the hub, under another name and under the same one."""
    port = pick_port()

    def jetstream(domain: str) -> str:
        return f"jetstream {{ domain: {domain}, store_dir: {json.dumps(str(tmp_path / domain))} }}"

    hub_config = f"{jetstream('hub')}\nleafnodes {{ host: 127.0.0.1, port: {port} }}"
    leaf_config = f"{jetstream('leaf')}\nleafnodes {{ remotes: [{{ url: nats://127.0.0.1:{port} }}] }}"
    with NatsServer(config=hub_config) as hub, NatsServer(config=leaf_config) as leaf:
        here = ConnectOptions(servers=(hub.url,), domain="hub")
        with BlockingConnection.open(here) as connection:
            create(connection, name)
            sent = publish(connection, name, [Message(f"{name}.k{i % 3}", b"%d" % i) for i in range(400)])
            beyond = ConnectOptions(servers=(leaf.url,), domain="leaf")
            with BlockingConnection.open(beyond) as far:
                for copy, chosen in ((f"{name}F", {}), (name, {"filter_subject": f"{name}.k0"})):
                    source: dict[str, object] = {"name": name, "external": {"api": "$JS.hub.API"}, **chosen}
                    eventually_blocking(partial(_made, far, copy, source), 60.0, "the leaf node is connected")
                    caught_up(far, copy, 400)
            gone = {*range(50, 90)}
            delete(connection, name, gone)
        expected = [row for row in numbered(sent) if row[0] not in gone]
        for url in (hub.url, leaf.url):
            reader = RangeReader(ConnectOptions(servers=(url,), domain="hub"), patience=60)
            for path in PATHS:
                for _ in range(4):
                    assert rows(reader.read(name, 0, 400, path=path)) == expected
            reader.close()


def _made(connection: BlockingConnection, name: str, mirror: dict[str, object]) -> bool:
    try:
        connection.api(f"STREAM.CREATE.{name}", {"name": name, "mirror": mirror, "storage": "memory"})
    except PartiError:  # the link between the two may not be there yet
        return False
    return True
