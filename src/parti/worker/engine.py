"""The running worker: its components wired together, and the tasks that drive them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from parti.backoff import FAST
from parti.dead_letters import DeadLetterWriter
from parti.errors import PartiError
from parti.model import Retention
from parti.observe import worker_metrics as m
from parti.wire.events import ConnectionEvent, ConnectionEventKind
from parti.wire.filters import SubjectFilter
from parti.worker.assigner import Assigner
from parti.worker.attempts import Attempts
from parti.worker.catchup import CatchUpReader
from parti.worker.durable import Durable
from parti.worker.errors import WorkerClosed
from parti.worker.health import Part
from parti.worker.inbox import Inbox
from parti.worker.info import PartitionInfo, Shown
from parti.worker.ledger import PartitionState
from parti.worker.routing import SubjectTemplate
from parti.worker.runtime import Runtime
from parti.worker.session import Interrupted, Session
from parti.worker.updates import Batch, Coalescer
from parti.worker.watch import HandlerWatch

_ALMOST_IDLE = 8  # messages in hand: what is left over is no hurry while there is work
_VERIFY_EVERY = 2.0  # seconds; a crash repeats no more for it, an idle partition is read again that far
_CALLS = 16  # questions to the server at once
_CLOSING_CALLS = 2.0  # seconds that the last calls of close() may take


class Engine:
    """The running worker: its components, and the tasks that drive them."""

    def __init__(
        self,
        runtime: Runtime,
    ) -> None:
        self.config = config = runtime.config
        self.recorder = recorder = runtime.recorder
        self.clock = runtime.clock
        self.backoff = runtime.backoff
        fence = runtime.fence
        lock = asyncio.Lock()
        self.attempts = Attempts(runtime, let_go=lambda message: self.inbox.let_go(message))
        self.inbox = Inbox(config, recorder, self.attempts.serve)
        self.inbox.pool.on_left = self.attempts.left_behind
        self.attempts.on_fenced = lambda state: self.inbox.pool.fence(state if fence.may_pull() else None)
        self.attempts.let_go = self.inbox.let_go  # without the detour: it is called once a message
        self.inbox.may_pull = self.inbox.pool.may_act = fence.may_pull
        self.durable = Durable(runtime)
        options = runtime.js.connection.connect_options
        self.catch_up = CatchUpReader(options, config.stream, self.inbox, recorder, self.durable.last_sequence)
        self.session = Session(
            runtime,
            self.durable,
            self.inbox,
            self.catch_up,
            lock=lock,
            recreate=lambda reason: self.assigner.mender.recreate(reason),
            begun=self._begun,
        )
        self.durable.before_adding = self.session.rewind
        self.assigner = Assigner(
            runtime, self.durable, self.inbox, self.session, lock=lock, catch_up=self.begin_catch_up
        )
        self.coalescer = Coalescer(
            window=config.update_coalescing_window, interval=config.min_update_interval, clock=runtime.clock
        )
        self.watch = HandlerWatch(
            self.inbox.pool,
            self.attempts,
            runtime,
            states=lambda: list(self.inbox.ledger.states.values()),
            in_hand=lambda: self.inbox.ledger.in_hand,
        )
        self.inbox.pool.on_bug = self._bug
        self._bugs: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._js = runtime.js
        self._lock = lock
        self._group: asyncio.TaskGroup | None = None
        self._behind: list[PartitionState] = []
        """Partitions whose range read has not begun."""
        self._left_over: set[int] = set()
        """Messages that were found to be done and still in the stream when that was looked at last."""
        self._not_ours: set[int] = set()
        """Those of an interest stream that another consumer keeps there."""
        self._reading = False

    def partition_info(self, state: PartitionState) -> PartitionInfo:
        return PartitionInfo(
            partition=state.partition,
            lease=state.lease,
            cursor=self.inbox.ledger.cursor(state.id),
            target=(state.target if state.target is not None else state.range_end) if state.behind else None,
            in_hand=len(state.open),
            done=state.done,
            retries=state.retries,
            dead_letters=state.dead_letters,
            stopped=state.stopped,
            held=state.stopped and state.target is not None,
        )

    def shown(self) -> Shown:
        """What an operator asks first."""
        ledger = self.inbox.ledger
        return Shown(
            worker_id=self.inbox.worker_id,
            consumer=self.durable.name,
            subjects=ledger.routes.subjects,
            in_hand=ledger.in_hand,
            batch_size=self.inbox.batches.size,
            pulling=self.inbox.pull is not None,
            partitions=tuple(self.partition_info(state) for state in ledger.states.values()),
        )

    async def run(self) -> None:
        """Until cancelled. What nobody expected ends the worker, and is shown by its health and raised by close()."""
        unlisten = self._js.connection.add_listener(self._on_connection)
        self.watch.start()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._until_bug(), name="parti-worker-lanes")
                group.create_task(self._updates(), name="parti-worker-updates")
                group.create_task(self.session.run(), name="parti-worker-session")
                group.create_task(self._tick(), name="parti-worker-tick")
                group.create_task(self._verify(), name="parti-worker-verify")
                # The first filter makes pyarrow look for pandas, whose import takes a second: not in a take-over.
                group.create_task(asyncio.to_thread(SubjectFilter, ("warm.up",)), name="parti-worker-warm-up")
        except BaseExceptionGroup as bug:
            self.recorder.broke(bug.exceptions[0], self.clock.now())
            self.coalescer.fail(WorkerClosed(f"the worker ended: {bug.exceptions[0]!r}"))
            raise
        finally:
            unlisten()
            self._group = None

    def _bug(self, bug: BaseException) -> None:
        if not self._bugs.done():
            self._bugs.set_exception(bug)

    async def _until_bug(self) -> None:
        """A lane that ended on a bug would stand still without a word: it ends the worker instead."""
        await self._bugs

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
                # docs/evidence/go-library.md#w17: a failed update is not forgotten. Unless a newer one is there, this
                # one is tried again.
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

    # -- catch-up -----------------------------------------------------------------------------------------------------

    def begin_catch_up(self, states: list[PartitionState]) -> None:
        """Bring these partitions to their targets, beside everything else."""
        if self.inbox.by_reset:
            if states:
                self.session.interrupt(Interrupted("partitions begin: what is left of them is delivered anew"))
            return
        self._behind += states
        if self._behind and not self._reading and self._group is not None:
            self._reading = True
            self._group.create_task(self._read_behind(), name="parti-worker-catchup")

    async def _read_behind(self) -> None:
        """One read after the other; all partitions that come while one is under way share the next.

        After a crash or an outage a worker gets its partitions one by one, within milliseconds. With a read for each
        the last of them began only when all others had been read.
        """
        assert self._group is not None
        waits = self.backoff.delays()
        await asyncio.sleep(0)
        while self._behind:
            states = self._nearest()
            try:
                await self.catch_up.take_over(states, self._subjects_of(states))
            except PartiError as error:
                self.recorder.event("worker.take_over", op="catch_up", result="retry", error=str(error), warn=True)
                self._behind += states
                await self.clock.sleep(next(waits, self.backoff.cap))
                continue
            waits = self.backoff.delays()
            self._group.create_task(self._taken_over(states), name="parti-worker-taken-over")
        self._reading = False

    def _nearest(self) -> list[PartitionState]:
        """Those that are about as far as the most advanced one: nobody waits for the backlog of another."""
        reach = max(state.received_through for state in self._behind) - self.config.catch_up_lag
        states = [state for state in self._behind if state.received_through >= reach]
        self._behind = [state for state in self._behind if state.received_through < reach]
        return states

    async def _taken_over(self, states: list[PartitionState]) -> None:
        """Everything up to the targets is with the lanes: when it is done, say so where a crash would look."""
        for state in states:
            if state.behind and self.inbox.ledger.states.get(state.id) is state:
                state.caught_up = asyncio.Event()
                await state.caught_up.wait()
        self.recorder.event("worker.take_over", op="catch_up", result="success", partitions=len(states))
        await self._remember()

    async def _remember(self) -> None:
        """A catch-up is done, so that a crash need not repeat it. If this fails the next update brings it."""
        with contextlib.suppress(PartiError):
            async with self._lock:
                if self.durable.memory() != self.assigner.mender.memory():
                    await self.durable.update(self.durable.filters, self.assigner.mender.memory())

    def _begun(self, states: list[PartitionState]) -> None:
        if states and self._group is not None:
            self._group.create_task(self._reach(states), name="parti-worker-reach")

    async def _reach(self, states: list[PartitionState]) -> None:
        """Bring the positions of these partitions to their targets also where nothing is left up to there.

        Only the stream's leader can say so: the consumer's may know less than was published
        (docs/evidence/cluster.md#c4).
        """
        calls = asyncio.Semaphore(_CALLS)
        await asyncio.gather(*(self._reach_one(state, calls) for state in states))
        self.recorder.event("worker.take_over", op="catch_up", result="success", partitions=len(states))
        await self._remember()

    async def _reach_one(self, state: PartitionState, calls: asyncio.Semaphore) -> None:
        ledger, subject = self.inbox.ledger, SubjectTemplate(self.config.subject_template).subject(state.partition)
        waits = FAST.delays()
        while state.range_end is not None and ledger.states.get(state.id) is state and not state.stopped:
            target = state.range_end
            if max(state.received_through, ledger.verified) >= target:
                break
            with contextlib.suppress(PartiError):
                async with calls:
                    left = await self.durable.next_sequence(subject, state.received_through + 1)
                if left is None or left > target:
                    state.received_through = max(state.received_through, target)
                    break
            await self.clock.sleep(next(waits))
        state.range_end = None

    def _subjects_of(self, states: list[PartitionState]) -> tuple[str, ...]:
        template = SubjectTemplate(self.config.subject_template)
        return tuple(sorted(template.subject(state.partition) for state in states))

    async def _verify(self) -> None:
        """Look every few seconds whether the consumer is still as we made it."""
        while True:
            await self.clock.sleep(_VERIFY_EVERY)
            if self.durable.known and self.session.pulling:
                with contextlib.suppress(PartiError):  # the pull loop has the same trouble, and says so
                    async with self._lock:
                        await self.assigner.mender.verify()
                    self.inbox.waits(self.durable.pending)
                    if self.inbox.by_reset and self.inbox.ledger.in_hand <= _ALMOST_IDLE:
                        await self._clear_leftovers()

    async def _clear_leftovers(self) -> None:
        """What is done and stays in the stream, because its ack got lost, is delivered once more and acknowledged.

        The server itself would wait for `ack_wait`, and on a replicated work queue it may never ask again.
        """
        ledger, calls = self.inbox.ledger, asyncio.Semaphore(_CALLS)
        first = (await self.durable.facts()).first_seq
        states = [s for s in ledger.states.values() if s.target is None and ledger.cursor(s.id) >= first]
        left = [found for found in await asyncio.gather(*(self._leftover(s, calls) for s in states)) if found]
        again = (set(left) & self._left_over) - self._not_ours
        self._not_ours &= set(left)
        if again:
            if self.inbox.retention is Retention.INTEREST:
                self._not_ours |= again  # delivered anew and still there: then another consumer has not handled it
            self.recorder.event("worker.leftovers", op="verify", result="delivered_anew", partitions=len(left))
            self.session.interrupt(Interrupted("handled messages are still in the stream"))
        self._left_over = set(left)

    async def _leftover(self, state: PartitionState, calls: asyncio.Semaphore) -> int | None:
        """The first message of the partition in the stream, when it is done already."""
        subject = SubjectTemplate(self.config.subject_template).subject(state.partition)
        async with calls:
            first = await self.durable.next_sequence(subject, 1)
        if first is None or self.inbox.ledger.states.get(state.id) is not state:  # it went while we asked
            return None
        return first if first <= self.inbox.ledger.cursor(state.id) and first not in state.open else None

    # -- time ---------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """In-progress heartbeats from receipt on, so that queueing never burns a delivery."""
        third = self.config.ack_wait / 3
        while True:
            await asyncio.sleep(third)
            self.inbox.heartbeat(older_than=third * 0.9)

    # -- the end ------------------------------------------------------------------------------------------------------

    async def stop(self, main: asyncio.Task[None]) -> None:
        self.coalescer.fail(WorkerClosed("the worker was closed before the update was in force"))
        self.session.pause()
        if not main.done():
            await self._drain()
        await self.inbox.pool.halt()
        self.watch.stop()
        self.attempts.handler.close()
        self.attempts.flush()
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
        """End everything at once; acks that were not sent yet never are.

        True when nothing was in the middle of a handler. What was may have an effect that is still on its way, or run
        on in a thread.
        """
        self.coalescer.fail(WorkerClosed("the worker was fenced before the update was in force"))
        if self.inbox.connection is not None:
            self.inbox.connection.abort()
        quiet = await self.inbox.pool.halt()
        self.watch.stop()
        self.attempts.handler.close()
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)
        return quiet and self.attempts.handler.still

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.config.drain_timeout):
                await self.inbox.pool.idled()
        except TimeoutError:
            self.recorder.event(
                "worker.drain_timeout", op="close", result="released", in_hand=self.inbox.ledger.in_hand, warn=True
            )

    async def _note_leftovers(self) -> None:
        ledger = self.inbox.ledger
        memory = self.assigner.mender.memory()
        left = {message.sequence for message in ledger.open_messages() if not message._lane.state.behind}
        memory = replace(memory, left=tuple(sorted(left | ledger.owed)))
        if self.durable.known and (left or memory.catching) and memory != self.durable.memory():
            async with self._lock:
                await self.durable.update(self.durable.filters, memory)
