"""The worker on a replicated stream: leaders step down, a node is killed; nothing is lost, repeated or reordered."""

from __future__ import annotations

import asyncio

import pytest
from worker_bench import Bench, Effects, parts

from parti.backoff import Backoff
from parti.errors import PartiError
from parti.testing import NatsCluster, eventually, insist
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

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
