"""The proof and the benchmark of groups in small sizes, and a group on a cluster that loses a node."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from parti.groups import ConsumerTemplate, ElasticGroups, GroupMessage, MemberOptions, elastic_consume
from parti.testing import NatsCluster, eventually, insist
from parti.wire.api import JetStreamApi
from parti.wire.api_publish import expectations
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti_lab.bench.group import BENCH
from parti_lab.bench.report import RunContext, execute
from parti_lab.prove.group import PROOF
from parti_lab.prove.group_go import find_cg


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "in_flight"), [("static", 1), ("elastic", 20)])
def test_nothing_is_lost_or_out_of_order_while_members_are_killed_frozen_and_stepped_down(
    kind: str, in_flight: int
) -> None:
    options = {"case": "churn", "kind": kind, "in_flight": in_flight, "events": 32, "handler": 0.0}
    result = execute(PROOF, RunContext(quick=True, seed=4, options=options))
    kept = ("lost", "inversions", "phantom", "two_owners")
    assert "error" not in result.figures, result.figures
    assert {name: result.figures[name] for name in kept} == dict.fromkeys(kept, 0)
    assert result.figures["duplicates_of_in_flight"] <= 1  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind"),
    [("frozen", "elastic"), ("long", "elastic"), ("deleted", "static"), ("go", "elastic"), ("go", "static")],
)
def test_many_in_hand_long_handlers_and_the_reference_in_the_other_seat(case: str, kind: str) -> None:
    if case == "go" and find_cg() is None:
        pytest.skip("no binary of the reference at PARTI_CG")
    options = {"case": case, "kind": kind, "in_flight": 1, "events": 0, "handler": 0.0}
    result = execute(PROOF, RunContext(quick=True, seed=5, options=options))
    assert "error" not in result.figures, result.figures
    assert result.goals
    assert all(name.startswith(case) for name in result.goals)
    promised = [name for name in result.goals if not name.endswith("_s")]
    broken = {name: result.figures[name] for name in promised if result.figures[name] and "repeats" not in name}
    assert broken == {}


@pytest.mark.slow
def test_the_benchmark_measures_every_client_and_layout() -> None:
    result = execute(BENCH, RunContext(quick=True, options={"strict_messages": 200, "messages": 4_000}))
    assert "error" not in result.figures, result.figures
    for figure in ("strict_of_fetch", "lanes_of_fetch", "filters_16_per_s", "compact_16_per_s"):
        assert float(result.figures[figure] or 0) > 0
    assert "reference" in result.figures or "reference_per_s" in result.figures


@pytest.mark.cluster
async def test_a_group_goes_on_when_a_node_of_its_cluster_dies(cluster: NatsCluster, name: str) -> None:
    async with await connect(ConnectOptions(servers=tuple(cluster.urls))) as connection:
        api = JetStreamApi(connection, timeout=3)
        await insist(lambda: api.stream_create({"name": name, "subjects": [f"{name}.*"], "num_replicas": 3}))
        groups = ElasticGroups(connection)
        await insist(lambda: groups.create(name, "g", max_members=4))
        await insist(lambda: groups.add_members(name, "g", ["a", "b"]))
        bucket = (await insist(lambda: api.stream_info("KV_elastic-consumer-groups")))["config"]
        assert bucket["num_replicas"] == 3
        seen: list[int] = []

        async def handler(message: GroupMessage) -> None:
            seen.append(message.sequence)

        options = MemberOptions(template=ConsumerTemplate(ack_wait=3))
        join = partial(elastic_consume, connection, name, "g", handler=handler, options=options)
        members = [await insist(partial(join, each)) for each in "ab"]

        async def publish(first: int, last: int) -> None:
            for n in range(first, last):  # a second try is safe under the same id
                headers = expectations(msg_id=f"{name}-{n}")
                await insist(partial(api.publish, f"{name}.{n}", b"", headers=headers), what=f"the publish of {n}")

        await publish(0, 40)
        await eventually(lambda: len(set(seen)) == 40, timeout=60, what="the messages before")
        leader = await asyncio.to_thread(cluster.wait_for_leader, f"{name}-g")
        await asyncio.to_thread(cluster.kill, leader)
        await publish(40, 80)
        await eventually(lambda: len(set(seen)) == 80, timeout=60, what="the messages after the node died")
        await asyncio.to_thread(cluster.restart, leader)
        for member in members:
            await member.stop()
