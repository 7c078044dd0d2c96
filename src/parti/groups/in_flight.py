"""A member's messages in flight and their handlers: strictly in order, or in lanes by key.

It outlives the consumer and the connection of its messages. A message redelivered while its handler runs is not run
twice; a done message whose acknowledgement was lost is acknowledged again and not repeated.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from parti.clock import Clock
from parti.dead_letters import until_stored
from parti.errors import PartiError
from parti.groups.message import GroupHandler, GroupMessage, Holding, KeyOf
from parti.model import Lease, Partition, PartitionId
from parti.observe import group_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics
from parti.outcomes import Again, Bury, Decision, Retry, RetryPolicy, describe
from parti.wire.acks import ACK, NAK
from parti.worker.handler import AdaptedHandler
from parti.worker.lanes import LanePool, Runner
from parti.worker.ledger import PartitionState

log = get_logger("groups")
_DONE_REMEMBERED = 4_096  # acknowledgements that may have been lost; far more than can be in flight at once
UNLIMITED = 1 << 62
"""Unlimited attempts: a message is delivered until it is acknowledged, and later messages wait."""
_CANCELLED = object()  # the outcome of a handler that was cancelled
_STUCK_AFTER = 60.0  # seconds of failed attempts at one message before the health check reports it


class Order(StrEnum):
    """The scope within which messages are handled one after the other."""

    STRICT = "strict"
    """All messages of the member."""
    PARTITION = "partition"
    """Messages of one partition; partitions run concurrently."""
    KEY = "key"
    """Messages of one key: the subject, or the result of the caller's key function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOptions:
    """How handlers run."""

    order: Order = Order.STRICT
    concurrency: int = 64  # concurrent handlers when the order is not strict; they mostly wait
    key: KeyOf | None = None
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(max_deliver=UNLIMITED))
    """The delays between attempts. With `max_deliver`, a message that failed that often goes to the dead-letter stream
    and later messages continue; by default nothing passes it."""


class GroupDeadLetters(Protocol):
    """Stores messages that no handler could process."""

    async def bury(self, message: GroupMessage, decision: Bury) -> None: ...


@dataclass(frozen=True, slots=True)
class InFlightOwner:
    """The calls that the messages in flight make to their member."""

    settle: Callable[[GroupMessage, bytes], None]
    still_fresh: Callable[[], bool]
    """No freeze recently."""
    certain: Callable[[], bool]
    """Nothing has put the settled pin in doubt since."""


class InFlight:
    """The messages in flight. Nothing starts while they are held; a dropped message never starts."""

    def __init__(
        self,
        handler: GroupHandler,
        options: HandlerOptions,
        owner: InFlightOwner,
        dead_letters: GroupDeadLetters,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.in_hand: dict[int, GroupMessage] = {}
        self.holding = True
        self._keeping = False
        """Held, and messages not started are kept until their owner is known."""
        self._options = options
        concurrency = 1 if options.order is Order.STRICT else options.concurrency
        adapted: Any = handler
        self._handler = AdaptedHandler(adapted, concurrency=concurrency)
        self._settle = owner.settle
        self._still_fresh = owner.still_fresh
        self._certain = owner.certain
        self._dead_letters = dead_letters
        self._clock = clock
        self._metrics = metrics
        self._state = PartitionState(Partition(("group",)), Lease(PartitionId("group"), 0))
        self._pool = LanePool(self._serve, concurrency=concurrency)
        self._held: list[GroupMessage] = []
        self._epoch = 0
        self._retrying: dict[int, asyncio.Event] = {}
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._failing: dict[int, tuple[float, GroupMessage]] = {}
        self._done: OrderedDict[int, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<InFlight in_hand={len(self.in_hand)} running={self.running}{' held' if self.holding else ''}>"

    @property
    def running(self) -> int:
        """Number of running handlers."""
        return self._state.running

    @property
    def lane(self) -> Any:
        """The lane of a message before its own lane is known."""
        return self._state.main

    def accept(self, messages: Iterable[GroupMessage]) -> None:
        """Add delivered messages: new ones are queued in order; known ones only get their new reply subject."""
        for message in messages:
            known = self.in_hand.get(message.queue_sequence)
            if known is not None and known.stored_ns == message.stored_ns:
                known._reply, known.holding = message._reply, message.holding
                continue
            if self._done.get(message.queue_sequence) == message.stored_ns:
                self._settle(message, ACK)
                continue
            self.in_hand[message.queue_sequence] = message
            if self.holding:
                self._park(message)
            else:
                self._push(message)
        self._metrics.set(m.IN_HAND, len(self.in_hand))

    def held_under(self, holding: Holding) -> set[int]:
        """Messages last delivered under this consumer and pin, and running ones that certainly belong here."""

        def ours(message: GroupMessage) -> bool:
            runs = message.started and not message.doubtful and message.holding[0] == holding[0]
            return runs or message.holding == holding

        return {sequence for sequence, message in self.in_hand.items() if ours(message)}

    def count_under(self, consumer: str) -> int:
        """The number of messages held from this consumer, under any pin."""
        return sum(message.holding[0] == consumer for message in self.in_hand.values())

    def release(self, epoch: int, holding: Holding) -> None:
        """Start held messages in stream order, and let later ones start too.

        A message of another pin that was not started is forgotten: another instance has it, or it is redelivered.
        """
        for message in [each for each in self.in_hand.values() if each.holding != holding and not each.started]:
            self._forget(message)
        self.holding = self._keeping = False
        self._epoch = epoch
        held, self._held = sorted(self._held, key=lambda message: message.queue_sequence), []
        for message in held:
            if self.in_hand.get(message.queue_sequence) is not message:
                continue
            message.parked = False
            if message.finished:
                self._settle(message, ACK)
                self.done(message)
            else:
                self._push(message)
        for message in self.in_hand.values():
            message.doubtful = message.doubtful and message.holding != holding

    def hold(self) -> None:
        """From now on new messages wait for `release`; messages already queued are not affected."""
        self.holding = True

    def suspend(self) -> None:
        """Start nothing more, and keep messages not started until `release` or `drop`; running handlers continue."""
        self.holding = self._keeping = True
        for message in self.in_hand.values():
            if not message.started and not message.parked:
                self._park(message)

    def _park(self, message: GroupMessage) -> None:
        message.parked = True  # its lane skips it when its turn comes
        self._held.append(message)
        if (retrying := self._retrying.get(message.queue_sequence)) is not None:
            retrying.set()

    def drop(self) -> list[GroupMessage]:
        """Forget and return all messages not started; running handlers continue. Nothing starts until `release`."""
        self.holding, self._keeping = True, False
        self._held.clear()
        dropped = [message for message in self.in_hand.values() if not message.started]
        for message in dropped:
            self._forget(message)
        return dropped

    def _forget(self, message: GroupMessage) -> None:
        del self.in_hand[message.queue_sequence]  # its lane skips it when its turn comes
        self._failing.pop(message.queue_sequence, None)
        if (retrying := self._retrying.get(message.queue_sequence)) is not None:
            retrying.set()

    def ours(self) -> list[GroupMessage]:
        """The messages in flight, without running ones that may belong to another instance since the pin was lost."""
        return [message for message in self.in_hand.values() if self._keeping or not message.doubtful]

    def doubt(self) -> None:
        """Messages in flight may belong to another instance by now."""
        for message in self.in_hand.values():
            message.doubtful = True

    def forget_done(self) -> None:
        """The group was recreated under the same name: messages done for the old one must be done again."""
        self._done.clear()

    def cancel(self, why: str, *, keep: bool) -> None:
        """Cancel the running handlers. Their messages go back to the server, or with `keep` wait for `drop`.

        A synchronous function in a thread cannot be stopped: its result is ignored.
        """
        for sequence, task in list(self._calls.items()):
            message = self.in_hand.get(sequence)
            if message is not None and not message.cancelled:
                message.cancelled = True
                message.handed_back = not keep
                log.warning("group.handler_cancelled", sequence=message.sequence, why=why)
                task.cancel()

    def stuck(self) -> str | None:
        """Describes the message that has been failing longest, if that is long; later messages wait behind it."""
        if not self._failing:
            return None
        since, message = min(self._failing.values(), key=lambda each: each[0])
        took = self._clock.now() - since
        if took < _STUCK_AFTER:
            return None
        return f"message {message.sequence} fails for {took:.0f} s, {message.attempt} attempts: {message.last_error}"

    async def idle(self, timeout: float) -> bool:
        """Wait until no handler runs; False if some still run after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._pool.idled()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """After this returns no handler runs."""
        self.drop()
        await self._pool.halt()
        self._handler.close()

    def finish(self, message: GroupMessage) -> None:
        """The message is handled: acknowledge it, unless another instance may have it by now.

        That instance handles it too, and compares the messages it holds with what the server has pending: a late ack
        from here would hide a message that is still on its way there. So the ack waits until the pin is settled.
        """
        message.acknowledged = True
        message.doubtful = message.doubtful or not self._still_fresh()
        if not message.doubtful and self._certain():
            self._settle(message, ACK)
            self.done(message)
            return
        message.finished = True
        waits = self.in_hand.get(message.queue_sequence) is message and (self._keeping or not self.holding)
        self.done(message)
        if waits:
            self.in_hand[message.queue_sequence] = message
            self._park(message)

    def done(self, message: GroupMessage) -> None:
        """The message is settled: it must not run again, even if its acknowledgement is lost."""
        self.in_hand.pop(message.queue_sequence, None)
        self._failing.pop(message.queue_sequence, None)
        self._done[message.queue_sequence] = message.stored_ns
        if len(self._done) > _DONE_REMEMBERED:
            self._done.popitem(last=False)

    def _push(self, message: GroupMessage) -> None:
        order = self._options.order
        if order is not Order.STRICT:
            if order is Order.PARTITION:
                key = str(message.number)
            else:
                key = self._options.key(message) if self._options.key is not None else message.subject
            message.key = key
            message._lane = self._state.lane(f"{order.value}:{key}")
        message.lease = Lease(PartitionId(str(message.number)), self._epoch)
        self._pool.push(message)

    async def _serve(self, message: Any, runner: Runner) -> float | None:  # noqa: ARG002 - the pool's signature
        """Attempt repeatedly until the message is settled or dropped. Returns None: the lane continues."""
        assert isinstance(message, GroupMessage)
        while self.in_hand.get(message.queue_sequence) is message and not message.parked:
            if not self._still_fresh():
                self._park(message)  # its owner must be known before anything starts
                return None
            message.attempt += 1
            outcome = await self._call(message)
            if outcome is _CANCELLED:
                wait = self._given_up(message)
            else:
                wait = await self._settle_outcome(message, outcome)
            if wait is None:
                return None
            await self._pause(message, wait)
        return None

    async def _call(self, message: GroupMessage) -> Any:
        """The handler's outcome; an exception is an outcome too, except one that ends the process."""
        task = asyncio.current_task()
        assert task is not None
        message.started = True
        self._calls[message.queue_sequence] = task
        try:
            return await self._handler.call(message)
        except asyncio.CancelledError as error:
            if message.cancelled:
                return _CANCELLED
            if task.cancelling():
                raise
            return self._failed(message, error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return self._failed(message, error)
        finally:
            message.started = False
            self._calls.pop(message.queue_sequence, None)
            if message.cancelled:
                task.uncancel()  # the runner's task continues; a handler that still ended well is done
                message.cancelled = False

    def _failed(self, message: GroupMessage, error: BaseException) -> Retry:
        log.warning("group.handler_failed", sequence=message.sequence, attempt=message.attempt, error=describe(error))
        return Retry(error=describe(error))

    def _given_up(self, message: GroupMessage) -> float | None:
        """Cancelled: the server redelivers the message; returns a delay if this instance is pinned again by now."""
        self._count("retry")
        if self.in_hand.get(message.queue_sequence) is not message:
            return None
        if not self.holding and not message.doubtful:
            return 0.0  # its handler took so long to end that this instance is pinned again: later messages wait for it
        if self._keeping and not message.handed_back:
            self._park(message)
            return None
        self._forget(message)
        if not message.doubtful and self._certain():
            self._settle(message, NAK)
        return None

    async def _pause(self, message: GroupMessage, seconds: float) -> None:
        """Wait for the next attempt; the lane waits too, so that no message overtakes. `drop` ends the wait at once."""
        dropped = self._retrying[message.queue_sequence] = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await dropped.wait()
        except TimeoutError:
            pass
        finally:
            del self._retrying[message.queue_sequence]

    async def _settle_outcome(self, message: GroupMessage, outcome: Any) -> float | None:
        if message.acknowledged:
            self._count("ack")
            return None
        if not self._still_fresh():
            message.doubtful = True
        decision: Decision = self._options.retry.decide(outcome, message.attempt)
        if message.doubtful and isinstance(decision, Again | Bury):
            self.in_hand.pop(message.queue_sequence, None)  # its new owner decides
            self._failing.pop(message.queue_sequence, None)
            return None
        if isinstance(decision, Again):
            self._count("retry")
            message.last_error = decision.error
            self._failing.setdefault(message.queue_sequence, (self._clock.now(), message))
            if not self.holding:
                return decision.delay
            if self._keeping:
                self._park(message)
                return None
            # The pin or the consumer was lost meanwhile: the new owner retries.
            self.in_hand.pop(message.queue_sequence, None)
            self._failing.pop(message.queue_sequence, None)
            self._settle(message, NAK)
            return None
        if isinstance(decision, Bury):
            await self._bury(message, decision)
            self._count("reject")
        else:
            self._count("ack")
        self.finish(message)
        return None

    async def _bury(self, message: GroupMessage, decision: Bury) -> None:
        """Retry until the dead letter is stored; the message is not acknowledged before. Health reports it."""

        def failed(error: PartiError, _: float) -> None:
            message.last_error = f"its dead letter cannot be stored: {error}"
            self._failing.setdefault(message.queue_sequence, (self._clock.now(), message))
            log.warning("group.dead_letter_failed", sequence=message.sequence, error=str(error))

        await until_stored(lambda: self._dead_letters.bury(message, decision), clock=self._clock, on_failure=failed)

    def _count(self, outcome: str) -> None:
        self._metrics.count(m.MESSAGES, outcome=outcome)
