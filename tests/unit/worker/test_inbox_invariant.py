"""Where an ack deletes, a sequence leaves the stream only by an ack after its own effect, in any situation.

An in-memory work queue, the shipped inbox and ledger, and any sequence of publishes, deliveries, stops, moves to and
fro, resets, lost acks and consumer checks. Outages, restarts and aborted moves once lost 1 to 140 messages.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from parti.config.worker import WorkerConfig
from parti.model import Partition, Retention
from parti.worker.inbox import Inbox
from parti.worker.ledger import PartitionState
from parti.worker.message import Message
from support.inbox import Bare, bare_inbox

NAMES = ("a", "b", "c")


class Queues:
    """In place of the lanes: what may start is known, and starts when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[Message]] = {name: deque() for name in NAMES}

    def push(self, message: Message) -> None:
        self.waiting[message._lane.state.id].append(message)

    def forget(self, state: PartitionState) -> None:
        self.waiting[state.id].clear()


@dataclass
class World:
    """The queue on the server, our consumer on it, and another worker that may own a partition meanwhile."""

    bare: Bare
    inbox: Inbox
    queues: Queues
    stream: dict[int, str] = field(default_factory=dict)
    partition_of: dict[int, str] = field(default_factory=dict)
    last: int = 0
    at: int = 1
    done: list[int] = field(default_factory=list)
    running: dict[str, Message] = field(default_factory=dict)
    ours: set[str] = field(default_factory=set)
    lose_acks: bool = False

    def write(self, frames: bytes) -> None:
        """The connection: acks reach the server, or get lost."""
        for frame in frames.split(b"PUB ")[1:]:
            sequence = int(frame.split(b" ")[0].rpartition(b".")[2])
            assert sequence in self.done, f"{sequence} was acknowledged unhandled"
            if not self.lose_acks:
                self.stream.pop(sequence, None)

    def state(self, name: str) -> PartitionState:
        return self.bare.ledger.states[name]  # type: ignore[index]

    def publish(self, name: str) -> None:
        self.last += 1
        self.stream[self.last] = self.partition_of[self.last] = name

    def deliver(self, count: int) -> None:
        left = sorted(sequence for sequence in self.stream if sequence >= self.at)[:count]
        if left:
            self.at = left[-1] + 1
            self.inbox.take([(f"s.{self.stream[n]}".encode(), b"r.%d" % n, b"", b"", 1, n, 0) for n in left], 0)

    def start(self, name: str) -> None:
        state, queue = self.state(name), self.queues.waiting[name]
        if name in self.ours and name not in self.running and queue and state.may_start(queue[0]):
            self.running[name] = queue.popleft()
            state.running += 1

    def end(self, name: str) -> None:
        if (message := self.running.pop(name, None)) is None:
            return
        self.done.append(message.sequence)
        state = self.state(name)
        state.running -= 1
        self.bare.room.let_go(message)
        if state.stopped:
            self.inbox.give_back(state)

    def stop(self, name: str) -> None:
        """Ours no longer: stop, finish what runs, give back the rest."""
        if name not in self.ours:
            return
        state = self.state(name)
        self.inbox.put_aside(state)
        state.stop([self.running[name].sequence] if name in self.running else [])
        if name not in self.running:
            self.inbox.give_back(state)
        self.ours.discard(name)

    def other(self, name: str, count: int) -> None:
        """Another worker owns it meanwhile, and handles the next ones; its last ack gets lost."""
        if name in self.ours or name in self.running:
            return
        for sequence in sorted(n for n, p in self.stream.items() if p == name and n not in self.done)[:count]:
            self.done.append(sequence)
            if sequence % 3:
                del self.stream[sequence]

    def take_over(self, name: str) -> None:
        """The claim is ours again, with the position that it carries."""
        if name in self.ours or name in self.running:
            return
        state = self.state(name)
        left = [n for n, p in self.stream.items() if p == name and n not in self.done]
        cursor = min(left) - 1 if left else self.last
        self.inbox.resume_at(state, cursor)
        self.ours.add(name)
        self.reset()

    def hold(self, name: str) -> None:
        """A move to us begins while our filter is still on."""
        if name in self.ours or name in self.running:
            return
        state = self.state(name)
        self.inbox.hold(state)
        self.inbox.extend(state, max(self.last, state.target or 0))

    def reset(self) -> None:
        """Everything that is left comes again, from the first on."""
        joining = self.inbox.joining()
        self.at = 1
        self.inbox.restarted(joining)

    def verify(self) -> None:
        ledger = self.bare.ledger
        ledger.verified = max(ledger.verified, ledger.high)
        for name in self.ours:
            first = min((n for n, p in self.stream.items() if p == name and n not in self.done), default=self.last + 1)
            assert ledger.cursor(self.state(name).id) < first, f"the position of {name} passed {first}"


def world() -> World:
    queues = Queues()
    config = WorkerConfig(stream="S", subject_template="s.{partition}")
    bare = bare_inbox(config, [Partition((name,)) for name in NAMES], queues)
    bare.ledger.retention = Retention.WORKQUEUE
    made = World(bare, bare.inbox, queues, ours=set(NAMES))
    bare.channel.connection = made  # type: ignore[assignment]
    return made


WALKS, STEPS = 150, 150


def step(here: World, rng: random.Random) -> None:
    name = rng.choice(NAMES)
    match rng.choices(
        ("publish", "deliver", "start", "end", "stop", "hold", "take_over", "other", "reset", "verify", "acks"),
        (6, 5, 5, 5, 1, 1, 2, 1, 1, 1, 1),
    )[0]:
        case "deliver":
            here.deliver(rng.randint(1, 6))
        case "other":
            here.other(name, rng.randint(1, 3))
        case "reset":
            here.reset()
        case "verify":
            here.verify()
        case "acks":
            here.lose_acks = not here.lose_acks
        case action:
            getattr(here, action)(name)


def finish(here: World) -> None:
    """Everything is ours, acks arrive, and all that is left is delivered."""
    here.lose_acks = False
    for each in NAMES:
        here.end(each)
        here.take_over(each)
    here.reset()
    before = (0, -1)
    while (here.at, len(here.done)) != before:
        before = (here.at, len(here.done))
        here.deliver(10)
        for each in NAMES:
            here.start(each)
            here.end(each)
    here.reset()
    here.deliver(10_000)


@pytest.mark.parametrize("seed", range(WALKS))
async def test_a_sequence_leaves_the_stream_only_after_its_effect_and_all_are_done_once_in_order(seed: int) -> None:
    rng, here = random.Random(seed), world()
    for _ in range(STEPS):
        step(here, rng)
    finish(here)
    assert not here.stream, "what was handled left the stream"
    assert sorted(here.done) == list(range(1, here.last + 1)), "everything once"
    for each in NAMES:
        of_one = [sequence for sequence in here.done if here.partition_of[sequence] == each]
        assert of_one == sorted(of_one), "in order"
    here.verify()
