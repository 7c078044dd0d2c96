"""The worker on a replicated stream: leaders step down, a node is killed; nothing is lost, repeated or reordered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from parti.backoff import Backoff
from parti.errors import PartiError
from parti.model import Lease
from parti.testing import NatsCluster, eventually, insist
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from support.worker import Bench, Effects, parts

NAMES = [f"p{i}" for i in range(8)]


async def load(bench: Bench, stop: asyncio.Event) -> None:
    """Publish until told to stop; a publish without an answer is repeated under the same id."""
    number = 0
    while not stop.is_set():
        for name in NAMES:
            while True:
                try:
                    headers = {"Nats-Msg-Id": f"{name}-{number}"}
                    await bench.js.publish(f"{bench.stream}.{name}", b"x", headers=headers, timeout=2.0)
                    break
                except PartiError:
                    await asyncio.sleep(0.05)
        number += 1


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("fault", ["step-downs", "node killed"])
async def test_on_a_cluster_nothing_is_lost_repeated_or_reordered(cluster: NatsCluster, name: str, fault: str) -> None:
    options = ConnectOptions(servers=tuple(cluster.urls), connect_timeout=1.0, request_timeout=2.0, reconnect_wait=0.1)
    async with await connect(options) as connection:
        js = JetStreamApi(connection)
        bench = Bench(cluster.servers[0], js, name)
        await insist(lambda: bench.create(storage="file", num_replicas=3))
        effects = Effects()
        worker = bench.worker(effects, backoff=Backoff(base=0.05, cap=1.0, max_tries=60))
        try:
            await worker.update_worker_consumer("w1", parts(*NAMES))
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(load(bench, stop))
                await effects.count(50, 60)
                if fault == "step-downs":
                    for _ in range(4):
                        for call in (f"STREAM.LEADER.STEPDOWN.{name}", f"CONSUMER.LEADER.STEPDOWN.{name}.parti-w1"):
                            try:
                                await js.request(call)
                            except PartiError:
                                continue  # there is no leader at the moment
                        wanted = len(effects.seen) + 30
                        await effects.count(wanted, 60)
                else:
                    leader = await asyncio.to_thread(cluster.wait_for_leader, name)
                    await asyncio.to_thread(cluster.kill, leader)
                    wanted = len(effects.seen) + 100
                    await effects.count(wanted, 60)
                    await asyncio.to_thread(cluster.restart, leader)
                stop.set()

            async def last() -> int:
                try:
                    return int((await js.stream_info(name))["state"]["last_seq"])
                except PartiError:
                    return 0

            end = await eventually(last, 60, "the stream has a leader")
            await effects.count(end, 60)
            assert sorted(effects.sequences) == list(range(1, end + 1)), "each exactly once"
            for each in NAMES:
                assert effects.of(each) == sorted(effects.of(each))
        finally:
            await worker.close()


@pytest.mark.slow
@pytest.mark.cluster
async def test_what_waits_for_its_owner_on_a_replicated_work_queue_is_not_taken_for_acknowledged(
    cluster: NatsCluster, name: str
) -> None:
    """The server deletes what lies below a consumer's ack floor and matches its filters, some seconds after an update.

    A second consumer of the stream, which gets a filter without any care, tells when that has happened.
    """
    options = ConnectOptions(servers=tuple(cluster.urls), connect_timeout=1.0, request_timeout=2.0, reconnect_wait=0.1)
    async with await connect(options) as connection:
        js = JetStreamApi(connection)
        bench = Bench(cluster.servers[0], js, name)
        await insist(lambda: bench.create(storage="file", num_replicas=3, retention="workqueue"))
        effects = Effects()
        patient = Backoff(base=0.05, cap=1.0, max_tries=60)
        worker, careless = bench.worker(effects, backoff=patient), bench.worker(Effects(), backoff=patient)

        async def left(*partitions: str) -> list[str]:
            filters = [f"{name}.{each}" for each in partitions]
            found = await js.stream_info(name, subjects_filter=f"{name}.>")
            return sorted(s for s in found["state"].get("subjects") or {} if s in filters)

        try:
            await worker.update_worker_consumer("w1", parts("a"))
            await careless.update_worker_consumer("w2", parts("c"))
            await bench.publish_many("bd", 5)
            await bench.publish_many("ac", 10)
            await eventually(lambda: _none(left("a", "c")), 60, "everything of a and c is acknowledged")
            await worker.update_worker_consumer("w1", parts("a", "b"), hold={"b"}, claimed=True)
            await careless.close()
            config = (await js.consumer_info(name, "parti-w2"))["config"]
            careless_filters = [f"{name}.c"], [f"{name}.c", f"{name}.d"]
            began = asyncio.get_running_loop().time()
            looks = 0

            async def taken() -> bool:
                """The server looks some seconds after an update, and not after each one: give it more of them."""
                nonlocal looks
                if asyncio.get_running_loop().time() >= began + 5.0 * looks:
                    looks += 1
                    for filters in careless_filters:
                        await js.consumer_update(name, config | {"filter_subjects": filters})
                return not await left("d")

            await eventually(taken, 60, "the server took what lies below the floor for acknowledged")
            worker.take_over(parts("b")[0].id, after=0, lease=Lease(parts("b")[0].id, 1))
            await effects.count(15, 20)
            assert len(effects.of("b")) == 5
        finally:
            await worker.close()
            await careless.close()


async def _none(found: Awaitable[list[str]]) -> bool:
    return not await found
