"""Keeps the consumer as its worker needs it: repaired after a foreign change, recreated when it is gone.

Neither loses, skips or repeats done messages: positions are our own, and everything after them is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from parti.backoff import retry
from parti.errors import PartiError
from parti.model import Retention
from parti.observe import worker_metrics as m
from parti.worker.channel import Channel, Interrupted
from parti.worker.durable import Durable, Memory, StreamFacts
from parti.worker.errors import StreamReplacedUnderWorker
from parti.worker.health import Part
from parti.worker.inbox import Inbox
from parti.worker.ledger import Ledger
from parti.worker.runtime import Runtime
from parti.worker.takeovers import TakeOvers

_NEVER = 1 << 62  # above every sequence


class Mender:
    """Hold `durable.changing` for every call except `memory` and `remember`: they change the consumer."""

    def __init__(
        self, runtime: Runtime, durable: Durable, ledger: Ledger, channel: Channel, inbox: Inbox, take_overs: TakeOvers
    ) -> None:
        self._expected = runtime.expected_stream
        self._config = runtime.config
        self._durable = durable
        self._ledger = ledger
        self._channel = channel
        self._inbox = inbox
        self._take_overs = take_overs
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._backoff = runtime.backoff
        self._stream_created = ""
        self._mending = False  # a repair was started and must be finished

    def meet_stream(self, facts: StreamFacts) -> None:
        """This is the stream from now on; raises `StreamReplacedUnderWorker` when it is not the expected one."""
        self._ledger.retention, self._stream_created = facts.retention, facts.created
        self._check_expected(facts)

    def memory(self) -> Memory:
        """What a successor must know beyond the ack floor."""
        ledger = self._ledger
        catching = {key: state.cursor(0) for key, state in ledger.states.items() if state.behind}
        return Memory(catching, ledger.high, tuple(sorted(ledger.owed)))

    async def remember(self) -> None:
        """Store that a catch-up is done, so that a crash does not repeat it. If this fails, the next update does it."""
        with contextlib.suppress(PartiError):
            async with self._durable.changing:
                if self._durable.memory() != self.memory():
                    await self.update(self._durable.filters, self.memory())

    async def update(self, filters: Sequence[str], memory: Memory) -> None:
        """Replace the consumer's filters and metadata; raises `ConsumerDoesNotExist` when it is gone.

        What a foreign change excluded is unknown, and later deliveries do not show it once our filters are back: so it
        is recorded before. Where filters are added, the ack floor of a work queue must be back at the start by then:
        messages below it that match a filter count as acknowledged, and a replicated server deletes them (decision 9).
        """
        tampered, adds = await self._durable.look_before_update(filters)
        if tampered:
            self._tampered()
        if adds:
            await self.rewind()
        await self._durable.update(filters, memory)

    async def reapply(self) -> None:
        """Send the last applied configuration again."""
        if await self._durable.info() is not None:
            await self.update(self._durable.filters, self._durable.memory())

    async def rewind(self) -> None:
        """Set the consumer of a work queue back to the start; nothing is delivered before the lock is released.

        For added filters: an ack floor above their partitions' remaining messages would count as acks of those.
        """
        if self._ledger.retention is not Retention.WORKQUEUE:
            return
        self._channel.interrupt(Interrupted("filters come"))
        await self._channel.quiet.wait()
        await self.set_back("not_found")

    async def set_back(self, reason: str) -> None:
        """When this returns the consumer is at our position, and stale only if someone interrupted meanwhile.

        `reason`: why it is recreated, if it is gone.
        """
        self._channel.stale = False
        try:
            await self._resync(reason)
        except BaseException:
            self._channel.stale = True
            raise

    async def _resync(self, reason: str) -> None:
        """Where an ack deletes, our position is the first remaining message."""
        ledger, inbox = self._ledger, self._inbox
        joining = inbox.joining() if ledger.by_reset else []
        if ledger.retention is Retention.WORKQUEUE:
            after = 0  # what remains of a work queue is not done, or its ack got lost
        elif ledger.retention is Retention.INTEREST:
            # From the ack floor: a lost ack keeps its message in the stream. From lower, when an added partition is not
            # done up to there: the reset makes its messages ours, also older ones (docs/guarantees).
            after = min((s.received_through for s in joining), default=_NEVER)
        else:
            after = ledger.floor()
        if not await self._durable.reset(after, not_above_floor=ledger.by_reset):
            await self.recreate(reason)
        if ledger.by_reset:
            self._take_overs.begun_by_reset(inbox.restarted(joining))
        self._channel.next_sequence = 1
        self._recorder.event("worker.attached", op="iterate", result="success", after=after)

    async def verify(self) -> None:
        """After this returns the consumer has our filters, and every partition gets what it may have missed meanwhile.

        A partition without a message of its own counts as received only up to the last check that found the consumer
        intact: a foreign change may have removed its filter since.
        """
        ledger, durable = self._ledger, self._durable
        high = ledger.high
        intact = await durable.intact()
        if intact is None:
            return  # the pull loop notices this itself and recreates it just after what is done
        if intact and not self._mending:
            ledger.verified = max(ledger.verified, high)
            return
        self._tampered()
        await self.update(durable.filters, self.memory())
        await self._read_missed()

    async def finish(self) -> None:
        """Our filters are in force again: finish a repair that was started."""
        if self._mending:
            await self._read_missed()

    def _tampered(self) -> None:
        """Another party changed the consumer: from now on only what is read or delivered again counts as received."""
        if not self._mending:
            self._recorder.metrics.count(m.CONSUMER_REPAIRS)
            self._recorder.event(
                "worker.consumer_changed", op="verify", result="mended", filters=len(self._durable.filters), warn=True
            )
        self._mending = True
        for state in self._ledger.states.values():
            self._inbox.put_aside(state)

    async def _read_missed(self) -> None:
        """The consumer has our filters again: every partition continues from its last verified position."""
        last = await self._durable.last_sequence()
        missed = [state for state in self._ledger.states.values() if not state.stopped]
        for state in missed:
            self._inbox.extend(state, max(last, state.target or 0))
        self._mending = False
        self._take_overs.begin(missed)
        self._channel.interrupt(Interrupted("another client changed the consumer"))

    async def recreate(self, reason: str, filters: tuple[str, ...] | None = None) -> None:
        """Recreate the consumer just after what is done: nothing that is done is delivered again."""
        durable, metrics, started = self._durable, self._recorder.metrics, self._clock.now()
        await self._notice_new_stream()
        # Never at the configured start: that would skip messages published while there was no consumer.
        ledger = self._ledger
        after = ledger.lowest() if ledger.by_reset else min(ledger.floor(), ledger.verified)
        chosen = filters if filters is not None else durable.filters

        async def attempt() -> object:
            metrics.count(m.RECREATION_ATTEMPTS, reason=reason)
            try:
                return await durable.create_once(chosen, self.memory(), after=after, retention=ledger.retention)
            except PartiError as error:
                self._recorder.failed(Part.RECREATION, self._clock.now(), error)
                raise

        try:
            await retry(
                attempt,
                backoff=replace(self._backoff, max_tries=self._config.max_recreation_retries),
                clock=self._clock,
                on_retry=lambda tries, wait, error: self._recorder.retried("create", tries, wait, error),
            )
        except PartiError as error:
            metrics.count(m.RECREATIONS, result="failure", reason=reason)
            self._recorder.event("worker.recreated", op="create", result="failure", error=str(error), warn=True)
            raise
        took = self._clock.now() - started
        metrics.count(m.RECREATIONS, result="success", reason=reason)
        metrics.observe(m.RECREATION_DURATION, took)
        self._recorder.worked(Part.RECREATION, self._clock.now())
        self._recorder.event("worker.recreated", op="create", result="success", after=after, took=round(took, 3))

    async def _notice_new_stream(self) -> None:
        """A stream that was deleted and recreated counts from 1 again: known positions are void there."""
        facts = await self._durable.facts()
        if facts.created == self._stream_created:
            return
        self._check_expected(facts)
        self._ledger.retention, self._stream_created = facts.retention, facts.created
        self._ledger.begin_again()
        for state in self._ledger.states.values():
            self._inbox.drop(state)
            state.received_through, state.highest_done, state.target, state.range_end = 0, 0, None, None
        self._recorder.event("worker.stream_replaced", op="create", result="started_over", warn=True)

    def _check_expected(self, facts: StreamFacts) -> None:
        """The manager keeps positions of another stream and must start over: nothing may start before that."""
        if self._expected is None or facts.created == self._expected.created:
            return
        for state in self._ledger.states.values():
            state.stopped, state.finish_through = True, 0
        self._expected.replaced(f"the stream was recreated at {facts.created}")
        raise StreamReplacedUnderWorker(f"stream {self._config.stream!r} was recreated at {facts.created}")
