"""A stream and its durables, with the facts that break simple designs.

See docs/evidence/jetstream.md#j1 to #j9, docs/evidence/cluster.md#c3.

- A filter update never goes back: what lies below the hidden scan position is skipped, and a pull that finds nothing
  moves that position to the end.
- Unacked messages of a subject that is no longer filtered are still redelivered, to the same consumer.
- RESET clears what is pending and restarts the consumer sequence at 1; late acks count once redelivered.
- An interest stream deletes what nobody is interested in, at once, also when a filter is dropped.
- A work queue refuses overlapping filters, and an ack deletes.
- A range read may be served by a replica that lags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from parti.model import Retention
from parti.testing.sim.world import Host, World

REFUSED = 10100
ACK_WAIT = 0.5
MAX_ACK_PENDING = 64


@dataclass(slots=True)
class Pull:
    """A waiting pull request of one inbox."""

    host: Host
    deliver: Any
    inbox: int
    left: int
    expires: float


@dataclass(slots=True)
class Consumer:
    """A durable."""

    filters: frozenset[str] = frozenset()
    scanned: int = 0
    sequence: int = 0
    delivered: int = 0
    pending: dict[int, float] = field(default_factory=dict)
    """Stream sequence -> when it is redelivered."""
    floor_at_least: int = 0
    pulls: list[Pull] = field(default_factory=list)
    arrives: float = 0.0

    @property
    def floor(self) -> int:
        return max(self.floor_at_least, min(self.pending) - 1 if self.pending else self.delivered)


class SimStream:
    """Messages 1..n with a partition each."""

    def __init__(self, world: World, retention: Retention) -> None:
        self._world = world
        self._retention = retention
        self.partition_of: list[str] = [""]
        self.values: list[tuple[str, int]] = [("", 0)]
        self.alive: list[bool] = [False]
        self.by_partition: dict[str, list[int]] = {}
        self.consumers: dict[str, Consumer] = {}

    @property
    def last(self) -> int:
        return len(self.alive) - 1

    def publish(self, partition: str, key: str, counter: int) -> int:
        self.partition_of.append(partition)
        self.values.append((key, counter))
        self.alive.append(True)
        self.by_partition.setdefault(partition, []).append(self.last)
        for consumer in self.consumers.values():
            if partition in consumer.filters:
                self._push(consumer)
        return self.last

    def consumer(self, name: str) -> Consumer:
        return self.consumers.setdefault(name, Consumer())

    def set_filters(self, name: str, filters: frozenset[str]) -> int:
        """The consumer's sequence so far; REFUSED (negative) when the stream is a work queue and filters overlap."""
        consumer = self.consumer(name)
        if self._retention is Retention.WORKQUEUE and any(
            filters & other.filters for other_name, other in self.consumers.items() if other_name != name
        ):
            return -REFUSED
        dropped = consumer.filters - filters
        consumer.filters = filters
        for partition in sorted(dropped):
            self._sweep(partition)
        return consumer.sequence

    def strip_filter(self, partition: str, keep: str) -> None:
        """Take a partition away from every other durable: what a successor does with a dead owner's filter."""
        for name, consumer in self.consumers.items():
            if name != keep:
                consumer.filters = consumer.filters - {partition}

    def pull(self, name: str, pull: Pull) -> None:
        consumer = self.consumer(name)
        consumer.pulls = [
            p for p in consumer.pulls if p.expires > self._world.now and p.left and p.host is not pull.host
        ]
        consumer.pulls.append(pull)
        self._push(consumer)

    def ack(self, name: str, seqs: tuple[int, ...]) -> bool:
        consumer = self.consumer(name)
        for seq in seqs:
            if consumer.pending.pop(seq, None) is None:
                continue
            if self._retention is Retention.WORKQUEUE or not self._keeps(seq):
                self.alive[seq] = False
        self._push(consumer)
        return True

    def delete(self, seq: int) -> None:
        self.alive[seq] = False

    def reset(self, name: str, seq: int) -> bool:
        consumer = self.consumer(name)
        consumer.pending.clear()
        consumer.sequence = 0
        consumer.scanned = consumer.delivered = consumer.floor_at_least = seq - 1
        consumer.pulls.clear()
        return True

    def read(self, partition: str, after: int, upto: int, *, leader: bool) -> tuple[int, ...]:
        """What is left of a partition in (after, upto], as the leader or some replica has it."""
        seen = self.last
        if not leader and self._world.rng.random() < 0.15:
            seen -= self._world.rng.randrange(1, 6)
        return tuple(s for s in self.by_partition.get(partition, ()) if after < s <= min(upto, seen) and self.alive[s])

    def _push(self, consumer: Consumer) -> None:
        """Deliver what is due to whoever waits: redeliveries first, then what the scan finds."""
        now = self._world.now
        pulls = [p for p in consumer.pulls if p.expires > now and p.left and not p.host.dead]
        consumer.pulls = pulls
        if not pulls:
            return
        pull = pulls[0]
        out: list[tuple[int, int]] = []
        for seq, due in list(consumer.pending.items()):
            if not self.alive[seq]:
                del consumer.pending[seq]
            elif due <= now and len(out) < pull.left:
                consumer.sequence += 1
                consumer.pending[seq] = now + ACK_WAIT
                out.append((seq, consumer.sequence))
        while len(consumer.pending) < MAX_ACK_PENDING and len(out) < pull.left and consumer.scanned < self.last:
            consumer.scanned += 1
            seq = consumer.scanned
            if self.alive[seq] and self.partition_of[seq] in consumer.filters:
                consumer.sequence += 1
                consumer.delivered = seq
                consumer.pending[seq] = now + ACK_WAIT
                out.append((seq, consumer.sequence))
        if not out:
            return
        pull.left -= len(out)
        world = self._world
        if world.lost(pull.host):
            return
        arrives = now + world.delay()
        if not (world.network.reorder and world.rng.random() < world.network.reorder):
            arrives = max(arrives, consumer.arrives)  # one connection keeps its order
            consumer.arrives = arrives
        world.at(arrives, pull.host, pull.deliver, pull.inbox, tuple(out))

    def _keeps(self, seq: int) -> bool:
        return self._retention is not Retention.INTEREST or self._wanted(seq)

    def _wanted(self, seq: int) -> bool:
        partition = self.partition_of[seq]
        return any(partition in c.filters and (seq in c.pending or seq > c.scanned) for c in self.consumers.values())

    def _sweep(self, partition: str) -> None:
        if self._retention is Retention.INTEREST:
            for seq in self.by_partition.get(partition, ()):
                if self.alive[seq] and not self._wanted(seq):
                    self.alive[seq] = False
