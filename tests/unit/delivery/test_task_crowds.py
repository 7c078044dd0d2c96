"""Hosts of all kinds share the memory: generated crowds of documents, in simulated time, through the real gate."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from parti.clock import SimulatedClock
from parti.config.deliver import DeliverSection
from parti.delivery.document import Mode
from parti.delivery.gate import Gate
from parti.delivery.line import HostLine, Name
from parti.delivery.order import OrderRules
from parti.delivery.policy import AttemptOutcome

OPEN = OrderRules()
ILL = ("dead", "hanging", "slow", "flaky", "throttling")
UNPROVEN = 4  # places of a host that has not answered
TRIP = 0.002  # seconds, to the server and back

Tasks = list[tuple[str, int]]
"""By host and document. A host's name begins with its kind."""


@dataclass(eq=False, slots=True)
class Lane:
    """A document: when its tasks were published and came into memory. They are in memory, or in the park."""

    host: str
    name: Name
    queue: deque[tuple[float, float]] = field(default_factory=deque)
    park: deque[tuple[float, float]] = field(default_factory=deque)
    mode: Mode = Mode.LIVE
    called: bool = False
    task: asyncio.Task[None] | None = None


class Crowd:
    """What `Feed` and `Documents` do to the gate, without a server and without real time."""

    def __init__(self, rng: random.Random, limit: int, block_for: float, timeout: float) -> None:
        self.config = DeliverSection(max_ack_pending=limit, breaker_open=0.5)
        self.clock = SimulatedClock()
        self.gate = Gate(self.config, self.clock, rng)
        self.gate.pressed = lambda: self.taken * 2 >= limit
        self.rng = rng
        self.block_for = block_for
        self.timeout = timeout
        self.lanes: dict[Name, Lane] = {}
        self.backlog: deque[tuple[Lane, float]] = deque()
        self.taken = 0
        self.answered: set[str] = set()
        self.published = 0  # tasks of hosts that are well, as all that follows
        self.in_memory: list[float] = []  # seconds from memory to delivery
        self.in_all: list[float] = []  # seconds from publishing to delivery
        self.needless: list[str] = []  # sent away although there was a free place

    def publish(self, tasks: Tasks) -> None:
        for host, document in tasks:
            name = (0, f"{host}-{document}")
            self.backlog.append((self.lanes.setdefault(name, Lane(host, name)), self.clock.now()))
            self.published += host.startswith("well")
        self.take()

    def take(self) -> None:
        """The feed brings what there is room for, at once."""
        while self.backlog and self.taken < self.config.max_ack_pending:
            lane, published = self.backlog.popleft()
            self.taken += 1
            self.gate.hold(lane.host)
            lane.queue.append((published, self.clock.now()))
            self.stir(lane)

    def stir(self, lane: Lane) -> None:
        if lane.task is None:
            lane.task = asyncio.create_task(self.run(lane))

    def call(self, lane: Lane) -> None:
        lane.called = True
        self.stir(lane)

    def gone(self, lane: Lane) -> tuple[float, float]:
        """The document's first task leaves the memory."""
        self.taken -= 1
        self.gate.unhold(lane.host)
        asyncio.get_running_loop().call_soon(self.take)
        return lane.queue.popleft()

    async def run(self, lane: Lane) -> None:
        failed_at: float | None = None
        while lane.queue or lane.park:
            if lane.called and lane.mode is not Mode.DRAINING:
                await self.clock.sleep(TRIP)
                lane.mode = Mode.DRAINING
            if lane.mode is Mode.PARKED:
                if not lane.queue:
                    break
                await self.clock.sleep(TRIP)
                lane.park.append(self.gone(lane))
                continue
            if lane.mode is Mode.DRAINING and not lane.park:
                lane.mode, lane.called = Mode.LIVE, False
                continue
            read = lane.mode is Mode.DRAINING
            if read:
                await self.clock.sleep(TRIP)
                self.gate.hold(lane.host)
            wait = await self.serve(lane, read)
            if read:
                self.gate.unhold(lane.host)
            if not wait:
                failed_at = None
                continue
            failed_at = self.clock.now() if failed_at is None else failed_at
            blocked = self.clock.now() - failed_at + wait
            if not read and blocked <= self.block_for and not self.gate.crowds(lane.host, "t", OPEN):
                await self.clock.sleep(wait)
            else:
                lane.mode, lane.called = Mode.PARKED, False
                lane.task = asyncio.create_task(self.wake(lane, wait))
                return
        lane.task = None

    async def wake(self, lane: Lane, wait: float) -> None:
        """The document is parked until its time; what comes meanwhile is parked behind it."""
        until = self.clock.now() + wait
        while (left := until - self.clock.now()) > 0:
            await self.clock.sleep(min(left, TRIP if lane.queue else left))
            if lane.queue:
                lane.park.append(self.gone(lane))
        lane.called = True
        await self.run(lane)

    async def serve(self, lane: Lane, read: bool) -> float:
        """Seconds until the next attempt if this one has failed, else 0."""
        postponed = await self.gate.admit(lane.host, "t", OPEN)
        if postponed is not None:
            assert isinstance(postponed.line, HostLine)
            places = self.config.host_concurrency if lane.host in self.answered else UNPROVEN
            if lane.host.startswith("well") and postponed.line.active < places:
                self.needless.append(f"{lane.host} after {self.clock.now():.3f} s: {postponed}")
            lane.mode, lane.called = Mode.PARKED, False
            self.gate.wait_outside(postponed.line, lane.name, lambda: self.call(lane))
            return 0.0
        takes, outcome, wait = self.answer(lane.host)
        await self.clock.sleep(takes)
        self.gate.release(lane.host, "t", OPEN, outcome)
        self.answered |= {lane.host} if not outcome.hurts_host else set()
        if not wait:
            published, came = lane.park.popleft() if read else self.gone(lane)
            if lane.host.startswith("well"):
                self.in_memory.append(self.clock.now() - came)
                self.in_all.append(self.clock.now() - published)
        return wait

    def answer(self, host: str) -> tuple[float, AttemptOutcome, float]:
        """Seconds that a call takes, how it ends, and seconds until the next attempt."""
        fails = self.rng.random() < 0.8
        match host.split("-")[0]:
            case "dead":
                return 0.001, AttemptOutcome.NETWORK, 0.2
            case "hanging":
                return self.timeout, AttemptOutcome.TIMEOUT, 0.2
            case "slow":
                return self.rng.uniform(0.05, 0.3), AttemptOutcome.DELIVERED, 0.0
            case "flaky" if fails:
                return 0.002, AttemptOutcome.SERVER_ERROR, 0.2
            case "throttling" if fails:
                return 0.002, AttemptOutcome.THROTTLED, self.rng.choice((1.0, 2.0))
            case _:
                return self.rng.uniform(0.001, 0.01), AttemptOutcome.DELIVERED, 0.0

    async def play(self, bursts: list[tuple[float, Tasks]]) -> None:
        """Publish at the given times, and let time pass until a minute after the last of them."""
        later, until = deque(bursts), bursts[-1][0] + 60.0
        while self.clock.now() < until and len(self.in_all) < self.published + sum(len(burst[1]) for burst in later):
            while later and later[0][0] <= self.clock.now():
                self.publish(later.popleft()[1])
            for _ in range(10):  # everything runs that can run now
                await asyncio.sleep(0)
            moments = [entry[0] for entry in self.clock._sleepers] + [burst[0] for burst in later] + [until]
            self.clock.advance(max(0.0, min(moments) - self.clock.now()) + 1e-9)
        self.gate.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


def drawn(rng: random.Random, hosts: list[str], times: list[float]) -> list[tuple[float, Tasks]]:
    """Tasks of all hosts, mixed; some hosts are not tried before the second burst."""
    documents = {host: rng.choice((1, 3, 20)) for host in hosts}
    found = []
    for time in times:
        counts = {host: 20 if host.startswith("well") else rng.choice((0, 20, 80)) for host in hosts}
        tasks = [(host, rng.randrange(documents[host])) for host, count in counts.items() for _ in range(count)]
        rng.shuffle(tasks)
        found.append((time, tasks))
    return found


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    ill=st.lists(st.sampled_from(ILL), min_size=1, max_size=4),
    well=st.integers(1, 2),
    limit=st.sampled_from([32, 64, 200]),
    block_for=st.sampled_from([0.2, 2.0, 60.0]),
    again=st.floats(0.01, 20.0),
)
def test_a_host_that_is_well_never_waits_outside_while_it_has_a_free_place(
    seed: int, ill: list[str], well: int, limit: int, block_for: float, again: float
) -> None:
    """Also one that was not tried yet, or not lately. Hosts that fail do not keep the memory, free places or not."""
    rng = random.Random(seed)
    crowd = Crowd(rng, limit, block_for, timeout=1.0)
    hosts = [f"{kind}-{number}" for number, kind in enumerate([*ill, *["well"] * well])]
    asyncio.run(crowd.play(drawn(rng, hosts, [0.0, 0.01, again])))
    assert crowd.needless == []
    assert len(crowd.in_all) == crowd.published
    assert max(crowd.in_memory) < 0.5
    assert max(crowd.in_all) < 5.0


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    hanging=st.integers(1, 3),
    beside=st.lists(st.sampled_from(("dead", "slow")), max_size=2),
    limit=st.sampled_from([32, 64, 200]),
)
def test_hosts_that_hang_hold_no_more_than_a_few_documents_each(
    seed: int, hanging: int, beside: list[str], limit: int
) -> None:
    """However many documents of theirs come: a host that is well is served long before the first of them times out."""
    rng = random.Random(seed)
    crowd = Crowd(rng, limit, 60.0, timeout=30.0)
    hosts = [f"{kind}-{number}" for number, kind in enumerate([*["hanging"] * hanging, *beside, "well"])]
    tasks = [(host, number) for host in hosts for number in range(limit)]
    rng.shuffle(tasks)
    asyncio.run(crowd.play([(0.0, tasks)]))
    assert len(crowd.in_all) == limit
    assert max(crowd.in_all) < 10.0
