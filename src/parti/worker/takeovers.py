"""Brings each added partition to its target, concurrently with everything else, and records when that is done."""

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

CALLS = 16  # concurrent requests to the server


class TakeOvers:
    """Range reads and requests to the server until each partition is at its target; starts with `begin`.

    `finished` is awaited after each, so that a crash does not repeat it.
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
        """Partitions whose range read has not started."""
        self._reading = False

    def work_in(self, tasks: asyncio.TaskGroup | None) -> None:
        """Run everything in this task group; None: start nothing more."""
        self._tasks = tasks

    def begin(self, states: list[PartitionState]) -> None:
        """Bring these partitions to their targets, in the background."""
        if self._ledger.by_reset:
            if states:
                self._channel.interrupt(Interrupted("partitions begin: what is left of them is delivered again"))
            return
        self._behind += states
        if self._behind and not self._reading and self._tasks is not None:
            self._reading = True
            self._tasks.create_task(self._read_behind(), name="parti-worker-catchup")

    def begun_by_reset(self, states: list[PartitionState]) -> None:
        """A reset of the consumer made these partitions live: the consumer delivers what remains of them."""
        if states and self._tasks is not None:
            self._tasks.create_task(self._reach(states), name="parti-worker-reach")

    async def _read_behind(self) -> None:
        """One read after the other; all partitions that arrive during a read share the next one.

        After a crash or an outage a worker gets its partitions one by one, within milliseconds. With one read per
        partition, the last would start only after all others were read.
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
        """The partitions within `catch_up_lag` of the most advanced one, so that none waits for another's backlog."""
        reach = max(state.received_through for state in self._behind) - self._config.catch_up_lag
        states = [state for state in self._behind if state.received_through >= reach]
        self._behind = [state for state in self._behind if state.received_through < reach]
        return states

    async def _taken_over(self, states: list[PartitionState]) -> None:
        """Everything up to the targets is in the lanes: when it is done, record it where a successor finds it."""
        for state in states:
            if state.behind and self._ledger.has(state):
                state.caught_up = asyncio.Event()
                await state.caught_up.wait()
        await self._tell(states)

    async def _reach(self, states: list[PartitionState]) -> None:
        """Bring the positions of these partitions to their targets, also where no messages remain up to there.

        Only the stream's leader can confirm that: the consumer's leader may not know the latest messages yet
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
