"""Durables of permanently dead workers are deleted with their state; those of live members are never touched."""

from __future__ import annotations

import pytest

from parti.testing import NatsServer, eventually
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ConsumerNotFound
from parti.worker.seal import Seal
from support.fleet import HASTY, Fleet, fleet_on

RETENTIONS = ["limits", "workqueue", "interest"]
THREE = HASTY | {"worker_id_max": 9}


async def stored(fleet: Fleet) -> int:
    return int((await fleet.js.stream_info(fleet.stream))["state"]["messages"])


async def gone(fleet: Fleet, durable: str) -> bool:
    try:
        await fleet.js.consumer_info(fleet.stream, durable)
    except ConsumerNotFound:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_the_durable_of_a_worker_that_died_for_good_goes_with_what_it_kept(
    server: NatsServer, name: str, retention: str
) -> None:
    async with fleet_on(server, name, count=6, retention=retention) as fleet:
        workers = [await fleet.worker(**THREE) for _ in range(3)]
        await fleet.spread(*workers)
        sequences = await fleet.publish(60)
        await fleet.handled(60)
        dead = workers[2]
        durable = f"parti-{name}-{dead.worker_id}"
        await fleet.crash(dead)
        sequences += await fleet.publish(120)

        async def removed() -> bool:
            return await gone(fleet, durable)

        await eventually(removed, 60, "the durable of the dead one is removed")
        sequences += await fleet.publish(60)
        await eventually(lambda: set(fleet.sequences()) == set(sequences), 60, "all are handled")
        if retention != "limits":

            async def empty() -> bool:
                return await stored(fleet) == 0

            await eventually(empty, 60, "nothing that was handled is kept")
        for each in workers[:2]:
            assert not await gone(fleet, f"parti-{name}-{each.worker_id}")


@pytest.mark.slow
async def test_on_an_interest_stream_only_what_has_another_owner_is_taken_off(server: NatsServer, name: str) -> None:
    """A partition that is not given out any more has nobody: the filter of its last owner keeps its messages."""
    async with fleet_on(server, name, count=2, retention="interest") as fleet:
        one = await fleet.worker(**THREE)
        await one.wait_for("converged", 60)
        # What a worker leaves that died with a partition which then was removed.
        durable = f"parti-{name}-worker-7"
        created = (await fleet.js.stream_info(name))["created"]
        config = {"name": durable, "durable_name": durable, "ack_policy": "explicit"}
        filters = [f"{name}.p0", f"{name}.p1", f"{name}.removed"]
        metadata = Seal(name, created, "worker-7").metadata()
        await fleet.js.consumer_create(
            name, config | {"filter_subjects": filters, "metadata": metadata}, action="create"
        )
        await fleet.publish(20, ["p0", "p1"])
        await fleet.publish(5, ["removed"])
        await fleet.handled(20)
        two = await fleet.worker(**THREE)  # ids change hands, so that the leader looks at once
        await fleet.spread(one, two)

        async def left() -> bool:
            return filters_of((await fleet.js.consumer_info(name, durable))["config"]) == (f"{name}.removed",)

        await eventually(left, 60, "only the filter that nobody else has is left")
        assert await stored(fleet) == 5
        seal = Seal.read((await fleet.js.consumer_info(name, durable))["config"])
        assert seal == Seal(name, created, "worker-7"), "the update kept whose it is"


@pytest.mark.slow
@pytest.mark.parametrize("retention", RETENTIONS)
async def test_durables_of_others_are_not_touched_however_dead_they_look(
    server: NatsServer, name: str, retention: str
) -> None:
    async with fleet_on(server, name, count=2, retention=retention) as fleet:
        subject = f"{name}.x" if retention == "workqueue" else f"{name}.p0"
        base = {"ack_policy": "explicit", "filter_subjects": [subject]}
        made = (await fleet.js.stream_info(name))["created"]
        theirs = {
            f"parti-{name}x-worker-8": Seal(f"{name}x", made, "worker-8").metadata(),
            f"parti-{name}-worker-9": Seal("other", made, "worker-9").metadata(),  # our name, their seal
            "parti-reports": {},
        }
        if retention == "workqueue":
            theirs = dict(list(theirs.items())[:1])  # it takes no two on one subject
        one = await fleet.worker(**THREE)
        await one.wait_for("converged", 60)
        before = {}
        for durable, metadata in theirs.items():
            config = base | {"name": durable, "durable_name": durable, "metadata": metadata}
            before[durable] = await fleet.js.consumer_create(name, config, action="create")
        ours = f"parti-{name}-worker-5"
        seal = Seal(name, made, "worker-5").metadata()
        config = {"name": ours, "durable_name": ours, "ack_policy": "explicit", "metadata": seal}
        nothing = f"{name}._parti_no_partition_worker-5"
        await fleet.js.consumer_create(name, config | {"filter_subjects": [nothing]}, action="create")
        two = await fleet.worker(**THREE)
        await fleet.spread(one, two)

        async def swept() -> bool:
            return await gone(fleet, ours)

        await eventually(swept, 60, "the leader looked: ours is gone")
        for durable, info in before.items():
            found = await fleet.js.consumer_info(name, durable)
            assert (found["created"], found["config"]) == (info["created"], info["config"]), durable
