import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from nats.js.errors import KeyNotFoundError

from parti.errors import ConfigError, UnknownOutcome, UsageError
from parti.testing import NatsServer
from parti.wire import errors
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyExists, KeyNotFound, Operation
from parti.wire.options import ConnectOptions


@pytest.fixture
async def api(server: NatsServer) -> AsyncIterator[JetStreamApi]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        yield JetStreamApi(connection)


@pytest.fixture
async def kv(api: JetStreamApi, name: str) -> KeyValue:
    return await KeyValue.ensure(api, name, storage="memory", history=5)


@pytest.fixture
async def leases(api: JetStreamApi, name: str) -> KeyValue:
    return await KeyValue.ensure(api, f"{name}-leases", storage="memory")


async def gone(kv: KeyValue, key: str) -> Change:
    """The change that tells that the key has no value any more; waits for it."""
    async with aclosing(kv.watch(key)) as changes:
        async for change in changes:
            if isinstance(change, Change) and change.value is None:
                return change
    raise AssertionError("the watch ended")


async def test_what_was_put_can_be_got_with_its_revision(kv: KeyValue) -> None:
    first = await kv.put("a.b", b"1")
    second = await kv.put("a.b", b"")
    assert second > first
    entry = await kv.get("a.b")
    assert (entry.key, entry.value, entry.revision) == ("a.b", b"", second)


async def test_a_key_never_written_is_a_typed_absence(kv: KeyValue) -> None:
    with pytest.raises(KeyNotFound) as raised:
        await kv.get("missing")
    assert (raised.value.key, raised.value.revision, raised.value.category) == ("missing", 0, "not_found")


async def test_a_deleted_key_is_absent_and_tells_the_revision_of_its_marker(kv: KeyValue) -> None:
    await kv.put("k", b"1")
    for remove in (kv.delete, kv.purge):
        marker = await remove("k")
        with pytest.raises(KeyNotFound) as raised:
            await kv.get("k")
        assert raised.value.revision == marker


async def test_of_two_creates_only_one_wins(kv: KeyValue) -> None:
    results = await asyncio.gather(*(kv.create("k", b"%d" % n) for n in range(10)), return_exceptions=True)
    won = [result for result in results if isinstance(result, int)]
    lost = [result for result in results if isinstance(result, KeyExists)]
    assert (len(won), len(lost)) == (1, 9)
    assert all(error.revision == won[0] for error in lost)


@pytest.mark.parametrize("removal", ["delete", "purge"])
async def test_a_removed_key_can_be_created_again(kv: KeyValue, removal: str) -> None:
    first = await kv.create("k", b"1")
    marker = await getattr(kv, removal)("k")
    second = await kv.create("k", b"2")
    assert first < marker < second
    assert (await kv.get("k")).value == b"2"


async def test_an_update_needs_the_last_revision(kv: KeyValue) -> None:
    first = await kv.create("k", b"1")
    second = await kv.update("k", b"2", first)
    with pytest.raises(errors.WrongLastSequence) as raised:
        await kv.update("k", b"3", first)
    assert not raised.value.retriable
    assert (await kv.get("k")).revision == second


@pytest.mark.parametrize("removal", ["delete", "purge"])
async def test_a_removal_by_revision_spares_a_newer_value(kv: KeyValue, removal: str) -> None:
    first = await kv.create("k", b"1")
    second = await kv.update("k", b"2", first)
    with pytest.raises(errors.WrongLastSequence):
        await getattr(kv, removal)("k", revision=first)
    assert (await kv.get("k")).value == b"2"
    await getattr(kv, removal)("k", revision=second)
    with pytest.raises(KeyNotFound):
        await kv.get("k")


async def test_an_expired_key_is_absent_and_can_be_created_at_once(leases: KeyValue) -> None:
    await leases.create("lease", b"a", ttl=1)
    change = await gone(leases, "lease")
    assert change.operation is Operation.EXPIRED
    with pytest.raises(KeyNotFound) as raised:
        await leases.get("lease")
    assert raised.value.revision == change.revision
    assert await leases.create("lease", b"b", ttl=60) > change.revision
    assert (await leases.get("lease")).value == b"b"


async def test_an_update_renews_the_ttl_instead_of_dropping_it(leases: KeyValue) -> None:
    revision = await leases.create("lease", b"a", ttl=60)
    renewed = await leases.update("lease", b"a", revision, ttl=1)
    change = await gone(leases, "lease")
    assert change.operation is Operation.EXPIRED
    assert change.revision > renewed


@pytest.mark.slow
async def test_an_update_without_a_ttl_makes_the_value_stay(leases: KeyValue) -> None:
    revision = await leases.create("lease", b"a", ttl=3)
    await leases.update("lease", b"b", revision)
    await leases.create("clock", b"x", ttl=4)
    assert (await gone(leases, "clock")).operation is Operation.EXPIRED
    assert (await leases.get("lease")).value == b"b"


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a*", ">", "a\r\nb", "ü"])
async def test_a_malformed_key_is_refused_before_it_is_sent(kv: KeyValue, key: str) -> None:
    for call in (kv.get(key), kv.put(key, b""), kv.create(key, b""), kv.update(key, b"", 1), kv.delete(key)):
        with pytest.raises(UsageError):
            await call


@pytest.mark.parametrize("bucket", ["", "a.b", "a b", "a>"])
def test_a_malformed_bucket_name_is_refused(bucket: str) -> None:
    with pytest.raises(UsageError):
        KeyValue(None, bucket)  # type: ignore[arg-type]


async def test_only_live_keys_are_listed(kv: KeyValue) -> None:
    for key in ("x.1", "x.2", "y.1", "x.3"):
        await kv.put(key, key.encode())
    await kv.delete("x.2")
    assert await kv.keys() == ["x.1", "x.3", "y.1"]
    assert await kv.keys("x.*") == ["x.1", "x.3"]
    assert [entry.value for entry in await kv.entries("y.>")] == [b"y.1"]
    assert await kv.keys("none.>") == []


async def test_a_listing_leaves_no_consumer_behind(kv: KeyValue) -> None:
    await kv.put("k", b"1")
    await kv.keys()
    assert await kv.api.consumer_names(kv.stream) == []


async def test_an_existing_bucket_is_used_as_it_is(api: JetStreamApi, name: str) -> None:
    first = await KeyValue.ensure(api, name, storage="memory", history=3)
    await first.put("k", b"1")
    again = await KeyValue.ensure(api, name, storage="memory", history=9)
    assert (await again.get("k")).value == b"1"
    assert (await api.stream_info(again.stream))["config"]["max_msgs_per_subject"] == 3
    assert (await (await KeyValue.open(api, name)).get("k")).value == b"1"


async def test_an_existing_bucket_without_ttl_is_refused_where_ttl_is_needed(api: JetStreamApi, name: str) -> None:
    await api.stream_create({"name": f"KV_{name}", "subjects": [f"$KV.{name}.>"], "storage": "memory"})
    with pytest.raises(ConfigError, match="allow_msg_ttl"):
        await KeyValue.ensure(api, name, storage="memory")


async def test_a_ttl_that_the_server_would_lengthen_is_refused(api: JetStreamApi, name: str) -> None:
    with pytest.raises(ConfigError, match="history"):
        await KeyValue.ensure(api, name, storage="memory", history=5, marker_ttl=60)
    markers = {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60_000_000_000, "allow_rollup_hdrs": True}
    await api.stream_create(
        {"name": f"KV_{name}", "subjects": [f"$KV.{name}.>"], "storage": "memory", "max_msgs_per_subject": 5, **markers}
    )
    kv = await KeyValue.open(api, name)
    with pytest.raises(UsageError, match="60 s instead of 5 s"):
        await kv.put("lease", b"a", ttl=5)
    assert await kv.put("lease", b"a", ttl=60) == 1


async def test_a_missing_bucket_is_a_typed_error(api: JetStreamApi, name: str) -> None:
    with pytest.raises(errors.StreamNotFound):
        await KeyValue.open(api, name)


async def test_other_clients_read_our_bucket_and_we_read_theirs(kv: KeyValue) -> None:
    theirs = await kv.api.connection.jetstream().key_value(kv.bucket)
    await kv.put("ours", b"1")
    assert (await theirs.get("ours")).value == b"1"
    await theirs.put("theirs", b"2")
    assert (await kv.get("theirs")).value == b"2"
    await theirs.delete("theirs")
    with pytest.raises(KeyNotFound):
        await kv.get("theirs")
    await kv.delete("ours")
    with pytest.raises(KeyNotFoundError):
        await theirs.get("ours")


async def test_a_bucket_behind_a_jetstream_domain_is_reached_through_it(name: str) -> None:
    with NatsServer(config="jetstream { domain: hub }") as hub:
        options = ConnectOptions(servers=(hub.url,), domain="hub")
        async with await connect(options) as connection:
            kv = await KeyValue.ensure(JetStreamApi(connection), name, storage="memory")
            revision = await kv.create("k", b"1")
            assert (await kv.get("k")).revision == revision
            assert await kv.keys() == ["k"]


async def test_a_write_whose_answer_is_lost_is_reported_as_unknown_and_not_repeated(
    own_server: NatsServer, name: str
) -> None:
    options = ConnectOptions(servers=(own_server.url,), request_timeout=2.0)
    async with await connect(options) as connection:
        kv = await KeyValue.ensure(JetStreamApi(connection), name, storage="memory", history=5)
        revision = await kv.create("k", b"1")
        # A stopped process keeps its sockets: the write is on its way, and the answer does not come in time.
        with own_server.frozen(), pytest.raises(UnknownOutcome) as raised:
            await kv.update("k", b"2", revision)
        assert not raised.value.retriable
        async with aclosing(kv.watch("k")) as changes:
            async for change in changes:
                if isinstance(change, Change) and change.value == b"2":
                    break
        assert (await kv.get("k")).revision == revision + 1


async def test_a_write_during_which_the_server_dies_is_unknown(own_server: NatsServer, name: str) -> None:
    async with await connect(ConnectOptions(servers=(own_server.url,))) as connection:
        kv = await KeyValue.ensure(JetStreamApi(connection), name, storage="memory")
        with own_server.frozen():
            write = asyncio.create_task(kv.put("k", b"1"))
            await asyncio.sleep(0)
            await asyncio.to_thread(own_server.kill)
        with pytest.raises(UnknownOutcome):
            await write
