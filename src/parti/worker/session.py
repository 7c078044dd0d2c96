"""Pulling from the consumer, for as long as the worker lives, through everything that can go wrong.

Each attach begins at the partitions' position: the consumer is reset to just behind what is done (or made anew there),
and its own sequence then begins at 1, so that a lost delivery shows as a gap. After any trouble (a gap, a missed
heartbeat, a new leader, a cut connection, a deleted consumer) nothing is processed before the next attach; what was in
hand stays in hand and is recognised when it comes again. (docs/evidence/cluster.md#c3, #c8)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from parti.errors import Category, PartiError, TransientError
from parti.model import Retention
from parti.observe import worker_metrics as m
from parti.waiting import first_of
from parti.wire.errors import MaxAckPendingReached, TooManyPulls
from parti.wire.live import LiveConnection, ReaderBroke
from parti.wire.pull import HeartbeatMissed, LivePull, PullSettings
from parti.worker.catchup import CatchUpReader
from parti.worker.durable import Durable, is_gone
from parti.worker.health import Part
from parti.worker.inbox import Inbox
from parti.worker.ledger import PartitionState
from parti.worker.runtime import Runtime

_CHECKPOINT = 1.0  # seconds of work that a crash in the middle of a catch-up may repeat
_FEW = 500  # pending messages that even a consumer on the cliff delivers quickly enough
_WITHOUT = 30.0  # seconds without catch-up after one failed: better slowly than not at all
NEVER = 1 << 62  # above every sequence
# a consumer with fewer filters drains a backlog at tens of thousands a second (docs/evidence/jetstream.md#j8)
_CLIFF_FILTERS = 8


class Interrupted(TransientError):
    """The pull loop is to attach anew, because of something we did ourselves; no failure."""


class FellBehind(Interrupted):
    """The backlog is better read by range."""


class Session:
    """The pull loop of one worker. `run()` ends only by cancellation, or by a bug."""

    def __init__(
        self,
        runtime: Runtime,
        durable: Durable,
        inbox: Inbox,
        catch_up: CatchUpReader,
        *,
        lock: asyncio.Lock,
        recreate: Callable[[str], Awaitable[None]],
        begun: Callable[[list[PartitionState]], None],
    ) -> None:
        """`begun`: told which partitions were aside and went live by a reset of the consumer."""
        self.stale = True
        """The consumer has to be set to our position before anything is pulled."""
        self.next_sequence: int | None = None
        self._options = runtime.js.connection.connect_options
        self._config = runtime.config
        self._durable = durable
        self._inbox = inbox
        self._catch_up = catch_up
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._backoff = runtime.backoff
        self._lock = lock
        self._recreate = recreate
        self._begun = begun
        self._trouble: asyncio.Future[PartiError] | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._running = asyncio.Event()
        self._back = asyncio.Event()
        self._refresh = False
        self._checkpointed = 0.0
        self._no_catch_up_before = 0.0

    def __repr__(self) -> str:
        return f"<Session {self._durable.name} {'pulling' if self._inbox.pull is not None else 'not pulling'}>"

    @property
    def pulling(self) -> bool:
        return self._inbox.pull is not None

    # -- steering -----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Pull, now or as soon as it is possible."""
        self._running.set()
        if self._inbox.pull is not None:
            self._inbox.pull.kick()

    def pause(self) -> None:
        """Stop pulling until `resume`; what is in hand goes on. Messages on their way come again later."""
        if self._running.is_set():
            self._running.clear()
            self.interrupt(Interrupted("paused"))

    def reconnected(self) -> None:
        """NATS is back: after a long outage the next try may be seconds away."""
        self._back.set()

    def interrupt(self, reason: PartiError) -> None:
        """Attach anew at once."""
        self.stale = True
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(reason)

    async def rewind(self) -> None:
        """Set the consumer of a work queue back to the start; nothing is delivered before the lock is free again.

        For filters that come: an ack floor above what is left of their partitions would be taken for its acks. Call it
        with the lock held.
        """
        if self._inbox.retention is not Retention.WORKQUEUE:
            return
        self.interrupt(Interrupted("filters come"))
        await self._quiet.wait()
        await self._set_back()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        waits = self._backoff.delays()
        try:
            while True:
                await self._running.wait()
                try:
                    await self._attach()
                    error = await self._pull()
                except PartiError as failure:
                    error = failure
                if isinstance(error, Interrupted):
                    if isinstance(error, FellBehind):
                        await self._guarded(self._read_backlog)
                    continue
                if self._recorder.health.failures(Part.ITERATOR) == 0:
                    waits = self._backoff.delays()  # it worked in between
                    self._note(error)
                    continue  # the first failure is answered at once
                self._note(error)
                wait = next(waits, self._backoff.cap)
                self._recorder.retried("iterate", self._recorder.health.failures(Part.ITERATOR), wait, error)
                await self._rest(wait)
        finally:
            self._stop_pull()
            if self._inbox.connection is not None:
                await self._inbox.connection.close()
                self._inbox.connection = None

    async def _rest(self, seconds: float) -> None:
        """Wait before the next try, but no longer than until NATS is known to be back."""
        self._back.clear()
        await first_of(self._clock.sleep(seconds), self._back.wait())

    def _note(self, error: PartiError) -> None:
        """Count a failure of the loop, and ask for a refresh when there were too many (once per window)."""
        now = self._clock.now()
        self.stale = True
        reason = "heartbeat" if isinstance(error, HeartbeatMissed) else "transient"
        self._recorder.metrics.count(m.ITERATOR_RESTARTS, reason=reason)
        self._recorder.event(
            "worker.pull_interrupted",
            op="iterate",
            result="restart",
            category=error.category.value,
            error=str(error),
            warn=error.category is not Category.TRANSIENT,
        )
        if is_gone(error):
            return  # recreating it is counted on its own
        self._recorder.failed(Part.ITERATOR, now, error)
        if self._recorder.health.escalate(now):
            self._refresh = True
            self._recorder.metrics.count(m.ITERATOR_ESCALATIONS, reason="consecutive_failures")
            self._recorder.event("worker.escalated", op="iterate", result="refresh", error=str(error), warn=True)

    async def _attach(self) -> None:
        """The connection is up and the consumer stands at our position."""
        connection = self._inbox.connection
        if self._refresh and connection is not None:
            await connection.close()
            connection = self._inbox.connection = None
        if connection is None or connection.lost.done():
            self._inbox.connection = None
            self.stale = True
            self._inbox.connection = await LiveConnection.open(self._options, name=self._durable.name)
        async with self._lock:
            if self._refresh:
                await self._reapply()
            while self.stale:  # who interrupts while the consumer is being reset wants another reset
                await self._set_back()
            self._refresh = False
        # Known before the first message: a consumer on the cliff takes seconds to deliver it.
        if self._durable.pending >= _FEW and self._cliff_threatens():
            lag = await self._durable.last_sequence() - self._inbox.ledger.high
            if lag >= self._config.catch_up_lag:
                raise FellBehind(f"{self._durable.pending} messages behind")

    async def _reapply(self) -> None:
        """Send the last applied configuration again (escalation)."""
        if await self._durable.info() is not None:
            await self._durable.update(self._durable.filters, self._durable.memory())

    async def _set_back(self) -> None:
        """`_resync`, after which nothing is stale but for whoever interrupted meanwhile."""
        self.stale = False
        try:
            await self._resync()
        except BaseException:
            self.stale = True
            raise

    async def _resync(self) -> None:
        """The consumer stands at our position. Where an ack deletes, that is the first message that is left."""
        ledger, inbox = self._inbox.ledger, self._inbox
        joining = inbox.joining() if inbox.by_reset else []
        if inbox.retention is Retention.WORKQUEUE:
            after = 0  # what is left of a work queue is what is not done, or whose ack got lost
        elif inbox.retention is Retention.INTEREST:
            # From the ack floor on: an ack that got lost keeps its message alive. From further down, when a partition
            # that came is not done from there on: the reset makes its messages ours, also older ones (docs/guarantees).
            after = min((s.received_through for s in joining), default=NEVER)
        else:
            after = ledger.floor()
        if not await self._durable.reset(after, not_above_floor=inbox.by_reset):
            await self._recreate("iterator_error" if self._refresh else "not_found")
        if inbox.by_reset:
            self._begun(inbox.restarted(joining))
        self.next_sequence = 1
        self._recorder.event("worker.attached", op="iterate", result="success", after=after)

    async def _pull(self) -> PartiError:
        """Pull until there is trouble, and return it."""
        connection, config, inbox = self._inbox.connection, self._config, self._inbox
        assert connection is not None
        if self.stale:
            return Interrupted("interrupted before the first pull")
        trouble = self._trouble = asyncio.get_running_loop().create_future()
        size = inbox.batches.size
        inbox.on_first = self._works
        inbox.on_lag = self._lag_watch()
        inbox.on_clogged = lambda: self.interrupt(Interrupted("deliveries of partitions that went fill the consumer"))
        inbox.pull = LivePull(
            connection,
            config.stream,
            self._durable.name,
            on_batch=inbox.on_batch,
            on_few=inbox.take,
            on_trouble=self._on_trouble,
            capacity=inbox.capacity,
            settings=PullSettings(
                batch=size,
                prefetch=size * config.prefetch_depth,
                expires=config.pull_timeout,
                heartbeat=config.idle_heartbeat,
                max_bytes=max(1, config.max_bytes // (2 * config.prefetch_depth)),
            ),
            next_sequence=self.next_sequence,
        )
        connection.on_error = self._on_trouble  # a permission that is lacking; the server keeps the connection
        # Silent and without trouble for longer than the watchdog needs: it works, there is just nothing to do.
        stable = asyncio.get_running_loop().call_later(3 * config.idle_heartbeat, self._works)
        inbox.pull.start()
        self._quiet.clear()
        try:
            await first_of(trouble, connection.lost)
            error = trouble.result() if trouble.done() else connection.lost.result()
            if isinstance(error, ReaderBroke):
                raise error.bug
            return error
        finally:
            stable.cancel()
            self._stop_pull()
            self.stale = True
            self._trouble = None
            self._quiet.set()

    def _stop_pull(self) -> None:
        if self._inbox.pull is not None:
            self._inbox.pull.stop()
            self._inbox.pull = None

    def _works(self) -> None:
        now = self._clock.now()
        self._recorder.worked(Part.ITERATOR, now)
        self._recorder.worked(Part.RECREATION, now)

    def _on_trouble(self, error: PartiError) -> None:
        if isinstance(error, TooManyPulls | MaxAckPendingReached):
            # Only this pull ended; acks on their way make room again.
            asyncio.get_running_loop().call_later(0.05, self.resume_pull)
            return
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(error)

    def resume_pull(self) -> None:
        if self._inbox.pull is not None:
            self._inbox.pull.kick()

    # -- falling behind -----------------------------------------------------------------------------------------------

    def _cliff_threatens(self) -> bool:
        """Many filters on a file stream with limits: a backlog there is better read by range.

        See docs/evidence/jetstream.md#j8.
        """
        return (
            self._config.catch_up == "auto"
            and self._inbox.file_storage
            and self._inbox.retention is Retention.LIMITS
            and len(self._durable.filters) >= _CLIFF_FILTERS
            and self._clock.now() >= self._no_catch_up_before
        )

    def _lag_watch(self) -> Callable[[int], None] | None:
        if not self._cliff_threatens():
            return None

        def look(lag: int) -> None:
            if lag >= self._config.catch_up_lag:
                self.interrupt(FellBehind(f"{lag} sequences behind"))

        return look

    async def _read_backlog(self) -> None:
        started = self._clock.now()
        self._checkpointed = started
        self._recorder.event("worker.catch_up", op="catch_up", result="started", after=self._inbox.ledger.high)
        subjects = self._inbox.ledger.routes.subjects
        count = await self._catch_up.backlog(subjects, self._config.catch_up_lag // 2, self._checkpoint)
        took = round(self._clock.now() - started, 3)
        self._recorder.event("worker.catch_up", op="catch_up", result="success", messages=count, took=took)

    async def _checkpoint(self) -> None:
        """Store how far the catch-up got in the consumer itself: a crash then begins there."""
        if self._clock.now() - self._checkpointed < _CHECKPOINT:
            return
        async with self._lock:
            await self._durable.reset(self._inbox.ledger.floor())
        self._checkpointed = self._clock.now()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except PartiError as error:
            self._no_catch_up_before = self._clock.now() + _WITHOUT
            self._note(error)
            await self._clock.sleep(next(self._backoff.delays(), self._backoff.base))
