"""A handler blocks the event loop beyond the lease: afterwards, nothing in the fenced process continues."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parti.testing import NatsServer, eventually
from parti.testing.child import spawn
from support.fleet import fleet_on
from support.layouts import LAYOUTS

HANDLER = """
import asyncio, os, time
from pathlib import Path

async def handle(message):
    await asyncio.sleep(0.03)
    began = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    if message.sequence > 100 and not Path("blocked").exists():
        Path("blocked").write_text(f"{message.sequence} {os.getpid()}")
        time.sleep(7)
    line = f"{message.partition.id} {message.lease.epoch} {message.sequence} {os.getpid()} {began}\\n"
    with Path("effects").open("a") as file:
        file.write(line)
"""

_FREEZES = 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cause", ["block", "freeze"])
async def test_no_effect_of_a_process_that_lost_its_lease_follows_one_of_the_next_owner(
    server: NatsServer, name: str, tmp_path: Path, layout: str, cause: str
) -> None:
    """An effect counts from when its step began: one that was on its way, only a sink that compares epochs can refuse.

    Which other steps are due when a process stops is chance; `tests/unit/worker/test_freeze_moments.py` tries them all.
    """
    rng = random.Random()
    if cause == "freeze":
        (tmp_path / "blocked").touch()
    (tmp_path / "app.py").write_text(HANDLER)
    (tmp_path / "parti.toml").write_text(
        f"""
[nats]
servers = ["{server.url}"]
[worker]
stream = "{name}"
subject_template = "{name}.{{partition}}.*"
lanes = "key"
pull_timeout = "1s"
idle_heartbeat = "250ms"
[control]
namespace = "{name}"
layout = "{layout}"
partitions = ["p{{0..7}}"]
heartbeat_ttl = "3s"
heartbeat_interval = "500ms"
cold_start_window = "200ms"
planned_scale_window = "100ms"
[observe]
listen = "off"
"""
    )
    script = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = ['parti', 'worker', 'run', 'app:handle']"
    command = [sys.executable, "-c", f"{script}; from parti.cli import main; main()"]
    effects = tmp_path / "effects"

    def lines() -> list[list[int]]:
        text = effects.read_text() if effects.exists() else ""
        return [[int(word.removeprefix("p")) for word in line.split()] for line in text.splitlines()]

    processes: list[Any] = []
    async with fleet_on(server, name, count=8) as fleet:
        stop = asyncio.Event()
        published = 0

        async def publish() -> None:
            nonlocal published
            while not stop.is_set():
                await fleet.js.publish(f"{name}.p{published % 8}.k{published % 40}")
                published += 1
                await asyncio.sleep(0.001)

        try:
            processes += [await asyncio.to_thread(spawn, command) for _ in range(2)]
            publishing = asyncio.create_task(publish())
            await eventually(lambda: len({line[3] for line in lines()}) == 2, what="both work")
            if cause == "freeze":
                for frozen in range(_FREEZES):
                    process, at = processes[frozen % 2], len(lines())
                    await eventually(
                        partial(lambda n: len({line[3] for line in lines()[n:]}) == 2, at), what="both work"
                    )
                    had = {line[0] for line in lines() if line[3] == process.pid}
                    await asyncio.sleep(rng.uniform(0.0, 0.05))
                    os.kill(process.pid, signal.SIGSTOP)
                    at = len(lines())
                    await eventually(
                        partial(lambda n, had: {line[0] for line in lines()[n:]} >= had, at, had), what="taken over"
                    )
                    os.kill(process.pid, signal.SIGCONT)
            else:
                blocked = tmp_path / "blocked"
                await eventually(lambda: blocked.exists() and blocked.read_text(), what="one blocks")
                came = [int(word) for word in blocked.read_text().split()]
                await eventually(lambda: came in [line[2:4] for line in lines()], what="it has gone on")
            at = len(lines())
            await eventually(lambda: len(lines()) > at + 400, what="work goes on")
            stop.set()
            await publishing
            await eventually(lambda: {x[2] for x in lines()} == set(range(1, published + 1)), what="all are handled")
        finally:
            stop.set()
            for process in processes:
                process.kill()
                await asyncio.to_thread(process.wait)
    newest: dict[int, int] = {}
    stale = []
    for partition, epoch, sequence, pid, _ in sorted(lines(), key=lambda line: line[4]):
        if epoch < newest.get(partition, 0):
            stale.append((partition, epoch, newest[partition], sequence, pid))
        newest[partition] = max(epoch, newest.get(partition, 0))
    assert not stale, f"{len(stale)} effects of a fenced process: {stale[:5]}"
