"""One member, from acquiring a worker id to its end: performs on real NATS what the pure steps in `control` decide.

`run()` returns when the member stopped or was fenced. Fenced means: its lease expired by its own clock, or another
process holds its id. Others then own its unfinished work, and the manager starts a member with a new nonce.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine
from typing import Any

from parti.backoff import FOREVER
from parti.control import election, identity
from parti.control.identity import IdPool
from parti.control.lease import NEVER
from parti.control.membership import Change, Membership
from parti.errors import PartiError
from parti.manager.claim_writer import hear_again
from parti.manager.host import Plane
from parti.manager.kv_store import (
    AssignmentChange,
    AssignmentGone,
    BucketAnew,
    ClaimChange,
    ClaimGone,
    Complete,
    LeaderChange,
    LeaseChange,
    StreamChange,
    Told,
)
from parti.manager.leading import Leadership
from parti.manager.lease_keeper import Ending, LeaseKeeper, terms_of
from parti.manager.life_keeper import LifeKeeper
from parti.manager.positions import Checkpointer
from parti.manager.predecessors import Predecessors
from parti.manager.roster import Roster
from parti.manager.setup import Setup
from parti.manager.stream_identity import StreamWatch
from parti.model import Assignment, Claim, Lease, Member, PartitionId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.worker.ledger import PartitionState

_TICK = 0.05  # seconds; a completed take-over is reported at the next tick
_LEAD_EVERY = 0.25  # seconds; the leader checks every partition, and its timeouts are seconds


class Agent:
    """Identity, membership, election and partitions of one nonce."""

    def __init__(
        self,
        setup: Setup,
        former: Predecessors,
        blocked: tuple[PartitionId, int] | None = None,
    ) -> None:
        """`blocked`: the message whose handler made this process's previous member lose its lease."""
        store, config, clock, metrics = setup.store, setup.config, setup.clock, setup.metrics
        self.stream_is_gone = False
        self._stream = StreamWatch(clock, setup.stream_gone, replaced=self.stream_replaced, failed=self.failed)
        self.store = store
        self.config = config
        self.clock = clock
        self.metrics = metrics
        self.member: Member | None = None
        self.plane: Plane | None = None
        self.leadership: Leadership | None = None
        self.assignment = Assignment()
        self.claims: dict[PartitionId, tuple[Claim, int]] = {}
        self.live = asyncio.Event()
        """Set when the member has its id and the watch has delivered the whole current state."""
        self._terms = terms_of(config)
        self.roster = Roster(store, clock, metrics, self._terms, spawn=self.spawn, changed=self._members_changed)
        pool = IdPool(config.worker_id_prefix, config.worker_id_min, config.worker_id_max)
        seeker = identity.seeking(
            secrets.token_hex(8),
            terms=self._terms,
            pool=pool,
            instance=setup.instance,
            capacity=setup.capacity,
            former=former.lives,
        )
        self._lease = LeaseKeeper(
            seeker, store, clock, spawn=self.spawn, granted=self._join, fenced=self._fenced, failed=self.failed
        )
        self._former = former
        self._setup = setup
        self._observer = setup.observer
        self._blocked = blocked
        self._assignment_revision = 0
        self._lost_any = False
        self._seen = 0
        """The highest revision that the watch has delivered."""
        self._checkpointer: Checkpointer | None = None
        self.lives: LifeKeeper | None = None
        self._ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()  # `run` has returned
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._next_lead = 0.0
        self._log = get_logger("control", namespace=config.namespace)

    def __repr__(self) -> str:
        owns = len(self.plane.owned()) if self.plane is not None else 0
        return f"<Agent {self.member or '-'} owns={owns} leader={'yes' if self.leading else 'no'}>"

    @property
    def members(self) -> Membership | None:
        return self.roster.members

    @property
    def stream_created(self) -> str:
        return self.store.stream_created

    @property
    def former(self) -> Predecessors:
        """What the next member of this process inherits; valid when `run` has returned."""
        return self._former

    @property
    def leading(self) -> bool:
        return self.leadership is not None and self.leadership.leading

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Run until the member stops or is fenced. When this returns, none of its tasks is running."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self.spawn(self._ticks(), "parti-ticks")
                self.spawn(self._stream.run(), "parti-stream")
                try:
                    ending = await self._ended
                finally:
                    for task in list(self._tasks):
                        task.cancel()
            if ending is Ending.FENCED:
                await self._abandon()
            return ending
        finally:
            self._group = None
            self._gone.set()

    async def _abandon(self) -> None:
        """When this returns, nothing can start under this nonce; the next member of this process relies on that."""
        done = self.plane.positions() if self.plane is not None else {}
        quiet_at = NEVER
        if self.plane is not None and not await self.plane.abandon():
            # An effect was interrupted: it gets as much time to end as other members would give it.
            quiet_at = self.clock.now() + self._terms.ttl + self._terms.margin
        self._former = self._former.and_then(
            self._lease.identity.afterlife(quiet_at),
            self._lease.identity.worker,
            done,
            self.lives.last_words() if self.lives is not None else None,
        )

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None or self._ended.done():
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def may_act(self) -> bool:
        return self._lease.may_act()

    def allows(self, lease: Lease) -> bool:
        return self.plane is not None and self.may_act() and self.plane.allows(lease)

    def renew_soon(self) -> None:
        """NATS is back: renew, or look for an id, at the next tick. The lease may expire sooner than a normal retry."""
        self._lease.renew_soon()

    def set_well(self, well: bool, reason: str = "") -> None:
        """The lease record carries this flag. The leader assigns nothing to a worker that is not well, and moves its
        partitions away while it can still hand them over. Each member starts well: set it again after a fence."""
        self._lease.set_well(well, reason)

    def _end(self, ending: Ending) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)
            self._observer.touched()

    async def _ticks(self) -> None:
        while True:
            now = self.clock.now()
            self._lease.tick(self._spoken)
            if self._ended.done():
                return
            if self.leadership is not None and self.live.is_set():
                self.roster.tick(now)
                lead = now >= self._next_lead
                if lead:
                    self._next_lead = now + _LEAD_EVERY
                self.leadership.tick(now, lead=lead)
            if self.plane is not None:
                self.plane.tick(now)
            if self.lives is not None:
                self.lives.tick(now)
            await asyncio.sleep(_TICK)

    # -- identity -----------------------------------------------------------------------------------------------------

    def _spoken(self) -> int:
        """The bucket revision up to which this member is current and holds no partition whose claim was lost."""
        return self.plane.spoken(self._seen) if self.plane is not None and self.live.is_set() else 0

    def stream_replaced(self, reason: str) -> None:
        """Positions are invalid on the new stream: this member ends, the next one starts under the new identity."""
        self.stream_is_gone = True
        self._fenced(reason)

    def _fenced(self, reason: str) -> None:
        worker = self._lease.identity.worker
        self._log.warning("worker.fenced", worker_id=worker, op="lease", result="fenced", reason=reason)
        self.metrics.count(m.FENCED)
        self._lease.end()
        self._end(Ending.FENCED)

    def _join(self, member: Member) -> None:
        """The id is acquired: watch the bucket, and begin when the whole current state has been read."""
        self.member = member
        self._log.info("worker.joined", worker=member.worker, nonce=member.nonce)
        self.plane = self._setup.plane(self, member)
        self._checkpointer = Checkpointer(self, member, self._claim_of, self._former.positions_of(member.worker))
        self.lives = LifeKeeper(self, member, self._former, self._setup.max_deliver, self._blocked)
        self.leadership = Leadership(
            self,
            member,
            self._setup,
            former=self._former.lives,
            heard_assignment=self.heard_assignment,
            changed=self._observer.touched,
            remembered=lambda: self.claims,
        )
        self.spawn(self._watch(), "parti-watch")

    def _claim_of(self, partition: PartitionId) -> Claim | None:
        return self.claims.get(partition, (None, 0))[0]

    async def _watch(self) -> None:
        assert self._checkpointer is not None
        await self._stream.look()  # the stream may have been replaced while no member was checking
        assert self.lives is not None
        await asyncio.gather(self._checkpointer.begin(), self.lives.begin())
        early: list[LeaseChange] = []
        waits = FOREVER.delays()
        while True:
            try:
                async for change in self.store.changes():
                    if isinstance(change, LeaseChange) and self.members is None:
                        early.append(change)
                    elif isinstance(change, Complete):
                        self._begin(early)
                        waits = FOREVER.delays()
                    else:
                        self._heard(change)
                    if not isinstance(change, Complete | BucketAnew):
                        self._seen = max(self._seen, change.revision)
            except PartiError as error:
                self.failed(error)
                await self.clock.sleep(next(waits))

    def _begin(self, leases: list[LeaseChange]) -> None:
        if self.live.is_set():
            return
        assert self.plane is not None
        assert self._checkpointer is not None
        self.roster.begin()
        for change in leases:
            self._heard(change)
        if not self._lost_any:
            self._lease.identity = self._lease.identity.undisputed(claim for claim, _ in self.claims.values())
        self.live.set()
        self.plane.begin()
        self.spawn(self._checkpointer.run(self.plane.positions), "parti-positions")
        assert self.lives is not None
        self.spawn(self.lives.run(), "parti-lives")
        self._observer.touched()

    # -- what is heard ------------------------------------------------------------------------------------------------

    def _heard(self, change: Told) -> None:
        match change:
            case LeaseChange(worker, record):
                if record is None and self.member is not None and worker == self.member.worker:
                    self._lease.look(worker)  # our own lease record: write it again at once
                self.roster.heard(change)
            case LeaderChange(record, revision):
                self.heard_leader(record, revision)
            case AssignmentChange(assignment, revision):
                self.heard_assignment(assignment, revision)
            case AssignmentGone(revision, expected):
                if self.leadership is not None and revision >= self._assignment_revision:
                    self.leadership.assignment_gone(revision, expected)
            case ClaimChange(claim, revision):
                self.heard_claim(claim, revision)
            case ClaimGone(partition, revision, expected):
                self.heard_claim_gone(partition, revision, expected)
            case StreamChange(record, _):
                if record is not None and record.identity != self.store.stream and self.store.stream:
                    self.stream_replaced(f"the namespace works on {record.identity} now")
            case BucketAnew():
                # Our state has revisions of another bucket. The next member starts from what this one has done.
                self._fenced("the bucket was recreated")
            case Complete():
                pass
        self._observer.touched()

    def heard_claim(self, claim: Claim, revision: int) -> None:
        known = self.claims.get(claim.partition)
        if known is not None and revision < known[1]:
            return  # a read was faster than the watch
        self.claims[claim.partition] = (claim, revision)
        if claim.lost:
            self._lease.renew_soon()  # the leader waits for our lease to report this revision
        if self.lives is not None:
            self.lives.heard(claim)
        if self.plane is not None:
            self.plane.claim_seen(claim, revision)
        if self.leadership is not None:
            self.leadership.claim_seen(claim, revision)
        self._observer.touched()

    def heard_claim_gone(self, partition: PartitionId, revision: int, expected: int) -> None:
        """The last known claim is kept: its owner writes it again, or the leader finds out who may own it."""
        known = self.claims.get(partition)
        if known is None and not expected:
            return  # this claim never existed
        if known is not None and revision and revision < known[1]:
            return
        revision = max(revision, known[1] if known is not None else 0)
        self._log.warning(
            "claim.lost",
            worker_id=self.member.worker if self.member is not None else "",
            op="claim",
            result="lost",
            partition=partition,
            known=str(known[0]) if known is not None else "",
        )
        self._lost_any = True
        self.metrics.count(m.CLAIMS_STALE)
        if self.plane is not None:
            self.plane.claim_lost(partition, revision, expected)
        if self.leadership is not None:
            self.leadership.claim_gone(partition, revision, expected)

    def heard_leader(self, record: election.LeaderRecord | None, revision: int) -> None:
        """Terms never restart, even when the leader's record was removed or damaged."""
        if self.leadership is not None:
            terms = (claim.term for claim, _ in self.claims.values()) if record is None else ()
            self.leadership.leader_seen(record, revision, max(self.assignment.term, *terms, 0))

    def heard_assignment(self, assignment: Assignment, revision: int) -> None:
        if revision > self._assignment_revision:
            self._assignment_revision = revision
            self.assignment = assignment
            self._observer.touched()
        if self.leadership is not None:
            self.leadership.assignment_seen(assignment, revision)

    def read_claim_again(self, partition: PartitionId) -> None:
        """Handle a nudge: read the claim again, because the watch may have missed a change."""
        self.spawn(hear_again(self, self.store, partition), "parti-nudged")

    def _members_changed(self, members: Membership, changes: tuple[Change, ...]) -> None:
        if self.leadership is not None:
            self.leadership.members_changed(members, changes)
        if changes:
            self._observer.touched()

    # -- partitions ---------------------------------------------------------------------------------------------------

    def begun(self, lease: Lease, state: PartitionState, previous: Member | None) -> None:
        if self.lives is not None:
            self.lives.granted(lease, state, previous, self.members)

    def granted(self, lease: Lease) -> None:
        self._log.debug("partition.granted", partition=lease.partition, epoch=lease.epoch)
        self._observer.granted(lease)

    def revoked(self, lease: Lease) -> None:
        self._log.debug("partition.revoked", partition=lease.partition, epoch=lease.epoch)
        self._observer.revoked(lease)

    def failed(self, error: Exception) -> None:
        self._observer.failed(error)

    # -- stopping -----------------------------------------------------------------------------------------------------

    async def leave(self) -> None:
        """Hand all partitions over to other members, if any; returns when that is done. Use it with a timeout.

        When the whole fleet stops, no member is left to take partitions: then every member just stops. A member that is
        fenced meanwhile has nothing to hand over.
        """
        plane, member = self.plane, self.member
        if member is None or plane is None or not self.roster.others(member.worker):
            return
        self._lease.leave()
        await self._observer.wait_until(
            lambda: plane.holds_nothing() or not self.roster.others(member.worker) or self._ended.done()
        )

    async def stop(self, *, returning: bool) -> None:
        """Stop all work, store the final positions, and mark the lease record as stopped; then `run` returns."""
        plane, checkpointer, leadership = self.plane, self._checkpointer, self.leadership
        if self.member is None or plane is None or checkpointer is None:
            self._end(Ending.STOPPED)
            return
        if self._ended.done():
            await self._gone.wait()
        final = await plane.stop()
        if await checkpointer.finish(final, plane.ahead()):
            if self.lives is not None:
                await self.lives.finish()
            if leadership is not None:
                await leadership.resign()
            await self._lease.say_stopped(returning=returning)
        self._end(Ending.STOPPED)
