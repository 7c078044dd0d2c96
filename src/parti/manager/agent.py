"""One member's life, from looking for an id to its end: performs on real NATS what the pure steps decide.

`run()` returns when the member stopped or was fenced. Fenced means: its lease is over by its own clock or somebody else
holds its id; whatever it did not finish belongs to others, and the manager begins anew with another nonce.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from enum import StrEnum
from typing import Any

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control import identity, membership
from parti.control.assign import Strategy
from parti.control.identity import Pool
from parti.control.lease import NEVER, LeaseTerms
from parti.control.membership import Membership
from parti.errors import PartiError
from parti.manager.claim_writer import hear_again
from parti.manager.former import Former
from parti.manager.host import Plane, PlaneFactory
from parti.manager.kv_store import AssignmentChange, ClaimChange, Complete, LeaderChange, LeaseChange, Store, Told
from parti.manager.leading import Leadership, rules_of
from parti.manager.life_keeper import LifeKeeper
from parti.manager.observer import Observer
from parti.manager.positions import Checkpointer
from parti.manager.sources import PartitionSource
from parti.model import Assignment, Claim, Lease, Member, PartitionId, Retention, WorkerId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics
from parti.worker.ledger import PartitionState

_TICK = 0.05  # seconds; a take-over that is through is told at the next tick
_LEAD_EVERY = 0.25  # the leader looks at every partition: timeouts are seconds


class Ending(StrEnum):
    """How a member's life ended."""

    STOPPED = "stopped"
    FENCED = "fenced"


def terms_of(config: ControlConfig) -> LeaseTerms:
    return LeaseTerms(config.heartbeat_ttl, config.heartbeat_interval, config.lease_margin)


class Agent:
    """Identity, membership, election and partitions of one nonce."""

    def __init__(
        self,
        store: Store,
        config: ControlConfig,
        *,
        source: PartitionSource,
        strategy: Strategy,
        retention: Retention,
        plane: PlaneFactory,
        observer: Observer,
        clock: Clock,
        metrics: Metrics,
        instance: str,
        former: Former,
        start_cursor: Callable[[], Coroutine[Any, Any, int]],
        nudge: Callable[[Member, PartitionId], None],
        max_deliver: int = 3,
        blocked: tuple[PartitionId, int] | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self.clock = clock
        self.metrics = metrics
        self.member: Member | None = None
        self.plane: Plane | None = None
        self.members: Membership | None = None
        self.leadership: Leadership | None = None
        self.assignment = Assignment()
        self.claims: dict[PartitionId, tuple[Claim, int]] = {}
        self.live = asyncio.Event()
        """The member has its id and has seen everything there is."""
        self.hold_judgement_until = float("-inf")
        """Nobody is declared dead before this: after an outage everybody gets time to renew."""
        self._terms = terms_of(config)
        pool = Pool(config.worker_id_prefix, config.worker_id_min, config.worker_id_max)
        self._identity = identity.seeking(
            secrets.token_hex(8), terms=self._terms, pool=pool, instance=instance, former=former.lives
        )
        self._former = former
        self._source = source
        self._strategy = strategy
        self._retention = retention
        self._make_plane = plane
        self._observer = observer
        self._start_cursor = start_cursor
        self._nudge = nudge
        self._max_deliver = max_deliver
        self._blocked = blocked
        self._assignment_revision = 0
        self._checkpointer: Checkpointer | None = None
        self._lives: LifeKeeper | None = None
        self._ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._next_lead = 0.0
        self._log = get_logger("control", namespace=config.namespace)

    def __repr__(self) -> str:
        owns = len(self.plane.owned()) if self.plane is not None else 0
        return f"<Agent {self.member or '-'} owns={owns} leader={'yes' if self.leading else 'no'}>"

    @property
    def former(self) -> Former:
        """What this process's next member may know, when `run` has returned."""
        return self._former

    @property
    def leading(self) -> bool:
        return self.leadership is not None and self.leadership.leading

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Until the member stopped or was fenced. When this returns nothing of it runs any more."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self.spawn(self._ticks(), "parti-ticks")
                try:
                    ending = await self._ended
                finally:
                    for task in list(self._tasks):
                        task.cancel()
        finally:
            self._group = None
        if ending is Ending.FENCED:
            await self._abandon()
        return ending

    async def _abandon(self) -> None:
        """What this process does next may rely on it: nothing starts any more under this nonce."""
        done = self.plane.positions() if self.plane is not None else {}
        quiet_at = NEVER
        if self.plane is not None and not await self.plane.abandon():
            # It was interrupted in the middle of an effect: that has as long to end as others would give it.
            quiet_at = self.clock.now() + self._terms.ttl + self._terms.margin
        self._former = self._former.and_then(self._identity.afterlife(quiet_at), self._identity.worker, done)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        if self._group is None or self._ended.done():
            work.close()
            return
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def may_act(self) -> bool:
        return self._identity.may_act(self.clock.now())

    def allows(self, lease: Lease) -> bool:
        return self.plane is not None and self.may_act() and self.plane.allows(lease)

    def reconnected(self) -> None:
        """NATS is back: renew, or look for an id, at the next tick. The lease may have less left than a usual retry."""
        if not self._identity.hold.waiting:
            self._identity = replace(self._identity, hold=self._identity.hold.failed(self.clock.now()))

    def _end(self, ending: Ending) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)

    async def _ticks(self) -> None:
        while True:
            now = self.clock.now()
            self._step_identity(identity.Tick(now))
            if self._ended.done():
                return
            if self.leadership is not None and self.live.is_set():
                if now >= self.hold_judgement_until:
                    self._step_members(membership.Tick(now))
                lead = now >= self._next_lead
                if lead:
                    self._next_lead = now + _LEAD_EVERY
                self.leadership.tick(now, lead=lead)
            if self.plane is not None:
                self.plane.tick(now)
            if self._lives is not None:
                self._lives.tick(now)
            await asyncio.sleep(_TICK)

    # -- identity -----------------------------------------------------------------------------------------------------

    def _step_identity(self, event: identity.Event) -> None:
        self._identity, effects = identity.step(self._identity, event)
        for effect in effects:
            match effect:
                case identity.ReadPool():
                    self.spawn(self._read_pool(), "parti-read-pool")
                case identity.ReadOwn(worker):
                    self.spawn(self._read_own(worker), "parti-read-own")
                case identity.WriteLease(_, record, expected):
                    self.spawn(self._write_lease(record, expected), "parti-write-lease")
                case identity.Granted(member):
                    self._join(member)
                case identity.Fenced(member, reason):
                    self._log.warning("worker.fenced", worker=member.worker, reason=reason)
                    self.metrics.count(m.FENCED)
                    self._end(Ending.FENCED)

    async def _read_pool(self) -> None:
        asked = self.clock.now()
        try:
            leases = await self.store.leases()
        except PartiError as error:
            self.failed(error)
            return
        self._step_identity(identity.PoolRead(self.clock.now(), asked, leases))

    async def _read_own(self, worker: WorkerId) -> None:
        try:
            record, revision = await self.store.lease(worker)
        except PartiError as error:
            self.failed(error)
            return
        self._step_identity(identity.OwnRead(self.clock.now(), record, revision))

    async def _write_lease(self, record: identity.LeaseRecord, expected: int) -> None:
        revision = await self.store.write_lease(record, expected)
        now = self.clock.now()
        self._step_identity(
            identity.NotWritten(now) if revision is None else identity.Written(now, record.beat, revision)
        )

    def _join(self, member: Member) -> None:
        """The id is ours: watch everything, and begin when all that there is has been seen."""
        self.member = member
        self._log.info("worker.joined", worker=member.worker, nonce=member.nonce)
        self.plane = self._make_plane(self, member)
        self._checkpointer = Checkpointer(self, member, self._owned_before, self._former.positions_of(member.worker))
        self._lives = LifeKeeper(self, member, self._former.lives, self._max_deliver, self._blocked)
        self.leadership = Leadership(
            self,
            member,
            self._terms,
            source=self._source,
            strategy=self._strategy,
            rules=rules_of(self, self._retention),
            former=self._former.lives,
            start_cursor=self._start_cursor,
            nudge=self._nudge,
            heard_assignment=self.heard_assignment,
            changed=self._observer.touched,
        )
        self.spawn(self._watch(), "parti-watch")

    def _owned_before(self, partition: PartitionId) -> bool:
        claim, _ = self.claims.get(partition, (None, 0))
        assert self.member is not None
        return claim is None or (claim.owner is not None and claim.owner.worker == self.member.worker)

    async def _watch(self) -> None:
        assert self._checkpointer is not None
        assert self._lives is not None
        await asyncio.gather(self._checkpointer.begin(), self._lives.begin())
        early: list[LeaseChange] = []
        while True:
            try:
                async for told in self.store.changes():
                    if isinstance(told, LeaseChange) and self.members is None:
                        early.append(told)
                    elif isinstance(told, Complete):
                        self._begin(early)
                    else:
                        self._heard(told)
            except PartiError as error:
                self.failed(error)
                await self.clock.sleep(self._terms.renew_every / 4)

    def _begin(self, leases: list[LeaseChange]) -> None:
        if self.live.is_set():
            return
        assert self.plane is not None
        assert self._checkpointer is not None
        self.members = Membership(self._terms, self.clock.now())
        for told in leases:
            self._heard(told)
        self.live.set()
        self.plane.begin()
        self.spawn(self._checkpointer.run(self.plane.positions), "parti-positions")
        assert self._lives is not None
        self.spawn(self._lives.run(), "parti-lives")
        self._observer.touched()

    # -- what is heard ------------------------------------------------------------------------------------------------

    def _heard(self, told: Told) -> None:
        match told:
            case LeaseChange(worker, record, revision, expired):
                self._step_members(membership.LeaseSeen(self.clock.now(), worker, record, revision, expired=expired))
            case LeaderChange(record, revision):
                if self.leadership is not None:
                    self.leadership.leader_seen(record, revision)
            case AssignmentChange(assignment, revision):
                self.heard_assignment(assignment, revision)
            case ClaimChange(claim, revision):
                self.heard_claim(claim, revision)
            case Complete():
                pass
        self._observer.touched()

    def heard_claim(self, claim: Claim, revision: int) -> None:
        known = self.claims.get(claim.partition)
        if known is not None and revision < known[1]:
            return  # a read was faster than the watch
        self.claims[claim.partition] = (claim, revision)
        if self._lives is not None:
            self._lives.heard(claim)
        if self.plane is not None:
            self.plane.claim_seen(claim, revision)
        if self.leadership is not None:
            self.leadership.claim_seen(claim, revision)
        self._observer.touched()

    def heard_assignment(self, assignment: Assignment, revision: int) -> None:
        if revision > self._assignment_revision:
            self._assignment_revision = revision
            self.assignment = assignment
            self._observer.touched()
        if self.leadership is not None:
            self.leadership.assignment_seen(assignment, revision)

    def read_claim_again(self, partition: PartitionId) -> None:
        """A nudge: the watch may have missed something."""
        self.spawn(hear_again(self, self.store, partition), "parti-nudged")

    def _step_members(self, event: membership.Event) -> None:
        if self.members is None or self.leadership is None:
            return
        self.members, effects = membership.step(self.members, event)
        for effect in effects:
            if isinstance(effect, membership.Confirm):
                self.spawn(self._confirm(effect.worker), "parti-confirm")
        changes = tuple(effect for effect in effects if not isinstance(effect, membership.Confirm))
        for change in changes:
            self._log.info(f"member.{type(change).__name__.lower()}", change=str(change))
        self.leadership.members_changed(self.members, changes)
        if changes:
            self.metrics.set(m.MEMBERS, len(self.members.active()))
            self._observer.touched()

    async def _confirm(self, worker: WorkerId) -> None:
        """Nothing was heard of this worker for too long: ask the bucket's leader whether that is true."""
        asked = self.clock.now()
        try:
            record, revision = await self.store.lease(worker)
        except PartiError:
            return  # asked again at one of the next ticks
        self._step_members(membership.LeaseSeen(self.clock.now(), worker, record, revision, asked))

    # -- partitions ---------------------------------------------------------------------------------------------------

    def begun(self, lease: Lease, state: PartitionState, previous: Member | None) -> None:
        if self._lives is not None:
            self._lives.granted(lease, state, previous, self.members)

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
        """Hand everything over to the others, if there are any; returns when it is done. Bound it by a timeout."""
        if self.member is None or self.plane is None or self.members is None:
            return
        others = {w for w in self.members.active() if w != self.member.worker}
        if not others:
            return
        self._step_identity(identity.Leave(self.clock.now()))
        await self._observer.wait_until(self.plane.holds_nothing)

    async def stop(self, *, returning: bool) -> None:
        """Nothing runs any more, the final positions are stored, and the record says so; then `run` returns."""
        plane, checkpointer, leadership = self.plane, self._checkpointer, self.leadership
        if self.member is None or plane is None or checkpointer is None:
            self._end(Ending.STOPPED)
            return
        final = await plane.stop()
        if await checkpointer.finish(final):
            if self._lives is not None:
                await self._lives.finish()
            if leadership is not None:
                await leadership.resign()
            await self._say_stopped(returning)
        self._end(Ending.STOPPED)

    async def _say_stopped(self, returning: bool) -> None:
        """The record under our id says that we stopped cleanly, or our lease is over anyway."""
        while self.may_act():
            stopped, effects = identity.step(self._identity, identity.Stop(self.clock.now(), returning))
            for effect in effects:
                if isinstance(effect, identity.WriteLease):
                    if await self.store.write_lease(effect.record, effect.expected) is not None:
                        self._identity = stopped
                        return
                    await self._look_at_own(effect.worker)

    async def _look_at_own(self, worker: WorkerId) -> None:
        """A renewal of ours was faster, or an answer got lost: go on from what the bucket holds."""
        try:
            record, revision = await self.store.lease(worker)
        except PartiError:
            await self.clock.sleep(_TICK)
            return
        self._step_identity(identity.OwnRead(self.clock.now(), record, revision))
