"""Messages in flight at a member, under any sequence of pins gained and lost, freezes, drains, cancels and outcomes.

A small server model decides what is pending and redelivered. After every step: no message runs twice at once, a key
is handled in order, nothing starts while its owner is unknown, and only what a handler finished is acknowledged.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from parti.clock import SystemClock
from parti.groups.in_flight import UNLIMITED, HandlerOptions, InFlight, InFlightOwner, Order
from parti.groups.message import GroupMessage, Holding
from parti.model import Lease, Partition, PartitionId
from parti.observe.metrics import NO_METRICS
from parti.outcomes import Bury, Reject, Retry, RetryPolicy

KEYS = 3


class Letters:
    def __init__(self) -> None:
        self.buried: set[int] = set()

    async def bury(self, message: GroupMessage, decision: Bury) -> None:
        self.buried.add(message.queue_sequence)


class World:
    """A server with one consumer, and one member's work on it."""

    def __init__(self, rng: random.Random, total: int, order: Order) -> None:
        self.rng, self.total, self.order = rng, total, order
        self.next = 1
        self.pending: set[int] = set()
        self.done: set[int] = set()
        self.pin = 0
        self.pinned = False
        self.frozen = False
        """The process stood still, and has not noticed it yet."""
        self.uncertain = False
        self.letters = Letters()
        self.running: dict[int, asyncio.Future[Any]] = {}
        self.broken: list[str] = []
        retry = RetryPolicy(max_deliver=UNLIMITED, delays=(0.0,))
        self.work = InFlight(
            self.handle,
            HandlerOptions(order=order, concurrency=8, retry=retry, key=lambda m: str(m.queue_sequence % KEYS)),
            InFlightOwner(self.settle, still_fresh=lambda: not self.frozen, certain=lambda: not self.uncertain),
            self.letters,
            SystemClock(),
            NO_METRICS,
        )
        self.finished: set[int] = set()

    @property
    def holding(self) -> Holding:
        return ("consumer", str(self.pin))

    def lane_of(self, sequence: int) -> int:
        return 0 if self.order is Order.STRICT else sequence % KEYS

    async def handle(self, message: GroupMessage) -> Any:
        sequence = message.queue_sequence
        mine = self.lane_of(sequence)
        beside = [other for other in self.running if self.lane_of(other) == mine]
        earlier = [other for other in self.work.in_hand if other < sequence and self.lane_of(other) == mine]
        # Told here and judged at the end: what a handler raises is an outcome, and no failure of the test.
        self.check(not self.work.holding, f"{sequence} started while nobody knows whose it is")
        self.check(not beside, f"{sequence} started beside {beside}")
        self.check(not earlier, f"{sequence} started before {earlier}")
        future = self.running[sequence] = asyncio.get_running_loop().create_future()
        try:
            outcome = await future
        finally:
            del self.running[sequence]
        if outcome == "raise":
            raise ValueError("no")
        if outcome is None or isinstance(outcome, Reject):
            self.finished.add(sequence)
        return outcome

    def settle(self, message: GroupMessage, body: bytes) -> None:
        sequence = message.queue_sequence
        self.check(not self.uncertain, f"{body!r} about {sequence} while it may be somebody else's")
        if body == b"+ACK":
            self.check(sequence in self.finished, f"{sequence} was acknowledged and not handled")
            self.pending.discard(sequence)
            self.done.add(sequence)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)

    def deliver(self, sequences: list[int]) -> None:
        self.work.accept([self.message(sequence) for sequence in sequences])

    def message(self, sequence: int) -> GroupMessage:
        message = GroupMessage()
        message.queue_sequence = message.sequence = message.stored_ns = sequence
        message.subject = message.key = str(sequence % KEYS)
        message.number, message.partition = 0, Partition(("0",))
        message.lease = Lease(PartitionId("0"), 0)
        message.attempt, message.data, message.last_error = 0, b"", ""
        message._lane, message._reply, message.holding = self.work.lane, b"r", self.holding
        message.acknowledged = message.started = message.doubtful = False
        message.parked = message.cancelled = message.handed_back = message.finished = False
        return message

    # -- steps -----------------------------------------------------------------------------------------------------

    def new(self) -> None:
        if self.pinned:
            count = min(self.rng.randrange(1, 5), self.total - self.next + 1)
            fresh = list(range(self.next, self.next + count))
            self.next += count
            self.pending.update(fresh)
            self.deliver(fresh)

    def lose_pin(self) -> None:
        self.pinned = self.frozen = False
        if self.uncertain:
            self.work.doubt()
        self.work.drop()

    def gain_pin(self) -> None:
        """As the member does it: everything pending comes again, and only then anything starts."""
        if not self.pinned:
            self.pin += 1
            self.pinned, self.uncertain = True, False
            again = sorted(self.pending)
            self.rng.shuffle(again)
            self.deliver(again)
            self.work.release(self.pin, self.holding)

    def freeze(self) -> None:
        """The process stands still; handlers may go on before it notices."""
        self.frozen = self.pinned

    def cut(self) -> None:
        if self.pinned:
            self.uncertain = True
            self.work.suspend()

    def notice(self) -> None:
        if self.frozen:
            self.frozen, self.uncertain = False, True
            self.work.suspend()
            self.work.doubt()

    def settle_pin(self) -> None:
        """The pin outlived it, or it did not."""
        if self.uncertain and self.pinned:
            if self.rng.random() < 0.5:
                self.uncertain = False
                self.work.release(self.pin, self.holding)
            else:
                self.lose_pin()

    def drain(self) -> None:
        self.work.suspend()
        if self.rng.random() < 0.5:
            self.work.cancel("the model", keep=True)

    def end_drain(self) -> None:
        if self.work.holding:
            self.lose_pin()

    def cancel(self) -> None:
        if not self.pinned:
            self.work.cancel("the model", keep=False)

    def end_one(self) -> None:
        if waiting := [sequence for sequence, future in self.running.items() if not future.done()]:
            outcome = self.rng.choice([None, None, None, Retry(after=0.0), "raise", Reject("no")])
            self.running[self.rng.choice(waiting)].set_result(outcome)

    async def finish(self) -> None:
        """Let everything come to its end: nothing may be left, and nothing may be missing."""
        self.notice()
        self.end_drain()
        self.gain_pin()
        while self.next <= self.total:
            self.new()
        for _ in range(200 * self.total):
            if len(self.done) == self.total:
                break
            for future in list(self.running.values()):
                if not future.done():
                    future.set_result(None)
            if self.rng.random() < 0.2:
                self.deliver(sorted(self.pending - set(self.work.in_hand)))
            await asyncio.sleep(0)
        assert self.done == set(range(1, self.total + 1))
        assert self.work.in_hand == {}
        assert self.work.stuck() is None
        await self.work.close()


STEPS = (
    "new",
    "new",
    "end_one",
    "end_one",
    "end_one",
    "lose_pin",
    "gain_pin",
    "freeze",
    "drain",
    "end_drain",
    "cancel",
)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(STEPS), max_size=60), st.sampled_from([Order.STRICT, Order.KEY]))
def test_work_keeps_its_promises_under_any_sequence_of_events(seed: int, steps: list[str], order: Order) -> None:
    async def play() -> None:
        world = World(random.Random(seed), 20, order)
        failures: list[BaseException] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context.get("exception") or ValueError(context)))
        world.gain_pin()
        for step in steps:
            getattr(world, step)()
            for _ in range(world.rng.randrange(4)):
                await asyncio.sleep(0)
        await world.finish()
        assert (world.broken, failures) == ([], [])

    asyncio.run(play())
