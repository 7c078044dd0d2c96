"""A message that kills its process, or blocks it beyond its lease, becomes a dead letter after a few lives."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from parti.dead_letters import DeadLetterReader
from parti.testing import NatsServer, eventually
from parti.testing.child import spawn
from support.fleet import Fleet, fleet_on

HANDLER = """
import asyncio, os, signal, time
from pathlib import Path

async def handle(message):
    await asyncio.sleep(0.002)
    kind = message.data.decode()
    if kind != "fine":
        with Path("lives").open("a") as file:
            file.write(f"{message.sequence} {os.getpid()}\\n")
    if kind == "exit":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "block":
        time.sleep(5)
    with Path("effects").open("a") as file:
        file.write(f"{message.sequence}\\n")
"""


class Supervised:
    """Worker processes that are started again whenever they end, as a supervisor does."""

    def __init__(self, folder: Path, server: NatsServer, name: str, layout: str, lanes: str) -> None:
        self.folder = folder
        self.deaths = 0
        self._processes: list[Any] = []
        self._task: asyncio.Task[None] | None = None
        (folder / "app.py").write_text(HANDLER)
        (folder / "parti.toml").write_text(
            f"""
[nats]
servers = ["{server.url}"]
[worker]
stream = "{name}"
subject_template = "{name}.{{partition}}.*"
lanes = "{lanes}"
pull_timeout = "1s"
idle_heartbeat = "250ms"
[control]
namespace = "{name}"
layout = "{layout}"
partitions = ["p{{0..3}}"]
heartbeat_ttl = "2500ms"
heartbeat_interval = "500ms"
cold_start_window = "100ms"
planned_scale_window = "100ms"
[observe]
listen = "off"
"""
        )

    async def __aenter__(self) -> Supervised:
        self._processes = [await self._spawn() for _ in range(2)]
        self._task = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for process in self._processes:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _spawn(self) -> Any:
        script = f"import os, sys; os.chdir({str(self.folder)!r}); sys.argv = ['parti', 'worker', 'run', 'app:handle']"
        return await asyncio.to_thread(spawn, [sys.executable, "-c", f"{script}; from parti.cli import main; main()"])

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for index, process in enumerate(self._processes):
                if process.poll() is not None:
                    self.deaths += 1
                    self._processes[index] = await self._spawn()

    def lines(self, file: str) -> list[list[int]]:
        path = self.folder / file
        return [[int(w) for w in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


async def buried(fleet: Fleet, running: Supervised, sequences: list[int], fine: list[int]) -> None:
    letters = DeadLetterReader(fleet.js, fleet.stream)

    async def all_there() -> bool:
        return await letters.count() >= len(sequences)

    await eventually(all_there, 90, f"letters of {sequences}")
    await eventually(lambda: {s for (s,) in running.lines("effects")} >= set(fine), 60, "all others are handled")
    found = [letter async for letter in letters.walk()]
    assert sorted(letter.original_sequence for letter in found) == sequences, "no innocent one rests there"
    assert {letter.reason for letter in found} == {"crash"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "lanes", "kind"),
    [
        ("per-worker", "partition", "block"),
        ("per-worker", "key", "kill"),
        ("per-partition", "key", "exit"),  # the other combinations are in tests/chaos/test_torture.py
    ],
)
async def test_a_message_that_ends_or_blocks_its_process_is_buried_after_max_deliver_lives(
    server: NatsServer, name: str, tmp_path: Path, layout: str, lanes: str, kind: str
) -> None:
    async with (
        fleet_on(server, name, count=4) as fleet,
        Supervised(tmp_path, server, name, layout, lanes) as running,
    ):
        acks = [
            await fleet.js.publish(f"{name}.p{n % 4}.k{n % 10}", kind.encode() if n == 100 else b"fine")
            for n in range(200)
        ]
        poison = acks[100].seq
        await buried(fleet, running, [poison], [ack.seq for ack in acks if ack.seq != poison])
        lives = [sequence for sequence, _ in running.lines("lives")]
        # Two when a starved process was fenced besides, and counted: what had ended it nobody can tell.
        assert 2 <= len(lives) <= 3, "max_deliver lives"
