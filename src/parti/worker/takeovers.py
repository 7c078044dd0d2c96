"""Partitions that come: each is brought to its target beside everything else, and that is noted when it is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from parti.backoff import FAST
from parti.errors import PartiError
from parti.worker.catchup import CatchUpReader
from parti.worker.channel import Channel, Interrupted
from parti.worker.durable import Durable
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.routing import SubjectTemplate
from parti.worker.runtime import Runtime

CALLS = 16  # questions to the server at once


class TakeOvers:
    """Range reads and questions to the server until each partition stands at its target; from `begin` on.

    `finished` is awaited after each, so that a crash need not repeat it.
    """

    def __init__(
        self,
        runtime: Runtime,
        ledger: Ledger,
        channel: Channel,
        durable: Durable,
        reader: CatchUpReader,
        *,
        finished: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = runtime.config
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._backoff = runtime.backoff
        self._ledger = ledger
        self._channel = channel
        self._durable = durable
        self._reader = reader
        self._finished = finished
        self._template = SubjectTemplate(runtime.config.subject_template)
        self._tasks: asyncio.TaskGroup | None = None
        self._behind: list[PartitionState] = []
        """Partitions whose range read has not begun."""
        self._reading = False

    def work_in(self, tasks: asyncio.TaskGroup | None) -> None:
        """Do everything in this group; None: nothing more."""
        self._tasks = tasks

    def begin(self, states: list[PartitionState]) -> None:
        """Bring these partitions to their targets, beside everything else."""
        if self._ledger.by_reset:
            if states:
                self._channel.interrupt(Interrupted("partitions begin: what is left of them is delivered anew"))
            return
        self._behind += states
        if self._behind and not self._reading and self._tasks is not None:
            self._reading = True
            self._tasks.create_task(self._read_behind(), name="parti-worker-catchup")

    def begun_by_reset(self, states: list[PartitionState]) -> None:
        """A reset of the consumer made these live: what is left of them comes by itself."""
        if states and self._tasks is not None:
            self._tasks.create_task(self._reach(states), name="parti-worker-reach")

    async def _read_behind(self) -> None:
        """One read after the other; all partitions that come while one is under way share the next.

        After a crash or an outage a worker gets its partitions one by one, within milliseconds. With a read for each
        the last of them began only when all others had been read.
        """
        assert self._tasks is not None
        waits = self._backoff.delays()
        await asyncio.sleep(0)
        while self._behind:
            states = self._nearest()
            try:
                await self._reader.take_over(states, self._subjects_of(states))
            except PartiError as error:
                self._recorder.event("worker.take_over", op="catch_up", result="retry", error=str(error), warn=True)
                self._behind += states
                await self._clock.sleep(next(waits, self._backoff.cap))
                continue
            waits = self._backoff.delays()
            self._tasks.create_task(self._taken_over(states), name="parti-worker-taken-over")
        self._reading = False

    def _nearest(self) -> list[PartitionState]:
        """Those that are about as far as the most advanced one: nobody waits for the backlog of another."""
        reach = max(state.received_through for state in self._behind) - self._config.catch_up_lag
        states = [state for state in self._behind if state.received_through >= reach]
        self._behind = [state for state in self._behind if state.received_through < reach]
        return states

    async def _taken_over(self, states: list[PartitionState]) -> None:
        """Everything up to the targets is with the lanes: when it is done, say so where a crash would look."""
        for state in states:
            if state.behind and self._ledger.has(state):
                state.caught_up = asyncio.Event()
                await state.caught_up.wait()
        await self._tell(states)

    async def _reach(self, states: list[PartitionState]) -> None:
        """Bring the positions of these partitions to their targets also where nothing is left up to there.

        Only the stream's leader can say so: the consumer's may know less than was published
        (docs/evidence/cluster.md#c4).
        """
        calls = asyncio.Semaphore(CALLS)
        await asyncio.gather(*(self._reach_one(state, calls) for state in states))
        await self._tell(states)

    async def _reach_one(self, state: PartitionState, calls: asyncio.Semaphore) -> None:
        ledger, subject = self._ledger, self._template.subject(state.partition)
        waits = FAST.delays()
        while state.range_end is not None and ledger.has(state) and not state.stopped:
            target = state.range_end
            if max(state.received_through, ledger.verified) >= target:
                break
            with contextlib.suppress(PartiError):
                async with calls:
                    left = await self._durable.next_sequence(subject, state.received_through + 1)
                if left is None or left > target:
                    state.received_through = max(state.received_through, target)
                    break
            await self._clock.sleep(next(waits))
        state.range_end = None

    async def _tell(self, states: list[PartitionState]) -> None:
        self._recorder.event("worker.take_over", op="catch_up", result="success", partitions=len(states))
        await self._finished()

    def _subjects_of(self, states: list[PartitionState]) -> tuple[str, ...]:
        return tuple(sorted(self._template.subject(state.partition) for state in states))
