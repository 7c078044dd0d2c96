"""Sources of partitions while workers run: a list, a bucket, the subjects of a stream, a function."""

from __future__ import annotations

from typing import Any

import pytest

from parti.errors import OverlappingPartitions
from parti.manager import CallableSource, Hooks, KvSource, StaticSource, SubjectSource
from parti.model import Partition
from parti.testing import NatsServer, eventually
from parti.wire.api import JetStreamApi
from parti.wire.kv import KeyValue
from parti.worker import WorkerConfig, WorkerConsumer
from support.fleet import HASTY, fleet_on, partition


async def test_partitions_of_a_list_that_come_and_go_are_assigned_and_retired(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=3) as fleet:
        source = StaticSource(fleet.partitions)
        one = await fleet.worker(source=source)
        await one.wait_for("converged", 60)
        source.update(["p0", "p1", "p2", "p3", "p4"])
        await eventually(lambda: len(one.owned()) == 5, 60, "the new ones are owned")
        await fleet.publish(5, ["p3", "p4"])
        await fleet.handled(5)
        source.update(["p0", "p3"])
        await eventually(lambda: one.owned() == {"p0", "p3"}, 60, "the others are retired")
        await fleet.publish(4, ["p1", "p2"])
        source.update(["p0", "p1", "p2", "p3"])
        await fleet.handled(9)
        assert len(set(fleet.sequences())) == 9


async def test_the_keys_of_a_bucket_are_followed_with_their_weights(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        kv = await KeyValue.ensure(fleet.js, f"{name}-source")
        await kv.put("p0", b"")
        await kv.put("p1", b"5")
        await kv.put("bad", b"heavy")
        source = KvSource(JetStreamApi(await fleet.connection()), f"{name}-source")
        assert await source.partitions() == (Partition(("p0",)), Partition(("p1",), 5))
        one = await fleet.worker(source=source)
        await eventually(lambda: one.owned() == {"p0", "p1"}, 60, "both are owned")
        await kv.put("p2", b"")
        await kv.delete("p0")
        await eventually(lambda: one.owned() == {"p1", "p2"}, 60, "changes are followed")
        await fleet.publish(4, ["p1", "p2"])
        await fleet.handled(4)


async def test_a_new_subject_of_the_stream_becomes_a_partition_and_its_first_messages_are_not_lost(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        await fleet.publish(4, ["p0", "p1"])
        source = SubjectSource(fleet.js, name, filter=f"{name}.>", token=2, every=0.05)
        one = await fleet.worker(source=source)
        await eventually(lambda: one.owned() == {"p0", "p1"}, 60, "both are found")
        await fleet.publish(3, ["p7"])
        await eventually(lambda: one.owned() == {"p0", "p1", "p7"}, 60, "the new one is found")
        await fleet.handled(7, 60)
        assert sorted(fleet.sequences()) == [1, 2, 3, 4, 5, 6, 7], "from its first message on"
        await fleet.js.stream_purge(name)
        await fleet.publish(1, ["p8"])
        await eventually(lambda: "p8" in one.owned(), 60, "one more is found")
        assert one.owned() == {"p0", "p1", "p7", "p8"}, "a subject that emptied stays known"


async def test_what_a_function_returns_is_followed_and_its_failures_change_nothing(
    server: NatsServer, name: str
) -> None:
    answers: list[list[str] | Exception] = [["p0"]]
    asked = 0

    async def which() -> list[str]:
        nonlocal asked
        asked += 1
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    async with fleet_on(server, name) as fleet:
        one = await fleet.worker(source=CallableSource(which, every=0.05))
        await eventually(lambda: one.owned() == {"p0"}, 60, "the first answer")
        answers.append(["p0", "p1:7"])
        await eventually(lambda: one.owned() == {"p0", "p1"}, 60, "the second answer")
        answers.append(RuntimeError("the database is away"))
        before = asked
        await eventually(lambda: asked > before + 2, 60, "it failed a few times")
        assert one.owned() == {"p0", "p1"}
        answers.append(["p1"])
        await eventually(lambda: one.owned() == {"p1"}, 60, "and was asked again")


async def test_partitions_that_share_subjects_are_refused_when_they_are_given(server: NatsServer, name: str) -> None:
    """`eu` and `eu.1` with `t.{partition}.>` would lose what both match: 2,085 of 8,000 in a run of others."""
    async with fleet_on(server, name) as fleet:
        wide: dict[str, Any] = {"subject_template": f"{name}.{{partition}}.>"}
        with pytest.raises(OverlappingPartitions, match=r"eu and eu\.1 share"):
            await fleet.worker(source=["eu", "eu.1", "us"], worker=wide)
        source = StaticSource(["eu.1", "us"])
        one = await fleet.worker(source=source, worker=wide)
        with pytest.raises(OverlappingPartitions, match=r"eu and eu\.1 share"):
            source.update(["eu", "eu.1", "us"])
        source.update(["eu.1", "us", "us2"])
        await eventually(lambda: one.owned() == {"eu.1", "us", "us2"}, 60, "the good list is in force")
        with pytest.raises(OverlappingPartitions, match="share subjects"):
            await WorkerConsumer(
                fleet.js, WorkerConfig(stream=name, **wide), handler=lambda _: None
            ).update_worker_consumer("w", [partition("eu"), partition("eu.1")])


async def test_a_function_that_tells_overlapping_partitions_leaves_the_last_good_ones_in_force(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        told, errors = [["eu", "us"]], list[Exception]()
        source = CallableSource(lambda: told[-1], every=0.05)
        hooks = Hooks(on_error=errors.append)
        one = await fleet.worker(source=source, hooks=hooks, worker={"subject_template": f"{name}.{{partition}}.>"})
        await eventually(lambda: one.owned() == {"eu", "us"}, 60, "both are owned")
        told.append(["eu", "eu.1", "us"])
        await eventually(lambda: any(isinstance(e, OverlappingPartitions) for e in errors), 60, "it is refused")
        problem = one.health_check().probe()
        assert isinstance(problem, str)
        assert "eu and eu.1 share subjects" in problem
        assert one.owned() == {"eu", "us"}
        with pytest.raises(OverlappingPartitions):
            await one.refresh_partitions()
        told.append(["eu", "us", "asia"])
        await eventually(lambda: one.owned() == {"eu", "us", "asia"}, 60, "the next good list is in force")
        assert one.health_check().probe() is None


async def test_a_source_that_raises_while_the_leader_changes_delays_nothing_but_itself(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name) as fleet:
        broken = False

        def told() -> list[str]:
            if broken:
                raise RuntimeError("the database is away")
            return fleet.partitions

        managers = [await fleet.worker(source=CallableSource(told, every=0.05), **HASTY) for _ in range(2)]
        await fleet.spread(timeout=60)
        broken = True
        leader = next(m for m in managers if m.is_leader)
        other = next(m for m in managers if m is not leader)
        await leader.stop()
        fleet.managers.remove(leader)
        await eventually(lambda: other.owned() == set(fleet.partitions), 20, "the other one goes on with all")
        await eventually(lambda: "the database is away" in str(other.health_check().probe()), 20, "health tells")
        await fleet.publish(12)
        await fleet.handled(12)
        broken = False
        await eventually(lambda: other.health_check().probe() is None, 20, "the source is well again")
