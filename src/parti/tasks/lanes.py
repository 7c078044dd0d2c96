"""Lanes: the tasks of one document, one at a time, in order; any number of documents side by side.

A lane is a task of the event loop only while its document has work. It waits in memory, or on the server (parked), and
whatever waits keeps later tasks of its document behind it, unless the trigger's order policy says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from parti.errors import UsageError
from parti.tasks.errors import LeaseLost, Reason, unforeseen
from parti.tasks.feed import Feed
from parti.tasks.gate import Postponed
from parti.tasks.held import Held, Wake
from parti.tasks.lane import Lane, Mode, place
from parti.tasks.latest import Latest
from parti.tasks.lease import SlotLease
from parti.tasks.names import ORIGIN
from parti.tasks.order import Hold, Order, hold
from parti.tasks.park import Park
from parti.tasks.policy import DONE, UNSPENT, Again, Attempt, Bury, Decision, Done, Outcome, decide, schedule_of
from parti.tasks.surely import Surely
from parti.tasks.tools import Tools
from parti.wire.stored import StoredMessage

_SHORT = 2.0  # seconds: a wait for a place that is not worth a round trip to the park


class Lanes:
    """All lanes of one partition. Everything with an effect asks the partition's lease first."""

    def __init__(
        self,
        tools: Tools,
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
        self._surely = Surely(lease, tools.recorder, tools.clock)
        self._latest = Latest(park, self._surely, self._parked, self._release)
        self._lanes: dict[str, Lane] = {}
        self._stopping = False
        self._dealt: dict[str, int] = {}  # documents whose park ran empty: tasks up to these places were dealt with
        self._dealt_up_to = 0
        self.parked: dict[str, int] = {}
        """The documents that are parked, also those without a lane in memory, and up to which task; 0: not known."""

    def __repr__(self) -> str:
        return f"<Lanes {len(self._lanes)} parked={len(self.parked)}>"

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    # -- coming in ----------------------------------------------------------------------------------------------------

    def offer(self, held: Held) -> None:
        """A task came: it goes behind all others of its document."""
        self._tools.gate.hold(held.host)
        if self._dealt and held.feed is not self._wakes:
            self._forget_dealt(held)
        lane = self._lane(held.key)
        lane.queue.append(held)
        if lane.nudge is not None and (
            held.rules.order is Order.LATEST or len(lane.queue) > self._tools.config.block_queue
        ):
            lane.nudge.set()
        self._stir(lane)

    def woken(self, wake: Wake) -> None:
        """A wake-up came: the document's parked head has its turn."""
        lane = self._lane(wake.key)
        if lane.wake is not None:
            # It is awake already; but it may be about to go to sleep again, and this be the wake-up it relies on: a
            # short wait can be over before the answer to its schedule is here. So the newer one stays.
            self._wakes.done(lane.wake.sequence)
            if not wake.head:
                wake.head, wake.attempts = lane.wake.head, lane.wake.attempts
        # Also when it is not parked as far as we know: looking costs one read.
        lane.wake = wake
        self._stir(lane)

    def _lane(self, key: str) -> Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key, Mode.PARKED if key in self.parked else Mode.LIVE)
            if self._dealt:
                lane.through = self._dealt.get(key, 0)
        return lane

    def _stir(self, lane: Lane) -> None:
        if lane.task is None and not self._stopping:
            lane.task = self._group.create_task(self._run(lane), name="parti-deliver-lane")

    async def stop(self, grace: float) -> None:
        """After this returns nothing runs: requests under way had `grace` seconds to end, the rest was cancelled."""
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
        """Whether nothing in this process is about to look at the document."""
        lane = self._lanes.get(key)
        return lane is None or (lane.task is None and lane.wake is None)

    def forget(self) -> None:
        """What is still in memory is not ours to deliver any more."""
        for lane in self._lanes.values():
            for held in lane.queue:
                self._tools.gate.unhold(held.host)
        self._lanes.clear()

    # -- one lane -----------------------------------------------------------------------------------------------------

    async def _run(self, lane: Lane) -> None:
        limit = self._tools.config.block_queue
        try:
            while not self._stopping:
                if lane.wake is not None and lane.mode is not Mode.DRAINING:
                    await self._learn(lane)
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
            self._unread(lane)
            lane.task, lane.busy, lane.nudge = None, False, None
            if not lane.queue and lane.wake is None:
                self._lanes.pop(lane.key, None)

    async def _head(self, lane: Lane) -> Held | None:
        self._unread(lane)
        if lane.mode is Mode.LIVE:
            self._drop_old(lane)
            if len(lane.queue) > 1 and lane.queue[0].rules.order is Order.LATEST:
                self._tools.recorder.superseded(self._latest.in_memory(lane))
            return lane.queue[0] if lane.queue else None
        stored = await self._surely(lambda: self._park.first(lane.key))
        if stored is None:
            return None
        held = self._parked(lane, stored)
        if held.rules.order is Order.LATEST:
            self._drop_old(lane)  # a parked task that is also in memory, as its acknowledgement got lost, is not newer
            if others := await self._latest.parked(lane, held):
                self._tools.recorder.superseded(others)
                return await self._head(lane)
        if lane.wake is not None and lane.wake.head == held.id:
            held.attempts = max(held.attempts, lane.wake.attempts)
        self._tools.gate.hold(held.host)
        lane.reading = held
        return held

    def _parked(self, lane: Lane, stored: StoredMessage) -> Held:
        held = self._tools.reader.read(
            stored.data,
            stored.headers,
            stream=self._tools.names.park,
            subject=stored.subject,
            sequence=0,
            time=stored.time_ns / 1e9,
            ours=True,
        )
        held.key, held.park_sequence, held.received = lane.key, stored.seq, self._tools.clock.now()
        return held

    async def _learn(self, lane: Lane) -> None:
        """Find out up to which task of the document everything is parked or was dealt with before.

        A task that comes again with a lower sequence, because its acknowledgement got lost together with the owner
        before us, must not go behind the parked ones: it was delivered before they were parked. That holds as well
        when the park has run empty before it comes (`_dealt`): wake-ups come sooner than the tasks themselves.
        """
        if lane.through:
            return
        lane.through = self.parked.get(lane.key, 0)
        if not lane.through and (last := await self._surely(lambda: self._park.last(lane.key))) is not None:
            lane.through = place(last.headers.get(ORIGIN, ""), self._tools.config.stream)

    def _is_old(self, lane: Lane, held: Held) -> bool:
        if held.feed is self._wakes or not lane.through:
            return False  # a task that was scheduled alone comes late on purpose
        if not 0 < place(held.source, self._tools.config.stream) <= lane.through:
            return False
        self._tools.recorder.duplicate(held.id)
        return True

    def _forget_dealt(self, held: Held) -> None:
        """Whatever the owner before us had in hand comes before anything newer: then nobody asks for it any more."""
        if place(held.source, self._tools.config.stream) > self._dealt_up_to:
            self._dealt.clear()
            self._dealt_up_to = 0

    def _drop_old(self, lane: Lane) -> None:
        while lane.queue and self._is_old(lane, lane.queue[0]):
            self._release(lane.queue.popleft())

    def _drained(self, lane: Lane) -> None:
        """Nothing is parked any more: the document goes on in memory."""
        lane.mode = Mode.LIVE
        self.parked.pop(lane.key, None)
        if lane.through:
            self._dealt[lane.key] = lane.through
            self._dealt_up_to = max(self._dealt_up_to, lane.through)
        if lane.wake is not None:
            self._wakes.done(lane.wake.sequence)
            lane.wake = None

    async def _failed(self, lane: Lane, head: Held, error: Exception) -> None:
        """Whatever a task brings about is the end of that task alone: it rests, and its document goes on."""
        if isinstance(error, MemoryError):
            lane.busy = False
            self._tools.recorder.event("deliver.out_of_memory", warn=True, id=head.id)
            await self._tools.clock.sleep(1.0)  # ours, not the task's: its turn comes again
            return
        refusal = unforeseen(error, "handled")
        self._tools.recorder.event("deliver.unforeseen", warn=True, id=head.id, error=repr(error)[:500])
        await self._bury(lane, head, refusal.reason, Attempt(Outcome.REFUSED, error=str(refusal)))
        lane.busy = False

    async def _serve(self, lane: Lane, head: Held) -> None:
        """One turn of the head: an attempt and what follows from it, or a reason why there is none now."""
        tools = self._tools
        if head.refusal is not None:
            await self._bury(lane, head, head.refusal.reason, Attempt(Outcome.REFUSED, error=str(head.refusal)))
            return
        if tools.is_disabled(head):
            await self._bury(lane, head, Reason.DISABLED, Attempt(Outcome.REFUSED, error="the endpoint is disabled"))
            return
        if head.attempts and self._has_expired(head):
            await self._expire(lane, head)
            return
        postponed = await tools.gate.admit(head.host, head.trigger, head.rules)
        if postponed is not None:
            if self._has_expired(head):  # one that was never tried has a try coming, but not from a host that is down
                await self._expire(lane, head)
            else:
                await self._postpone(lane, head, postponed)
            return
        lane.busy = True
        started, attempt = tools.clock.now(), None
        try:
            attempt = await tools.courier.attempt(head, self._lease)
        finally:
            outcome = attempt.outcome if attempt is not None and attempt.outcome not in UNSPENT else None
            if tools.gate.release(head.host, head.trigger, head.rules, outcome):
                tools.recorder.breaker_opened(head.host)
        if attempt.outcome not in UNSPENT:
            head.attempts += 1
        now = tools.clock.now()
        tools.recorder.attempted(head, attempt, now - started)
        await self._follow(lane, head, attempt, now)
        lane.busy = False

    def _has_expired(self, head: Held) -> bool:
        return self._tools.clock.wall() - head.first_seen >= self._tools.config.max_task_age

    async def _expire(self, lane: Lane, head: Held) -> None:
        attempt = Attempt(Outcome.REFUSED, error="older than deliver.max_task_age when its turn came")
        await self._bury(lane, head, Reason.EXPIRED, attempt)
        lane.busy = False

    async def _follow(self, lane: Lane, head: Held, attempt: Attempt, now: float) -> None:
        tools = self._tools
        decision: Decision = DONE
        if attempt.outcome is not Outcome.DELIVERED:  # the one outcome that needs no schedule to be asked for
            assert head.task is not None
            decision = decide(
                attempt,
                attempts=head.attempts,
                age=tools.clock.wall() - head.first_seen,
                schedule=schedule_of(head.task.retry_policy, tools.config),
                config=tools.config,
                rng=tools.rng,
            )
        match decision:
            case Done():
                await self._let_go(lane, head)
                tools.recorder.delivered(head)
            case Bury(reason, disable):
                if disable:
                    await self._surely(lambda: tools.disable(head, attempt))
                await self._bury(lane, head, reason, attempt)
            case Again(wait):
                if head.failed_at is None:
                    head.failed_at = now
                queued = len(lane.queue) - (lane.mode is Mode.LIVE)
                where = hold(
                    head.rules.order, wait=wait, blocked=now - head.failed_at, queued=queued, config=tools.config
                )
                tools.recorder.failed(head, attempt, wait, where)
                await self._hold(lane, head, wait, where)

    async def _postpone(self, lane: Lane, head: Held, postponed: Postponed) -> None:
        order, wait = head.rules.order, postponed.wait
        where = Hold.ALONE if order is Order.SKIP else Hold.PARK
        if wait <= _SHORT and postponed.why != "crowded" and order is not Order.PARK:
            where = Hold.MEMORY
        self._tools.recorder.postponed(head, wait, postponed.why, where)
        await self._hold(lane, head, wait, where)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _hold(self, lane: Lane, head: Held, wait: float, where: Hold) -> None:
        try:
            if where is Hold.MEMORY:
                await self._pause(lane, head, wait)
            elif where is Hold.ALONE:
                lane.busy = True
                await self._surely(lambda: self._park.alone(head, wait))
                await self._let_go(lane, head)
            else:
                await self._park_lane(lane, head, wait)
        except UsageError as error:
            # The server takes no message of this size with our headers: it cannot wait anywhere but in memory.
            await self._bury(lane, head, Reason.TOO_LARGE, Attempt(Outcome.REFUSED, error=str(error)))

    async def _pause(self, lane: Lane, head: Held, wait: float) -> None:
        """Wait in memory; give up the place when too many queue up behind, or when a newer task takes over."""
        lane.busy = False
        clock, limit = self._tools.clock, self._tools.config.block_queue
        until = clock.now() + wait
        lane.nudge = asyncio.Event()
        try:
            while (left := until - clock.now()) > 0:
                try:
                    async with asyncio.timeout(left):
                        await lane.nudge.wait()
                except TimeoutError:
                    break
                lane.nudge.clear()
                behind = len(lane.queue) - (lane.mode is Mode.LIVE)
                if head.rules.order is Order.LATEST and behind:
                    if lane.mode is Mode.LIVE:
                        self._tools.recorder.superseded(self._latest.in_memory(lane))
                        head = lane.queue[0]
                elif behind > limit:
                    await self._park_lane(lane, head, until - clock.now())
                    return
        finally:
            lane.nudge = None
        # A parked head is read again, and takes its attempts from the wake-up.
        if lane.mode is Mode.DRAINING and lane.wake is not None:
            lane.wake.head, lane.wake.attempts = head.id, head.attempts

    async def _park_lane(self, lane: Lane, head: Held, wait: float) -> None:
        """The wake-up is stored first: a crash in between leaves a wake-up too many, never a document asleep."""
        lane.busy = True
        before = lane.wake
        await self._surely(lambda: self._park.wake_after(lane.key, wait, head.id, head.attempts))
        self.parked.setdefault(lane.key, lane.through)
        if lane.mode is Mode.DRAINING:
            self._unread(lane)
            if lane.wake is not None and lane.wake is before:
                self._wakes.done(lane.wake.sequence)
                lane.wake = None
        lane.mode = Mode.PARKED
        lane.busy = False

    async def _forward(self, lane: Lane) -> None:
        """Put what is in memory behind what is parked."""
        lane.busy = True
        await self._learn(lane)
        while lane.queue and not self._stopping:
            held = lane.queue[0]
            if self._is_old(lane, held):
                self._release(lane.queue.popleft())
                continue
            if held.refusal is not None:
                await self._bury(lane, held, held.refusal.reason, Attempt(Outcome.REFUSED, error=str(held.refusal)))
                continue
            try:
                await self._surely(lambda held=held: self._park.append(held))  # type: ignore[misc]
            except UsageError as error:
                await self._bury(lane, held, Reason.TOO_LARGE, Attempt(Outcome.REFUSED, error=str(error)))
                continue
            self._tools.recorder.parked(held)
            lane.queue.popleft()
            self._release(held)
            if held.feed is not self._wakes:
                lane.through = place(held.source, self._tools.config.stream) or lane.through
        if lane.mode is not Mode.LIVE:
            self.parked[lane.key] = lane.through
        lane.busy = False

    # -- letting go ---------------------------------------------------------------------------------------------------

    async def _bury(self, lane: Lane, held: Held, reason: Reason, attempt: Attempt) -> None:
        lane.busy = True
        await self._surely(lambda: self._tools.letters.bury(held, reason, attempt))
        await self._let_go(lane, held, b"+TERM " + reason.value.encode())
        self._tools.recorder.buried(held, reason, attempt)

    async def _let_go(self, lane: Lane, held: Held, verb: bytes = b"+ACK") -> None:
        if held.park_sequence:
            await self._surely(lambda: self._park.remove(held.park_sequence))
            return
        if lane.queue and lane.queue[0] is held:
            lane.queue.popleft()
        self._release(held, verb)

    def _release(self, held: Held, verb: bytes = b"+ACK") -> None:
        self._tools.gate.unhold(held.host)
        if held.feed is not None:
            held.feed.done(held.sequence, verb)

    def _unread(self, lane: Lane) -> None:
        """The parked head leaves memory; in the park it stays what it is."""
        if lane.reading is not None:
            self._tools.gate.unhold(lane.reading.host)
            lane.reading = None
