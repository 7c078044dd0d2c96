"""The TaskConsumer: takes delivery tasks from JetStream and sends them to their endpoints, in order per document."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from parti.backoff import PATIENT, retry
from parti.clock import Clock, Randomness, SystemClock
from parti.config.deliver import DeliverSection
from parti.delivery.connection import KeptConnection
from parti.delivery.context import DeliveryContext
from parti.delivery.courier import Courier
from parti.delivery.endpoints import Endpoints
from parti.delivery.engine_lock import OtherEngine
from parti.delivery.gate import Gate
from parti.delivery.guard import AddressGuard
from parti.delivery.lease import SlotLease
from parti.delivery.letters import TaskLetters
from parti.delivery.names import DeliveryNames
from parti.delivery.order import RuleBook
from parti.delivery.ownership import Ownership
from parti.delivery.partition import DeliveryPartition
from parti.delivery.pending import TaskReader
from parti.delivery.recorder import DeliveryRecorder
from parti.delivery.secrets import SecretStore
from parti.delivery.storage import ensure_streams
from parti.delivery.transport import HttpTransport, Transport
from parti.errors import PartiError, UsageError
from parti.observe import delivery_metrics as m
from parti.observe.metrics import NO_METRICS, Metrics
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

_REPORT_EVERY = 1.0
_START = replace(PATIENT, cap=2.0, max_tries=8)  # about 6 s: the time a server takes to restart
T = TypeVar("T")


@contextlib.asynccontextmanager
async def _unwrapped() -> AsyncIterator[None]:
    """Raise parti's own errors out of task groups unwrapped, so that a caller can catch them by class."""
    try:
        yield
    except ExceptionGroup as group:
        found: Exception = group
        while isinstance(found, ExceptionGroup) and len(found.exceptions) == 1:
            found = found.exceptions[0]
        if not isinstance(found, PartiError):
            raise
        raise found from None


class TaskConsumer:
    """Delivers every task at least once, in order per document, or stores it as a dead letter; never loses one.

    Several processes may run at once: they share the partitions, and one process at a time delivers each document.
    """

    def __init__(
        self,
        config: DeliverSection | None = None,
        *,
        nats: ConnectOptions | None = None,
        metrics: Metrics = NO_METRICS,
        transport: Transport | None = None,
        guard: AddressGuard | None = None,
        clock: Clock | None = None,
        rng: Randomness | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing happens before `start`. Secrets are read from `environ`, by default the process environment."""
        self.config = config or DeliverSection()
        self.guard = guard or AddressGuard(self.config.allow_addresses, self.config.allow_ports)
        self._options = nats or ConnectOptions()
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._transport = transport or HttpTransport(self.config, self.guard)
        self._secrets = SecretStore(self._clock, self.config.secrets_dir, environ)
        self._book = RuleBook(self.config.triggers, self.config.order)
        self._recorder = DeliveryRecorder(self.config, metrics, self._clock)
        self._gate = Gate(self.config, self._clock, self._rng)
        self._shares: Ownership | None = None
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()
        self._joined = asyncio.Event()
        self._started = False

    def __repr__(self) -> str:
        owns = sorted(self._shares.slots) if self._shares is not None else []
        return f"<TaskConsumer {self.config.stream} owns={owns} {self._gate!r}>"

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that this process delivers now."""
        return tuple(sorted(self._shares.slots)) if self._shares is not None else ()

    async def start(self) -> None:
        """Deliver until `stop` or a cancellation; in both cases, finish what is in flight first.

        Raises the errors that make delivery impossible from the start: no server (a restarting one is waited for), no
        stream, refused credentials.
        """
        if self._started:
            raise UsageError("a TaskConsumer is started once: make another one")
        self._started = True
        try:
            connection = await self._patiently(lambda: connect(self._options))
            try:
                await self._serve(JetStreamApi(connection))
            finally:
                await connection.close()
        finally:
            self._stopped.set()

    async def stop(self) -> None:
        """Stop fetching, finish what is in flight (for up to 10 s), hand back the rest; then `start` returns."""
        self._stop.set()
        if self._started:
            await self._stopped.wait()

    async def wait_ready(self, partitions: int | None = None, timeout: float = 30.0) -> None:
        """Return when this process delivers at least `partitions` partitions (0: when it has joined)."""
        wanted = self.config.partitions if partitions is None else partitions
        async with asyncio.timeout(timeout):
            await self._joined.wait()
            assert self._shares is not None
            while len([slot for slot in self._shares.slots.values() if slot.attached.is_set()]) < wanted:
                await self._clock.sleep(0.01)

    def health(self) -> str | None:
        """None when this process can work now, as owner or as standby; else the reason."""
        if self._shares is None or self._stopped.is_set():
            return "not running"
        waiting = [number for number, slot in self._shares.slots.items() if not slot.attached.is_set()]
        return f"partitions {waiting} are not attached to the server" if waiting else self._recorder.stuck()

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return the step's result, also when the server is restarting."""

        def log_retry(tries: int, wait: float, error: PartiError) -> None:
            self._recorder.event("deliver.start_delayed", warn=True, tries=tries, wait=round(wait, 2), error=str(error))

        return await retry(step, backoff=_START, clock=self._clock, on_retry=log_retry)

    async def _serve(self, js: JetStreamApi) -> None:
        bucket = await self._patiently(lambda: ensure_streams(js, self.config))
        names = DeliveryNames(self.config.stream)
        # One waiting document must not fill all slots in flight: no other document could come in.
        most = max(1, self.config.max_ack_pending // self.config.partitions // 8)
        tools = DeliveryContext(
            config=msgspec.structs.replace(self.config, block_queue=min(self.config.block_queue, most)),
            names=names,
            clock=self._clock,
            rng=self._rng,
            reader=TaskReader(self.config, self._book),
            gate=self._gate,
            courier=Courier(self.config, self._transport, self.guard, self._secrets, self._clock),
            letters=TaskLetters(js, names),
            endpoints=Endpoints(bucket),
            recorder=self._recorder,
        )
        other = OtherEngine(js, bucket, self.config.stream, self._clock)
        await self._patiently(other.refuse)
        link = KeptConnection(self._options, self._recorder, self._clock)

        def make_slot(lease: SlotLease) -> DeliveryPartition:
            return DeliveryPartition(
                tools, js, bucket, link, lease, lambda: (len(shares.slots) - 1) / self.config.partitions
            )

        shares = self._shares = Ownership(tools, bucket, make_slot, other.refuse)
        self._gate.share = lambda: max(1, shares.staying) / self.config.partitions  # the last partition keeps its share
        self._gate.pressed = lambda: any(slot.main.is_crowded for slot in shares.slots.values())
        await self._transport.open()
        try:
            async with _unwrapped(), asyncio.TaskGroup() as group:
                beside = [group.create_task(link.run()), group.create_task(self._report(shares))]
                sharing = group.create_task(shares.run())
                self._joined.set()
                try:
                    await self._stop.wait()
                finally:
                    # A cancellation also waits for requests in flight: an aborted request may have had its effect.
                    shares.leave()
                    await asyncio.shield(asyncio.wait([sharing]))
                    for task in beside:
                        task.cancel()
        finally:
            self._gate.close()
            await self._transport.close()

    async def _report(self, shares: Ownership) -> None:
        """Update the gauges."""
        metrics = self._recorder.metrics
        while True:
            active, queued, parked = [0] * 16, [0] * 16, 0
            for slot in shares.slots.values():
                if slot.lanes is None:
                    continue
                parked += len(slot.lanes.sleepers.parked)
                for lane in slot.lanes:
                    worker = hash(lane.key) % 16
                    active[worker] += lane.busy
                    queued[worker] += len(lane.queue)
            for number, worker_id in enumerate(m.WORKERS):
                metrics.set(m.WORKER_ACTIVE, active[number], worker_id=worker_id)
                metrics.set(m.WORKER_QUEUE, queued[number], worker_id=worker_id)
            metrics.set(m.PARKED_DOCUMENTS, parked)
            metrics.set(m.BREAKERS_OPEN, self._gate.open_breakers)
            await self._clock.sleep(_REPORT_EVERY)
