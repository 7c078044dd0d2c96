"""Lanes: the tasks of one document run one at a time, in order; any number of documents run in parallel.

A lane is an asyncio task only while its document has work. It waits in memory, or on the server (parked). A waiting
task blocks later tasks of its document, unless the trigger's order policy says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from enum import StrEnum

from parti.delivery.already_done import AlreadyDone
from parti.delivery.context import DeliveryContext
from parti.delivery.copies import Copies
from parti.delivery.document import Document, Mode, Sending, is_alone, place
from parti.delivery.errors import LeaseLost, Reason, unforeseen
from parti.delivery.feed import Feed
from parti.delivery.latest import Latest
from parti.delivery.lease import SlotLease
from parti.delivery.line import Line, Postponed
from parti.delivery.order import OrderHold, TaskOrder, hold
from parti.delivery.park import Park
from parti.delivery.parking import Parking
from parti.delivery.pending import Pending, Wake
from parti.delivery.policy import UNSPENT, AttemptOutcome, DeliveryAttempt, decide, retry_policy
from parti.delivery.retrying import RetryWhileOwner
from parti.delivery.sleepers import Sleepers
from parti.errors import UsageError
from parti.outcomes import DONE, Again, Bury, Decision, Done
from parti.wire.acks import ACK, term

_MOMENT = 0.01  # seconds by which two clocks may differ


class Documents:
    """All lanes of one partition. Every step with an effect checks the partition's lease first."""

    def __init__(
        self,
        tools: DeliveryContext,
        lease: SlotLease,
        park: Park,
        wakes: Feed,
        group: asyncio.TaskGroup,
        on_lost: Callable[[], None],
    ) -> None:
        self._tools = tools
        self._lease = lease
        self._park = park
        self._wakes = wakes
        self._group = group
        self._on_lost = on_lost
        self._surely = RetryWhileOwner(lease, tools.recorder, tools.clock)
        self._lanes: dict[str, Document] = {}
        self._stopping = False
        self._dealt = AlreadyDone(tools.config.stream)
        self.sleepers = Sleepers(lease.slot, tools.gate, self._call)
        """The parked documents, also those without a lane in memory."""
        self._parking = Parking(tools, park, wakes, self._surely, self.sleepers)
        self._copies = Copies(park, self._surely, wakes, tools.recorder)
        self._latest = Latest(park, self._surely, self._parking.read, self._release)

    def __repr__(self) -> str:
        return f"<Documents {len(self._lanes)} parked={len(self.sleepers.parked)}>"

    def __iter__(self) -> Iterator[Document]:
        return iter(self._lanes.values())

    # -- coming in ----------------------------------------------------------------------------------------------------

    def offer(self, held: Pending) -> None:
        """A task came: append it behind all others of its document."""
        self._came(held)
        if self._dealt and held.feed is not self._wakes:
            self._dealt.came(held.source)
        lane = self._lane(held.key)
        lane.queue.append(held)
        if lane.nudge is not None and (
            held.rules.order is TaskOrder.LATEST or len(lane.queue) > self._tools.config.block_queue
        ):
            lane.nudge.set()
        self._stir(lane)

    def woken(self, wake: Wake) -> None:
        """A wake-up came: it is the turn of the document's parked head."""
        lane = self._lane(wake.key)
        if lane.wake is not None:
            # The document is awake already. But it may be about to park again and rely on this wake-up: a short wait
            # can be over before the reply to its schedule arrives. So keep the newer wake-up.
            self._wakes.done(lane.wake.sequence)
            if not wake.head:
                wake.head, wake.attempts = lane.wake.head, lane.wake.attempts
        # Also when the document does not seem to be parked: looking costs one read.
        lane.wake = wake
        self._call(wake.key)

    def _call(self, key: str) -> None:
        """It is the turn of the document's parked head."""
        self.sleepers.called(key)
        lane = self._lane(key)
        lane.called = True
        self._stir(lane)

    def _lane(self, key: str) -> Document:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Document(key, Mode.PARKED if key in self.sleepers.parked else Mode.LIVE)
            if self._dealt:
                lane.through = self._dealt.through(key)
        return lane

    def _stir(self, lane: Document) -> None:
        if lane.task is None and not self._stopping:
            lane.task = self._group.create_task(self._run(lane), name="parti-deliver-lane")

    async def stop(self, grace: float) -> None:
        """After this returns nothing runs: requests in flight had `grace` seconds to end, the rest was cancelled."""
        self._stopping = True
        running = {lane.task: lane for lane in self._lanes.values() if lane.task is not None}
        for task, lane in running.items():
            if not lane.busy:
                task.cancel()
        if running:
            _, late = await asyncio.wait(running, timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def asleep(self, key: str) -> bool:
        """Whether no lane in this process is about to look at the document."""
        lane = self._lanes.get(key)
        return key not in self.sleepers and (lane is None or (lane.task is None and lane.wake is None))

    def forget(self) -> None:
        """Drop what is still in memory: this process may no longer deliver it."""
        for lane in self._lanes.values():
            for held in lane.queue:
                self._went(held)
        self._lanes.clear()
        self.sleepers.forget()

    # -- one lane -----------------------------------------------------------------------------------------------------

    async def _run(self, lane: Document) -> None:
        limit = self._tools.config.block_queue
        try:
            while not self._stopping:
                if lane.called and lane.mode is not Mode.DRAINING:
                    await self._parking.learn(lane)
                    await self._parking.learn_head(lane)
                    lane.mode = Mode.DRAINING
                if lane.mode is Mode.PARKED or (lane.mode is Mode.DRAINING and len(lane.queue) > limit):
                    if lane.mode is Mode.PARKED and not lane.queue:
                        return
                    await self._forward(lane)
                    continue
                head = await self._head(lane)
                if head is not None:
                    try:
                        await self._serve(lane, head)
                    except LeaseLost:
                        raise
                    except Exception as error:
                        await self._failed(lane, head, error)
                elif lane.mode is Mode.DRAINING:
                    self._drained(lane)
                else:
                    return
        except LeaseLost:
            self._on_lost()
        finally:
            self._parking.unread(lane)
            lane.task, lane.busy, lane.nudge = None, False, None
            if not lane.queue and lane.wake is None and not lane.called:
                self._lanes.pop(lane.key, None)
            self.sleepers.looked_at(lane.key)

    async def _head(self, lane: Document) -> Pending | None:
        self._parking.unread(lane)
        if lane.mode is Mode.LIVE:
            self._drop_old(lane)
            if len(lane.queue) > 1 and lane.queue[0].rules.order is TaskOrder.LATEST:
                self._tools.recorder.superseded(self._latest.in_memory(lane))
            return lane.queue[0] if lane.queue else None
        stored = await self._parking.head(lane)
        if stored is None:
            return None
        held = self._parking.read(lane, stored)
        if held.rules.order is TaskOrder.LATEST:
            self._drop_old(lane)  # a parked task that is also in memory, because its ack was lost, is not newer
            if others := await self._latest.parked(lane, held):
                self._tools.recorder.superseded(others)
                return await self._head(lane)
        parked = self.sleepers.parked.get(lane.key)
        if parked is not None and parked.head == held.id:
            held.attempts, held.due = max(held.attempts, parked.attempts), parked.due
        self._came(held)
        lane.reading = held
        return held

    def _is_old(self, lane: Document, held: Pending) -> bool:
        if held.feed is self._wakes or not lane.through:
            return False  # a task with its own schedule comes late on purpose
        if not 0 < place(held.source, self._tools.config.stream) <= lane.through:
            return False
        self._tools.recorder.duplicate(held.id)
        return True

    def _drop_old(self, lane: Document) -> None:
        while lane.queue and self._is_old(lane, lane.queue[0]):
            self._release(lane.queue.popleft())

    def _drained(self, lane: Document) -> None:
        """Nothing is parked any more: the document continues in memory."""
        lane.mode = Mode.LIVE
        self.sleepers.parked.pop(lane.key, None)
        self._park.end(lane.key)
        self._dealt.drained(lane)
        self._parking.answered(lane, lane.wake)

    async def _failed(self, lane: Document, head: Pending, error: Exception) -> None:
        """An error ends only the task that raised it: the task becomes a dead letter, and its document continues."""
        if isinstance(error, MemoryError):
            lane.busy = False
            self._tools.recorder.event("deliver.out_of_memory", warn=True, id=head.id)
            await self._tools.clock.sleep(1.0)  # a local problem, not the task's: it gets another turn
            return
        refusal = unforeseen(error, "handled")
        self._tools.recorder.event("deliver.unforeseen", warn=True, id=head.id, error=repr(error)[:500])
        await self._bury(lane, head, refusal.reason, DeliveryAttempt(AttemptOutcome.REFUSED, error=str(refusal)))
        lane.busy = False

    async def _serve(self, lane: Document, head: Pending) -> None:
        """One turn of the head: an attempt and its consequences, or a reason why no attempt is made now."""
        tools = self._tools
        if head.again and await self._copies.has_another(head):
            await self._let_go(lane, head)
            return
        if head.refusal is not None:
            await self._bury(
                lane, head, head.refusal.reason, DeliveryAttempt(AttemptOutcome.REFUSED, error=str(head.refusal))
            )
            return
        if tools.is_disabled(head):
            await self._bury(
                lane, head, Reason.DISABLED, DeliveryAttempt(AttemptOutcome.REFUSED, error="the endpoint is disabled")
            )
            return
        if head.attempts and self._has_expired(head):
            await self._expire(lane, head)
            return
        if (left := head.due - tools.clock.now()) > 0:
            # The task was tried by an earlier owner, or woken too early: the endpoint's Retry-After still applies.
            if left <= _MOMENT:  # a timer fired early: not worth a message
                await tools.clock.sleep(left)
            else:
                await self._hold(lane, head, left, self._where(lane, head, left))
            return
        postponed = await tools.gate.admit(head.host, head.trigger, head.rules)
        if postponed is not None:
            if self._has_expired(head):  # a task that was never tried still gets one try, but not at a down host
                await self._expire(lane, head)
            else:
                await self._postpone(lane, head, postponed)
            return
        started, attempt, right = tools.clock.now(), None, Sending(lane, self._lease)
        try:
            attempt = await tools.courier.attempt(head, right, tools.gate.pace(head.trigger, head.rules))
        finally:
            lane.busy = True
            outcome = attempt.outcome if attempt is not None and attempt.outcome not in UNSPENT else None
            rest = attempt.retry_after if attempt is not None and outcome is None else None  # host name not resolved
            if tools.gate.release(head.host, head.trigger, head.rules, outcome, rest):
                tools.recorder.breaker_opened(head.host)
        if attempt.outcome not in UNSPENT:
            head.attempts += 1
        now = tools.clock.now()
        tools.recorder.attempted(head, attempt, now - started)
        await self._follow(lane, head, attempt, now)
        lane.busy = False

    def _has_expired(self, head: Pending) -> bool:
        # A wait that ends with the task's lifetime may end slightly early, and must not become one more attempt.
        return self._tools.clock.wall() - head.first_seen >= self._tools.config.max_task_age - _MOMENT

    async def _expire(self, lane: Document, head: Pending) -> None:
        attempt = DeliveryAttempt(AttemptOutcome.REFUSED, error="older than deliver.max_task_age when its turn came")
        await self._bury(lane, head, Reason.EXPIRED, attempt)
        lane.busy = False

    async def _follow(self, lane: Document, head: Pending, attempt: DeliveryAttempt, now: float) -> None:
        tools = self._tools
        decision: Decision = DONE
        if attempt.outcome is not AttemptOutcome.DELIVERED:  # the one outcome that needs no retry schedule
            assert head.task is not None
            decision = decide(
                attempt,
                attempts=head.attempts,
                age=tools.clock.wall() - head.first_seen,
                policy=retry_policy(head.task.retry_policy, tools.config),
                config=tools.config,
                rng=tools.rng,
            )
        match decision:
            case Done():
                await self._let_go(lane, head)
                tools.recorder.delivered(head)
            case Bury(reason):
                if reason is Reason.GONE:
                    await self._surely(lambda: tools.disable(head, attempt))
                await self._bury(lane, head, reason, attempt)
            case Again(wait):
                if head.failed_at is None:
                    head.failed_at = now
                head.due = now + wait
                where = self._where(lane, head, wait)
                tools.recorder.failed(head, attempt, wait, where)
                await self._hold(lane, head, wait, where)

    def _where(self, lane: Document, head: Pending, wait: float) -> OrderHold:
        """Where the head waits for its time. The next owner finds out, wherever that is."""
        tools = self._tools
        blocked = tools.clock.now() - head.failed_at if head.failed_at is not None else 0.0
        queued = len(lane.queue) - (lane.mode is Mode.LIVE)
        where = hold(head.rules.order, wait=wait, blocked=blocked, queued=queued, config=tools.config)
        stored = head.feed is None or head.feed is self._wakes  # its attempts and due time are stored in wake-ups
        if where is OrderHold.MEMORY and (stored or tools.gate.crowds(head.host, head.trigger, head.rules)):
            where = OrderHold.PARK
        if where is OrderHold.ALONE and is_alone(lane.key):
            where = OrderHold.PARK
        if head.feed is not None:
            tell = head.feed.tried if where is OrderHold.MEMORY else head.feed.remember
            tell(head.sequence, head.attempts, tools.clock.wall() + wait)
        return where

    async def _postpone(self, lane: Document, head: Pending, postponed: Postponed) -> None:
        """Nothing is sent now: the document waits outside the line, which calls it later."""
        tools = self._tools
        alone = head.rules.order is TaskOrder.SKIP and not is_alone(lane.key)
        tools.recorder.postponed(head, postponed.wait, postponed.why, OrderHold.ALONE if alone else OrderHold.PARK)
        assert postponed.line is not None
        try:
            if alone:
                await self._put_aside(lane, head, postponed.line)
            else:
                await self._parking.go_outside(lane, head, postponed.line)
        except UsageError as error:
            await self._bury(lane, head, Reason.TOO_LARGE, DeliveryAttempt(AttemptOutcome.REFUSED, error=str(error)))

    async def _put_aside(self, lane: Document, head: Pending, line: Line) -> None:
        """Only this task waits outside; its document continues."""
        lane.busy = True
        await self._parking.put_aside(head, line)
        await self._let_go(lane, head)
        lane.busy = False

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _hold(self, lane: Document, head: Pending, wait: float, where: OrderHold) -> None:
        try:
            if where is OrderHold.MEMORY:
                await self._pause(lane, head, wait)
            elif where is OrderHold.ALONE:
                lane.busy = True
                await self._surely(lambda: self._park.alone(head, wait))
                await self._let_go(lane, head)
            else:
                await self._parking.park(lane, head, wait)
        except UsageError as error:
            # The server rejects a message of this size with our headers: the task can only wait in memory.
            await self._bury(lane, head, Reason.TOO_LARGE, DeliveryAttempt(AttemptOutcome.REFUSED, error=str(error)))

    async def _pause(self, lane: Document, head: Pending, wait: float) -> None:
        """Wait in memory, until too many tasks queue up behind, or a newer task replaces this one."""
        lane.busy = False
        if self._stopping:
            return  # the next owner knows until when it waits
        clock, limit = self._tools.clock, self._tools.config.block_queue
        until = clock.now() + wait
        lane.nudge = asyncio.Event()
        try:
            while (left := until - clock.now()) > 0:
                try:
                    async with asyncio.timeout(left):
                        await lane.nudge.wait()
                except TimeoutError:
                    continue
                lane.nudge.clear()
                behind = len(lane.queue) - (lane.mode is Mode.LIVE)
                if head.rules.order is TaskOrder.LATEST and behind:
                    if lane.mode is Mode.LIVE:
                        self._tools.recorder.superseded(self._latest.in_memory(lane))
                        head = lane.queue[0]
                elif behind > limit:
                    await self._parking.park(lane, head, until - clock.now())
                    return
        finally:
            lane.nudge = None

    async def _forward(self, lane: Document) -> None:
        """Park the tasks in memory behind those that are parked."""
        lane.busy = True
        await self._parking.learn(lane)
        while lane.queue and not self._stopping:
            held = lane.queue[0]
            if self._is_old(lane, held) or await self._copies.has_another(held):
                self._release(lane.queue.popleft())
                continue
            if held.refusal is not None:
                await self._bury(
                    lane, held, held.refusal.reason, DeliveryAttempt(AttemptOutcome.REFUSED, error=str(held.refusal))
                )
                continue
            try:
                await self._surely(lambda held=held: self._park.append(held))  # type: ignore[misc]
            except UsageError as error:
                await self._bury(
                    lane, held, Reason.TOO_LARGE, DeliveryAttempt(AttemptOutcome.REFUSED, error=str(error))
                )
                continue
            self._tools.recorder.parked(held)
            lane.queue.popleft()
            self._release(held)
            if held.feed is not self._wakes:
                lane.through = place(held.source, self._tools.config.stream) or lane.through
        if lane.mode is not Mode.LIVE:
            self.sleepers.entry(lane.key).through = lane.through
        lane.busy = False

    # -- letting go ---------------------------------------------------------------------------------------------------

    async def _bury(self, lane: Document, held: Pending, reason: StrEnum, attempt: DeliveryAttempt) -> None:
        lane.busy = True
        await self._surely(lambda: self._tools.letters.bury(held, reason, attempt))
        await self._let_go(lane, held, term(reason.value))
        self._tools.recorder.buried(held, reason, attempt)

    async def _let_go(self, lane: Document, held: Pending, verb: bytes = ACK) -> None:
        if held.park_sequence:
            await self._surely(lambda: self._park.remove(lane.key, held.park_sequence))
            await self._parking.forget_note(lane)
            return
        if lane.queue and lane.queue[0] is held:
            lane.queue.popleft()
        self._release(held, verb)

    def _release(self, held: Pending, verb: bytes = ACK) -> None:
        self._went(held)
        if held.feed is not None:
            held.feed.done(held.sequence, verb)

    def _came(self, held: Pending) -> None:
        self._tools.gate.hold(held.host, held.size, held.trigger, held.rules)
        self._copies.came(held)

    def _went(self, held: Pending) -> None:
        self._tools.gate.unhold(held.host, held.size, held.trigger, held.rules)
