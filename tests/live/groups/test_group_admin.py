"""Administration of groups on a real server: the reference's rules, without its gaps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from parti.groups import ElasticGroups, StaticGroups, errors
from parti.groups.records import MemberMapping, PartitioningFilter
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.errors import StreamNotFound
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

DATA = Path(__file__).parents[2] / "data" / "groups"
KEY = (PartitioningFilter("k.*", (1,)),)


def dump(name: str) -> Any:
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[Connection]:
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        yield opened


@pytest.fixture
def api(connection: Connection) -> JetStreamApi:
    return JetStreamApi(connection)


@pytest.fixture
async def stream(api: JetStreamApi, name: str) -> str:
    await api.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
    return name


@pytest.fixture
def elastic(connection: Connection) -> ElasticGroups:
    return ElasticGroups(connection)


@pytest.fixture
def static(connection: Connection) -> StaticGroups:
    return StaticGroups(connection)


async def raw_of(api: JetStreamApi, kind: str, stream: str, group: str) -> bytes:
    return (await KeyValue(api, f"{kind}-consumer-groups").get(f"{stream}.{group}")).value


async def test_the_first_group_creates_the_bucket_as_the_reference_does(own_server: NatsServer) -> None:
    async with await connect(ConnectOptions(servers=(own_server.url,))) as connection:
        api = JetStreamApi(connection)
        await api.stream_create({"name": "efoo", "subjects": ["efoo.*"]})
        groups = ElasticGroups(connection)
        await groups.create("efoo", "ecg", max_members=10, filters=[PartitioningFilter("efoo.*", (1,))])
        await StaticGroups(connection).create("efoo", "scg", max_members=2, members=["m"])
        for kind in ("elastic", "static"):
            found = (await api.stream_info(f"KV_{kind}-consumer-groups"))["config"]
            expected = dump(f"{kind}_kv_bucket_stream_info")["config"]
            for config in (found, expected):
                config.pop("metadata", None)
            assert found == expected
        queue = (await api.stream_info("efoo-ecg"))["config"]
        wanted = dump("elastic_workqueue_stream_info")["config"]
        queue.pop("metadata")
        wanted.pop("metadata")
        assert queue == wanted
        assert await raw_of(api, "elastic", "efoo", "ecg") == dump("elastic_kv_entry_created")["value_raw"].encode()
        await groups.delete("efoo", "ecg")
        marker = await api.msg_get("KV_elastic-consumer-groups", last_by_subj="$KV.elastic-consumer-groups.efoo.ecg")
        assert (marker.data, marker.headers["KV-Operation"]) == (b"", "DEL")


async def test_creating_twice_is_the_same_as_once_and_other_settings_are_refused(
    elastic: ElasticGroups, static: StaticGroups, stream: str
) -> None:
    first = await elastic.create(stream, "g", max_members=4, filters=KEY)
    await elastic.add_members(stream, "g", ["m1"])
    again = await elastic.create(stream, "g", max_members=4, filters=KEY)
    assert again.record.members == ("m1",)
    assert again.revision > first.revision
    same: dict[str, Any] = {"max_members": 4, "filters": KEY}
    for other in ({"max_members": 5}, {"filters": None}, {"max_buffered_msgs": 9}):
        with pytest.raises(errors.GroupExists):
            await elastic.create(stream, "g", **same | other)
    one = await static.create(stream, "s", max_members=4, members=["m2", "m1"])
    two = await static.create(stream, "s", max_members=4, members=["m1", "m2", "m2"])
    assert one.revision == two.revision
    with pytest.raises(errors.GroupExists, match="members"):
        await static.create(stream, "s", max_members=4, members=["m1"])


async def test_ten_creators_at_once_make_one_group(elastic: ElasticGroups, stream: str, api: JetStreamApi) -> None:
    made = await asyncio.gather(*(elastic.create(stream, "g", max_members=4, filters=KEY) for _ in range(10)))
    assert len({stored.revision for stored in made}) == 1
    assert (await api.stream_info(f"{stream}-g"))["config"]["retention"] == "workqueue"


async def test_a_refused_work_queue_leaves_no_record_behind(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await api.stream_create({"name": f"{stream}-taken", "subjects": [f"other.{stream}"], "storage": "memory"})
    with pytest.raises(errors.NameCollision):
        await elastic.create(stream, "taken", max_members=4, filters=KEY)
    with pytest.raises(errors.GroupNotFound):
        await elastic.get(stream, "taken")
    await elastic.create(stream, "fine", max_members=4, filters=KEY)
    assert await elastic.names(stream) == ["fine"]


async def test_a_missing_stream_a_missing_group_and_a_purged_record_are_typed(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    with pytest.raises(StreamNotFound):
        await elastic.create("nowhere", "g", max_members=1)
    with pytest.raises(errors.GroupNotFound):
        await elastic.get(stream, "g")
    await elastic.create(stream, "g", max_members=1)
    await KeyValue(api, "elastic-consumer-groups").purge(f"{stream}.g")
    with pytest.raises(errors.GroupNotFound):
        await elastic.get(stream, "g")


async def test_a_record_that_is_no_record_is_told_as_such(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "g", max_members=2)
    bucket = KeyValue(api, "elastic-consumer-groups")
    await bucket.put(f"{stream}.g", b"{")
    with pytest.raises(errors.RecordUnreadable):
        await elastic.get(stream, "g")
    await bucket.put(f"{stream}.g", b'{"max_members":0,"partitioning_filters":null}')
    with pytest.raises(errors.BadMaxMembers):
        await elastic.get(stream, "g")


async def test_names_that_make_the_same_work_queue_or_durable_are_refused(
    elastic: ElasticGroups, static: StaticGroups, api: JetStreamApi, stream: str
) -> None:
    longer = f"{stream}-x"
    await api.stream_create({"name": longer, "subjects": [f"x.{stream}"], "storage": "memory"})
    await elastic.create(longer, "g", max_members=2)
    with pytest.raises(errors.NameCollision, match=f"{longer}-g"):
        await elastic.create(stream, "x-g", max_members=2)
    await static.create(stream, "a-b", max_members=2, members=["c"])
    with pytest.raises(errors.NameCollision, match="a-b-c"):
        await static.create(stream, "a", max_members=2, members=["b-c"])
    await api.consumer_create(stream, {"durable_name": "mine-m", "ack_policy": "explicit"})
    with pytest.raises(errors.NameCollision, match="mine-m"):
        await static.create(stream, "mine", max_members=2, members=["m"])


async def test_bad_names_are_refused_before_anything_is_written(elastic: ElasticGroups, stream: str) -> None:
    with pytest.raises(errors.BadName):
        await elastic.create(stream, "a.b", max_members=2)
    with pytest.raises(errors.BadName):
        await elastic.create("", "g", max_members=2)
    await elastic.create(stream, "g", max_members=2)
    with pytest.raises(errors.BadName):
        await elastic.add_members(stream, "g", ["a b"])
    with pytest.raises(errors.NoMembersGiven):
        await elastic.add_members(stream, "g", [" ", ""])


async def test_members_come_and_go_sorted_and_a_change_of_nothing_writes_nothing(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "g", max_members=4, filters=KEY)
    assert await elastic.add_members(stream, "g", ["m3", "m1", " "]) == ("m1", "m3")
    revision = (await elastic.get(stream, "g")).revision
    assert await elastic.add_members(stream, "g", ["m1"]) == ("m1", "m3")
    assert await elastic.drop_members(stream, "g", ["nobody"]) == ("m1", "m3")
    assert (await elastic.get(stream, "g")).revision == revision
    assert await elastic.drop_members(stream, "g", ["m1", "nobody"]) == ("m3",)
    assert await elastic.drop_members(stream, "g", ["m3"]) == ()
    assert b"members" not in (await raw_of(api, "elastic", stream, "g")).replace(b"max_members", b"")


async def test_writers_at_the_same_time_lose_nothing(elastic: ElasticGroups, stream: str) -> None:
    await elastic.create(stream, "g", max_members=40)
    await asyncio.gather(*(elastic.add_members(stream, "g", [f"m{n}"]) for n in range(8)))
    assert (await elastic.get(stream, "g")).record.members == tuple(f"m{n}" for n in range(8))


async def test_mappings_replace_members_and_forbid_adding_and_dropping(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "g", max_members=3)
    await elastic.add_members(stream, "g", ["m1"])
    mapping = [MemberMapping("m1", (2, 0)), MemberMapping("m2", (1,))]
    await elastic.set_mappings(stream, "g", mapping)
    record = (await elastic.get(stream, "g")).record
    assert (record.members, record.mappings) == ((), tuple(mapping))
    for change in (elastic.add_members, elastic.drop_members):
        with pytest.raises(errors.GroupIsMapped):
            await change(stream, "g", ["m1"])
    revision = (await elastic.set_mappings(stream, "g", mapping)).revision
    assert revision == (await elastic.get(stream, "g")).revision
    with pytest.raises(errors.MappingIncomplete):
        await elastic.set_mappings(stream, "g", mapping[:1])
    with pytest.raises(errors.NoMembersGiven):
        await elastic.set_mappings(stream, "g", [])
    assert (await elastic.delete_mappings(stream, "g")).record.member_names == ()
    assert await raw_of(api, "elastic", stream, "g") == b'{"max_members":3,"partitioning_filters":null}'


async def test_a_group_written_with_old_names_is_readable_and_not_changed(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "other", max_members=1)
    old = b'{"max_members":4,"filter":"k.*","partitioning-wildcards":[1],"members":["m"]}'
    await KeyValue(api, "elastic-consumer-groups").put(f"{stream}.old", old)
    record = (await elastic.get(stream, "old")).record
    assert record.partitioning_filters == (PartitioningFilter("k.*", (1,)),)
    assert record.old_names == ("filter", "partitioning-wildcards")
    with pytest.raises(errors.OldRecord):
        await elastic.add_members(stream, "old", ["n"])
    assert await raw_of(api, "elastic", stream, "old") == old


async def test_groups_are_listed_by_stream_also_those_with_a_dot_in_their_name(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "b", max_members=1)
    await elastic.create(stream, "a", max_members=1)
    bucket = KeyValue(api, "elastic-consumer-groups")
    await bucket.put(f"{stream}.c.d", b'{"max_members":1,"partitioning_filters":null}')
    assert await elastic.names(stream) == ["a", "b", "c.d"]
    assert (await elastic.get(stream, "c.d")).record.max_members == 1
    await elastic.delete(stream, "a")
    assert await elastic.names(stream) == ["b", "c.d"]


async def test_deleting_a_static_group_touches_only_its_own_consumers(
    static: StaticGroups, api: JetStreamApi, stream: str
) -> None:
    await static.create(stream, "a", max_members=2, members=["m1", "m2"])
    await static.create(stream, "a-b", max_members=2, members=["m1"])
    pinned = {"ack_policy": "explicit", "priority_groups": ["PCG"], "priority_policy": "pinned_client"}
    for name in ("a-m1", "a-b-m1", "a-other"):
        await api.consumer_create(stream, {"durable_name": name, **pinned})
    await api.consumer_create(stream, {"durable_name": "a-report", "ack_policy": "explicit"})
    assert (await static.plan_delete(stream, "a")).consumers == ("a-m1",)
    await static.delete(stream, "a")
    assert sorted(await api.consumer_names(stream)) == ["a-b-m1", "a-other", "a-report"]
    with pytest.raises(errors.GroupNotFound):
        await static.delete(stream, "a")


async def test_deleting_an_elastic_group_takes_its_work_queue_also_when_that_is_gone(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "g", max_members=2)
    assert (await elastic.plan_delete(stream, "g")).streams == (f"{stream}-g",)
    await elastic.delete(stream, "g")
    with pytest.raises(StreamNotFound):
        await api.stream_info(f"{stream}-g")
    await elastic.create(stream, "g", max_members=2)
    await api.stream_delete(f"{stream}-g")
    await elastic.delete(stream, "g")
    assert await elastic.names(stream) == []


async def test_create_again_repairs_a_group_whose_work_queue_is_missing(
    elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "g", max_members=2)
    await api.stream_delete(f"{stream}-g")
    await elastic.create(stream, "g", max_members=2)
    assert (await api.stream_info(f"{stream}-g"))["config"]["retention"] == "workqueue"


async def test_a_new_group_may_start_late_in_the_stream(elastic: ElasticGroups, api: JetStreamApi, stream: str) -> None:
    for n in range(10):
        await api.publish(f"{stream}.{n}", b"x")
    await elastic.create(stream, "late", max_members=2, start_sequence=8)
    await elastic.create(stream, "late", max_members=2)  # idempotent, whatever the start was
    from parti.testing import eventually

    async def messages() -> int:
        return int((await api.stream_info(f"{stream}-late"))["state"]["messages"])

    await eventually(lambda: _is(messages, 3), what="the last three messages")


async def _is(count: Any, wanted: int) -> bool:
    return bool(await count() == wanted)


async def test_a_member_is_active_only_when_it_is_itself(
    static: StaticGroups, elastic: ElasticGroups, api: JetStreamApi, stream: str
) -> None:
    await elastic.create(stream, "g", max_members=4)
    await elastic.add_members(stream, "g", ["m1", "m2"])
    pinned = {"ack_policy": "explicit", "priority_groups": ["PCG"], "priority_policy": "pinned_client"}
    await api.consumer_create(f"{stream}-g", {"name": "m1", "filter_subjects": ["0.>", "1.>"], **pinned})
    assert await elastic.active_members(stream, "g") == ["m1"]
    assert (await elastic.member_info(stream, "g", "m1")).active
    two = await elastic.member_info(stream, "g", "m2")
    assert (two.listed, two.active, two.partitions) == (True, False, (2, 3))
    assert not (await elastic.member_info(stream, "g", "m3")).listed
    with pytest.raises(errors.NoActiveInstance):
        await elastic.step_down(stream, "g", "m2")
    await elastic.step_down(stream, "g", "m1")
    await static.create(stream, "s", max_members=1, members=["m1"])
    await api.consumer_create(stream, {"durable_name": "s-m1", **pinned})
    assert await static.active_members(stream, "s") == []  # a durable without a waiting pull
