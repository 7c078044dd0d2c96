"""One attempt at a message: run the handler, then act on its outcome.

Whatever a handler does (raise anything, return nonsense, hang, cancel itself), its message is done, retried, or stored
in the dead-letter stream. It is never dropped. A result that arrives after the process lost its lease is ignored: the
next owner decides about that message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from parti.dead_letters import DeadLetterWriter, until_stored
from parti.errors import PartiError
from parti.model import Tried
from parti.observe import worker_metrics as m
from parti.outcomes import Ack, Again, Bury, DeadLetterReason, Decision, Reject, Retry, RetryPolicy, describe
from parti.worker.errors import HandlerCancelled, HandlerTimeout, LeaseOver
from parti.worker.handler import AdaptedHandler
from parti.worker.health import Part
from parti.worker.lanes import LanePool, Runner, Why
from parti.worker.message import Message
from parti.worker.runtime import Runtime
from parti.worker.wary import Wary

_FLUSH_AFTER = 0.05  # seconds that a latency sample may wait to be recorded together with others
_FLUSH_AT = 256
_BEFORE = "it failed as often as it may before it came to this process"
_ENDED = "processes ended, or lost their lease, while they handled it, as often as it may be tried"
_LONG = 0.25  # seconds of handler time after which the lease is checked again: less than its margin


class Attempts:
    """Runs handlers in lanes. Checks the fence before every start, with the lease that the handler would get."""

    def __init__(
        self, runtime: Runtime, *, let_go: Callable[[Message], None], on_bug: Callable[[BaseException], None]
    ) -> None:
        """`let_go`: called when the message is done or stored in the dead-letter stream. `on_bug`: see `LanePool`."""
        config = runtime.config
        self.pool = LanePool(
            self.serve,
            concurrency=config.concurrency,
            strict=config.order == "strict",
            may_act=runtime.fence.may_pull,
            on_left=self.left_behind,
            on_bug=on_bug,
        )
        self.office: DeadLetterWriter | None = None
        self.handler = handler = AdaptedHandler(runtime.handler, concurrency=config.concurrency)
        self._policy = RetryPolicy(config.max_deliver, config.delays)
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._backoff = runtime.backoff
        self._let_go = let_go
        self._latencies: list[float] = []
        self.ended = 0
        """Number of attempts that ended and whose latencies were recorded."""
        self._may_pull = runtime.fence.may_pull
        self._may_start = may_start = runtime.fence.may_start
        self._loop = asyncio.get_running_loop()
        self.now: Callable[[], float] = self._loop.time
        if type(self._loop).time is asyncio.BaseEventLoop.time:
            self.now = time.monotonic  # the same clock without a Python frame; it is read twice per message
        handler.on_left = self.left_behind
        handler.use_fence(may_start)

    async def serve(self, message: Message, runner: Runner) -> float | None:
        """Returns None when the message is finished, else the seconds until its next attempt."""
        state = message._lane.state
        if not self._may_start(state.lease):
            return self._refuse(message)
        wary = state.wary
        if wary is not None and (answer := await self._ask(message, wary)) is not None:
            return answer if answer >= 0 else None
        failed = state.tries.failed
        before = failed.get(message.sequence) if failed else None
        last = False
        if before is not None:
            message.attempt = max(message.attempt, before.attempts)
            last = message.attempt + 1 >= self._policy.max_deliver
            if last and (answer := await self._last_attempt(message, before, wary)) is not None:
                return answer if answer >= 0 else None
        message.attempt += 1
        message.lease = state.lease
        now = self.now
        started = runner.since = now()
        runner.handling = message
        outcome: object
        try:
            outcome = await self.handler.call(message)
        except asyncio.CancelledError:
            try:
                outcome = self._cancelled(runner)
            except asyncio.CancelledError:
                if last:
                    state.tries.take_back(message.sequence)
                raise
        except LeaseOver:
            return self._refuse(message, counted=last)
        except BaseException as error:  # SystemExit from a library is a failed attempt, not the end of a lane
            outcome = Retry(error=describe(error))
        finally:
            if wary is not None:
                wary.leave(message)
        took = now() - started
        if took > _LONG or runner.why is not None:
            why = runner.why
            if why is not None:
                self._forgive(runner)
            if runner.lost:
                return None  # left behind: another owner has the message by now
            if not self._may_start(state.lease):
                if why is None and not self.handler.in_thread:
                    # The lease ended while the handler ran without yielding: its last step blocked the event loop.
                    self._recorder.blocked = (state.id, message.sequence)
                return self._refuse(message, counted=last)
        latencies = self._latencies
        if not latencies:
            self._loop.call_later(_FLUSH_AFTER, self.flush)
        latencies.append(took)
        if len(latencies) >= _FLUSH_AT:
            self.flush()
        if outcome is None or type(outcome) is Ack:
            if failed:
                state.tries.done(message.sequence)
            self._let_go(message)
            return None
        runner.handling = None
        return await self._follow(message, outcome, counted=last)

    async def _last_attempt(self, message: Message, before: Tried, wary: Wary | None) -> float | None:
        """Count and report the last attempt before it starts: it may end this process. Returns what `_ask` returns."""
        started = False
        try:
            answer = await self._before_last(message, before)
            started = answer is None
        finally:
            if wary is not None and not started:  # also on cancellation: other owners wait for `leave`
                wary.leave(message)
        return answer

    async def _before_last(self, message: Message, before: Tried) -> float | None:
        state = message._lane.state
        if before.attempts >= self._policy.max_deliver:
            message.lease = state.lease
            spent = Retry(error=_BEFORE, timed_out=before.timed_out)
            decision = self._policy.decide(spent, message.attempt)
            answer = await self._conclude(message, Bury(DeadLetterReason.CRASH, _ENDED) if before.ended else decision)
            return answer if answer is not None else -1.0
        state.tries.count(message.sequence)
        if state.tries.tell is not None:
            try:
                await state.tries.tell()
            except asyncio.CancelledError:
                state.tries.take_back(message.sequence)
                raise
            if not self._may_start(state.lease):  # the report may have taken longer than the lease
                return self._refuse(message, counted=True)
        return None

    async def _ask(self, message: Message, wary: Wary) -> float | None:
        """Returns None when the message may start, below 0 when it is finished instead, else the seconds to wait."""
        state = message._lane.state
        answer = await wary.enter(message)
        if isinstance(answer, float | int):
            return answer
        if not self._may_start(state.lease):  # the question may have taken longer than the lease
            if answer is None:
                wary.leave(message)
            return self._refuse(message)
        if answer is None:
            return None
        message.lease = state.lease
        if isinstance(answer, Bury):
            await self._bury(message, answer)
            await wary.buried(message)
            if not self._may_start(state.lease):
                return self._refuse(message)
            state.dead_letters += 1
        self._let_go(message)
        return -1.0

    def _refuse(self, message: Message, *, counted: bool = False) -> float:
        """The lease is over: start nothing and ignore results that arrive now; the next owner repeats the message."""
        state = message._lane.state
        if counted:
            state.tries.take_back(message.sequence)
        state.stopped, state.finish_through = True, 0
        self._recorder.event(
            "worker.fenced", op="start", result="refused", partition=state.id, sequence=message.sequence, warn=True
        )
        # Cancel what else runs under this lease: the partition's handlers, or all when the process lost its own.
        self.pool.fence(state if self._may_pull() else None)
        return 0.0

    async def halt(self) -> bool:
        """When this returns no handler will start, and none runs except in threads; see `LanePool.halt`."""
        quiet = await self.pool.halt()
        self.handler.close()
        self.flush()
        return quiet

    def left_behind(self, message: Message) -> None:
        """Log that a handler still runs although nothing waits for it any more."""
        self._recorder.event(
            "message.left_behind",
            op="handle",
            result="released",
            partition=message.partition.id,
            subject=message.subject,
            sequence=message.sequence,
            epoch=message.lease.epoch,
            error="the handler did not end when it was cancelled, or sits in a thread; the message is repeated",
            warn=True,
        )

    def flush(self) -> None:
        """Record the gathered latencies. They are batched: one by one they would cost more than a quick handler."""
        if self._latencies:
            gathered, self._latencies = self._latencies, []
            self.ended += len(gathered)
            self._recorder.metrics.observe_all(m.HANDLER_LATENCY, gathered)

    async def _follow(self, message: Message, outcome: object, *, counted: bool) -> float | None:
        state = message._lane.state
        if not isinstance(outcome, Reject):
            timed_out = isinstance(outcome, Retry) and outcome.timed_out
            tries, sequence = state.tries, message.sequence
            total = tries.timed_out(sequence, timed_out) if counted else tries.count(sequence, timed_out=timed_out)
            message.attempt = max(message.attempt, total)  # another owner may have used some attempts meanwhile
        return await self._conclude(message, self._policy.decide(outcome, message.attempt))

    async def _conclude(self, message: Message, decision: Decision) -> float | None:
        state = message._lane.state
        if isinstance(decision, Again):
            message.last_error = decision.error
            state.retries += 1
            self._recorder.metrics.count(m.RETRIES)
            self._recorder.event(
                "message.retry",
                op="handle",
                result="retry",
                partition=state.id,
                subject=message.subject,
                sequence=message.sequence,
                attempt=message.attempt,
                wait=decision.delay,
                error=decision.error,
            )
            return decision.delay
        if isinstance(decision, Bury):
            await self._bury(message, decision)
            if not self._may_start(state.lease):
                return self._refuse(message)
            state.dead_letters += 1
        self._let_go(message)  # its attempts stay counted: if it is redelivered, it is not tried again
        return None

    def _cancelled(self, runner: Runner) -> Retry:
        """A cancelled handler: by its timeout, by itself, or because the worker stops (then it is re-raised)."""
        if runner.why is Why.TIMEOUT:
            error = HandlerTimeout("the handler ran longer than worker.handler_timeout")
            return Retry(error=describe(error), timed_out=True)
        if runner.why is not None:
            raise asyncio.CancelledError
        self._forgive(runner)
        return Retry(error=describe(HandlerCancelled("the handler was cancelled from inside")))

    @staticmethod
    def _forgive(runner: Runner) -> None:
        """Clear pending cancellations: the handler has ended and the task continues."""
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        if not runner.lost:
            runner.why = None

    async def _bury(self, message: Message, decision: Bury) -> None:
        """The message stays open and blocks its lane until the server has acknowledged the letter."""
        office = self.office
        assert office is not None

        def failed(error: PartiError, _: float) -> None:
            self._recorder.failed(Part.DEAD_LETTER, self._clock.now(), error)
            self._recorder.event(
                "message.dead_letter_failed",
                op="dead_letter",
                result="retry",
                subject=message.subject,
                sequence=message.sequence,
                error=str(error),
                warn=True,
            )

        await until_stored(
            lambda: office.bury(message, decision), clock=self._clock, on_failure=failed, backoff=self._backoff
        )
        self._recorder.worked(Part.DEAD_LETTER, self._clock.now())
        self._recorder.metrics.count(m.DEAD_LETTERS, reason=decision.reason.value)
        self._recorder.event(
            "message.dead_letter",
            op="dead_letter",
            result="success",
            partition=message._lane.state.id,
            subject=message.subject,
            sequence=message.sequence,
            attempts=message.attempt,
            reason=decision.reason.value,
            error=decision.error,
            warn=True,
        )
