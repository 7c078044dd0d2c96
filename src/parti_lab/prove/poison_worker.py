"""The program of a worker process in `parti prove poison`: some messages do harm in every life."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import time
from pathlib import Path

from parti.worker import Message, Outcome
from parti_lab.prove.torture_worker import Misbehaviour, TortureHandler, main

POISON = "poison:"
HARMS = ("exit", "kill", "hang", "base", "block", "memory")
ANY = "any"  # a different harm in each life
_ROOM = 256 << 20  # bytes that a handler may allocate before the system refuses


class PoisonHandler(TortureHandler):
    """Reports each life of a poisonous message to the sink, then does the harm that the message names."""

    async def __call__(self, message: Message) -> Outcome:
        unit, counter, fate = json.loads(message.data)
        if fate.startswith(POISON):
            value, kind = f"{unit}#{counter}", fate.removeprefix(POISON)
            await self.sink.ask("life", value, self.owner)
            await self._harm(kind if kind != ANY else random.choice(HARMS))
        return await super().__call__(message)

    async def _harm(self, kind: str) -> None:
        match kind:
            case "exit":
                raise SystemExit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
                await asyncio.Event().wait()
            case "hang":
                await asyncio.Event().wait()
            case "base":
                raise Misbehaviour("poison")
            case "memory":
                _eat()
            case _:
                time.sleep(self.blocks)  # noqa: ASYNC251 - this is the harm


def _eat() -> None:
    """Allocate memory until it fails; the limit is for this process only, so that no other process starves."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM, before[1]))
    eaten = []
    try:
        while True:
            eaten.append(bytearray(16 << 20))
    finally:
        eaten.clear()
        resource.setrlimit(resource.RLIMIT_AS, before)


if __name__ == "__main__":
    main(PoisonHandler)
