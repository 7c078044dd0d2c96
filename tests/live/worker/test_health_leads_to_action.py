"""A worker that can no longer work hands over its partitions, logs the reason, and ends; in both layouts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from parti.errors import TransientError
from parti.manager import Manager
from parti.observe.health import run_checks
from parti.testing import NatsServer, eventually
from parti.testing.child import spawn
from parti.worker import Message, WorkerConsumer, WorkerFailed
from parti.worker.health import Part
from support.fleet import Fleet, fleet_on
from support.layouts import LAYOUTS, consumer_of


async def pair(fleet: Fleet, layout: str, **changes: Any) -> tuple[Manager, WorkerConsumer, Manager, list[int]]:
    seen: list[int] = []

    async def handle(message: Message) -> None:
        seen.append(message.sequence)

    sick = await consumer_of(fleet, handle, **changes)
    one = await fleet.worker(consumer=sick, layout=layout, shutdown_timeout=3.0)
    two = await fleet.worker(consumer=await consumer_of(fleet, handle), layout=layout)
    await fleet.spread(one, two)
    return one, sick, two, seen


async def gave_up(fleet: Fleet, one: Manager, two: Manager, seen: list[int], because: str) -> None:
    await eventually(lambda: one.ended().done(), what="the sick one ended")
    with pytest.raises(WorkerFailed, match=because):
        await one.ended()
    await eventually(lambda: sorted(two.owned()) == fleet.partitions, what="all are with the other one")
    await fleet.publish(12)
    await eventually(lambda: sorted(seen) == list(range(1, 13)), what=f"all are handled: {seen}")
    failing = await run_checks([one.liveness_check(), one.health_check()])
    assert because in failing["manager-alive"]
    assert because in failing["manager"]
    with pytest.raises(WorkerFailed):
        await one.stop()
    fleet.managers.remove(one)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["in a lane", "where messages are read"])
async def test_a_worker_that_ended_on_a_bug_hands_its_partitions_on(
    server: NatsServer, name: str, layout: str, where: str
) -> None:
    """A bug where messages are read made asyncio close the connection 58 times a second; all were healthy."""

    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    async with fleet_on(server, name, count=4) as fleet:
        one, sick, two, seen = await pair(fleet, layout)
        assert one._agent is not None
        plane: Any = one._agent.plane if layout == "per-partition" else sick._engine
        if where == "in a lane":
            plane._bug(ZeroDivisionError("a bug of ours"))
        else:

            def connected() -> Any:
                return plane._connection if layout == "per-partition" else plane.channel.connection

            await eventually(lambda: connected() is not None, what="a connection that brings messages")
            connected()._dispatch = bug
        await gave_up(fleet, one, two, seen, "ZeroDivisionError")


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_worker_that_stays_unhealthy_hands_its_partitions_on(
    server: NatsServer, name: str, layout: str
) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        one, sick, two, seen = await pair(fleet, layout, unhealthy_limit=0.5, health_failure_threshold=1)

        async def stay_sick() -> None:
            while True:  # an update that was due and went well makes it well again
                sick._recorder.failed(Part.UPDATE, sick._clock.now(), TransientError("no permission"))
                await asyncio.sleep(0.02)

        sickness = asyncio.create_task(stay_sick())
        await gave_up(fleet, one, two, seen, "no permission")
        sickness.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_worker_whose_places_are_all_taken_by_hanging_handlers_hands_its_partitions_on(
    server: NatsServer, name: str, layout: str
) -> None:
    seen: list[int] = []
    hung: list[int] = []

    async def hang(message: Message) -> None:
        hung.append(message.sequence)
        await asyncio.Event().wait()

    async def handle(message: Message) -> None:
        seen.append(message.sequence)

    async with fleet_on(server, name, count=4) as fleet:
        limits = {"concurrency": 1, "stall_limit": 1.0, "unhealthy_limit": 1.0, "drain_timeout": 0.2}
        sick = await consumer_of(fleet, hang, **limits)
        one = await fleet.worker(consumer=sick, layout=layout, shutdown_timeout=3.0)
        await one.wait_for("converged", 60)
        await fleet.publish(8)
        await eventually(lambda: hung, what="it hangs")
        two = await fleet.worker(consumer=await consumer_of(fleet, handle), layout=layout)
        await eventually(lambda: one.ended().done(), what="it gave up")
        with pytest.raises(WorkerFailed, match="none ended"):
            await one.ended()
        await eventually(lambda: sorted(seen) == list(range(1, 9)), what=f"all are handled: {seen}")
        assert sorted(two.owned()) == fleet.partitions
        with pytest.raises(WorkerFailed):
            await one.stop()
        fleet.managers.remove(one)


HANDLERS = """
import asyncio, os, time
from pathlib import Path

def note(message):
    with Path("seen").open("a") as file:
        file.write(f"{message.sequence} {os.getpid()}\\n")

async def block(message):
    note(message)
    time.sleep(300)

async def deaf(message):
    note(message)
    while True:
        try:
            await asyncio.sleep(300)
        except asyncio.CancelledError:
            pass

def thread(message):
    note(message)
    time.sleep(300)
"""


class Running:
    """`parti worker run` in a folder of its own."""

    def __init__(self, folder: Path, server: NatsServer, name: str, worker: str) -> None:
        self.seen = folder / "seen"
        (folder / "app.py").write_text(HANDLERS)
        (folder / "parti.toml").write_text(
            f"""
[nats]
servers = ["{server.url}"]
[worker]
stream = "{name}"
subject_template = "{name}.{{partition}}"
{worker}
[control]
namespace = "{name}"
partitions = ["p{{0..3}}"]
shutdown_timeout = "1s"
[observe]
listen = "127.0.0.1:0"
"""
        )
        self._folder = folder
        self.process: Any = None

    async def __call__(self, handler: str) -> None:
        script = (
            f"import os, sys; os.chdir({str(self._folder)!r}); sys.argv = ['parti', 'worker', 'run', 'app:{handler}']"
        )
        command = [sys.executable, "-c", f"{script}; from parti.cli import main; main()"]
        self.process = await asyncio.to_thread(spawn, command)

    async def ended(self) -> tuple[int, str]:
        try:
            code = await asyncio.to_thread(self.process.wait, 60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)
        return code, self.process.stdout.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("handler", ["deaf", "thread"])
async def test_a_worker_process_ends_on_sigterm_whatever_its_handlers_do(
    server: NatsServer, name: str, tmp_path: Path, handler: str
) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        await fleet.publish(8)
        running = Running(tmp_path, server, name, 'drain_timeout = "500ms"')
        await running(handler)
        await eventually(lambda: running.seen.exists() and running.seen.read_text().count("\n") == 4, what="it hangs")
        os.kill(running.process.pid, signal.SIGTERM)
        code, output = await running.ended()
        assert code == 0, output
        assert "handed over and left" in output
        assert "message.left_behind" in output


@pytest.mark.slow
async def test_a_worker_process_whose_loop_is_blocked_says_where_and_ends_with_code_4(
    server: NatsServer, name: str, tmp_path: Path
) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        await fleet.publish(1)
        running = Running(tmp_path, server, name, 'unhealthy_limit = "3s"')
        await running("block")
        code, output = await running.ended()
        assert code == 4, output
        assert "worker.loop_blocked" in output
        assert f"the handler of {name}.p0 sequence 1 (partition p0)" in output
        assert "app.py" in output
        assert "in block" in output


@pytest.mark.slow
async def test_a_worker_process_that_gives_up_ends_with_code_3_and_its_health_tells_why(
    server: NatsServer, name: str, tmp_path: Path
) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        await fleet.publish(8)
        limits = 'concurrency = 1\nstall_limit = "1s"\nunhealthy_limit = "8s"\ndrain_timeout = "500ms"'
        running = Running(tmp_path, server, name, limits)
        await running("deaf")
        url = ""
        while not url:
            line = (await asyncio.to_thread(running.process.stdout.readline)).decode()
            url = line.split("listening on ")[1].strip() if "listening on" in line else ""

        def ready() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
                    return json.load(answer)  # type: ignore[no-any-return]
            except urllib.error.HTTPError as answer:
                return json.load(answer)  # type: ignore[no-any-return]

        async def stalled() -> bool:
            return "none ended" in (await asyncio.to_thread(ready))["failing"].get("worker", "")

        await eventually(stalled, what="/readyz names the cause")
        code, output = await running.ended()
        assert code == 3, output
        assert "gave up: unhealthy for" in output
