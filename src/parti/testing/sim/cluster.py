"""A whole cluster in virtual time: server, processes, publisher and sink, judged after every effect."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from parti.control.handoff import Finished, HandoffTerms
from parti.control.identity import IdPool
from parti.control.pacing import PacingTerms
from parti.control.reconcile import LeaderRules
from parti.model import ClaimState, Layout, Lease, Member, Partition, PartitionId, Retention
from parti.testing.history import Effect, History
from parti.testing.sim.kv import Key, SimKv
from parti.testing.sim.plane import worker_config
from parti.testing.sim.process import Process
from parti.testing.sim.server import SimServer
from parti.testing.sim.stream import SimStream
from parti.testing.sim.world import World


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The simulated layout, retention and size."""

    layout: Layout = Layout.PER_WORKER
    retention: Retention = Retention.LIMITS
    workers: int = 3
    partitions: int = 5
    lanes: str = "partition"
    """Or "key": then the next owner is also given what is done above a position."""
    failing: float = 0.0
    """Share of attempts that fail: they are retried, or end in the dead-letter stream."""
    max_ack_pending: int = 64
    """Per consumer: a low number keeps consumers at their limit all the time."""


class Cluster:
    """Everything in one simulated world."""

    def __init__(self, world: World, shape: ClusterShape) -> None:
        self.world = world
        self.layout = shape.layout
        self.retention = shape.retention
        self.pool = IdPool(last=7)
        self.kv = SimKv(world)
        self.stream = SimStream(world, shape.retention)
        self.server = SimServer(self.stream, lambda: world.now, self._buried)
        self.worker_config = worker_config(lanes=shape.lanes, max_ack_pending=shape.max_ack_pending)
        self.failing = shape.failing
        self.partitions = tuple(Partition((f"p{i}",)) for i in range(shape.partitions))
        self.rules = LeaderRules(
            windows=PacingTerms(cold_start=0.4, planned=0.15, cooldown=0.2),
            handoff=HandoffTerms(prepare_timeout=0.5, commit_timeout=0.3),
            retry=0.15,
        )
        self.history = History()
        self.processes: list[Process] = []
        self.results: Counter[str] = Counter()
        self.broken: list[str] = []
        self.over = False
        self.unclean: set[str] = set()
        """Members that crashed or were fenced: their last effects may be repeated."""
        self._born = 0
        self._did: dict[int, Process] = {}
        self._letters: set[int] = set()
        self._tampered: dict[str, set[str]] = {}
        """Partition -> the owners named by its claims when those were removed or damaged."""
        self._counters: Counter[str] = Counter()

    # -- processes ------------------------------------------------------------------------------------------------

    def start(self, before: Process | None = None) -> Process:
        """Start a process; after fencing, the same one again on the same machine."""
        self._born += 1
        process = Process(self, f"n{self._born}", before)
        self.processes.append(process)
        self.world.log(process.name, "starts")
        return process

    def living(self) -> list[Process]:
        return [p for p in self.processes if not p.dead]

    def crash(self, process: Process) -> None:
        self.world.log(process.name, "CRASH")
        self.unclean.add(str(process.member))
        process.dead = True

    def fenced(self, process: Process) -> None:
        """The process lost its lease: its work in flight is dropped, and a new process replaces it."""
        self.unclean.add(str(process.member))
        process.dead = True
        self.start(process)

    def stopped(self, process: Process) -> None:
        process.dead = True

    def nudge(self, member: Member, partition: PartitionId) -> None:
        for process in self.living():
            if process.member == member and not self.world.lost(process):
                self.world.after(self.world.delay(), process, process.reread, ("claim", partition))

    def tamper(self, key: Key, how: str) -> None:
        """Remove or damage a record. Nobody can rewrite the positions of a member that is gone: its work may repeat."""
        self.world.log("tampering", f"{how}s {key[0]} {key[1]}")
        if key[0] == "checkpoint" and key[1] not in {p.member.worker for p in self.living() if p.member is not None}:
            self.unclean.update(str(p.member) for p in self.processes if p.member and p.member.worker == key[1])
        if key[0] == "claim" and (claim := self.kv.get(key)[0]) is not None and claim.owner is not None:
            self._tampered.setdefault(claim.partition, set()).add(str(claim.owner))
        self.kv.tamper(key, how)

    def count(self, effect: Any) -> None:
        if isinstance(effect, Finished):
            self.results[effect.result] += 1

    # -- publisher and sink ---------------------------------------------------------------------------------------

    def publish(self) -> None:
        rng = self.world.rng
        partition = self.partitions[min(rng.randrange(0, 2 * len(self.partitions)), len(self.partitions) - 1)].id
        if self.retention is Retention.INTEREST and not any(
            partition in c.filters for c in self.stream.consumers.values()
        ):
            return  # an interest stream stores nothing that no consumer wants
        key = f"{partition}.k{rng.randrange(0, 3)}"
        counter = self._counters[key]
        self._counters[key] += 1
        self.stream.publish(partition, key, counter)
        self.history.published(key, "pub", counter)

    def effect(self, process: Process, lease: Lease, seq: int) -> None:
        """The sink: it accepts everything, so that only the protocol can prevent stale effects."""
        if self.over or seq in self._letters:
            return
        key, counter = self.stream.values[seq]
        owner = str(process.member)
        self.world.log(process.name, f"effect {key}-{counter} seq {seq} in {lease.partition}@{lease.epoch}")
        broken = self.history.effect(Effect(lease.partition, key, "pub", counter, owner, lease.epoch))
        if "duplicated" in broken and self._may_repeat(seq):
            broken.remove("duplicated")
        self._did[seq] = process
        if broken:
            self.broken.append(f"{', '.join(broken)}: {key}-{counter} (seq {seq} of {lease.partition}) by {owner}")

    def _buried(self, seq: int) -> None:
        """The message is stored in the dead-letter stream, so it is done. A letter may be late, and is stored once."""
        self.world.log("letter", f"of seq {seq}")
        self._letters.add(seq)

    def end(self) -> None:
        """The run is over: later events do not count."""
        self.over = True
        for process in self.processes:
            process.loop.end()

    def _may_repeat(self, seq: int) -> bool:
        """At least once: a member's last effects before it crashed, froze or was fenced may be repeated."""
        before = self._did[seq]
        if str(before.member) in self.unclean or before.thaw_at > self.world.now:
            return True
        # The claim that held the position is gone, and so is the owner it was written for.
        return not self.unclean.isdisjoint(self._tampered.get(self.stream.partition_of[seq], ()))

    def settled(self) -> bool:
        """Everything published is done, every partition is stable at a live owner, and a leader knows it.

        A leader that waits for a change that it missed would move no partition any more.
        """
        if any(seq not in self._did and seq not in self._letters for seq in range(1, self.stream.last + 1)):
            return False
        alive = {p.member for p in self.living()}
        claims = [entry[0] for entry in self.kv.list("claim").values() if entry[0] is not None]
        known = any(p.leader is not None and p.leader.converged for p in self.living())
        return (
            known
            and len(claims) == len(self.partitions)
            and all(c.state is ClaimState.STABLE and c.owner in alive for c in claims)
        )
