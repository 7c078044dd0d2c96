"""The endpoints of one random scenario: real servers on loopback that fail for a while and are healthy afterwards."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from parti.clock import SystemClock
from parti.testing.http_server import Answer, FaultHttpServer, Hang, ReceivedRequest, Reply, ResetConnection
from parti_lab.prove.delivery_judge import SeenRequest
from parti_lab.prove.delivery_names import NAMES
from parti_lab.prove.delivery_scenario import DeliveryScenario, HostKind, Trigger

_LOOK = 0.02


@dataclass(slots=True)
class Ground:
    """The endpoints of one run, and the requests they received."""

    scenario: DeliveryScenario
    rng: random.Random
    heals_at: float = math.inf
    """Set at the first request, because processes take time to start."""
    servers: dict[str, list[FaultHttpServer]] = field(default_factory=dict)
    seen: list[SeenRequest] = field(default_factory=list)
    stall: float = 0.0
    """The longest stall of this process, in seconds."""
    clock: SystemClock = field(default_factory=SystemClock)
    hanging: Path = Path()
    """While this file exists, the names of `no_dns` hosts cannot be looked up."""

    def url(self, trigger: Trigger, document: int) -> str:
        server = self.servers[trigger.name][document % trigger.hosts]
        if trigger.host == "no_dns":
            return f"http://{trigger.name}{NAMES}:{server.port}/hook"
        return f"{server.url}/hook"

    async def open(self, stack: AsyncExitStack) -> None:
        self.hanging.touch()
        for trigger in self.scenario.triggers:
            self.servers[trigger.name] = [FaultHttpServer() for _ in range(trigger.hosts)]
            for server in self.servers[trigger.name]:
                await server.start()
                stack.push_async_callback(server.stop)
                server.otherwise(self._script(trigger))
                if trigger.host == "dead":
                    await server.stop()
        stack.callback(asyncio.create_task(self._watch()).cancel)

    async def _watch(self) -> None:
        """Record our own stalls; restart the dead hosts when it is time."""
        dead = [trigger.name for trigger in self.scenario.triggers if trigger.host == "dead"]
        down = [server for name in dead for server in self.servers[name]]
        while True:
            before = self.clock.now()
            await self.clock.sleep(_LOOK)
            self.stall = max(self.stall, self.clock.now() - before - _LOOK)
            if self.clock.now() >= self.heals_at:
                self.hanging.unlink(missing_ok=True)
                while down:
                    await down.pop().start()

    def _script(self, trigger: Trigger) -> Callable[[ReceivedRequest], Reply]:
        def decide(request: ReceivedRequest) -> Reply:
            now, body = self.clock.now(), request.json()
            self.heals_at = min(self.heals_at, now + self.scenario.heals)
            reply = self._reply(trigger.host if now < self.heals_at else "well")
            status = reply.status if isinstance(reply, Answer) else 0
            delay = reply.delay if isinstance(reply, Answer) else 0.0
            self.seen.append(
                SeenRequest(
                    at=now,
                    id=request.headers["webhook-id"],
                    trigger=trigger.name,
                    document=body["documentId"],
                    number=body["seq"],
                    attempt=int(request.headers["x-parti-attempt"]),
                    status=status,
                    epoch=int(request.headers["x-parti-epoch"]),
                    wait=float(reply.headers.get("Retry-After", 0)) if isinstance(reply, Answer) else 0.0,
                    ended=now + delay,
                    partition=request.headers["x-parti-partition"],
                )
            )
            return reply

        return decide

    def _reply(self, kind: HostKind) -> Reply:
        ill, rng = self.rng.random() < 0.8, self.rng
        match kind:
            case "slow":
                return Answer(200, delay=rng.uniform(0.05, 0.3))
            case "flaky" if ill:
                return rng.choice((Answer(500), Answer(503), Answer(408), ResetConnection()))
            case "throttling" if ill:
                return Answer(rng.choice((429, 503)), {"Retry-After": rng.choice(("1", "2"))})
            case "hanging":
                return Hang()
            case "resetting" if ill:
                return ResetConnection()
            case _:
                return Answer(200)
