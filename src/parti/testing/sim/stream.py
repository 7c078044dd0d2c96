"""A stream and its consumers, with the properties that shape the protocols (docs/evidence/jetstream.md#j1).

- Editing filters never goes back: messages below the scan position are skipped, and a pull that finds nothing
  moves that position to the end.
- Unacked messages of a subject that is no longer filtered are still redelivered, to the same consumer.
- RESET clears pending messages and restarts the consumer sequence at 1; late acks count once redelivered.
- An interest stream deletes messages without interest at once, also when a filter is dropped.
- A work queue refuses overlapping filters, and an ack deletes. So does a filter that is added while the ack floor is
  above messages that it matches (docs/decisions/0009).
- A waiting pull gets heartbeats, and expires by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from parti.model import Retention
from parti.testing.sim.world import SimMachine, World

NAME = "S"
TEMPLATE = "s.{partition}.*"


class SimLink(Protocol):
    """The target of deliveries: one connection of a process."""

    host: SimMachine

    def wants(self, subject: str) -> int | None:
        """The subscription that receives this subject, or None."""
        ...

    def send(self, frames: bytes, *, steady: bool = False) -> None:
        """Send bytes to the process; `steady` bytes are never lost or reordered."""
        ...


@dataclass(slots=True, eq=False)
class Pull:
    """A waiting pull request of one inbox."""

    link: SimLink
    reply: str
    left: int
    expires: float
    heartbeat: float


@dataclass(slots=True)
class Delivered:
    """A delivered message that waits for its ack."""

    due: float
    count: int


@dataclass(slots=True, eq=False)
class Consumer:
    """A durable."""

    name: str
    config: dict[str, Any]
    created: str
    start: int = 1
    """The lowest sequence that a reset may go to."""
    filters: frozenset[str] = frozenset()
    """Partitions."""
    scanned: int = 0
    sequence: int = 0
    delivered: int = 0
    pending: dict[int, Delivered] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    floor_at_least: int = 0
    pulls: list[Pull] = field(default_factory=list)
    alarm: float | None = None

    @property
    def floor(self) -> int:
        return max(self.floor_at_least, min(self.pending) - 1 if self.pending else self.delivered)


def partitions_of(filters: list[str]) -> frozenset[str]:
    """The partitions that these filters name; the filter that matches nothing names none."""
    return frozenset(f.split(".")[1] for f in filters if f.endswith(".*"))


class SimStream:
    """Messages 1..n with a partition each."""

    def __init__(self, world: World, retention: Retention) -> None:
        self._world = world
        self.retention = retention
        self.partition_of: list[str] = [""]
        self.subjects: list[str] = [""]
        self.values: list[tuple[str, int]] = [("", 0)]
        self.alive: list[bool] = [False]
        self.by_partition: dict[str, list[int]] = {}
        self.consumers: dict[str, Consumer] = {}
        self._made = 0

    @property
    def last(self) -> int:
        return len(self.alive) - 1

    def publish(self, partition: str, key: str, counter: int) -> int:
        self.partition_of.append(partition)
        self.subjects.append(f"s.{key}")
        self.values.append((key, counter))
        self.alive.append(True)
        self.by_partition.setdefault(partition, []).append(self.last)
        for consumer in self.consumers.values():
            if partition in consumer.filters:
                self._push(consumer)
        return self.last

    # -- consumers ----------------------------------------------------------------------------------------------------

    def create(self, name: str, config: dict[str, Any]) -> Consumer:
        self._made += 1
        start = int(config.get("opt_start_seq") or 1)
        consumer = Consumer(name, config, f"2026-01-01T00:00:{self._made % 60:02d}.{self._made:09d}Z", start)
        consumer.scanned = consumer.delivered = consumer.floor_at_least = start - 1
        consumer.filters = partitions_of(config["filter_subjects"])
        self.consumers[name] = consumer
        return consumer

    def delete_consumer(self, consumer: Consumer) -> None:
        del self.consumers[consumer.name]
        self.end_pulls(consumer, b"409 Consumer Deleted")
        for partition in sorted(consumer.filters):
            self._sweep(partition)

    def overlaps(self, name: str, filters: frozenset[str]) -> bool:
        """Whether a work queue would refuse these filters."""
        others = (consumer for other, consumer in self.consumers.items() if other != name)
        return self.retention is Retention.WORKQUEUE and any(filters & other.filters for other in others)

    def update(self, consumer: Consumer, config: dict[str, Any]) -> None:
        filters = partitions_of(config["filter_subjects"])
        added, dropped = filters - consumer.filters, consumer.filters - filters
        consumer.config, consumer.filters = config, filters
        for partition in sorted(dropped):
            self._sweep(partition)
        if self.retention is Retention.WORKQUEUE:
            for partition in sorted(added):
                for seq in self.by_partition.get(partition, ()):
                    if seq <= consumer.floor and seq not in consumer.pending:
                        self.alive[seq] = False

    def reset(self, consumer: Consumer, seq: int) -> None:
        consumer.pending.clear()
        consumer.counts.clear()
        consumer.sequence = 0
        consumer.scanned = consumer.delivered = consumer.floor_at_least = seq - 1
        consumer.alarm = None

    def waiting(self, consumer: Consumer) -> int:
        """Messages that the consumer has not delivered yet."""
        found = range(consumer.scanned + 1, self.last + 1)
        return sum(self.alive[seq] and self.partition_of[seq] in consumer.filters for seq in found)

    def ack(self, name: str, seq: int) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None and consumer.pending.pop(seq, None) is not None:
            if self.retention is Retention.WORKQUEUE or not self._keeps(seq):
                self.alive[seq] = False
            self._push(consumer)

    def in_progress(self, name: str, seq: int) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None and seq in consumer.pending:
            consumer.pending[seq].due = self._world.now + consumer.config["ack_wait"] / 1e9

    def delete(self, seq: int) -> bool:
        was, self.alive[seq] = self.alive[seq], False
        return was

    def read(self, after: int, upto: int, partitions: frozenset[str], most: int) -> tuple[list[int], int]:
        """The next messages of these partitions in (after, upto], and the sequence up to which that is complete."""
        found: list[int] = []
        for seq in range(after + 1, min(upto, self.last) + 1):
            if self.alive[seq] and self.partition_of[seq] in partitions:
                found.append(seq)
                if len(found) == most:
                    return found, seq
        return found, upto

    def next_of(self, partition: str, at_least: int) -> int | None:
        return next((s for s in self.by_partition.get(partition, ()) if s >= at_least and self.alive[s]), None)

    # -- pulls --------------------------------------------------------------------------------------------------------

    def pull(self, name: str, pull: Pull) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None:
            consumer.pulls.append(pull)
            self._watch(consumer, pull)
            self._push(consumer)

    def end_pulls(self, consumer: Consumer, status: bytes) -> None:
        pulls, consumer.pulls = consumer.pulls, []
        for pull in pulls:
            self._status(pull, status)

    def _open(self, pull: Pull) -> bool:
        return pull.expires > self._world.now and pull.left > 0 and pull.link.wants(pull.reply) is not None

    def _watch(self, consumer: Consumer, pull: Pull) -> None:
        wait = min(pull.heartbeat, pull.expires - self._world.now)
        self._world.after(max(wait, 0.001), None, self._beat, consumer, pull)

    def _beat(self, consumer: Consumer, pull: Pull) -> None:
        if pull not in consumer.pulls:
            return
        if not self._open(pull):
            consumer.pulls.remove(pull)
            self._status(pull, b"408 Request Timeout")
            return
        self._status(pull, b"100 Idle Heartbeat")
        self._watch(consumer, pull)

    def _status(self, pull: Pull, status: bytes) -> None:
        sid = pull.link.wants(pull.reply)
        if sid is not None:
            head = b"NATS/1.0 " + status + b"\r\n\r\n"
            pull.link.send(b"HMSG %s %d %d %d\r\n%s\r\n" % (pull.reply.encode(), sid, len(head), len(head), head))

    def _push(self, consumer: Consumer) -> None:
        """Deliver what is due to waiting pulls: redeliveries first, then new messages of the scan."""
        now, wait = self._world.now, consumer.config["ack_wait"] / 1e9
        consumer.pulls = [p for p in consumer.pulls if self._open(p)]
        out: dict[int, tuple[SimLink, list[bytes]]] = {}
        for pull in consumer.pulls:
            while pull.left and (seq := self._next(consumer)) is not None:
                pull.left -= 1
                consumer.sequence += 1
                count = consumer.counts[seq] = consumer.counts.get(seq, 0) + 1
                consumer.pending[seq] = Delivered(now + wait, count)
                frames = out.setdefault(id(pull.link), (pull.link, []))[1]
                frames.append(self._frame(consumer, seq, count, pull.link.wants(pull.reply) or 0))
        for link, frames in out.values():
            link.send(b"".join(frames))
        if consumer.alarm is None and consumer.pending:
            consumer.alarm = min(each.due for each in consumer.pending.values())
            self._world.at(max(now + 0.001, consumer.alarm), None, self._wake, consumer, consumer.alarm)

    def _wake(self, consumer: Consumer, alarm: float) -> None:
        if consumer.alarm == alarm and self.consumers.get(consumer.name) is consumer:
            consumer.alarm = None
            self._push(consumer)

    def _next(self, consumer: Consumer) -> int | None:
        now = self._world.now
        for seq, each in list(consumer.pending.items()):
            if not self.alive[seq]:
                del consumer.pending[seq]
            elif each.due <= now:
                return seq
        most = consumer.config["max_ack_pending"]
        while len(consumer.pending) < most and consumer.scanned < self.last:
            consumer.scanned += 1
            if self.alive[consumer.scanned] and self.partition_of[consumer.scanned] in consumer.filters:
                consumer.delivered = consumer.scanned
                return consumer.scanned
        return None

    def _frame(self, consumer: Consumer, seq: int, count: int, sid: int) -> bytes:
        waiting = self.last - consumer.scanned
        reply = f"$JS.ACK.{NAME}.{consumer.name}.{count}.{seq}.{consumer.sequence}.{seq}.{waiting}"
        return f"MSG {self.subjects[seq]} {sid} {reply} 0\r\n\r\n".encode()

    # -- interest -----------------------------------------------------------------------------------------------------

    def _keeps(self, seq: int) -> bool:
        return self.retention is not Retention.INTEREST or self._wanted(seq)

    def _wanted(self, seq: int) -> bool:
        partition = self.partition_of[seq]
        return any(partition in c.filters and (seq in c.pending or seq > c.scanned) for c in self.consumers.values())

    def _sweep(self, partition: str) -> None:
        if self.retention is Retention.INTEREST:
            for seq in self.by_partition.get(partition, ()):
                if self.alive[seq] and not self._wanted(seq):
                    self.alive[seq] = False
