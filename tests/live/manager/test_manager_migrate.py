"""Migration from one durable per partition to parti: nothing lost, nothing repeated, nothing deleted unasked."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from parti.cli import main
from parti.manager.kv_store import Store
from parti.manager.migrate import Migration, NotReady
from parti.testing import NatsServer, eventually
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions
from parti.wire.pull import LivePull, PullOwner, PullSettings, ack_frames
from parti.worker import WorkerConfig
from support.fleet import Fleet, fleet_on


async def legacy(fleet: Fleet, partition: str, take: int, ack: int) -> None:
    """A durable of the old kind that was given `take` messages and acked the first `ack` of them."""
    name = f"old-{partition}"
    await fleet.js.consumer_create(
        fleet.stream,
        {
            "name": name,
            "durable_name": name,
            "ack_policy": "explicit",
            "filter_subject": f"{fleet.stream}.{partition}",
            "ack_wait": 60_000_000_000,
        },
    )
    if not take:
        return
    connection = await LiveConnection.open(ConnectOptions(servers=(fleet.url,)))
    got = [0]

    def on_batch(deliveries: object) -> None:
        count = len(deliveries)  # type: ignore[arg-type]
        frames = ack_frames(deliveries).split(b"PUB ")[1:]  # type: ignore[arg-type]
        connection.write(b"".join(b"PUB " + frame for frame in frames[: max(0, ack - got[0])]))
        got[0] += count

    settings = PullSettings(batch=take, prefetch=take, expires=1.0, heartbeat=0.4)
    pull = LivePull(
        connection,
        fleet.stream,
        name,
        PullOwner(on_batch, on_trouble=lambda error: None, capacity=lambda: take - got[0]),
        settings,
    )
    pull.start()
    await eventually(lambda: got[0] >= take, 60, "taken")
    pull.stop()
    await connection.close()


def migration(fleet: Fleet, store: Store) -> Migration:
    from support.fleet import partition

    worker = WorkerConfig(stream=fleet.stream, subject_template=f"{fleet.stream}.{{partition}}")
    return Migration(fleet.js, store, worker, [partition(p) for p in fleet.partitions])


async def quiet(fleet: Fleet) -> None:
    """Nobody pulls from the old durables any more."""

    async def idle() -> bool:
        infos = await fleet.js.consumer_list(fleet.stream)
        return all(info["num_waiting"] == 0 for info in infos)

    await eventually(idle, 60, "no pull waits")


async def test_the_switch_begins_at_the_legacy_floors(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=3) as fleet:
        await fleet.publish(60)
        await legacy(fleet, "p0", take=10, ack=10)
        await legacy(fleet, "p1", take=8, ack=5)
        await legacy(fleet, "p2", take=0, ack=0)
        await quiet(fleet)
        store = await Store.open(fleet.js, name)
        plan = await migration(fleet, store).shadow()
        assert [row.legacy.remaining for row in plan.rows if row.legacy] == [10, 15, 20]
        assert [row.ours for row in plan.rows] == [10, 15, 20]
        assert all(row.parity for row in plan.rows)
        await migration(fleet, store).switch()
        assert len(await fleet.js.consumer_names(name)) == 3
        one = await fleet.worker()
        await one.wait_for("converged", 30)
        await fleet.handled(45)
        per = {p: sum(1 for _, m in fleet.seen if m.partition.id == p) for p in fleet.partitions}
        assert per == {"p0": 10, "p1": 15, "p2": 20}


async def test_the_legacy_durables_go_only_with_execute(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        await fleet.publish(10)
        await legacy(fleet, "p0", take=2, ack=2)
        await legacy(fleet, "p1", take=0, ack=0)
        await fleet.js.consumer_create(
            name, {"name": "somebody", "durable_name": "somebody", "ack_policy": "explicit", "filter_subject": ">"}
        )
        await quiet(fleet)
        store = await Store.open(fleet.js, name)
        plan = await migration(fleet, store).switch(execute=True)
        assert plan.strangers == ("somebody",)
        assert await fleet.js.consumer_names(name) == ["somebody"]


async def test_messages_acked_ahead_of_others_are_refused_unless_allowed(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=1) as fleet:
        sequences = await fleet.publish(10)
        await legacy(fleet, "p0", take=5, ack=0)
        # Acked out of order: the third, while the first two are open.
        await fleet.js.connection.publish(f"$JS.ACK.{name}.old-p0.1.{sequences[2]}.3.0.0", b"+ACK")

        async def acked() -> bool:
            return bool((await fleet.js.consumer_info(name, "old-p0"))["num_ack_pending"] == 4)

        assert await eventually(acked, 60, "the ack arrived")
        await quiet(fleet)
        store = await Store.open(fleet.js, name)
        with pytest.raises(NotReady, match="done again"):
            await migration(fleet, store).switch()
        assert (await migration(fleet, store).switch(allow_repeat=True)).rows[0].repeats == 1


async def test_the_command_shows_the_plan_as_json(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        await fleet.publish(4)
        await legacy(fleet, "p0", take=1, ack=1)
        settings = {
            "nats.servers": server.url,
            "worker.stream": name,
            "worker.subject_template": f"{name}.{{partition}}",
            "control.namespace": name,
            "control.partitions": "p{0..1}",
        }
        flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        import asyncio

        done = await asyncio.to_thread(CliRunner().invoke, main, ["migrate", "shadow", "--json", *flags])
        assert done.exit_code == 0, done.output
        rows = json.loads(done.stdout)["partitions"]
        assert [(row["partition"], row["left"], row["ours"]) for row in rows] == [("p0", 1, 1), ("p1", None, None)]
