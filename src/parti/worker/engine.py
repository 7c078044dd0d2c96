"""The running worker: its components wired together, and the tasks that drive them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from parti.dead_letters import DeadLetterWriter
from parti.errors import PartiError
from parti.model import Retention
from parti.observe import worker_metrics as m
from parti.wire.events import ConnectionEvent, ConnectionEventKind
from parti.wire.filters import SubjectFilter
from parti.worker.assigner import Assigner
from parti.worker.attempts import Attempts
from parti.worker.backlog import Backlog
from parti.worker.catchup import CatchUpReader
from parti.worker.channel import Channel, Interrupted
from parti.worker.durable import Durable
from parti.worker.errors import WorkerClosed
from parti.worker.health import Part
from parti.worker.inbox import Inbox
from parti.worker.info import PartitionInfo, Shown
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.mending import Mender
from parti.worker.room import Room
from parti.worker.routing import Routes, SubjectTemplate
from parti.worker.runtime import Runtime
from parti.worker.session import Session
from parti.worker.takeovers import CALLS, TakeOvers
from parti.worker.updates import Batch, Coalescer
from parti.worker.watch import HandlerWatch

_ALMOST_IDLE = 8  # open messages: with more, clearing leftovers waits
_VERIFY_EVERY = 2.0  # seconds; an idle partition's cursor lags this much: a crash reads that again, but repeats no more
_CLOSING_CALLS = 2.0  # seconds that the last calls of close() may take


class Engine:
    """The running worker: its components, and the tasks that drive them."""

    def __init__(self, runtime: Runtime) -> None:
        self.config = config = runtime.config
        self.recorder = runtime.recorder
        self.clock = runtime.clock
        self.backoff = runtime.backoff
        self.ledger = ledger = Ledger(
            Routes(SubjectTemplate(config.subject_template), ()), lane_per_key=config.lanes == "key"
        )
        self.channel = channel = Channel()
        self.room = room = Room(runtime, ledger, channel)
        self.attempts = Attempts(runtime, let_go=room.let_go, on_bug=self._bug)
        self.watch = HandlerWatch(runtime, self.attempts, ledger.taken)
        self.inbox = inbox = Inbox(runtime, ledger, channel, room, self.attempts.pool)
        self.durable = durable = Durable(runtime)
        self.catch_up = CatchUpReader(runtime, ledger, room, inbox, durable)
        self.take_overs = TakeOvers(runtime, ledger, channel, durable, self.catch_up, finished=self._remember)
        self.mender = mender = Mender(runtime, durable, ledger, channel, inbox, self.take_overs)
        backlog = Backlog(runtime, ledger, durable, self.catch_up)
        self.session = Session(runtime, durable, channel, room, inbox, mender, backlog)
        self.assigner = Assigner(runtime, durable, ledger, channel, inbox, self.take_overs, mender)
        self.coalescer = Coalescer(
            window=config.update_coalescing_window, interval=config.min_update_interval, clock=runtime.clock
        )
        self._bugs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._js = runtime.js
        self._left_over: set[int] = set()
        """Messages that were done and still in the stream at the last check."""
        self._not_ours: set[int] = set()
        """Done messages of an interest stream that another consumer retains."""

    def partition_info(self, state: PartitionState) -> PartitionInfo:
        return PartitionInfo(
            partition=state.partition,
            lease=state.lease,
            cursor=self.ledger.cursor(state.id),
            target=(state.target if state.target is not None else state.range_end) if state.behind else None,
            in_hand=len(state.open),
            done=state.done,
            retries=state.retries,
            dead_letters=state.dead_letters,
            stopped=state.stopped,
            held=state.stopped and state.target is not None,
        )

    def shown(self) -> Shown:
        """The state shown to operators."""
        ledger = self.ledger
        return Shown(
            worker_id=self.recorder.worker_id,
            consumer=self.durable.name,
            subjects=ledger.routes.subjects,
            in_hand=ledger.in_hand,
            batch_size=self.room.batches.size,
            pulling=self.channel.pulling,
            partitions=tuple(self.partition_info(state) for state in ledger.states.values()),
        )

    async def run(self) -> None:
        """Runs until cancelled. An unexpected error ends the worker; its health shows it and close() raises it."""
        unlisten = self._js.connection.add_listener(self._on_connection)
        self.watch.start()
        try:
            async with asyncio.TaskGroup() as group:
                self.take_overs.work_in(group)
                group.create_task(self._until_bug(), name="parti-worker-lanes")
                group.create_task(self._updates(), name="parti-worker-updates")
                group.create_task(self.session.run(), name="parti-worker-session")
                group.create_task(self._tick(), name="parti-worker-tick")
                group.create_task(self._verify(), name="parti-worker-verify")
                # The first filter makes pyarrow import pandas, which takes a second: not during a take-over.
                group.create_task(asyncio.to_thread(SubjectFilter, ("warm.up",)), name="parti-worker-warm-up")
        except BaseExceptionGroup as bug:
            self.recorder.broke(bug.exceptions[0], self.clock.now())
            self.coalescer.fail(WorkerClosed(f"the worker ended: {bug.exceptions[0]!r}"))
            raise
        finally:
            unlisten()
            self.take_overs.work_in(None)

    def _bug(self, bug: BaseException) -> None:
        if not self._bugs.done():
            self._bugs.set_exception(bug)

    async def _until_bug(self) -> None:
        """A lane that ended on a bug would stall silently: end the worker instead."""
        await self._bugs

    async def _remember(self) -> None:
        await self.mender.remember()

    def _on_connection(self, event: ConnectionEvent) -> None:
        if event.kind is ConnectionEventKind.RECONNECTED:
            self.session.reconnected()

    # -- updates ------------------------------------------------------------------------------------------------------

    async def _updates(self) -> None:
        waits = self.backoff.delays()
        while True:
            batch = await self.coalescer.take()
            try:
                await self._apply(batch)
                waits = self.backoff.delays()
            except PartiError as error:
                batch.settle(error)
                # docs/evidence/go-library.md#w17: a failed update is not forgotten. It is retried unless a newer one is
                # there.
                await self.clock.sleep(next(waits, self.backoff.cap))
                if not self.coalescer.pending:
                    self.coalescer.put(batch.wanted)
            except BaseException as error:
                batch.settle(WorkerClosed("the worker was closed before the update was in force"))
                raise error

    async def _apply(self, batch: Batch) -> None:
        metrics, recorder, started = self.recorder.metrics, self.recorder, self.clock.now()
        metrics.count(m.COALESCED_BATCHES)
        metrics.count(m.COALESCED_UPDATES, len(batch.waiters))
        try:
            changed = await self.assigner.apply(batch.wanted)
        except PartiError as error:
            metrics.count(m.UPDATES, result="failure")
            metrics.count(m.UPDATE_FAILURES)
            recorder.failed(Part.UPDATE, self.clock.now(), error)
            recorder.event("worker.update", op="update", result="failure", error=str(error), warn=True)
            raise
        if self.attempts.office is None:
            self.attempts.office = DeadLetterWriter(self._js, self.config.stream, self.durable.name, self.durable.scope)
        recorder.worked(Part.UPDATE, self.clock.now())
        if changed:
            took = self.clock.now() - started
            metrics.count(m.UPDATES, result="success")
            metrics.observe(m.UPDATE_DURATION, took)
            recorder.event(
                "worker.update", op="update", result="success", coalesced=len(batch.waiters), took=round(took, 4)
            )
        else:
            metrics.count(m.UPDATES, result="noop")
            metrics.count(m.UPDATE_SKIPPED)
        batch.settle(None)

    # -- supervising the consumer -------------------------------------------------------------------------------------

    async def _verify(self) -> None:
        """Check every few seconds that the consumer is still as we created it."""
        while True:
            await self.clock.sleep(_VERIFY_EVERY)
            if self.durable.known and self.channel.pulling:
                with contextlib.suppress(PartiError):  # the pull loop has the same trouble and reports it
                    async with self.durable.changing:
                        await self.mender.verify()
                    self.room.waits(self.durable.pending)
                    if self.ledger.by_reset and self.ledger.in_hand <= _ALMOST_IDLE:
                        await self._clear_leftovers()

    async def _clear_leftovers(self) -> None:
        """Redeliver and acknowledge messages that are done but remain in the stream because their ack got lost.

        The server itself would wait for `ack_wait`, and on a replicated work queue it may never redeliver.
        """
        ledger, calls = self.ledger, asyncio.Semaphore(CALLS)
        first = (await self.durable.facts()).first_seq
        states = [s for s in ledger.states.values() if s.target is None and ledger.cursor(s.id) >= first]
        left = [found for found in await asyncio.gather(*(self._leftover(s, calls) for s in states)) if found]
        again = (set(left) & self._left_over) - self._not_ours
        self._not_ours &= set(left)
        if again:
            if ledger.retention is Retention.INTEREST:
                self._not_ours |= again  # redelivered and still there: another consumer has not handled it
            self.recorder.event("worker.leftovers", op="verify", result="delivered_anew", partitions=len(left))
            self.channel.interrupt(Interrupted("handled messages are still in the stream"))
        self._left_over = set(left)

    async def _leftover(self, state: PartitionState, calls: asyncio.Semaphore) -> int | None:
        """The partition's first message in the stream, if it is done already."""
        subject = SubjectTemplate(self.config.subject_template).subject(state.partition)
        async with calls:
            first = await self.durable.next_sequence(subject, 1)
        if first is None or not self.ledger.has(state):  # it was removed while we asked
            return None
        return first if first <= self.ledger.cursor(state.id) and first not in state.open else None

    # -- time ---------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """In-progress heartbeats from receipt on, so that queueing never uses up a delivery."""
        third = self.config.ack_wait / 3
        while True:
            await asyncio.sleep(third)
            self.inbox.heartbeat(older_than=third * 0.9)

    # -- shutdown -----------------------------------------------------------------------------------------------------

    async def stop(self, main: asyncio.Task[None]) -> None:
        self.coalescer.fail(WorkerClosed("the worker was closed before the update was in force"))
        self.channel.pause()
        if not main.done():
            await self._drain()
        await self.attempts.halt()
        self.watch.stop()
        if not main.done():
            with contextlib.suppress(PartiError, TimeoutError):
                async with asyncio.timeout(_CLOSING_CALLS):
                    await self._note_leftovers()
            main.cancel()
        try:
            await main
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise

    async def abandon(self, main: asyncio.Task[None]) -> bool:
        """Stop everything at once; acks that were not sent yet are discarded.

        True when no handler was running. A running one may have an effect that is still on its way, or continue in a
        thread.
        """
        self.coalescer.fail(WorkerClosed("the worker was fenced before the update was in force"))
        self.channel.abort()
        quiet = await self.attempts.halt()
        self.watch.stop()
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)
        return quiet and self.attempts.handler.still

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await self.attempts.pool.idled()
        except TimeoutError:
            self.recorder.event(
                "worker.drain_timeout", op="close", result="released", in_hand=self.ledger.in_hand, warn=True
            )

    async def _note_leftovers(self) -> None:
        memory = self.mender.memory()
        left = {message.sequence for message in self.ledger.open_messages() if not message._lane.state.behind}
        memory = replace(memory, left=tuple(sorted(left | self.ledger.owed)))
        if self.durable.known and (left or memory.catching) and memory != self.durable.memory():
            async with self.durable.changing:
                await self.mender.update(self.durable.filters, memory)
