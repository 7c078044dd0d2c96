import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from parti.errors import ConnectionFailed, PartiError, UsageError
from parti.testing import NatsCluster, NatsServer, eventually, insist
from parti.wire import errors
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.delivery import parse_delivery
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, Operation, SnapshotDone, check_pattern
from parti.wire.options import ConnectOptions
from parti.wire.watch import WatchSettings


@pytest.fixture
async def kv(server: NatsServer, name: str) -> AsyncIterator[KeyValue]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        yield await KeyValue.ensure(JetStreamApi(connection), name, storage="memory")


class Watcher:
    """Runs a watch in the background and keeps what it told."""

    def __init__(self) -> None:
        self.told: list[Change | SnapshotDone] = []
        self.news = asyncio.Event()

    @property
    def changes(self) -> list[Change]:
        return [item for item in self.told if isinstance(item, Change)]

    @property
    def state(self) -> dict[str, bytes]:
        """What somebody who only listens to the watch believes the bucket to hold."""
        state: dict[str, bytes] = {}
        for change in self.changes:
            if change.value is None:
                state.pop(change.key, None)
            else:
                state[change.key] = change.value
        return state

    async def run(self, kv: KeyValue, pattern: str, settings: WatchSettings) -> None:
        async with aclosing(kv.watch(pattern, settings)) as changes:
            async for item in changes:
                self.told.append(item)
                self.news.set()

    async def until(self, *expected: str) -> None:
        """Wait until the listener's state has exactly these `key=value` pairs."""
        wanted = dict(pair.split("=") for pair in expected)
        await eventually(lambda: {key: value.decode() for key, value in self.state.items()} == wanted, 60, f"{wanted}")

    async def snapshot(self) -> None:
        await eventually(lambda: any(isinstance(item, SnapshotDone) for item in self.told), 60, "the snapshot")

    def assert_exact(self) -> None:
        """No revision was told twice, and none after a later one."""
        revisions = [change.revision for change in self.changes if change.operation is not Operation.VANISHED]
        assert revisions == sorted(set(revisions))


@asynccontextmanager
async def watching(kv: KeyValue, pattern: str = ">", **settings: Any) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watcher.run(kv, pattern, WatchSettings(**settings)))
        try:
            yield watcher
        finally:
            task.cancel()


async def consumers(kv: KeyValue) -> list[str]:
    return await kv.api.consumer_names(kv.stream)


async def delete_consumers(kv: KeyValue) -> None:
    for consumer in await consumers(kv):
        await kv.api.consumer_delete(kv.stream, consumer)


async def reopen(server: NatsServer, connection: Connection) -> None:
    """Kill the server, bring it back, and wait until the connection is."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.restart)
    await eventually(lambda: connection.is_connected, 60, "the reconnect")


async def test_the_present_state_comes_first_then_the_marker_then_the_changes(kv: KeyValue) -> None:
    await kv.put("a", b"1")
    await kv.put("b", b"2")
    await kv.delete("b")
    async with watching(kv) as watcher:
        await watcher.snapshot()
        first = await kv.put("a", b"3")
        await eventually(lambda: len(watcher.told) == 4)  # a bucket that keeps one value of a key tells the last one
        second = await kv.delete("a")
        await eventually(lambda: len(watcher.told) == 5)
    assert watcher.told == [
        Change("a", b"1", 1, Operation.PUT, watcher.changes[0].time_ns),
        Change("b", None, 3, Operation.DELETE, watcher.changes[1].time_ns),
        SnapshotDone(3),
        Change("a", b"3", first, Operation.PUT, watcher.changes[2].time_ns),
        Change("a", None, second, Operation.DELETE, watcher.changes[3].time_ns),
    ]


async def test_an_empty_bucket_is_told_empty_at_once(kv: KeyValue) -> None:
    async with watching(kv) as watcher:
        await watcher.snapshot()
    assert watcher.told == [SnapshotDone(0)]


async def test_only_keys_of_the_pattern_are_told(kv: KeyValue) -> None:
    await kv.put("x.1", b"1")
    await kv.put("y.1", b"1")
    async with watching(kv, "x.*") as watcher:
        await watcher.snapshot()
        await kv.put("y.2", b"1")
        await kv.put("x.2", b"1")
        await watcher.until("x.1=1", "x.2=1")


async def test_a_snapshot_of_many_keys_is_complete_and_in_order(kv: KeyValue) -> None:
    for start in range(0, 1500, 100):
        await asyncio.gather(*(kv.put(f"k{n}", b"%d" % n) for n in range(start, start + 100)))
    async with watching(kv) as watcher:
        await watcher.snapshot()
    assert len(watcher.state) == 1500
    watcher.assert_exact()


async def test_an_expiry_is_told(kv: KeyValue) -> None:
    async with watching(kv) as watcher:
        await kv.put("lease", b"1", ttl=1)
        await eventually(lambda: len(watcher.changes) == 2, what="the put and its expiry")
    assert [change.operation for change in watcher.changes] == [Operation.PUT, Operation.EXPIRED]
    assert watcher.state == {}


async def test_closing_the_iterator_leaves_nothing_behind(kv: KeyValue) -> None:
    before = asyncio.all_tasks()
    subscriptions = len(kv.api.connection._subs)
    for _ in range(5):
        async with aclosing(kv.watch()) as changes:
            async for _item in changes:
                break
    assert await consumers(kv) == []
    assert len(kv.api.connection._subs) <= subscriptions + 1  # the inbox of the requests stays
    assert {task for task in asyncio.all_tasks() - before if not task.done()} <= {
        subscription._wait_for_msgs_task for subscription in kv.api.connection._subs.values()
    }


async def test_a_cancelled_watch_removes_its_consumer(kv: KeyValue) -> None:
    async with watching(kv) as watcher:
        await watcher.snapshot()
        assert len(await consumers(kv)) == 1
    assert await consumers(kv) == []


async def test_a_watch_goes_on_after_its_consumer_was_deleted(kv: KeyValue) -> None:
    await kv.put("a", b"1")
    async with watching(kv) as watcher:
        await watcher.until("a=1")
        for round_ in range(3):
            await delete_consumers(kv)
            await kv.put("a", b"%d" % (round_ + 2))
            await watcher.until(f"a={round_ + 2}")
        assert len(await consumers(kv)) == 1
    watcher.assert_exact()
    assert [change.value for change in watcher.changes] == [b"1", b"2", b"3", b"4"]


async def test_a_snapshot_cut_off_in_the_middle_is_completed_without_repeats(kv: KeyValue) -> None:
    for start in range(0, 1000, 100):
        await asyncio.gather(*(kv.put(f"k{n}", b"x") for n in range(start, start + 100)))
    cut = False
    told: list[Change | SnapshotDone] = []
    async with aclosing(kv.watch()) as changes:
        async for item in changes:
            told.append(item)
            if len(told) == 100 and not cut:
                cut = True
                await delete_consumers(kv)
            if isinstance(item, SnapshotDone):
                break
    keys = [item.key for item in told if isinstance(item, Change)]
    assert len(keys) == len(set(keys)) == 1000
    assert sum(isinstance(item, SnapshotDone) for item in told) == 1


async def test_a_key_that_goes_without_a_marker_is_told_by_comparison(kv: KeyValue) -> None:
    async with watching(kv, relist_every=0.1) as watcher:
        await kv.put("stays", b"1")
        last = await kv.put("goes", b"1")
        await watcher.until("stays=1", "goes=1")
        await kv.api.stream_purge(kv.stream, filter=f"$KV.{kv.bucket}.goes")
        await watcher.until("stays=1")
    change = watcher.changes[-1]
    assert (change.key, change.operation, change.revision) == ("goes", Operation.VANISHED, last)


async def test_an_own_write_that_is_purged_before_the_watch_has_told_it_has_vanished(kv: KeyValue) -> None:
    written: dict[str, int] = {}
    async with watching(kv, relist_every=0.1, written=lambda: written) as watcher:
        await kv.put("stays", b"1")
        await watcher.until("stays=1")
        written |= {"stays": 1, "goes": 7}  # as if it was purged while the watch created its consumer
        await eventually(lambda: len(watcher.changes) > 1, 60, "it is told")
        change = watcher.changes[1]
        assert (change.key, change.operation, change.revision) == ("goes", Operation.VANISHED, 7)


async def test_a_recreated_bucket_is_told_as_it_is_now(kv: KeyValue) -> None:
    for key in ("kept", "lost", "x", "y"):
        await kv.put(key, b"old")
    async with watching(kv) as watcher:
        await watcher.until("kept=old", "lost=old", "x=old", "y=old")
        config = (await kv.api.stream_info(kv.stream))["config"]
        await kv.api.stream_delete(kv.stream)
        await kv.api.stream_create(config)
        await kv.put("kept", b"new")  # revision 1, below everything told before
        await watcher.until("kept=new")
        await kv.put("more", b"1")
        await watcher.until("kept=new", "more=1")
    assert sum(isinstance(item, SnapshotDone) for item in watcher.told) == 1


async def test_a_watch_survives_restarts_of_the_server_without_missing_or_repeating(
    own_server: NatsServer, name: str
) -> None:
    async with await connect(ConnectOptions(servers=(own_server.url,), reconnect_wait=0.05)) as connection:
        kv = await KeyValue.ensure(JetStreamApi(connection), name)
        async with watching(kv, heartbeat=0.2) as watcher:
            await watcher.snapshot()
            for round_ in range(3):
                await kv.put("a", b"before%d" % round_)
                await reopen(own_server, connection)
                await kv.put("b", b"after%d" % round_)
                await watcher.until(f"a=before{round_}", f"b=after{round_}")
    watcher.assert_exact()
    assert len(watcher.changes) == 6


async def test_changes_made_while_the_watcher_is_away_are_told_when_it_is_back(
    own_server: NatsServer, name: str
) -> None:
    options = ConnectOptions(servers=(own_server.url,), reconnect_wait=0.05)
    async with await connect(options) as connection, await connect(options) as other:
        kv = await KeyValue.ensure(JetStreamApi(connection), name)
        writer = KeyValue(JetStreamApi(other), name)
        async with watching(kv) as watcher:
            await writer.put("a", b"1")
            await writer.put("b", b"1")
            await watcher.until("a=1", "b=1")
            await connection.force_reconnect()
            await writer.put("a", b"2")
            await writer.delete("b")
            await writer.put("c", b"1")
            await watcher.until("a=2", "c=1")
    watcher.assert_exact()


async def test_a_watch_ends_with_an_error_when_its_connection_is_closed_for_good(server: NatsServer, name: str) -> None:
    connection = await connect(ConnectOptions(servers=(server.url,)))
    kv = await KeyValue.ensure(JetStreamApi(connection), name, storage="memory")
    async with aclosing(kv.watch()) as changes:
        assert await anext(changes) == SnapshotDone(0)
        await connection.close()
        with pytest.raises(ConnectionFailed):
            await anext(changes)


async def test_watching_a_missing_bucket_is_a_typed_error(kv: KeyValue) -> None:
    await kv.api.stream_delete(kv.stream)
    async with aclosing(kv.watch()) as changes:
        with pytest.raises(errors.StreamNotFound):
            await anext(changes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_under_random_trouble_the_listener_ends_with_the_state_of_the_bucket(
    own_server: NatsServer, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    options = ConnectOptions(servers=(own_server.url,), reconnect_wait=0.05)
    async with await connect(options) as watching_connection, await connect(options) as writing_connection:
        kv = await KeyValue.ensure(JetStreamApi(watching_connection), name)
        writer = KeyValue(JetStreamApi(writing_connection), name)
        async with watching(kv, heartbeat=0.2) as watcher:
            for step in range(150):
                key, trouble = f"k{rng.randrange(12)}", rng.random()
                if trouble < 0.04:
                    await delete_consumers(writer)
                elif trouble < 0.08:
                    await watching_connection.force_reconnect()
                elif trouble < 0.1:
                    await reopen(own_server, writing_connection)
                elif trouble < 0.35:
                    await writer.delete(key)
                else:
                    await writer.put(key, b"%d" % step)
            expected = {entry.key: entry.value for entry in await writer.entries()}
            await eventually(lambda: watcher.state == expected, 60, "the listener's state")
        watcher.assert_exact()


@pytest.mark.cluster
@pytest.mark.slow
async def test_a_watch_of_a_replicated_bucket_survives_the_death_of_nodes(cluster: NatsCluster, name: str) -> None:
    options = ConnectOptions(servers=tuple(cluster.urls), reconnect_wait=0.05)
    async with await connect(options) as connection:
        kv = await insist(lambda: KeyValue.ensure(JetStreamApi(connection), name, replicas=3))

        async def put(key: str, value: bytes) -> None:
            # Repeating a put of the same value is safe here; an unknown outcome may show as one more revision.
            async def attempt() -> bool:
                try:
                    await kv.put(key, value)
                except PartiError:
                    return False
                return True

            await eventually(attempt, 60, "the put")

        async with watching(kv) as watcher:
            await put("a", b"0")
            await watcher.until("a=0")
            for node in range(3):
                await asyncio.to_thread(cluster.kill, node)
                await put("a", b"killed%d" % node)
                await watcher.until(f"a=killed{node}")
                await asyncio.to_thread(cluster.restart, node)
                await asyncio.to_thread(cluster.wait_current)
        watcher.assert_exact()


@pytest.mark.parametrize("pattern", ["", "a..b", "a.>.b", "a>", "a*", "a b", ".a", "a."])
def test_a_malformed_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError):
        check_pattern(pattern)


def test_ack_subjects_are_read_with_and_without_a_domain() -> None:
    plain = parse_delivery("$JS.ACK.S.C.1.20.3.1700.4")
    assert plain is not None
    assert (plain.stream, plain.consumer, plain.delivered, plain.stream_seq) == ("S", "C", 1, 20)
    assert (plain.consumer_seq, plain.time_ns, plain.pending) == (3, 1700, 4)
    assert parse_delivery("$JS.ACK._.hash.S.C.1.20.3.1700.4.rnd") == plain
    assert parse_delivery("$JS.ACK.hub.hash.S.C.1.20.3.1700.4") == plain
    for other in ("", "_INBOX.x", "$JS.ACK.S.C.a.b.c.d.e", "$JS.ACK.a.b.S.C.1.20.3.1700"):
        assert parse_delivery(other) is None
