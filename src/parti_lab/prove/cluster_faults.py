"""The servers of a proof and their faults: leaders step down, a node is killed, all nodes are restarted."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from parti.errors import PartiError
from parti.testing import NatsCluster, NatsServer
from parti.wire.api import JetStreamApi

FAULTS: Final = ("none", "stepdown", "kill", "roll")


@dataclass
class Servers:
    """The URLs that clients connect to, and the servers that faults can hit."""

    urls: tuple[str, ...]
    server: NatsServer | None = None
    cluster: NatsCluster | None = None

    @classmethod
    async def open(cls, stack: AsyncExitStack, replicas: int) -> Servers:
        """Start one server, or a cluster of three; they end with the stack."""
        if replicas == 1:
            server = await stack.enter_async_context(NatsServer())
            return cls((server.url,), server=server)
        cluster = await stack.enter_async_context(NatsServer.cluster(3))
        return cls(tuple(cluster.urls), cluster=cluster)


class ClusterFaults:
    """Breaks a cluster repeatedly until stopped; afterwards every node is up and current."""

    def __init__(self, kind: str, servers: Servers, js: JetStreamApi, streams: list[str], rng: random.Random) -> None:
        self._kind = kind
        self._servers = servers
        self._js = js
        self._streams = streams
        self._rng = rng
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.count = 0

    def start(self) -> None:
        if self._kind != "none":
            self._task = asyncio.get_running_loop().create_task(self._run(), name="parti-faults")

    async def stop(self) -> None:
        self._stopped.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._stopped.is_set():
            if await self._waited(1.0 if self._kind == "stepdown" else 2.0):
                return
            if self._kind == "stepdown":
                await self._step_down()
            elif self._kind == "kill":
                await self._kill()
            else:
                await self._roll()

    async def _waited(self, seconds: float) -> bool:
        """Wait; True when the faults have to end."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _step_down(self) -> None:
        stream = self._rng.choice(self._streams)
        calls = [f"STREAM.LEADER.STEPDOWN.{stream}"]
        try:
            names = await self._js.consumer_names(stream)
            calls += [
                f"CONSUMER.LEADER.STEPDOWN.{stream}.{name}" for name in self._rng.sample(names, min(2, len(names)))
            ]
        except PartiError:
            pass  # there is no leader right now, which this fault causes on purpose
        for call in calls:
            try:
                await self._js.request(call)
                self.count += 1
            except PartiError:
                continue

    async def _kill(self) -> None:
        cluster = self._servers.cluster
        assert cluster is not None
        node = await asyncio.to_thread(cluster.leader_of, self._streams[0])
        node = self._rng.randrange(3) if node is None or self._rng.random() < 0.5 else node
        await asyncio.to_thread(cluster.kill, node)
        self.count += 1
        await self._waited(5.0)
        await asyncio.to_thread(cluster.restart, node)

    async def _roll(self) -> None:
        cluster = self._servers.cluster
        assert cluster is not None
        for node in range(3):
            await asyncio.to_thread(cluster.terminate, node)
            await asyncio.to_thread(cluster.restart, node)
            self.count += 1
