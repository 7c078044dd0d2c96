"""Keeping the consumer what its worker needs: mended when somebody changed it, made anew when it is gone.

Neither loses, skips or repeats anything that is done: positions are our own, and everything behind them is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from parti.backoff import retry
from parti.errors import PartiError
from parti.observe import worker_metrics as m
from parti.worker.durable import Durable, Memory, StreamFacts
from parti.worker.errors import StreamReplacedUnderWorker
from parti.worker.health import Part
from parti.worker.inbox import Inbox
from parti.worker.ledger import PartitionState
from parti.worker.runtime import Runtime
from parti.worker.session import Interrupted, Session


class Mender:
    """Call everything but `memory` with the engine's lock held: it changes the consumer."""

    def __init__(
        self,
        runtime: Runtime,
        durable: Durable,
        inbox: Inbox,
        session: Session,
        *,
        catch_up: Callable[[list[PartitionState]], None],
        forget_positions: Callable[[], None],
    ) -> None:
        self.expected_stream = ""
        """When the stream was made that positions speak of; empty when they are our own."""
        self.on_stream_replaced: Callable[[str], None] = lambda reason: None  # noqa: ARG005
        self._config = runtime.config
        self._durable = durable
        self._inbox = inbox
        self._session = session
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._backoff = runtime.backoff
        self._catch_up = catch_up
        self._forget_positions = forget_positions
        self._stream_created = ""
        self._mending = False  # a repair was begun, and is to be finished
        durable.on_tampered = self._tampered

    def meet_stream(self, facts: StreamFacts) -> None:
        """This is the stream from now on; raises `StreamReplacedUnderWorker` when it is not the expected one."""
        self._inbox.retention, self._inbox.file_storage = facts.retention, facts.file
        self._stream_created = facts.created
        if self.expected_stream and facts.created != self.expected_stream:
            self._refuse_stream(facts)

    def memory(self) -> Memory:
        """What a successor has to know beyond the ack floor."""
        ledger = self._inbox.ledger
        catching = {key: state.cursor(0) for key, state in ledger.states.items() if state.behind}
        return Memory(catching, ledger.high, tuple(sorted(ledger.owed)))

    async def verify(self) -> None:
        """After this returns the consumer has our filters, and every partition gets what it may have missed meanwhile.

        Only what was delivered before a look that found everything in order counts as received by partitions that had
        no message of their own since: somebody may have taken their filter away.
        """
        ledger, durable = self._inbox.ledger, self._durable
        high = ledger.high
        intact = await durable.intact()
        if intact is None:
            return  # the pull loop notices by itself, and makes it anew behind what is certain
        if intact and not self._mending:
            ledger.verified = max(ledger.verified, high)
            return
        self._tampered()
        await durable.update(durable.filters, self.memory())
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
        for state in self._inbox.ledger.states.values():
            self._inbox.put_aside(state)

    async def _read_missed(self) -> None:
        """The consumer has our filters again: every partition goes on from its own last certain position."""
        last = await self._durable.last_sequence()
        missed = [state for state in self._inbox.ledger.states.values() if not state.stopped]
        for state in missed:
            self._inbox.extend(state, max(last, state.target or 0))
        self._mending = False
        self._catch_up(missed)
        self._session.interrupt(Interrupted("the consumer was changed by somebody else"))

    async def recreate(self, reason: str, filters: tuple[str, ...] | None = None) -> None:
        """Make the consumer anew just behind what is done: nothing that is done comes again."""
        durable, metrics, started = self._durable, self._recorder.metrics, self._clock.now()
        await self._notice_new_stream()
        # Never by the configured start: that would skip what came while there was no consumer.
        ledger = self._inbox.ledger
        after = ledger.lowest() if self._inbox.by_reset else min(ledger.floor(), ledger.verified)
        chosen = filters if filters is not None else durable.filters

        async def attempt() -> object:
            metrics.count(m.RECREATION_ATTEMPTS, reason=reason)
            try:
                return await durable.create_once(chosen, self.memory(), after=after, retention=self._inbox.retention)
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
        if self.expected_stream:
            self._refuse_stream(facts)
        self._stream_created = facts.created
        self._inbox.retention, self._inbox.file_storage = facts.retention, facts.file
        ledger = self._inbox.ledger
        ledger.stand_at(0)
        ledger.owed.clear()
        self._forget_positions()
        for state in ledger.states.values():
            self._inbox.drop(state)
            state.received_through, state.highest_done, state.target, state.range_end = 0, 0, None, None
        self._recorder.event("worker.stream_replaced", op="create", result="started_over", warn=True)

    def _refuse_stream(self, facts: StreamFacts) -> NoReturn:
        """Positions are the manager's, and of another stream: it has to begin anew. Nothing may start before it did."""
        for state in self._inbox.ledger.states.values():
            state.stopped, state.finish_through = True, 0
        self.on_stream_replaced(f"the stream was made anew at {facts.created}")
        raise StreamReplacedUnderWorker(f"stream {self._config.stream!r} was made anew at {facts.created}")
