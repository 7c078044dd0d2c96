"""What is open (received, not done) and what is done, per partition: the position belongs to it, never to the worker.

Pure bookkeeping, no I/O. It rests on three facts:

- the consumer delivers in stream order, and a gap in its own sequence is noticed (docs/evidence/cluster.md#c3). So
  every message of a partition up to `received_through` was received: it is in `open`, or it is done;
- a partition that was added while the consumer ran gets (cursor, target] by a range read and everything above `target`
  from the consumer (docs/evidence/handoff.md#h1). Until then it is *catching up*, and live messages are held;
- after a worker was stopped with open messages, `owed` lists them: at or below `received_through`, only those are still
  to be done.

The invariant of work queues and interest streams, where an ack deletes: **a sequence leaves the stream only by an ack
that follows its own effect or letter.** So `received_through` never covers more than was received here in stream order,
or the partition's claim says is done; messages that are only held or ignored are never acknowledged (`Inbox.take`). On
those streams nothing is read by range: a reset of the consumer redelivers the rest in order, and a partition that is
added stays *aside* (its deliveries are ignored) until that reset.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from parti.model import Ahead, Lease, Partition, PartitionId, Retention
from parti.worker.lanes import Lane
from parti.worker.message import Message
from parti.worker.routing import Routes
from parti.worker.tries import Tries
from parti.worker.wary import Wary

_FORMER = 10_000  # positions of partitions that this worker owned before
_LEFT = 5_000  # messages that a claim lists one by one (10 KB packed); with more, those of other keys are repeated


class PartitionState:
    """One partition as this worker sees it."""

    __slots__ = (
        "ahead",
        "caught_up",
        "dead_letters",
        "done",
        "drained",
        "draining",
        "finish_through",
        "from_ranges",
        "held",
        "highest_done",
        "id",
        "lanes",
        "lease",
        "main",
        "open",
        "partition",
        "range_end",
        "received_through",
        "retries",
        "running",
        "stopped",
        "target",
        "tries",
        "turn",
        "wary",
    )

    def __init__(self, partition: Partition, lease: Lease, seen: int = 0) -> None:
        self.partition = partition
        self.id = partition.id
        self.lease = lease
        self.received_through = seen
        self.target: int | None = None
        self.range_end: int | None = None  # the target of the last take-over, until everything up to it is done
        self.from_ranges = 0  # open messages that came by a range read: no ack floor covers them
        self.caught_up: asyncio.Event | None = None
        self.open: dict[int, Message] = {}  # received and not done: queued, running, waiting for a retry, or held
        self.held: deque[Message] = deque()
        self.turn = 0  # incremented whenever open messages are dropped: a read that began before is void
        self.wary: Wary | None = None  # checked before each start, if a message may have ended the previous process
        self.tries = Tries()
        self.stopped = False
        self.finish_through = 0
        self.ahead: Ahead | None = None  # done above the cursor, before it came to us or before it was stopped here
        self.highest_done = 0  # the highest done sequence; with a lane per key, earlier ones may be open
        self.running = 0
        self.draining: float | None = None  # since when a release waits for a handler to end
        self.drained: asyncio.Event | None = None
        self.lanes: dict[str, Lane] = {}
        self.main = self.lane(partition.id)
        self.done = self.retries = self.dead_letters = 0

    def __repr__(self) -> str:
        mode = f"catching up to {self.target}" if self.target is not None else "live"
        return f"<PartitionState {self.id} {mode} seen={self.received_through} open={len(self.open)}>"

    @property
    def catching_up(self) -> bool:
        return self.target is not None

    @property
    def behind(self) -> bool:
        """The take-over is not finished: some messages up to its target are not read or not done.

        See docs/evidence/handoff.md#h3.
        """
        return self.target is not None or (self.range_end is not None and self.from_ranges > 0)

    def check_whole(self) -> None:
        """Notify the waiter of the take-over if it is finished."""
        if not self.from_ranges and self.target is None:
            self.range_end = None
            if self.caught_up is not None:
                self.caught_up.set()

    def stop(self, running: Iterable[int]) -> None:
        """Start nothing more, except below a message that was already started: then one cursor describes what is done.

        With a lane per key, or in relaxed order, a message can be done before an earlier one. If the earlier one went
        to the next owner, the later one would be repeated there.
        """
        if not self.stopped:
            self.stopped, self.finish_through = True, max(self.highest_done, *running, 0)

    def look_ahead(self) -> None:
        """Record what is done above the cursor before open messages are dropped: the next owner skips it."""
        before = self.ahead or Ahead(0)
        upto = max(self.highest_done, before.upto)
        left = {s for s in self.open if s <= upto} | {s for s in before.left if s > self.received_through}
        cursor = min(self.received_through, min(self.open, default=self.received_through + 1) - 1)
        self.ahead = Ahead(upto, frozenset(left)) if upto > cursor and len(left) <= _LEFT else None

    def pass_ahead(self) -> None:
        """Everything up to the earlier owners' progress was received: whatever is not open there is done."""
        if self.ahead is not None:
            self.highest_done, self.ahead = max(self.highest_done, self.ahead.upto), None

    def may_start(self, message: Message) -> bool:
        return not self.stopped or message.sequence <= self.finish_through

    @property
    def unfinished(self) -> bool:
        """Stopped, but some messages must still finish before the cursor is exact."""
        return self.stopped and any(sequence <= self.finish_through for sequence in self.open)

    async def finished(self) -> None:
        """Returns when nothing of the stopped partition runs or is unfinished, or when it resumes."""
        while self.stopped and (self.running or self.unfinished):
            idle = self.drained = self.drained or asyncio.Event()
            await idle.wait()
            if self.drained is idle:
                self.drained = None

    def lane(self, key: str) -> Lane:
        """The lane of a key, created on first use."""
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(self, key)
        return lane

    def first_open(self) -> int | None:
        """The lowest open sequence that did not come by a range read of a catch-up."""
        if self.target is not None:
            return self.held[0].sequence if self.held else None
        if self.range_end is not None:
            return min((sequence for sequence in self.open if sequence > self.range_end), default=None)
        return min(self.open, default=None)

    def cursor(self, verified: int) -> int:
        """Up to here every message of the partition is done; `verified`: the ledger's value."""
        # During a catch-up, held messages lie above a range that was not read yet.
        reached = self.received_through if self.target is not None else max(self.received_through, verified)
        return min(reached, min(self.open) - 1) if self.open else reached


@dataclass(frozen=True, slots=True)
class Place:
    """Where messages of one subject go."""

    state: PartitionState
    subject: str
    key: str
    lane: Lane | None
    """Set when lanes are partitions; None when lanes are keys, which come and go."""


class Ledger:
    """All partitions of the worker, and the position of its consumer."""

    def __init__(self, routes: Routes, *, lane_per_key: bool = False) -> None:
        self.routes = routes
        self.states: dict[PartitionId, PartitionState] = {}
        self.high = 0
        """The consumer has delivered up to here."""
        self.verified = 0
        """Up to here the consumer certainly had all our filters: everything of the live partitions was received."""
        self.owed: set[int] = set()
        self.in_hand = 0
        self.bytes = 0
        """Payload bytes of all open messages."""
        self.retention = Retention.LIMITS
        """The stream's retention policy."""
        self.former: dict[PartitionId, int] = {}
        """Final positions of partitions that this worker owned before."""
        self._lane_per_key = lane_per_key
        self._places: dict[bytes, Place | None] = {}

    def __repr__(self) -> str:
        return f"<Ledger partitions={len(self.states)} in_hand={self.in_hand} high={self.high}>"

    @property
    def by_reset(self) -> bool:
        """Whether an ack deletes: then a reset of the consumer brings what remains, and nothing is read by range."""
        return self.retention is not Retention.LIMITS

    def taken(self) -> tuple[int, list[PartitionState]]:
        """The number of open messages, and all partitions."""
        return self.in_hand, list(self.states.values())

    def has(self, state: PartitionState) -> bool:
        """Whether this is still our current state of the partition: it may have been removed and re-added meanwhile."""
        return self.states.get(state.id) is state

    def remove(self, state: PartitionState, cursor: int) -> None:
        """The partition was removed; it is done up to `cursor`."""
        if len(self.former) >= _FORMER:
            self.former.pop(next(iter(self.former)))
        self.former[state.id] = cursor
        del self.states[state.id]

    def begin_again(self) -> None:
        """The stream counts from 1 again: every stored position is void."""
        self.stand_at(0)
        self.owed.clear()
        self.former.clear()

    def assign(self, routes: Routes) -> None:
        """Use these routes from now on; the caller adds and removes states."""
        self.routes = routes
        self._places.clear()

    def stand_at(self, sequence: int) -> None:
        """The consumer starts just after this sequence."""
        self.high = self.verified = sequence

    def forget_places(self) -> None:
        self._places.clear()

    def rebase(self) -> None:
        """The consumer restarts with what remains of the stream: keep per partition what it delivered before."""
        for state in self.states.values():
            if state.target is None:
                state.received_through = max(state.received_through, self.verified)
        self.high = self.verified = 0

    def place(self, subject: bytes) -> Place | None:
        """Where messages of this subject go; None when no partition of this worker has it."""
        try:
            return self._places[subject]
        except KeyError:
            pass
        if len(self._places) >= 20_000:
            self._places.clear()
        route = self.routes.find(subject)
        state = self.states.get(route.partition) if route is not None else None
        place = None
        if route is not None and state is not None:
            place = Place(state, route.subject, route.key, None if self._lane_per_key else state.main)
        self._places[subject] = place
        return place

    def let_go(self, message: Message) -> bool:
        """The message is done; False when it was no longer ours."""
        state = message._lane.state
        if (held := state.open.pop(message.sequence, None)) is not message:
            if held is not None:
                state.open[message.sequence] = held  # redelivered under a newer lease: not ours to finish
            return False
        self.in_hand -= 1
        self.bytes -= len(message.data)
        if message.sequence > state.highest_done:
            state.highest_done = message.sequence
        if message.delivered == 0:
            state.from_ranges -= 1
            state.check_whole()
        return True

    def forget(self, messages: Iterable[Message]) -> None:
        """These messages are no longer open, and not done."""
        for message in messages:
            self.in_hand -= 1
            self.bytes -= len(message.data)

    def floor(self) -> int:
        """The consumer may be reset to just after this: everything below is done, or comes by a range read."""
        lowest = [first for state in self.states.values() if (first := state.first_open()) is not None]
        if self.owed:
            lowest.append(min(self.owed))
        return min(lowest) - 1 if lowest else self.high

    def lowest(self) -> int:
        """Up to here every active partition is done."""
        return min((self.cursor(key) for key, state in self.states.items() if not state.stopped), default=0)

    def cursor(self, partition: PartitionId) -> int:
        """Up to here the partition is done."""
        cursor = self.states[partition].cursor(self.verified)
        return min(cursor, min(self.owed) - 1) if self.owed else cursor

    def open_messages(self) -> list[Message]:
        """All open messages, in stream order."""
        return sorted((m for s in self.states.values() for m in s.open.values()), key=lambda m: m.sequence)
