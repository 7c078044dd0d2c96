"""Python members beside Go members of the same groups.

Two Go programs: the reference's own `cg`, and a small member of ours over nats.go. Without a binary at `PARTI_CG`, each
is built through the Go module proxy as a test dependency; where Go or a module is not reachable, its tests are skipped
with the reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from parti.groups import (
    EventKind,
    GroupMessage,
    MemberOptions,
    MemberState,
    PartitioningFilter,
    StaticGroups,
    errors,
    partitions_of,
    predict,
    static_consume,
)
from parti.testing import NatsServer, eventually
from parti.testing.reference import ReferenceUnavailable, build_peer, build_reference
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import StreamNotFound
from parti_lab.prove.group_go import find_cg
from support.go_peer import PEER, TEMPLATE, Bench, Go

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["reference", "peer"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("go")
    if request.param == "reference" and (found := find_cg()) is not None:
        return "reference", found
    with (directory.parents[1] / "go.lock").open("w") as lock:  # one compiles, the others find it in Go's cache
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            binary = build_reference(directory) if request.param == "reference" else build_peer(directory, [PEER])
        except ReferenceUnavailable as error:
            pytest.skip(f"{request.param} cannot be built here: {error}")
    return str(request.param), binary


@pytest.fixture
def go(built: tuple[str, Path], server: NatsServer, tmp_path: Path) -> Iterator[Go]:
    made = Go(*built, tmp_path, server.url)
    yield made
    made.end()


async def test_go_and_python_members_own_the_partitions_that_both_compute(
    connection: Connection, go: Go, name: str
) -> None:
    bench = Bench(connection, name)
    await bench.create(["go", "py"])
    go.consume("elastic", name, "g", "go")
    await bench.joined("go")
    record = (await bench.groups.get(name, "g")).record
    async with await bench.join("py"):
        await bench.publish(40)
        own = set(partitions_of(record, "py"))
        mine = [n for n in range(1, 41) if predict(record, f"{name}.{n - 1}") in own]
        assert sorted(bench.seen) == mine
        go_filters = (await bench.api.consumer_info(bench.queue, "go"))["config"]["filter_subjects"]
        assert go_filters == [f"{p}.{name}.*" for p in partitions_of(record, "go")]


async def test_instances_of_one_member_in_both_languages_share_its_consumer_and_take_over_from_each_other(
    connection: Connection, go: Go, name: str
) -> None:
    bench = Bench(connection, name)
    await bench.create(["m"])
    process = go.consume("elastic", name, "g", "m")
    created = await bench.joined("m")
    await bench.publish(10)
    python = await bench.join("m")
    assert await bench.joined("m") == created  # the same configuration to the last field: nobody made it anew
    assert EventKind.TEMPLATE_DIFFERS not in [event.kind for event in python.events.recent]
    await bench.publish(10)
    assert bench.seen == []  # Go is pinned
    os.kill(process.pid, signal.SIGKILL)
    await bench.publish(10)
    assert len(bench.seen) >= 10  # by the end of the pin's time to live Python has taken over
    go.consume("elastic", name, "g", "m")

    async def both_wait() -> bool:
        return bool((await bench.api.consumer_info(bench.queue, "m"))["num_waiting"] >= 2)

    await eventually(both_wait, timeout=60, what="the pull of the standby")
    before = len(bench.seen)
    await bench.groups.step_down(name, "g", "m")
    await bench.publish(10)
    assert len(bench.seen) - before <= 1
    await eventually(lambda: python.state is MemberState.STANDBY, timeout=60, what="the lost pin")
    await bench.groups.step_down(name, "g", "m")
    await bench.publish(10)
    await eventually(lambda: python.state is MemberState.ACTIVE, what="the pin again")
    await python.stop()
    await bench.publish(10)  # Go goes on at once
    assert len(set(bench.seen)) <= bench.published


async def test_a_membership_change_moves_partitions_between_the_languages(
    connection: Connection, go: Go, name: str
) -> None:
    bench = Bench(connection, name)
    await bench.create(["go"])
    go.consume("elastic", name, "g", "go")
    await bench.joined("go")
    await bench.publish(10)
    async with await bench.join("py") as python:
        assert python.state is MemberState.WAITING
        await bench.groups.add_members(name, "g", ["py"])
        await eventually(lambda: python.partitions == (3, 4, 5), timeout=60, what="the share of Python")
        await bench.publish(40)
        assert bench.seen
        before = len(bench.seen)
        await bench.groups.drop_members(name, "g", ["go"])
        await eventually(lambda: len(python.partitions) == 6, timeout=60, what="all partitions")
        await bench.publish(10)
        assert len(bench.seen) >= before + 10
        await bench.groups.add_members(name, "g", ["go"])
        await bench.groups.drop_members(name, "g", ["py"])
        await eventually(lambda: python.state is MemberState.WAITING, timeout=60, what="the drop")
        seen = len(bench.seen)
        await bench.publish(10)
        assert len(bench.seen) == seen


async def test_a_group_made_by_either_side_is_accepted_unchanged_by_the_other(
    connection: Connection, go: Go, name: str
) -> None:
    bench = Bench(connection, name)
    await bench.stream_only()
    reference = ["elastic", "create", name, "g", "6", "--filter", f"{name}.*"]
    peer = ["create", name, "g", "6", f"{name}.*"]
    await asyncio.to_thread(go.call, reference, peer, "1\n")
    made = await bench.groups.get(name, "g")
    filters = [PartitioningFilter(f"{name}.*", (1,))]
    again = await bench.groups.create(name, "g", max_members=6, filters=filters)
    assert again.revision == made.revision
    await bench.groups.add_members(name, "g", ["py"])
    async with await bench.join("py") as python:
        await bench.publish(5)
        assert bench.seen == [1, 2, 3, 4, 5]
        await asyncio.to_thread(go.call, ["elastic", "delete", name, "g", "-f"], ["delete", name, "g"])
        await python.wait()
    with pytest.raises(errors.GroupNotFound):
        await bench.groups.get(name, "g")
    with pytest.raises(StreamNotFound):
        await bench.api.stream_info(bench.queue)
    await bench.groups.create(name, "g", max_members=6, filters=filters)
    await asyncio.to_thread(go.call, reference, peer, "1\n")  # text for text what Go would have asked for
    process = go.consume("elastic", name, "g", "go")
    await bench.groups.delete(name, "g")
    await asyncio.to_thread(process.wait, 20)


async def test_a_static_members_durable_is_shared_by_both_languages(connection: Connection, go: Go, name: str) -> None:
    api = JetStreamApi(connection)
    subjects = [f"{partition}.{name}.>" for partition in range(4)]
    await api.stream_create({"name": name, "subjects": subjects})
    groups = StaticGroups(connection)
    await groups.create(name, "g", max_members=4, members=["a", "b"])
    process = go.consume("static", name, "g", "a")

    async def floor() -> int:
        try:
            return int((await api.consumer_info(name, "g-a"))["ack_floor"]["consumer_seq"])
        except errors.GroupError:
            return -1

    async def durable() -> bool:
        return "g-a" in await api.consumer_names(name)

    await eventually(durable, timeout=60, what="the durable of Go")
    for n in range(12):
        await api.publish(f"{n % 4}.{name}.{n}", b"x")

    async def done(count: int) -> bool:
        return await floor() >= count

    await eventually(lambda: done(6), timeout=60, what="the messages of Go")
    os.kill(process.pid, signal.SIGKILL)
    seen: list[GroupMessage] = []

    async def handler(message: GroupMessage) -> None:
        seen.append(message)

    async with await static_consume(connection, name, "g", "a", handler, MemberOptions(template=TEMPLATE)) as member:
        assert EventKind.TEMPLATE_DIFFERS not in [event.kind for event in member.events.recent]
        for n in range(8):
            await api.publish(f"{n % 4}.{name}.{n}", b"x")
        await eventually(lambda: len(seen) == 4, timeout=60, what="the messages after the takeover")
        assert {message.number for message in seen} == {0, 1}
