"""The program of a worker process in `parti prove torture`: handlers retry, raise, reject and misbehave on demand.

A message contains its own fate. Each message misbehaves once: its next handler can finish.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from parti.backoff import PATIENT, retry
from parti.clock import SystemClock
from parti.config.sections import LogFormat, LogLevel, ObserveSection
from parti.manager import CallableSource, ControlConfig, Hooks, Manager
from parti.model import Lease
from parti.observe.logs import configure_logging
from parti.waiting import first_of
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Outcome, Reject, Retry, WorkerConfig, WorkerConsumer
from parti_lab.prove.asking import Asking

_TICK = 0.1
_STALL = 0.5


class Misbehaviour(BaseException):
    """An exception that no handler should raise."""


class StaleTortureEffect(Exception):
    """The sink refused the effect: another worker owns the partition by now."""


def say(word: str, **fields: Any) -> None:
    """Send one line to the proof."""
    print(json.dumps({"say": word, **fields}), flush=True)


async def watch_stalls() -> None:
    """Report stalls of this process (starved by the machine, frozen or blocked) until cancelled."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(_TICK)
        now = time.monotonic()
        if now - before - _TICK > _STALL:
            say("stall", start=before, end=now)
        before = now


class TortureHandler:
    """Does what each message asks for."""

    def __init__(self, sink: Asking, takes: float, blocks: float) -> None:
        self.sink = sink
        self._takes = takes
        self.blocks = blocks
        self.owner = f"pid-{os.getpid()}"

    async def __call__(self, message: Message) -> Outcome:
        began = time.monotonic()
        unit, counter, fate = json.loads(message.data)
        if fate == "reject":
            return Reject("told to")
        if fate in ("retry", "raise") and message.attempt == 1:
            if fate == "raise":
                raise RuntimeError("told to")
            return Retry()
        if fate in ("hang", "base", "exit", "block") and await self.sink.ask("misbehave", f"{unit}#{counter}"):
            await self._misbehave(fate)
        if self._takes:
            await asyncio.sleep(self._takes * (0.5 + (counter % 7) / 6))
        effect = (message.partition.id, unit, counter, self.owner, message.lease.epoch)
        if not await self.sink.ask("effect", *effect, began, message.sequence, message.attempt):
            raise StaleTortureEffect("the sink knows a newer epoch")
        return None

    async def _misbehave(self, fate: str) -> None:
        say("misbehaves", fate=fate, at=time.monotonic())
        match fate:
            case "hang":
                await asyncio.Event().wait()
            case "base":
                raise Misbehaviour("told to")
            case "exit":
                raise SystemExit(3)
            case _:
                time.sleep(self.blocks)  # noqa: ASYNC251 - this is the fault


def listed_partitions(path: Path) -> list[str]:
    """The partition source: the content of the proof's file."""
    said = json.loads(path.read_text())
    if said["raises"]:
        raise RuntimeError("the source was told to raise")
    return list(said["partitions"])


async def work(settings: dict[str, Any], handles: type[TortureHandler] = TortureHandler) -> None:
    """Run until a signal: SIGTERM leaves, SIGUSR1 stops with `returning`, SIGUSR2 restarts in this process at once."""
    life = 0
    while await _live(settings, handles, life):
        life += 1
    say("stopped")


async def _live(settings: dict[str, Any], handles: type[TortureHandler], life: int) -> bool:
    """One life of a worker; True if another one must follow at once."""
    options = ConnectOptions(servers=tuple(settings["urls"]), request_timeout=5.0, name="torture-worker")
    # A worker that returns in the same process may start while the server is down.
    patience = replace(PATIENT, cap=0.5, max_tries=100 if life else 1)
    connection = await retry(lambda: connect(options), backoff=patience, clock=SystemClock())
    sink = await Asking.open(int(settings["sink"]))
    consumer = WorkerConsumer(JetStreamApi(connection), WorkerConfig(**settings["worker"]))
    handler = handles(sink, float(settings["takes"]), float(settings["blocks"]))
    handler.owner += f".{life}" if life else ""
    consumer.handler(handler)
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    heard: set[int] = set()
    manager = Manager(
        ControlConfig(**settings["control"]), connection, _source(settings), consumer=consumer, hooks=_hooks()
    )
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        asyncio.get_running_loop().add_signal_handler(number, _ask, asked, heard, number)
    await manager.start(60.0)
    say("live", worker=manager.worker_id)
    stalls = asyncio.create_task(watch_stalls())
    await first_of(asked, manager.ended())
    if not asked.done():
        await manager.ended()
    await manager.stop(returning=asked.done() and asked.result() != signal.SIGTERM)
    stalls.cancel()
    await sink.close()
    await connection.close()
    # A worker that should return but gets SIGTERM meanwhile ends: one signal does not swallow the other.
    return asked.done() and asked.result() == signal.SIGUSR2 and signal.SIGTERM not in heard


def _ask(asked: asyncio.Future[int], heard: set[int], number: int) -> None:
    heard.add(number)
    if not asked.done():
        asked.set_result(number)


def _source(settings: dict[str, Any]) -> CallableSource:
    path = Path(settings["source"])
    return CallableSource(lambda: listed_partitions(path), every=0.3)


def _hooks() -> Hooks:
    def granted(lease: Lease) -> None:
        say("granted", partition=lease.partition, epoch=lease.epoch, at=time.monotonic())

    def revoked(lease: Lease) -> None:
        say("revoked", partition=lease.partition, epoch=lease.epoch, at=time.monotonic())

    return Hooks(
        on_partition_granted=granted,
        on_partition_revoked=revoked,
        on_state_changed=lambda _, new: say("state", state=new.value, at=time.monotonic()),
    )


def main(handles: type[TortureHandler] = TortureHandler) -> None:
    """Run the whole program."""
    given = json.loads(sys.argv[1])
    configure_logging(ObserveSection(log_format=LogFormat.JSON, log_level=LogLevel(given["log_level"])))
    asyncio.run(work(given, handles))


if __name__ == "__main__":
    main()
