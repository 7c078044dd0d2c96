"""Positions belong to one stream: a recreated, restored or exchanged stream is read from its start, and reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parti.manager import Hooks
from parti.manager.kv_store import Store
from parti.manager.stream_identity import NamespaceTaken, Replaced, Replacement, StreamReplaced
from parti.testing import NatsServer, eventually
from support.fleet import HASTY, Fleet, fleet_on

LAYOUTS = pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
RETENTIONS = pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])


async def made_anew(fleet: Fleet, **config: object) -> None:
    await fleet.js.stream_delete(fleet.stream)
    body = {"name": fleet.stream, "subjects": [f"{fleet.stream}.>"], "storage": "memory", "allow_direct": True}
    await fleet.js.stream_create(body | config)


def generations(fleet: Fleet, first: int) -> set[bytes]:
    return {message.data for _, message in fleet.seen[first:]}


@LAYOUTS
@RETENTIONS
async def test_a_stream_made_anew_between_two_lives_is_worked_off_from_its_beginning(
    server: NatsServer, name: str, layout: str, retention: str
) -> None:
    async with fleet_on(server, name, count=4, retention=retention) as fleet:
        one = await fleet.worker(layout=layout)
        await one.wait_for("converged", 60)
        await fleet.publish(40)
        await fleet.handled(40)
        await one.stop()
        await made_anew(fleet, retention=retention)
        told: list[Replacement] = []
        if retention == "interest":  # it keeps nothing for a consumer that is to come
            await fleet.worker(layout=layout, hooks=Hooks(on_stream_replaced=told.append))
            await fleet.managers[-1].wait_for("converged", 60)
            await fleet.publish(30)
        else:
            await fleet.publish(30)
            await fleet.worker(layout=layout, hooks=Hooks(on_stream_replaced=told.append))
        await fleet.handled(70)
        assert len(fleet.seen) == 70
        assert [r.kind for r in told] == [Replaced.RECREATED]
        assert (told[0].done, told[0].last_seq) == (40, 0 if retention == "interest" else 30)
        found = fleet.metrics.registry.get_sample_value("parti_stream_replaced_total", {"kind": "recreated"})
        assert found == 1


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_stream_made_anew_under_a_fleet_is_noticed_and_nothing_of_it_is_skipped(
    server: NatsServer, name: str, layout: str, retention: str
) -> None:
    async with fleet_on(server, name, count=6, retention=retention) as fleet:
        one = await fleet.worker(layout=layout, **HASTY)
        two = await fleet.worker(layout=layout, **HASTY)
        await fleet.spread(one, two)
        await fleet.publish(60)
        await fleet.handled(60)
        await made_anew(fleet, retention=retention)
        sequences = await fleet.publish(48)
        await eventually(lambda: set(fleet.sequences()[60:]) >= set(sequences), 60, "all of the new stream")
        await fleet.spread(one, two)
        later = await fleet.publish(12)
        await eventually(lambda: set(fleet.sequences()[60:]) >= set(later), 60, "what came later")
        await one.stop()  # positions of the new stream, not of the old one, move along
        last = await fleet.publish(12)
        await eventually(lambda: set(fleet.sequences()[60:]) >= set(last), 60, "what came after the move")


@pytest.mark.slow
async def test_a_stream_that_went_back_is_worked_off_again(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        one = await fleet.worker()
        await one.wait_for("converged", 60)
        await fleet.publish(10)
        await fleet.handled(10)
        await one.stop()
        store = await Store.open(fleet.js, name)
        found = await store.stream_record()
        assert found[0] is not None
        store.stream = found[0].identity
        for claim, revision in (await store.claims()).values():  # as after a restore of a state with 10 messages only
            assert await store.write_claim(replace(claim, cursor=5_000), revision)
        told: list[Replacement] = []
        await fleet.worker(hooks=Hooks(on_stream_replaced=told.append))
        await fleet.handled(20)
        assert [(r.kind, r.done, r.last_seq) for r in told] == [(Replaced.REWOUND, 5_000, 10)]


async def test_a_replacement_can_be_refused(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        one = await fleet.worker()
        await one.wait_for("converged", 60)
        await fleet.publish(4)
        await fleet.handled(4)
        await one.stop()
        await made_anew(fleet)
        two = await fleet.worker(start=False, on_stream_replaced="stop")
        with pytest.raises(StreamReplaced, match="4 counted as done"):
            await two.start(60)
        fleet.managers.remove(two)
        await fleet.publish(2)
        await fleet.worker()  # nothing was touched, so that this one notices, too
        await fleet.handled(6)


async def test_two_applications_in_one_namespace_are_refused_while_the_first_lives(
    server: NatsServer, name: str
) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        one = await fleet.worker(**HASTY)
        await one.wait_for("converged", 60)
        await fleet.publish(8)
        await fleet.handled(8)
        other = f"{name}-other"
        await fleet.js.stream_create({"name": other, "subjects": [f"{other}.>"], "storage": "memory"})
        two = await fleet.worker(
            start=False, worker={"stream": other, "subject_template": f"{other}.{{partition}}"}, **HASTY
        )
        with pytest.raises(NamespaceTaken, match="live members"):
            await two.start(60)
        fleet.managers.remove(two)
        await one.stop()
        told: list[Replacement] = []
        await fleet.js.publish(f"{other}.p0", b"x")
        three = await fleet.worker(
            worker={"stream": other, "subject_template": f"{other}.{{partition}}"},
            hooks=Hooks(on_stream_replaced=told.append),
            **HASTY,
        )
        await fleet.handled(9)
        assert three.worker_id is not None
        assert [r.kind for r in told] == [Replaced.EXCHANGED]
