"""Durables have their namespace in their name and metadata; foreign durables are refused and left unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from parti import __version__
from parti.manager import Hooks, Manager
from parti.model import Partition
from parti.testing import NatsServer, eventually
from parti.wire.errors import ConsumerNotFound
from parti.worker import Message, WorkerConfig, WorkerConsumer
from parti.worker.errors import ForeignDurable
from parti.worker.seal import Seal
from support.fleet import Fleet, fleet_on

LAYOUTS = ["per-worker", "per-partition"]


def durable_of(manager: Manager, layout: str, partition: str = "p0") -> str:
    own = manager.worker_id if layout == "per-worker" else f"slot-{partition}"
    return f"parti-{manager.config.namespace}-{own}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("retention", ["limits", "interest"])
async def test_two_namespaces_on_one_stream_each_handle_every_message_once(
    server: NatsServer, name: str, layout: str, retention: str
) -> None:
    """With shared durables 39 and 161 of 200 were lost, 107 and 93 in the other layout.

    See docs/evidence/incidents.md#i8.
    """
    async with fleet_on(server, name, count=4, retention=retention) as fleet:
        other = Fleet(fleet.url, fleet.js, name, fleet.partitions)
        try:
            a = await fleet.worker(namespace=f"{name}-a", layout=layout)
            b = await other.worker(namespace=f"{name}-b", layout=layout)
            await a.wait_for("converged", 60)
            await b.wait_for("converged", 60)
            sequences = await fleet.publish(200)
            await fleet.handled(200)
            await other.handled(200)
            assert sorted(fleet.sequences()) == sorted(other.sequences()) == sequences
        finally:
            for manager in other.managers:
                await manager.stop()
            for each in other.connections:
                await each.close()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_durable_says_whose_it_is_and_an_update_keeps_that(server: NatsServer, name: str, layout: str) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        created = (await fleet.js.stream_info(name))["created"]
        one = await fleet.worker(layout=layout)
        await one.wait_for("converged", 60)
        two = await fleet.worker(layout=layout)  # takes half of the first one's filters
        await fleet.spread(one, two)
        for manager in (one, two):
            partition = sorted(manager.owned())[0]
            found = await fleet.js.consumer_info(name, durable_of(manager, layout, partition))
            worker = manager.worker_id if layout == "per-worker" else ""
            assert Seal.read(found["config"]) == Seal(name, created, worker or "", __version__)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"metadata": {"parti.version": "0.1.0", "parti.namespace": "elsewhere"}}, "of namespace 'elsewhere'"),
        ({"deliver_subject": "somewhere.else"}, "push consumer"),
        ({"ack_policy": "none"}, "ack policy is 'none'"),
    ],
)
async def test_a_durable_under_our_name_that_is_not_ours_is_left_alone_and_told_until_it_is_gone(
    server: NatsServer, name: str, layout: str, theirs: dict[str, Any], why: str
) -> None:
    async with fleet_on(server, name, count=1) as fleet:
        names = [f"parti-{name}-worker-0", f"parti-{name}-slot-p0"]
        durable = names[LAYOUTS.index(layout)]
        config = {"name": durable, "durable_name": durable, "ack_policy": "explicit", "filter_subject": f"{name}.x"}
        before = await fleet.js.consumer_create(name, config | theirs, action="create")
        one = await fleet.worker(layout=layout, prepare_timeout=5.0, commit_timeout=5.0)
        consumer = one._consumer
        await eventually(lambda: not consumer.is_healthy, 60, "the worker is unhealthy")
        reason = consumer.health().last_error
        assert durable in reason
        assert why in reason
        assert "worker.consumer_prefix or control.namespace" in reason
        assert consumer.health_check().probe() == reason
        sequences = await fleet.publish(5)
        after = await fleet.js.consumer_info(name, durable)
        same = ("created", "config", "delivered", "ack_floor")
        assert {k: after[k] for k in same} == {k: before[k] for k in same}, "nothing was done to it"
        assert not fleet.seen
        await fleet.js.consumer_delete(name, durable)
        await fleet.handled(5)
        assert fleet.sequences() == sequences
        await eventually(lambda: consumer.is_healthy, 60, "the worker is healthy again")


async def test_a_work_queue_whose_subjects_another_namespace_has_says_which_one(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2, retention="workqueue") as fleet:
        a = await fleet.worker(namespace=f"{name}-a")
        await a.wait_for("converged", 60)
        told: list[Exception] = []
        b = await fleet.worker(namespace=f"{name}-b", hooks=Hooks(on_error=told.append))
        await eventually(lambda: any(isinstance(each, ForeignDurable) for each in told), 60, "the hook is told")
        assert not b._consumer.is_healthy
        text = str(next(each for each in told if isinstance(each, ForeignDurable)))
        assert f"parti-{name}-a-worker-0" in text
        assert f"of namespace '{name}-a', and has subjects of this work queue" in text
        sequences = await fleet.publish(20)
        await fleet.handled(20)
        assert fleet.sequences() == sequences
        assert {who for who, _ in fleet.seen} == {"m0"}


async def test_nothing_of_a_stream_that_was_made_anew_is_skipped_because_of_the_old_one(
    server: NatsServer, name: str
) -> None:
    """A durable that carries another creation time says nothing about positions."""
    async with fleet_on(server, name, count=1) as fleet:
        seen: list[int] = []

        async def handle(message: Message) -> None:
            seen.append(message.sequence)

        sequences = await fleet.publish(10)
        config = WorkerConfig(stream=name, subject_template=f"{name}.{{partition}}")
        # As a restore leaves it: the stream is another, the consumer claims to have done the first seven.
        stale = {
            "name": "parti-w1",
            "durable_name": "parti-w1",
            "ack_policy": "explicit",
            "filter_subjects": [f"{name}.p0"],
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": 1,
            "metadata": Seal("", "2020-01-01T00:00:00Z", "w1").metadata() | {"parti.left": "[7, [3]]"},
        }
        await fleet.js.consumer_create(name, stale, action="create")
        await fleet.js.consumer_reset(name, "parti-w1", 8)
        async with WorkerConsumer(fleet.js, config, handle) as worker:
            await worker.update_worker_consumer("w1", [Partition(("p0",))])
            await eventually(lambda: len(seen) >= 10, 60, "all ten")
            assert seen == sequences
            found = await fleet.js.consumer_info(name, "parti-w1")
            seal = Seal.read(found["config"])
            assert seal is not None
            assert seal.stream == (await fleet.js.stream_info(name))["created"]
        with pytest.raises(ConsumerNotFound):
            await fleet.js.consumer_info(name, f"parti-{name}-w1")
