"""The pull loop: pulls from the consumer for the worker's whole life and recovers from every failure.

Each attach starts at the partitions' position: the consumer is reset (or recreated) just after what is done, and its
own sequence then starts at 1, so that a lost delivery shows as a gap. After any trouble (a gap, a missed heartbeat, a
new leader, a lost connection, a deleted consumer) nothing is processed before the next attach; open messages stay open
and are recognised when they are redelivered. (docs/evidence/cluster.md#c3, #c8)
"""

from __future__ import annotations

import asyncio

from parti.errors import Category, PartiError
from parti.observe import worker_metrics as m
from parti.waiting import first_of
from parti.wire.columns import Deliveries
from parti.wire.errors import MaxAckPendingReached, TooManyPulls
from parti.wire.live import ReaderBroke
from parti.wire.pull import HeartbeatMissed, Item, LivePull, PullOwner, PullSettings, items_of
from parti.worker.backlog import Backlog
from parti.worker.channel import Channel, FellBehind, Interrupted
from parti.worker.durable import Durable, is_gone
from parti.worker.health import Part
from parti.worker.inbox import Inbox
from parti.worker.mending import Mender
from parti.worker.room import Room
from parti.worker.runtime import Runtime


class Session:
    """The pull loop of one worker. `run()` ends only by cancellation or by a bug."""

    def __init__(
        self,
        runtime: Runtime,
        durable: Durable,
        channel: Channel,
        room: Room,
        inbox: Inbox,
        mender: Mender,
        backlog: Backlog,
    ) -> None:
        self._options = runtime.js.connection.connect_options
        self._config = runtime.config
        self._durable = durable
        self._channel = channel
        self._room = room
        self._inbox = inbox
        self._mender = mender
        self._backlog = backlog
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._backoff = runtime.backoff
        self._back = asyncio.Event()
        self._refresh = False
        self._first = False  # nothing was received since the last attach
        self._watch_lag = False

    def __repr__(self) -> str:
        return f"<Session {self._durable.name} {self._channel!r}>"

    def reconnected(self) -> None:
        """NATS is reachable again: retry now, since after a long outage the next try may be seconds away."""
        self._back.set()

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        waits = self._backoff.delays()
        try:
            while True:
                await self._channel.running.wait()
                try:
                    await self._attach()
                    error = await self._pull()
                except PartiError as failure:
                    error = failure
                if isinstance(error, Interrupted):
                    if isinstance(error, FellBehind):
                        await self._read_backlog()
                    continue
                if self._recorder.health.failures(Part.ITERATOR) == 0:
                    waits = self._backoff.delays()  # it worked in between
                    self._note(error)
                    continue  # the first failure is retried at once
                self._note(error)
                wait = next(waits, self._backoff.cap)
                self._recorder.retried("iterate", self._recorder.health.failures(Part.ITERATOR), wait, error)
                await self._rest(wait)
        finally:
            self._channel.stop_pull()
            await self._channel.close()

    async def _rest(self, seconds: float) -> None:
        """Wait before the next try, but not longer than until NATS is reachable again."""
        self._back.clear()
        await first_of(self._clock.sleep(seconds), self._back.wait())

    def _note(self, error: PartiError) -> None:
        """Count a failure of the loop, and request a refresh when there were too many (once per window)."""
        now = self._clock.now()
        self._channel.stale = True
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
            return  # recreating the consumer is counted separately
        self._recorder.failed(Part.ITERATOR, now, error)
        if self._recorder.health.escalate(now):
            self._refresh = True
            self._recorder.metrics.count(m.ITERATOR_ESCALATIONS, reason="consecutive_failures")
            self._recorder.event("worker.escalated", op="iterate", result="refresh", error=str(error), warn=True)

    async def _attach(self) -> None:
        """When this returns the connection is up and the consumer is at our position."""
        await self._channel.open(self._options, self._durable.name, anew=self._refresh)
        async with self._durable.changing:
            if self._refresh:
                await self._mender.reapply()
            while self._channel.stale:  # an interrupt during the reset requires another reset
                await self._mender.set_back("iterator_error" if self._refresh else "not_found")
            self._refresh = False
        await self._backlog.check()

    async def _pull(self) -> PartiError:
        """Pull until an error occurs, and return it."""
        connection, config, channel = self._channel.connection, self._config, self._channel
        assert connection is not None
        if channel.stale:
            return Interrupted("interrupted before the first pull")
        size = self._room.batches.size
        self._first, self._watch_lag = True, self._backlog.cliff_threatens()
        pull = LivePull(
            connection,
            config.stream,
            self._durable.name,
            PullOwner(self._on_batch, self._on_trouble, self._room.capacity, on_few=self._take),
            PullSettings(
                batch=size,
                prefetch=size * config.prefetch_depth,
                expires=config.pull_timeout,
                heartbeat=config.idle_heartbeat,
                max_bytes=max(1, config.max_bytes // (2 * config.prefetch_depth)),
            ),
            next_sequence=channel.next_sequence,
        )
        connection.on_error = self._on_trouble  # for example a missing permission; the server keeps the connection
        # No error for longer than the watchdog needs: the pull works, there is just nothing to do.
        stable = asyncio.get_running_loop().call_later(3 * config.idle_heartbeat, self._works)
        trouble = channel.begin(pull)
        try:
            await first_of(trouble, connection.lost)
            error = trouble.result() if trouble.done() else connection.lost.result()
            if isinstance(error, ReaderBroke):
                raise error.bug
            return error
        finally:
            stable.cancel()
            channel.end()

    def _on_batch(self, deliveries: Deliveries) -> None:
        """Process one large read."""
        self._take(items_of(deliveries), int(deliveries.pending[-1]))

    def _take(self, items: list[Item], pending: int) -> None:
        """Process one read, and its information about the consumer; `pending` more wait at the server."""
        self._inbox.take(items, pending)
        if self._first:
            self._first = False
            self._works()
        if self._watch_lag and (lag := self._inbox.lag) >= self._config.catch_up_lag:
            self._channel.interrupt(FellBehind(f"{lag} sequences behind"))
        if self._inbox.clogged:
            self._channel.interrupt(Interrupted("deliveries of partitions that went fill the consumer"))

    def _works(self) -> None:
        now = self._clock.now()
        self._recorder.worked(Part.ITERATOR, now)
        self._recorder.worked(Part.RECREATION, now)

    def _on_trouble(self, error: PartiError) -> None:
        if isinstance(error, TooManyPulls | MaxAckPendingReached):
            # Only this pull ended; acks in transit make room again.
            asyncio.get_running_loop().call_later(0.05, self._channel.kick)
            return
        self._channel.report(error)

    async def _read_backlog(self) -> None:
        try:
            await self._backlog.read()
        except PartiError as error:
            self._backlog.failed()
            self._note(error)
            await self._clock.sleep(next(self._backoff.delays(), self._backoff.base))
