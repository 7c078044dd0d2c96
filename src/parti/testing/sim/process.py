"""One worker process: a small agent with the shipped plane. It makes no decisions itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from parti.control import election, identity, membership, reconcile
from parti.control.identity import Identity, LeaseRecord
from parti.control.lease import LeaseTerms
from parti.control.membership import Membership
from parti.control.reconcile import Leader
from parti.manager.host import Plane
from parti.manager.positions import Checkpointer
from parti.model import Claim, Member, PartitionId, WorkerId
from parti.testing.sim.host import SimHost
from parti.testing.sim.kv import Entry, Key
from parti.testing.sim.leading import Leading
from parti.testing.sim.loop import SimLoop
from parti.testing.sim.network import Network
from parti.testing.sim.plane import make_plane
from parti.testing.sim.watch import SimWatch

if TYPE_CHECKING:
    from parti.testing.sim.cluster import Cluster

TICK = 0.05
TERMS = LeaseTerms(ttl=1.2, renew_every=0.3, margin=0.1)


class Process:
    """Identity, membership, election and, as leader, the reconcile loop; the plane handles the partitions."""

    def __init__(self, cluster: Cluster, nonce: str, before: Process | None = None) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.name = nonce
        self.dead = False
        self.thaw_at = 0.0
        self.cut_until = 0.0
        rng = self.world.rng
        self._offset: float = rng.uniform(-1000.0, 1000.0) if before is None else before._offset
        self._rate: float = rng.uniform(0.98, 1.02) if before is None else before._rate
        former = before.identity.afterlife() if before is not None else {}
        self.identity: Identity = identity.seeking(nonce, terms=TERMS, pool=cluster.pool, former=former)
        self.members: Membership | None = None
        self.election: election.Election | None = None
        self.leading = Leading(self)
        self.member: Member | None = None
        self.plane: Plane | None = None
        self.leaving = False
        self.ambush: tuple[str, Callable[[Process], None]] | None = None
        """A fault that waits until this process reaches a point: a handler running, a claim being written."""
        self.known: dict[PartitionId, tuple[Claim, int]] = {}
        """All claims seen, including those lost since."""
        self._term = 0
        """The highest term of any assignment seen."""
        self._ticks = 0
        self.loop = SimLoop(self.world, self, self.clock, self._rate)  # type: ignore[abstract]
        self.network = self.loop.network = Network(self, cluster.server)
        self.host = SimHost(self)
        self._checkpointer: Checkpointer | None = None
        self.watch: SimWatch | None = None
        self._early: list[tuple[Key, Any, int]] = []
        self._seen = 0
        """The highest revision that the watch has told."""
        self._lost_any = False
        self._stopping = False
        self.world.after(rng.uniform(0, TICK), self, lambda: self.host.spawn(self._run(), "parti-ticks"))

    def enter(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.loop.enter(act, args)

    def clock(self) -> float:
        """This machine's own seconds, with their own origin and pace."""
        return self._offset + self.world.now * self._rate

    @property
    def leader(self) -> Leader | None:
        return self.leading.leader

    def may_act(self) -> bool:
        return self.identity.may_act(self.clock())

    def log(self, what: str) -> None:
        self.world.log(self.name, what)

    def reached(self, point: str) -> None:
        """Trigger a waiting fault here: the worst moment is in the middle of an operation."""
        if self.ambush is not None and self.ambush[0] == point:
            (_, strike), self.ambush = self.ambush, None
            if point == "waking":  # between two callbacks of its loop: due callbacks continue before any timer
                strike(self)
            else:
                self.world.after(self.world.rng.uniform(0.0, 0.012), None, strike, self)

    # -- the loop -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """As the shipped agent does: callbacks due before a freeze ended continue before the lease is checked."""
        while True:
            self._tick()
            await asyncio.sleep(TICK)

    def _tick(self) -> None:
        self._ticks += 1
        if self.members is not None and self.plane is not None and self.identity.hold.due(self.clock()):
            self.identity = replace(self.identity, seen=self.plane.spoken(self._seen))
        self._identity(identity.Tick(self.clock()))
        if self.member is None or self.plane is None:
            return
        now = self.clock()
        self._election(election.Tick(now))
        self._members(membership.Tick(now))
        self.leading.lead(reconcile.Tick(now))
        self.plane.tick(now)
        if self.leaving and self.plane.holds_nothing() and self._ticks % 4 == 0:
            self.stop(returning=False)

    def call(
        self,
        serve: Callable[[], Any],
        answered: Callable[[Any], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.world.call(self, serve, answered, failed)

    # -- identity -------------------------------------------------------------------------------------------------

    def _identity(self, event: identity.Event) -> None:
        self.identity, effects = identity.step(self.identity, event)
        for effect in effects:
            match effect:
                case identity.ReadPool():
                    self._read_pool()
                case identity.ReadOwn(worker):
                    self._read_own(("lease", worker))
                case identity.WriteLease(worker, record, expected):
                    self._write_lease(("lease", worker), record, expected)
                case identity.IdGranted(member):
                    self._join(member)
                case identity.IdFenced(_, reason):
                    self.log(f"FENCED: {reason}")
                    self.cluster.fenced(self)

    def _read_pool(self) -> None:
        asked = self.clock()

        def pool(found: dict[str, Entry]) -> None:
            leases: dict[Any, tuple[LeaseRecord, int]] = dict(found.items())
            self._identity(identity.PoolRead(self.clock(), asked, leases))

        self.call(lambda: self.cluster.kv.list("lease"), pool)

    def _read_own(self, key: Key) -> None:
        def own(entry: Entry) -> None:
            self._identity(identity.OwnRead(self.clock(), *entry))

        self.call(lambda: self.cluster.kv.get(key), own)

    def _write_lease(self, key: Key, record: LeaseRecord, expected: int) -> None:
        def written(entry: Entry | None) -> None:
            if entry is None:
                self._identity(identity.NotWritten(self.clock()))
            else:
                self._identity(identity.Written(self.clock(), record.beat, entry[1]))

        def failed() -> None:
            self._identity(identity.NotWritten(self.clock()))

        self.call(lambda: self.cluster.kv.cas(key, record, expected), written, failed)

    def _join(self, member: Member) -> None:
        """Live from here on: watch all records, and read them once."""
        self.member = member
        self.log(f"is {member.worker}")
        self.plane = make_plane(self, member)
        self._checkpointer = Checkpointer(self.host, member, self._claim_of)
        self.election = election.candidate(member, terms=TERMS, former=self.identity.former)
        self.watch = self.cluster.kv.watch(self, self._told, self._begin)

    def _told(self, key: Key, value: Any, revision: int) -> None:
        """As the shipped agent does: missing renewals count once the whole bucket has been read."""
        if key[0] == "lease" and self.members is None:
            self._early.append((key, value, revision))
        else:
            self.heard(key, value, revision)
        self._seen = max(self._seen, revision)

    def _begin(self) -> None:
        """All existing records are known: partitions may start, and positions may be written."""
        assert self.plane is not None
        assert self._checkpointer is not None
        self.members = Membership(TERMS, self.clock())
        for change in self._early:
            self.heard(*change)
        if not self._lost_any:
            self.identity = self.identity.undisputed(claim for claim, _ in self.known.values())
        self.host.spawn(self._write_positions(self._checkpointer, self.plane), "parti-positions")

    async def _write_positions(self, checkpointer: Checkpointer, plane: Plane) -> None:
        await checkpointer.begin()
        plane.begin()
        await checkpointer.run(plane.positions)

    def _claim_of(self, partition: PartitionId) -> Claim | None:
        return self.known.get(partition, (None, 0))[0]

    def wrote(self, key: Key, revision: int) -> None:
        """As the shipped store does, for the records that nobody writes again soon."""
        if self.watch is not None and key[0] in ("claim", "assignment"):
            self.watch.wrote(key, revision)

    def leave(self) -> None:
        """Graceful: hand over all partitions, then leave."""
        if self.member is not None and not self.leaving:
            self.leaving = True
            self.log("leaves")
            self._identity(identity.Leave(self.clock()))

    def stop(self, *, returning: bool) -> None:
        """Clean end: nothing runs any more, the last positions are stored, and the record says so."""
        if self.plane is not None and self.may_act() and not self._stopping:
            self._stopping = True
            self.host.spawn(self._stop(self.plane, returning), "parti-stop")

    async def _stop(self, plane: Plane, returning: bool) -> None:
        assert self._checkpointer is not None
        final = await plane.stop()
        if await self._checkpointer.finish(final, plane.ahead()):
            self._election(election.Resign(self.clock()))
            self._say_stopped(returning)

    def _say_stopped(self, returning: bool) -> None:
        if self.may_act():
            self.log("stops and will be back" if returning else "stops")
            self._identity(identity.Stop(self.clock(), returning))
            self.cluster.stopped(self)

    # -- what the watch brings ------------------------------------------------------------------------------------

    def heard(self, key: Key, value: Any, revision: int) -> None:
        kind, name = key
        now = self.clock()
        if kind == "lease" and self.members is not None:
            if value is None and self.member is not None and name == self.member.worker:
                self._identity(identity.OwnRead(now, None, revision))
            self._members(membership.LeaseSeen(now, name, value, revision))  # type: ignore[arg-type]
        elif kind == "leader":
            self._election(election.LeaderSeen(now, value, revision, self._floor()))
        elif kind == "claim":
            self._heard_claim(PartitionId(name), value, revision)
        elif kind == "assignment" and value is not None:
            if value.version > self.host.assignment.version or value.term > self.host.assignment.term:
                self.host.assignment = value
            self._term = max(self._term, value.term)
            self.leading.lead(reconcile.AssignmentSeen(now, value, revision))
        elif kind == "assignment":
            stored = self.leader.assignment_revision if self.leader is not None else 0
            if (revision or float("inf")) > stored > 0:
                self.leading.lead(reconcile.AssignmentLost(now, revision))

    def _heard_claim(self, partition: PartitionId, claim: Claim | None, revision: int) -> None:
        assert self.plane is not None
        _, at = self.known.get(partition, (None, 0))
        if claim is not None:
            if revision > at:
                self.known[partition] = (claim, revision)
            self.plane.claim_seen(claim, revision)
            self.leading.lead(reconcile.ClaimsSeen(self.clock(), ((claim, revision),)))
            if claim.lost and not self.identity.hold.waiting:  # the leader waits for our lease to report this revision
                self.identity = replace(self.identity, hold=self.identity.hold.failed(self.clock()))
            return
        self._lost_any = True
        gone = reconcile.Gone(revision or at, revision)
        if gone.revision >= at:
            self.plane.claim_lost(partition, gone.revision, gone.expected)
            self.leading.claim_gone(partition, gone)

    def _members(self, event: membership.Event) -> None:
        if self.members is None:
            return
        self.members, effects = membership.step(self.members, event)
        changes = tuple(e for e in effects if not isinstance(e, membership.Confirm))
        for effect in effects:
            if isinstance(effect, membership.Confirm):
                self._confirm(effect.worker)
        for change in changes:
            self.log(f"sees {type(change).__name__} {getattr(change, 'member', None) or getattr(change, 'new', '')}")
        if self.leader is not None:
            self.leading.lead(reconcile.MembersChanged(event.now, self.members, changes))

    def _confirm(self, worker: WorkerId) -> None:
        asked = self.clock()

        def read(entry: Entry) -> None:
            record, revision = entry
            self._members(membership.LeaseSeen(self.clock(), worker, record, revision, asked))

        self.call(lambda: self.cluster.kv.get(("lease", worker)), read)

    # -- election -------------------------------------------------------------------------------------------------

    def _election(self, event: election.Event) -> None:
        if self.election is None:
            return
        self.election, effects = election.step(self.election, event)
        for effect in effects:
            match effect:
                case election.ReadLeader():

                    def read(entry: Entry) -> None:
                        self._election(election.LeaderSeen(self.clock(), *entry, self._floor()))

                    self.call(lambda: self.cluster.kv.get(("leader", "")), read)
                case election.WriteLeader(record, expected):
                    self._write_leader(record, expected)
                case election.Elected(term):
                    self.log(f"leads term {term}")
                    self.leading.load(term)
                case election.Deposed(term, reason):
                    self.log(f"no longer leads term {term}: {reason}")
                    self.leading.leader = None

    def _floor(self) -> int:
        """Terms never start again, whatever happened to the leader's record."""
        return max([self._term, *(claim.term for claim, _ in self.known.values())])

    def _write_leader(self, record: election.LeaderRecord, expected: int) -> None:
        def written(entry: Entry | None) -> None:
            if entry is None:
                self._election(election.NotWritten(self.clock()))
            else:
                self._election(election.Written(self.clock(), record, entry[1]))

        def failed() -> None:
            self._election(election.NotWritten(self.clock()))

        self.call(lambda: self.cluster.kv.cas(("leader", ""), record, expected), written, failed)

    def reread(self, key: Key) -> None:
        """Read a key from any replica; a stale answer changes nothing."""

        def found(entry: Entry) -> None:
            if entry[1]:
                self.heard(key, *entry)

        self.call(lambda: self.cluster.kv.get_anywhere(key), found)
