"""A simulated process in its role as leader: it performs what the shipped `reconcile` decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parti.control import reconcile
from parti.control.handoff import Nudge
from parti.control.leader_signals import traces_of
from parti.control.reconcile import Leader
from parti.model import Claim, Member, PartitionId
from parti.testing.sim.kv import Entry, Key

if TYPE_CHECKING:
    from parti.testing.sim.process import Process

_AGAIN = 0.05
_SOURCE_IS_SLOW = 0.5


class Leading:
    """The leader role of a process, while it has it."""

    def __init__(self, process: Process) -> None:
        self.leader: Leader | None = None
        self._process = process
        self._gone: dict[PartitionId, reconcile.Gone] = {}

    def load(self, term: int) -> None:
        """A new leader reads all records, then adopts them."""
        kv = self._process.cluster.kv

        def still() -> bool:
            election = self._process.election
            return election is not None and election.term == term and election.may_lead(self._process.clock())

        def loaded(found: tuple[Entry, dict[str, Entry], dict[str, Entry]]) -> None:
            """Adopt when the members and the partitions are known; the source may take its time."""
            if not still():
                return
            rng = self._process.world.rng
            if self._process.members is None or rng.random() < _SOURCE_IS_SLOW:
                self._process.world.after(rng.uniform(0, _AGAIN), self._process, loaded, found)
                return
            (stored, revision), claims, stored_positions = found
            positions = [entry[0] for entry in stored_positions.values() if entry[0] is not None]
            lost = {PartitionId(p): reconcile.Gone(r, r) for p, (c, r) in claims.items() if c is None}
            self.leader = reconcile.elect(
                term,
                self._process.clock(),
                self._process.members,
                self._process.cluster.partitions,
                reconcile.Found(
                    stored,
                    revision,
                    claims={PartitionId(p): entry for p, entry in claims.items() if entry[0] is not None},
                    lost=lost,
                    remembered=self._process.known,
                    traces=traces_of(positions),
                ),
                rules=self._process.cluster.rules,
            )
            gone, self._gone = self._gone, {}
            self.lead(reconcile.ClaimsLost(self._process.clock(), gone))
            self.lead(reconcile.Tick(self._process.clock()))

        def read() -> tuple[Entry, dict[str, Entry], dict[str, Entry]]:
            return kv.get(("assignment", "")), kv.list("claim"), kv.list("checkpoint")

        def again() -> None:
            if still():
                self._process.call(read, loaded, again)

        self._gone = {}
        again()

    def claim_gone(self, partition: PartitionId, gone: reconcile.Gone) -> None:
        """Kept until the stored state is adopted."""
        if self.leader is None:
            self._gone[partition] = gone
        else:
            self.lead(reconcile.ClaimsLost(self._process.clock(), {partition: gone}))

    def lead(self, event: reconcile.Event) -> None:
        if self.leader is None or self._process.election is None:
            return
        if not self._process.election.may_lead(self._process.clock()):
            return
        self.leader, effects = reconcile.step(self.leader, event)
        for effect in effects:
            match effect:
                case reconcile.WriteAssignment(assignment, expected):
                    self._process.log(f"assigns v{assignment.version} term {assignment.term}: {assignment.reason}")
                    self._write_and_hear(("assignment", ""), assignment, expected)
                case reconcile.WriteClaim(claim, expected, reason):
                    self._process.log(f"{reason}: {claim}")
                    self._write_and_hear(("claim", claim.partition), claim, expected)
                case reconcile.ReadPositions(member, partitions):
                    self._read_positions(member, partitions)
                case reconcile.ReadTraces(partitions):
                    self._read_traces(partitions)
                case Nudge(member, partition):
                    self._process.cluster.nudge(member, partition)
                    self._process.reread(("claim", partition))
                case _:
                    self._process.cluster.count(effect)

    def _write_and_hear(self, key: Key, value: Any, expected: int) -> None:
        kv = self._process.cluster.kv

        def written(entry: Entry | None) -> None:
            if entry is None:
                self._process.call(lambda: kv.get(key), lambda current: self._process.heard(key, *current))
            else:
                self._process.wrote(key, entry[1])
                self._process.heard(key, *entry)

        self._process.call(lambda: kv.cas(key, value, expected), written, lambda: self._process.reread(key))

    def _read_positions(self, member: Member, partitions: tuple[PartitionId, ...]) -> None:
        """How far a departed member got. Only its positions count, as for the shipped leader."""

        def answered(entry: Entry) -> None:
            if self.leader is None:
                return
            claims = [self.leader.claims.get(partition, (Claim(partition), 0))[0] for partition in partitions]
            self.lead(reconcile.PositionsRead.of(self._process.clock(), member, claims, entry[0]))

        self._process.call(lambda: self._process.cluster.kv.get(("checkpoint", member.worker)), answered)

    def _read_traces(self, partitions: tuple[PartitionId, ...]) -> None:
        def serve() -> dict[PartitionId, reconcile.Trace]:
            stored = [entry[0] for entry in self._process.cluster.kv.list("checkpoint").values()]
            return traces_of((checkpoint for checkpoint in stored if checkpoint is not None), partitions)

        def answered(found: dict[PartitionId, reconcile.Trace]) -> None:
            self.lead(reconcile.TracesRead(self._process.clock(), partitions, found))

        self._process.call(serve, answered)
