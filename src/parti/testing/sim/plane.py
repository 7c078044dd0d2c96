"""The shipped planes of both layouts, assembled as the manager does, with a handler whose effects are judged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from parti.backoff import Backoff
from parti.config.worker import WorkerConfig
from parti.manager.host import Plane
from parti.manager.per_partition import PerPartitionPlane
from parti.manager.per_worker import PerWorkerPlane
from parti.model import Layout, Member
from parti.outcomes import Outcome, Reject, Retry
from parti.testing.sim.host import CONTROL
from parti.testing.sim.network import SimReader
from parti.testing.sim.stream import NAME, TEMPLATE
from parti.wire.api import JetStreamApi
from parti.wire.async_ranges import AsyncRangeReader
from parti.worker import WorkerConsumer
from parti.worker.engine import Engine
from parti.worker.message import Message

if TYPE_CHECKING:
    from parti.testing.sim.process import Process


class SimConsumer(WorkerConsumer):
    """The shipped worker; only its range reads come from the simulated stream, because the real ones use threads."""

    process: Process

    def _start(self) -> Engine:
        if self._engine is None:
            engine = super()._start()
            process, host = self.process, self.process.host
            reader = SimReader(process.network, process.cluster.server)
            engine.catch_up.open_reader = lambda: cast(AsyncRangeReader, reader)
            assert self._main is not None
            host.watched(self._main)
        return super()._start()


def make_plane(process: Process, member: Member) -> Plane:
    """The plane of a member that has just received its id."""
    cluster, host = process.cluster, process.host
    consumer = SimConsumer(
        JetStreamApi(process.network),  # type: ignore[arg-type]  # it does what that needs of a connection
        cluster.worker_config,
        Work(process).handle,
        fence=host,
        backoff=Backoff(base=0.02, cap=0.2),
        clock=host.clock,
    )
    consumer.process = process
    consumer.use_namespace(CONTROL.namespace)
    if cluster.layout is Layout.PER_WORKER:
        return PerWorkerPlane(host, member, consumer, cluster.retention)
    return PerPartitionPlane(host, member, consumer.runtime(), cluster.retention)


def worker_config(*, lanes: str, max_ack_pending: int) -> WorkerConfig:
    """All durations are a tenth of the usual ones, like the leases of the simulation."""
    return WorkerConfig(
        stream=NAME,
        subject_template=TEMPLATE,
        lanes="key" if lanes == "key" else "partition",
        ack_wait=0.6,
        retry_delays=("20ms", "80ms"),
        max_deliver=3,
        max_ack_pending=max_ack_pending,
        pull_batch_size=10,
        pull_timeout=0.4,  # shorter than the lease, or a frozen owner's pull would take the next owner's messages
        idle_heartbeat=0.15,
        drain_timeout=0.3,
        update_coalescing_window=0.005,
        min_update_interval=0.02,
        health_failure_threshold=1000,
        catch_up_lag=100,
    )


class Work:
    """The handler: takes some time, fails sometimes, and has its one effect at the end."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def handle(self, message: Message) -> Outcome:
        process, rng = self._process, self._process.world.rng
        process.reached("handler")
        await self._waited(rng.uniform(0.05, 0.2) if rng.random() < 0.05 else rng.uniform(0.001, 0.025))
        if rng.random() < process.cluster.failing:
            return rng.choice((Retry(), Retry(after=0.15), Retry(after=0.6), Reject("by chance")))
        # After an aborted move the same owner continues under a newer epoch, even in the middle of a message.
        process.cluster.effect(process, message._lane.state.lease, message.sequence)
        return None

    async def _waited(self, seconds: float) -> None:
        """As `asyncio.sleep`, but a process can stop just when the handler is about to continue."""
        over: asyncio.Future[None] = self._process.loop.create_future()
        timer = self._process.loop.call_later(seconds, self._wake, over)
        try:
            await over
        finally:
            timer.cancel()

    def _wake(self, over: asyncio.Future[None]) -> None:
        if not over.done():
            over.set_result(None)
            self._process.reached("waking")
