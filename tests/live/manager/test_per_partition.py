"""The per-partition layout on an old server, and with lost acks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from parti.control.signals import Gap
from parti.manager import Manager
from parti.manager.layouts.per_partition.plane import PerPartitionPlane
from parti.testing import NatsServer, eventually
from parti.wire import api_consumers
from parti.wire.api import JetStreamApi
from parti.wire.live import LiveConnection
from parti.worker import Message, WorkerConfig, WorkerConsumer
from support.fleet import Fleet, fleet_on, stopping

pytestmark = pytest.mark.slow  # each is quick, but there are many
LONG: dict[str, Any] = {"layout": "per-partition", "prepare_timeout": 60.0, "commit_timeout": 60.0}


@pytest.fixture(params=["reset", "recreated"])
def moved_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """CONSUMER.RESET came with 2.14. `recreated` is what older servers get; also run by hand on a real 2.12.8."""
    if request.param == "recreated":
        without_reset(monkeypatch)
    return str(request.param)


def without_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_consumers, "RESET_SINCE", (99, 0, 0))


class LossyAcks:
    """Loses every ack of a worker on its way to the server, until it is told to stop."""

    def __init__(self, connection: LiveConnection) -> None:
        self.lost = 0
        self.losing = True
        self._write = connection.write
        connection.write = self.write  # type: ignore[method-assign]

    @classmethod
    async def of(cls, manager: Manager) -> LossyAcks:
        plane = manager._agent.plane  # type: ignore[union-attr]
        assert isinstance(plane, PerPartitionPlane)
        await eventually(lambda: plane._connection is not None, 60, "connected")
        assert plane._connection is not None
        return cls(plane._connection)

    def write(self, data: bytes) -> None:
        if self.losing and data.startswith(b"PUB $JS.ACK.") and data.endswith(b"+ACK\r\n"):
            self.lost += 1
            return
        self._write(data)


async def stored(fleet: Fleet) -> int:
    return int((await fleet.js.stream_info(fleet.stream))["state"]["messages"])


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_acks_that_got_lost_are_confirmed_before_a_planned_move_so_that_nothing_is_repeated(
    server: NatsServer, name: str, retention: str, moved_by: str
) -> None:
    async with fleet_on(server, name, count=4, retention=retention) as fleet:
        one = await fleet.worker(**LONG)
        await one.wait_for("converged", 60)
        lossy = await LossyAcks.of(one)
        first = await fleet.publish(40)
        await fleet.handled(40, 60)
        assert lossy.lost == 40
        assert await stored(fleet) == 40, "the server knows of none"
        lossy.losing = False
        two = await fleet.worker(**LONG)
        await one.stop()
        await eventually(lambda: sorted(two.owned()) == fleet.partitions, 60, f"all {moved_by} for the other one")
        second = await fleet.publish(40)
        await fleet.handled(80, 60)
        assert sorted(fleet.sequences()) == first + second, "nothing lost, nothing twice"
        if retention != "limits":

            async def empty() -> bool:
                return await stored(fleet) == 0

            await eventually(empty, 60, "all are acknowledged")


async def test_acks_that_a_broken_connection_swallowed_are_sent_again(server: NatsServer, name: str) -> None:
    """A reset forgets what is pending: a message whose ack was lost before it would stay in a work queue for ever."""
    async with fleet_on(server, name, count=4, retention="workqueue") as fleet:
        one = await fleet.worker(**LONG)
        await one.wait_for("converged", 60)
        await LossyAcks.of(one)
        await fleet.publish(40)
        await fleet.handled(40, 60)
        one._agent.plane._connection.abort()  # type: ignore[union-attr]
        await fleet.publish(40)
        await fleet.handled(80, 60)

        async def empty() -> bool:
            return await stored(fleet) == 0

        await eventually(empty, 60, "all are acknowledged")
        assert sorted(fleet.sequences()) == list(range(1, 81))


async def test_what_is_done_above_another_keys_message_is_acked_when_it_comes_again(
    server: NatsServer, name: str
) -> None:
    """Lanes of keys: done, above the cursor, its ack lost. Delivered again it is neither new nor in hand."""
    keyed = {"lanes": "key", "subject_template": f"{name}.{{partition}}.*"}
    async with fleet_on(server, name, count=1, retention="workqueue") as fleet:
        one = await fleet.worker(worker=keyed, **LONG)
        await one.wait_for("converged", 60)
        lossy = await LossyAcks.of(one)
        fleet.gate.clear()
        await fleet.js.publish(f"{name}.p0.first")
        await eventually(lambda: len(fleet.entered) == 1, 60, "the first is inside its handler")
        stuck, fleet.gate = fleet.gate, asyncio.Event()
        fleet.gate.set()
        for n in range(20):
            await fleet.js.publish(f"{name}.p0.k{n % 5}")
        await fleet.handled(20, 60)
        assert lossy.lost == 20
        one._agent.plane._connection.abort()  # type: ignore[union-attr]

        async def only_the_first() -> bool:
            return await stored(fleet) == 1

        await eventually(only_the_first, 60, "what is done is acknowledged")
        stuck.set()

        async def empty() -> bool:
            return await stored(fleet) == 0

        await eventually(empty, 60, "all are acknowledged")
        assert len(fleet.seen) == 21


@pytest.mark.parametrize("seed", range(3))
async def test_resets_at_any_moment_leave_nothing_in_a_work_queue_and_repeat_nothing(
    server: NatsServer, name: str, seed: int
) -> None:
    """The generator: gaps at random while handlers run, then a planned stop in the middle of the next reset."""
    rng = random.Random(seed)
    keyed = {"lanes": "key", "subject_template": f"{name}.{{partition}}.*"}
    async with fleet_on(server, name, count=3, retention="workqueue") as fleet:
        seen: list[Message] = []

        async def handle(message: Message) -> None:
            await asyncio.sleep(rng.uniform(0, 0.01))
            seen.append(message)

        consumer = WorkerConsumer(
            JetStreamApi(await fleet.connection()),
            WorkerConfig(stream=name, pull_timeout=1.0, idle_heartbeat=0.25, **keyed),  # type: ignore[arg-type]
            handle,
        )
        one = await fleet.worker(consumer=consumer, **LONG)
        await one.wait_for("converged", 60)
        for n in range(300):
            await fleet.js.publish(f"{name}.p{n % 3}.k{rng.randrange(6)}")
            if rng.random() < 0.05:
                one._agent.plane._feed(f"p{rng.randrange(3)}", Gap())  # type: ignore[union-attr]
            if rng.random() < 0.1:
                await asyncio.sleep(rng.uniform(0, 0.01))
        for n in range(3):
            one._agent.plane._feed(f"p{n}", Gap())  # type: ignore[union-attr]
        await asyncio.sleep(rng.uniform(0, 0.02))
        await one.stop()
        at_stop = len(seen)
        await eventually_stored(fleet, 300 - at_stop)
        await fleet.worker(worker=keyed, **LONG)
        await fleet.handled(300 - at_stop, 60)
        await eventually_stored(fleet, 0)
        both = sorted([m.sequence for m in seen] + fleet.sequences())
        assert both == list(range(1, 301)), "nothing lost, nothing twice"


async def eventually_stored(fleet: Fleet, count: int) -> None:
    async def there() -> bool:
        return await stored(fleet) == count

    await eventually(there, 60, f"{count} messages in the stream")


@pytest.mark.parametrize("layout", ["per-worker", "per-partition"])
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_a_partition_takes_its_backlog_with_it_also_where_the_server_has_no_reset(
    server: NatsServer, name: str, retention: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers below 2.14; test_w01 is the same with a reset. An interest stream must not lose what nobody filters."""
    without_reset(monkeypatch)
    settings = LONG | {"layout": layout}
    async with fleet_on(server, name, count=4, retention=retention) as fleet:
        one = await fleet.worker(**settings)
        await one.wait_for("converged", 60)
        fleet.gate.clear()
        sequences = await fleet.publish(40)
        await eventually(lambda: len(fleet.entered) == 4, 60, "one message in each handler")
        two = await fleet.worker(**settings)
        overlap = layout == "per-worker" and retention != "workqueue"
        await eventually(lambda: stopping(one, overlap=overlap) == 2, 60, "half of them are on their way")
        fleet.gate.set()
        await fleet.handled(40, 60)
        await fleet.spread(one, two, timeout=60)
        assert sorted(fleet.sequences()) == sequences
        for each in fleet.partitions:
            of_one = [m.sequence for _, m in fleet.seen if m.partition.id == each]
            assert of_one == sorted(of_one)

        async def guards() -> list[str]:
            return [c for c in await fleet.js.consumer_names(name) if c.endswith("-guard")]

        async def none_left() -> bool:
            return await guards() == []

        await eventually(none_left, 60, "what stood in is gone")


async def test_what_is_done_leaves_a_work_queue_although_its_acks_got_lost(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2, retention="workqueue") as fleet:
        one = await fleet.worker(layout="per-partition", worker={"ack_wait": 600.0})
        await one.wait_for("converged", 60)
        lossy = await LossyAcks.of(one)
        await fleet.publish(12)
        await fleet.handled(12)
        lossy.losing = False

        async def empty() -> bool:
            return bool((await fleet.js.stream_info(name))["state"]["messages"] == 0)

        await eventually(empty, 60, "the queue is empty")
        await fleet.publish(4)
        await fleet.handled(16)
        assert len(fleet.seen) == 16
