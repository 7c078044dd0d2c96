"""The worker's public API: a handler gets the messages of the assigned partitions, ordered, fenced, acknowledged."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Self, TypeVar

from parti.backoff import Backoff
from parti.clock import Clock, SystemClock
from parti.config.worker import WorkerConfig
from parti.errors import ConfigError, PartiError, UsageError
from parti.model import Ahead, Lease, Partition, PartitionId
from parti.observe import worker_metrics as m
from parti.observe.health import HealthCheck
from parti.observe.metrics import NO_METRICS, Metrics
from parti.waiting import first_of, stop_signals
from parti.wire.api import JetStreamApi
from parti.worker.engine import Engine
from parti.worker.errors import WorkerClosed, WorkerFailed, WorkerIdMutation
from parti.worker.guardrails import check_subjects
from parti.worker.handler import Handler
from parti.worker.health import HealthTracker, Part, WorkerHealth
from parti.worker.info import Fence, PartitionInfo, Shown, Unfenced, WorkerInfo
from parti.worker.ledger import PartitionState
from parti.worker.recorder import Recorder
from parti.worker.routing import Routes, SubjectTemplate, consumer_name
from parti.worker.runtime import ExpectedStream, Runtime
from parti.worker.stream import MessageStream
from parti.worker.updates import Wanted

_LOOK = 0.5  # seconds between two health checks

H = TypeVar("H", bound=Handler)


class WorkerConsumer:
    """One durable consumer for all partitions of one worker; lives from the first update until `close()`.

    Promises: a message counts as done only after its handler succeeded or it is stored in the dead-letter stream;
    messages of one lane run one after the other in stream order; after `close()` has returned no handler runs or will
    start. A crash may repeat at most the messages that were received and not done. It never loses one.
    """

    def __init__(
        self,
        js: JetStreamApi,
        config: WorkerConfig,
        handler: Handler | None = None,
        *,
        metrics: Metrics = NO_METRICS,
        fence: Fence | None = None,
        backoff: Backoff | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not config.stream:
            raise ConfigError("worker.stream is not set: name the stream to consume")
        self.config = config
        self._js = js
        self._handler = handler
        self._metrics = metrics
        self._fence: Fence = fence or Unfenced()
        self._namespace = ""
        self._backoff = backoff or Backoff()
        self._clock = clock or SystemClock()
        self._template = SubjectTemplate(config.subject_template)
        self._health = HealthTracker(threshold=config.health_failure_threshold, window=config.health_window)
        self._recorder = Recorder(metrics, self._health)
        self._recorder.show_health()
        self.on_blocked: Callable[[str], None] | None = None
        """Called from a thread when a handler blocks the event loop beyond `unhealthy_limit`: only a restart helps."""
        self._worker_id = ""
        self._main: asyncio.Task[None] | None = None
        self._closing = False
        self._closed = asyncio.Event()
        self._engine: Engine | None = None
        self._show: Callable[[], Shown] | None = None
        self._stream: MessageStream | None = None
        self._expected_stream: ExpectedStream | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closing else "new" if self._engine is None else repr(self._engine.ledger)
        return f"<WorkerConsumer {self._worker_id or '-'} {state} {'healthy' if self.is_healthy else 'unhealthy'}>"

    def handler(self, function: H) -> H:
        """Decorator form: `@consumer.handler` above the function that handles the messages."""
        if self._handler is not None:
            raise UsageError("this worker has a handler already")
        self._handler = function
        return function

    def messages(self) -> MessageStream:
        """`async for` form: call it before the first update, iterate, and settle each message."""
        if self._stream is None:
            self._stream = MessageStream(lambda lease: self._fence.may_start(lease))
            self.handler(self._stream.handle)
        return self._stream

    # -- assignment ---------------------------------------------------------------------------------------------------

    async def update_worker_consumer(
        self,
        worker_id: str,
        partitions: Iterable[Partition],
        *,
        positions: Mapping[PartitionId, int] | None = None,
        leases: Mapping[PartitionId, Lease] | None = None,
        hold: Collection[PartitionId] = (),
        flush: bool = False,
        claimed: bool = False,
    ) -> None:
        """When this returns, the worker has these partitions, or those of a later call: the last call wins.

        Calls within `update_coalescing_window` become one update on the server; `flush` skips the wait. Invalid input
        (too many subjects, another worker id, a malformed key) is refused before anything is sent. When the server is
        unreachable or refuses, the error is raised after all retries, the last good assignment stays in force, and the
        new one is retried in the background.

        `positions`: the sequence up to which a new partition is done; the rest is read by range before its live
        messages continue. `hold`: partitions that this worker does not own yet; see `take_over`. `claimed`: the caller
        keeps the positions (parti.manager); those stored in the durable are ignored.
        """
        wanted = self._checked(worker_id, tuple(partitions), positions or {}, leases or {}, hold)
        if claimed:
            wanted = replace(wanted, claimed=True)
        engine = self._start()
        if self._main is not None and self._main.done():
            raise WorkerClosed(f"the worker ended ({self._health.broken or 'cancelled'}): make a new one")
        started = self._clock.now()
        await engine.coalescer.put(wanted, flush=flush)
        self._worker_id = worker_id
        self._metrics.observe(m.UPDATE_LATENCY, self._clock.now() - started)

    def _checked(
        self,
        worker_id: str,
        partitions: tuple[Partition, ...],
        positions: Mapping[PartitionId, int],
        leases: Mapping[PartitionId, Lease],
        hold: Collection[PartitionId],
    ) -> Wanted:
        if self._closing:
            raise WorkerClosed("this worker is closed: make a new one")
        if self._handler is None:
            raise UsageError("this worker has no handler: pass one, or use @consumer.handler")
        consumer_name(self.config.consumer_prefix, worker_id, self._namespace)
        if self._worker_id and worker_id != self._worker_id and not self.config.allow_worker_id_change:
            self._metrics.count(m.GUARDRAIL_VIOLATIONS, type="workerid_mutation")
            self._recorder.event("worker.update", op="update", result="refused", wanted_id=worker_id, warn=True)
            raise WorkerIdMutation(
                f"this worker is {self._worker_id!r} and cannot become {worker_id!r}: make a new WorkerConsumer, or "
                "set worker.allow_worker_id_change"
            )
        check_subjects({self._template.subject(partition) for partition in partitions}, self.config, self._recorder)
        return Wanted(worker_id, Routes(self._template, partitions), dict(positions), dict(leases), frozenset(hold))

    # -- handoff ------------------------------------------------------------------------------------------------------

    async def stop_partition(self, partition: PartitionId) -> int:
        """When this returns no handler of the partition runs or will start; returns the cursor up to which it is done.

        Its filter stays; new messages are kept, or read again later. `resume_partition` undoes this.
        """
        engine, state = self._state(partition)
        await engine.inbox.stop(state)
        return engine.ledger.cursor(partition)

    def resume_partition(self, partition: PartitionId, lease: Lease | None = None) -> None:
        """Resume a stopped partition at its cursor."""
        engine, state = self._state(partition)
        if lease is not None:
            state.lease = lease
        engine.assigner.go_on(state)

    def take_over(self, partition: PartitionId, *, after: int, lease: Lease, ahead: Ahead | None = None) -> int:
        """Start a held partition whose position is now known; returns its target T.

        A range read brings `(after, T]`; the messages held above T follow. `position()` shows when this is finished.
        Messages that `ahead` lists as done are skipped.
        """
        engine, state = self._state(partition)
        if not state.stopped or state.target is None:
            raise UsageError(f"partition {partition} is not held: name it in `hold` of the update that adds it")
        state.lease = lease
        target = engine.inbox.resume_at(state, after, ahead)
        engine.take_overs.begin([state])
        return target

    def state_of(self, partition: PartitionId) -> PartitionState:
        """The partition's state, as its lanes use it."""
        return self._state(partition)[1]

    def ahead_of(self, partition: PartitionId) -> Ahead | None:
        """What a stopped partition has done above its cursor; also None when the partition was removed meanwhile."""
        state = self._engine.ledger.states.get(partition) if self._engine is not None else None
        return state.ahead if state is not None else None

    def blocked_by(self) -> tuple[PartitionId, int] | None:
        """The message whose handler last blocked the event loop; returned once, to explain a lost lease."""
        blocked, self._recorder.blocked = self._recorder.blocked, None
        return blocked

    def renew_lease(self, lease: Lease) -> None:
        """Run the partition's handlers under this lease, from the next message on."""
        _, state = self._state(lease.partition)
        state.lease = lease

    async def last_sequence(self) -> int:
        """The stream's last sequence, from its leader."""
        engine = self._start()
        return await engine.durable.last_sequence()

    def runtime(self) -> Runtime:
        """The shared objects that the worker's components get, also those of a layout that reads by itself."""
        if self._handler is None:
            raise UsageError("this worker has no handler: pass one, or use @consumer.handler")
        return Runtime(
            self._js,
            self.config,
            self._handler,
            self._recorder,
            self._fence,
            self._backoff,
            self._clock,
            self._namespace,
            self.on_blocked,
            self._expected_stream,
        )

    def expect_stream(self, created: str, tell: Callable[[str], None]) -> None:
        """The caller keeps the positions, and they belong to the stream with this creation time.

        On another stream nothing is changed; `tell` is called. Call this before the first update and after `abandon`.
        """
        self._expected_stream = ExpectedStream(created, tell) if created else None

    def use_fence(self, fence: Fence) -> None:
        """Check this fence from now on; only before the first update."""
        if self._engine is not None:
            raise UsageError("this worker is running: give it its fence before the first update")
        self._fence = fence

    def use_namespace(self, namespace: str) -> None:
        """Name the durable `<prefix>-<namespace>-<worker id>` from now on; only before the first update."""
        if self._engine is not None:
            raise UsageError("this worker is running: give it its namespace before the first update")
        self._namespace = namespace

    def cannot_update(self, error: PartiError) -> None:
        """Show this as the reason why an update is refused: the caller knows more than the server's error says."""
        self._recorder.failed(Part.UPDATE, self._clock.now(), error)

    async def hold_partition(self, partition: PartitionId) -> int:
        """Restart a stopped partition: drop its open messages, hold new ones; returns its target T.

        For a partition that moved to another worker and returns while its filter is still in force.
        """
        engine, state = self._state(partition)
        if not state.stopped or state.running:
            raise UsageError(f"partition {partition} is running: stop it before it is held")
        engine.inbox.hold(state)
        last = await engine.durable.last_sequence()
        engine.inbox.extend(state, max(last, state.target or 0))
        return state.target or 0

    def position(self, partition: PartitionId) -> PartitionInfo:
        """The partition's position and state."""
        if self._engine is None and self._show is not None:
            for info in self._show().partitions:
                if info.partition.id == partition:
                    return info
        engine, state = self._state(partition)
        return engine.partition_info(state)

    def kick(self) -> None:
        """Check again whether pulling is allowed: call this when the fence has opened."""
        if self._engine is not None:
            self._engine.channel.kick()

    def _state(self, partition: PartitionId) -> tuple[Engine, PartitionState]:
        engine = self._engine
        state = engine.ledger.states.get(partition) if engine is not None else None
        if engine is None or state is None:
            raise UsageError(f"partition {partition} is not assigned to this worker")
        return engine, state

    # -- inspection ---------------------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self._worker_id

    @property
    def js(self) -> JetStreamApi:
        return self._js

    @property
    def consumer_name(self) -> str:
        """The durable's name, or the common prefix when each partition has its own; empty before the first update."""
        return self._shown().consumer

    @property
    def subjects(self) -> tuple[str, ...]:
        """The subjects in force."""
        return self._shown().subjects

    @property
    def is_healthy(self) -> bool:
        return self._health.healthy

    def health(self) -> WorkerHealth:
        """The health state, the failure counts and the last error."""
        return self._health.snapshot()

    def health_check(self) -> HealthCheck:
        """For `/readyz`: fails while the worker is unhealthy, and says why."""
        return HealthCheck("worker", lambda: self._health.cause() or None)

    def liveness_check(self) -> HealthCheck:
        """For `/healthz`: fails when only a restart helps: a bug ended the worker, or it is past `unhealthy_limit`."""
        return HealthCheck("worker-alive", lambda: self.hopeless() or None, live=True)

    def hopeless(self) -> str:
        """Why other workers should take its partitions: a bug ended it, or it is past `unhealthy_limit`; else empty."""
        if self._health.broken:
            return f"the worker ended: {self._health.broken}"
        limit, lasting = self.config.unhealthy_limit, self._health.hopeless_for(self._clock.now())
        if limit and lasting > limit:
            return f"unhealthy for {lasting:.0f} s (worker.unhealthy_limit is {limit:g} s): {self._health.cause()}"
        return ""

    def info(self) -> WorkerInfo:
        """The worker's state, for operators."""
        self._metrics.count(m.DUMP_REQUESTS)
        shown = self._shown()
        return WorkerInfo(
            worker_id=shown.worker_id or self._worker_id,
            consumer=shown.consumer,
            stream=self.config.stream,
            subjects=shown.subjects,
            in_hand=shown.in_hand,
            batch_size=shown.batch_size,
            pulling=shown.pulling,
            health=self.health(),
            partitions=shown.partitions,
        )

    def _shown(self) -> Shown:
        if self._engine is not None:
            return self._engine.shown()
        if self._show is not None:
            return self._show()
        return Shown("", "", (), 0, self.config.pull_batch_size, False, ())

    def show(self, plane: Callable[[], Shown] | None) -> None:
        """Make `info()` and `position()` report on this layout, which reads by itself."""
        self._show = plane

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _start(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self.runtime())
            self._main = asyncio.get_running_loop().create_task(self._engine.run(), name="parti-worker")
        return self._engine

    async def run_until_signal(self, *signals: signal.Signals) -> None:
        """Wait for SIGTERM or SIGINT (or those given), then close; a second signal ends the process as usual."""
        giving_up = asyncio.create_task(self.gave_up())
        bug = () if self._main is None else (self._main,)  # a bug that ends the worker must end the wait
        try:
            with stop_signals(*signals) as asked:
                await first_of(asked.wait(), giving_up, *bug)
        finally:
            hopeless = giving_up.done()
            giving_up.cancel()
            await self.close()
        if hopeless:
            raise WorkerFailed(giving_up.result())

    async def gave_up(self) -> str:
        """Returns, with the reason, when this worker should give its partitions to others: see `hopeless`."""
        while not (reason := self.hopeless()):
            await self._clock.sleep(_LOOK)
        return reason

    async def abandon(self) -> bool:
        """When this returns nothing starts or is acknowledged any more, and the worker can start again.

        For a fenced worker: its open messages belong to another owner now. The next update may use another worker id.
        True when no handler was running: otherwise an effect may still be on its way.
        """
        engine, main = self._engine, self._main
        self._engine, self._main, self._worker_id = None, None, ""
        if engine is not None and main is not None:
            still = await engine.abandon(main)
            self._recorder.event("worker.abandoned", op="close", result="fenced", still=still, warn=True)
            return still
        return True

    async def close(self) -> None:
        """Stop pulling, finish what was received (up to `drain_timeout`), then stop everything.

        When this returns no handler runs or will start, and every ack has reached the server. Unfinished messages are
        recorded in the consumer, so that the successor handles exactly those and repeats nothing. A bug that had ended
        the worker is raised here.
        """
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        try:
            if self._engine is not None and self._main is not None:
                await self._engine.stop(self._main)
        finally:
            if self._stream is not None:
                self._stream.end()
            self._closed.set()
            self._recorder.event("worker.closed", op="close", result="success")
