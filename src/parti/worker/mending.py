"""Keeping the consumer what its worker needs: mended when somebody changed it, made anew when it is gone.

Neither loses, skips or repeats anything that is done: positions are our own, and everything behind them is read again.
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
    """Call everything but `memory` and `remember` with `durable.changing` held: it changes the consumer."""

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
        self._mending = False  # a repair was begun, and is to be finished

    def meet_stream(self, facts: StreamFacts) -> None:
        """This is the stream from now on; raises `StreamReplacedUnderWorker` when it is not the expected one."""
        self._ledger.retention, self._stream_created = facts.retention, facts.created
        self._check_expected(facts)

    def memory(self) -> Memory:
        """What a successor has to know beyond the ack floor."""
        ledger = self._ledger
        catching = {key: state.cursor(0) for key, state in ledger.states.items() if state.behind}
        return Memory(catching, ledger.high, tuple(sorted(ledger.owed)))

    async def remember(self) -> None:
        """A catch-up is done, so that a crash need not repeat it. If this fails the next update brings it."""
        with contextlib.suppress(PartiError):
            async with self._durable.changing:
                if self._durable.memory() != self.memory():
                    await self.update(self._durable.filters, self.memory())

    async def update(self, filters: Sequence[str], memory: Memory) -> None:
        """Replace the consumer's filters and metadata; raises `ConsumerDoesNotExist` when it is gone.

        What somebody else's change left out meanwhile is not known, and once our filters are back, what comes does not
        tell: so that is noted before. Where filters are added, the ack floor of a work queue has to be back at the
        start by then: what lies below it and matches a filter counts as acknowledged, and a replicated server deletes
        it (decision 9).
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
        """Set the consumer of a work queue back to the start; nothing is delivered before the lock is free again.

        For filters that come: an ack floor above what is left of their partitions would be taken for its acks.
        """
        if self._ledger.retention is not Retention.WORKQUEUE:
            return
        self._channel.interrupt(Interrupted("filters come"))
        await self._channel.quiet.wait()
        await self.set_back("not_found")

    async def set_back(self, reason: str) -> None:
        """The consumer stands at our position, and nothing is stale but for whoever interrupted meanwhile.

        `reason`: why it is made anew, if it is gone.
        """
        self._channel.stale = False
        try:
            await self._resync(reason)
        except BaseException:
            self._channel.stale = True
            raise

    async def _resync(self, reason: str) -> None:
        """Where an ack deletes, our position is the first message that is left."""
        ledger, inbox = self._ledger, self._inbox
        joining = inbox.joining() if ledger.by_reset else []
        if ledger.retention is Retention.WORKQUEUE:
            after = 0  # what is left of a work queue is what is not done, or whose ack got lost
        elif ledger.retention is Retention.INTEREST:
            # From the ack floor on: an ack that got lost keeps its message alive. From further down, when a partition
            # that came is not done from there on: the reset makes its messages ours, also older ones (docs/guarantees).
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

        Only what was delivered before a look that found everything in order counts as received by partitions that had
        no message of their own since: somebody may have taken their filter away.
        """
        ledger, durable = self._ledger, self._durable
        high = ledger.high
        intact = await durable.intact()
        if intact is None:
            return  # the pull loop notices by itself, and makes it anew behind what is certain
        if intact and not self._mending:
            ledger.verified = max(ledger.verified, high)
            return
        self._tampered()
        await self.update(durable.filters, self.memory())
        await self._read_missed()

    async def finish(self) -> None:
        """Our filters are in force again: what a repair had begun is done to its end."""
        if self._mending:
            await self._read_missed()

    def _tampered(self) -> None:
        """Somebody changed the consumer: from now on only what is read or delivered anew counts as received."""
        if not self._mending:
            self._recorder.metrics.count(m.CONSUMER_REPAIRS)
            self._recorder.event(
                "worker.consumer_changed", op="verify", result="mended", filters=len(self._durable.filters), warn=True
            )
        self._mending = True
        for state in self._ledger.states.values():
            self._inbox.put_aside(state)

    async def _read_missed(self) -> None:
        """The consumer has our filters again: every partition goes on from its own last certain position."""
        last = await self._durable.last_sequence()
        missed = [state for state in self._ledger.states.values() if not state.stopped]
        for state in missed:
            self._inbox.extend(state, max(last, state.target or 0))
        self._mending = False
        self._take_overs.begin(missed)
        self._channel.interrupt(Interrupted("the consumer was changed by somebody else"))

    async def recreate(self, reason: str, filters: tuple[str, ...] | None = None) -> None:
        """Make the consumer anew just behind what is done: nothing that is done comes again."""
        durable, metrics, started = self._durable, self._recorder.metrics, self._clock.now()
        await self._notice_new_stream()
        # Never by the configured start: that would skip what came while there was no consumer.
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
        """A stream that was deleted and made anew counts from 1 again: known positions mean nothing there."""
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
        """Positions of another stream are the manager's, who has to begin anew: nothing may start before it did."""
        if self._expected is None or facts.created == self._expected.created:
            return
        for state in self._ledger.states.values():
            state.stopped, state.finish_through = True, 0
        self._expected.replaced(f"the stream was made anew at {facts.created}")
        raise StreamReplacedUnderWorker(f"stream {self._config.stream!r} was made anew at {facts.created}")
