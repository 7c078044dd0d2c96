"""Performs the effects of the election and of the leader on real NATS; control.election and reconcile decide.

A leader lasts for one term. Its writes are compare-and-set on the state its decision was based on, so that a deposed
leader that does not know it yet cannot undo a newer leader's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from parti.backoff import FOREVER
from parti.control import election, reconcile
from parti.control.election import LeaderRecord
from parti.control.handoff import Finished, HandoffResult, HandoffTerms, Nudge, Slow, StageDone
from parti.control.leader_signals import traces_of
from parti.control.membership import Change, Died, Membership
from parti.control.pacing import PacingTerms
from parti.control.reconcile import Leader, LeaderRules
from parti.errors import PartiError
from parti.manager.claim_writer import hear_again, stamp
from parti.manager.host import Host
from parti.manager.leader_writes import LeaderWrites, Tell
from parti.manager.lease_keeper import terms_of
from parti.manager.partition_feed import PartitionFeed
from parti.manager.setup import Setup
from parti.model import Assignment, Claim, Member, Partition, PartitionId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.wire.kv_election import RESIGNED, ElectionEvents, Elector

_BATCH = 0.003  # seconds of claim changes combined into one step: a step checks every partition
_GATHER = 0.1  # seconds without a join or leave, after which all earlier ones become one step
_GATHER_MOST = 1.0  # seconds at most; a leaving member works until its partitions moved, so nothing stalls
_WRITERS = 128  # writes in flight at once
_USUAL = ("assigned", "moved", "taken over")  # every other reason is a failure
_PATIENCE = 0.5  # seconds a new leader waits for the source before it continues with the stored partitions

_Wish = reconcile.WriteAssignment | reconcile.WriteClaim | reconcile.ReadPositions | reconcile.ReadTraces


def rules_of(host: Host) -> LeaderRules:
    """The rules of the namespace, from its configuration."""
    config = host.config
    return LeaderRules(
        windows=PacingTerms(config.cold_start_window, config.planned_scale_window, config.rebalance_cooldown),
        handoff=HandoffTerms(
            config.prepare_timeout, config.prepare_retries, config.commit_timeout, config.commit_retries
        ),
        parallel=config.parallel_moves,
    )


def partitions_of(assignment: Assignment | None) -> tuple[Partition, ...]:
    """The partitions in a stored assignment: the last list that a leader accepted."""
    if assignment is None:
        return ()
    return tuple(Partition(tuple(p.split(".")), assignment.weights.get(p, 1)) for p in sorted(assignment.owners))


class Leadership:
    """One member's part in the leader election, and its work while it leads."""

    def __init__(
        self,
        host: Host,
        member: Member,
        setup: Setup,
        *,
        former: Iterable[Member],
        heard_assignment: Callable[[Assignment, int], None],
        changed: Callable[[], None],
        remembered: Callable[[], Mapping[PartitionId, tuple[Claim, int]]],
    ) -> None:
        """`changed`: called when this member starts or stops leading; `remembered`: every claim that this member ever
        saw, including removed ones."""
        self._elector = Elector(
            election.candidate(member, terms=terms_of(setup.config), former=former),
            host.store,
            host.clock,
            ElectionEvents(self._elected, self._deposed, may_write=host.may_act, heard=host.heard_leader),
            spawn=host.spawn,
        )
        self.leader: Leader | None = None
        self.members: Membership | None = None
        self._host = host
        self._member = member
        self.feed = PartitionFeed(
            setup.source, setup.check, clock=host.clock, changed=self.partitions_changed, failed=host.failed
        )
        self._setup = setup
        self._heard_assignment = heard_assignment
        self._changed = changed
        self._remembered = remembered
        self._term_task: asyncio.Task[None] | None = None
        self._batch: dict[PartitionId, tuple[Claim, int]] = {}
        self._gone: dict[PartitionId, reconcile.Gone] = {}
        self._flush_due = False
        self._changes: tuple[Change, ...] = ()
        self._gathering: asyncio.TimerHandle | None = None
        self._gathering_since = 0.0
        self._writes: LeaderWrites[_Wish] = LeaderWrites(self._perform, host.spawn, limit=_WRITERS)
        self._log = get_logger("control", worker=member.worker)

    def __repr__(self) -> str:
        return f"<Leadership {self._member} {'leads' if self.leading else 'follows'} term={self.election.term}>"

    @property
    def election(self) -> election.Election:
        return self._elector.state

    @property
    def leading(self) -> bool:
        return self._elector.leading

    # -- what is heard ------------------------------------------------------------------------------------------------

    def tick(self, now: float, *, lead: bool) -> None:
        """`lead`: also let the leader check every partition, which costs more."""
        self._elector.tick()
        if lead:
            self._lead(reconcile.Tick(now))

    def leader_seen(self, record: LeaderRecord | None, revision: int, floor: int) -> None:
        """`floor`: the highest term found in any other record."""
        self._elector.seen(record, revision, floor)

    def claim_seen(self, claim: Claim, revision: int) -> None:
        if self.leader is None:
            return
        known = self._batch.get(claim.partition)
        if known is None or revision > known[1]:
            self._batch[claim.partition] = (claim, revision)
        self._flush_soon()

    def claim_gone(self, partition: PartitionId, revision: int, expected: int) -> None:
        if self._term_task is not None:
            self._gone[partition] = reconcile.Gone(revision, expected)
            self._flush_soon()

    def assignment_gone(self, revision: int, expected: int) -> None:
        if self.leader is not None and revision >= self.leader.assignment_revision > 0:
            self._log.warning("assignment.lost", worker_id=self._member.worker, op="assignment", result="rewritten")
            self._lead(reconcile.AssignmentLost(self._host.clock.now(), expected))

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_later(_BATCH, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self.leader is None:
            return  # lost claims are kept until the stored state is adopted
        gone, self._gone = self._gone, {}
        if gone:
            self._lead(reconcile.ClaimsLost(self._host.clock.now(), gone))
        batch, self._batch = tuple(self._batch.values()), {}
        if batch:
            self._lead(reconcile.ClaimsSeen(self._host.clock.now(), batch))

    def assignment_seen(self, assignment: Assignment, revision: int) -> None:
        self._lead(reconcile.AssignmentSeen(self._host.clock.now(), assignment, revision))

    def members_changed(self, members: Membership, changes: tuple[Change, ...]) -> None:
        """A death is handled at once. Joins and leaves close together become one step, so that no partition moves to a
        worker that leaves a moment later."""
        self.members = members
        self._changes += changes
        if any(isinstance(change, Died) for change in changes):
            self._flush_members()
        elif changes:
            self._gather()
        else:
            self._lead(reconcile.MembersChanged(self._host.clock.now(), members))

    def _gather(self) -> None:
        """When 75 workers leave together, the news takes a second to arrive. Without waiting, partitions would move to
        workers that leave next, again and again."""
        loop = asyncio.get_running_loop()
        if self._gathering is None:
            self._gathering_since = loop.time()
        else:
            self._gathering.cancel()
        due = min(loop.time() + _GATHER, self._gathering_since + _GATHER_MOST)
        self._gathering = loop.call_at(due, self._flush_members)

    def _flush_members(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        changes, self._changes = self._changes, ()
        if self.members is not None and changes:
            self._lead(reconcile.MembersChanged(self._host.clock.now(), self.members, changes))

    def partitions_changed(self, partitions: tuple[Partition, ...], *, refresh: bool = False) -> None:
        self._lead(reconcile.PartitionsChanged(self._host.clock.now(), partitions, refresh))

    async def refresh(self) -> None:
        """Read the source again and rebalance at once; does nothing on a follower.

        Errors of the source are raised, and the previous partitions stay in force.
        """
        if self.leader is not None:
            self.partitions_changed(await self.feed.ask(), refresh=True)

    async def resign(self) -> None:
        """Give up the term, so that the next leader need not wait for a lease to expire."""
        await self._elector.resign()

    # -- the election -------------------------------------------------------------------------------------------------

    def _elected(self, term: int) -> None:
        self._log.info("leader.elected", term=term)
        self._host.metrics.count(m.LEADER_CHANGES)
        self._host.spawn(self._serve_term(term), "parti-term")

    def _deposed(self, term: int, reason: str) -> None:
        write_log = self._log.info if reason == RESIGNED else self._log.warning
        write_log("leader.deposed", term=term, reason=reason)
        self._depose()
        self._changed()

    def _depose(self) -> None:
        self.leader = None
        self._batch.clear()
        self._gone.clear()
        self._writes.forget()
        if self._term_task is not None:
            self._term_task.cancel()
            self._term_task = None

    # -- one term -----------------------------------------------------------------------------------------------------

    async def _serve_term(self, term: int) -> None:
        """Read the whole stored state, adopt it, then follow the partition source until the term ends."""
        if self._term_task is not None:
            self._term_task.cancel()
        self._term_task = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                following = group.create_task(self.feed.run(), name="parti-source")
                await self._adopt(term)
                await following
        except asyncio.CancelledError:
            if self.election.leading and self.election.term == term:
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # the term ended, not the member

    async def _adopt(self, term: int) -> None:
        host = self._host
        waits = FOREVER.delays()
        while True:
            try:
                stored, revision = await host.store.assignment()
                claims, gone = await host.store.claims_and_gone()
                traces = traces_of(await host.store.checkpoints())
                break
            except PartiError as error:
                host.failed(error)
                await host.clock.sleep(next(waits))
        while self.members is None:
            await host.clock.sleep(next(waits))
        partitions = await self.feed.first(None if stored is None else _PATIENCE)
        if partitions is None:
            partitions = partitions_of(stored)
            self._log.warning("leader.source_silent", term=term, op="adopt", result="stored", known=len(partitions))
        if not self.leading or self.election.term != term:
            return
        self.leader = reconcile.elect(
            term,
            host.clock.now(),
            self.members,
            partitions,
            reconcile.Found(
                stored,
                revision,
                claims,
                lost={p: reconcile.Gone(lost.revision, lost.expected) for p, lost in gone.items()},
                remembered=self._remembered(),
                traces=traces,
            ),
            rules=rules_of(self._host),
            strategy=self._setup.strategy,
        )
        lost = sorted(p for p in self.leader.lost if p in self.leader.partitions)
        self._log.info("leader.adopted", term=term, partitions=len(partitions), claims=len(claims), lost=len(lost))
        if lost and stored is not None:
            self._log.warning("leader.claims_missing", op="adopt", result="lost", count=len(lost), first=lost[0])
        self._changed()
        self._flush()
        self._lead(reconcile.Tick(host.clock.now()))

    # -- leading ------------------------------------------------------------------------------------------------------

    def _lead(self, event: reconcile.Event) -> None:
        if self.leader is None or not self.leading:
            return
        self.leader, effects = reconcile.step(self.leader, event)
        self._changed()
        for effect in effects:
            match effect:
                case reconcile.WriteAssignment():
                    self._writes.want("assignment", effect)
                case reconcile.WriteClaim(claim):
                    self._writes.want(f"claim {claim.partition}", effect)
                case reconcile.ReadPositions(member):
                    self._writes.want(f"positions {member}", effect)
                case reconcile.ReadTraces():
                    self._writes.want("traces", effect)
                case Nudge(member, partition):
                    self._setup.nudge(member, partition)
                    self._host.spawn(hear_again(self._host, self._host.store, partition), "parti-claim")
                case Slow(claim, seconds):
                    self._log.warning(
                        "handoff.slow",
                        worker_id=self._member.worker,
                        op="handoff",
                        result="catching up",
                        took=round(seconds, 1),
                        claim=str(claim),
                    )
                case StageDone(stage, seconds):
                    self._host.metrics.observe(m.HANDOFF_PHASE, seconds, phase=stage.value)
                case Finished(partition, result, seconds):
                    self._host.metrics.count(m.HANDOFFS, result=result.value)
                    self._host.metrics.observe(m.HANDOFF_DURATION, seconds)
                    self._log_finished(partition, result, seconds)

    def _log_finished(self, partition: PartitionId, result: HandoffResult, seconds: float) -> None:
        write_log = self._log.debug if result is HandoffResult.SUCCESS else self._log.warning
        write_log(
            "handoff.finished",
            worker_id=self._member.worker,
            op="handoff",
            result=result.value,
            partition=partition,
            took=round(seconds, 4),
        )

    async def _perform(self, wish: _Wish) -> Tell | None:
        if not self.leading:
            return None
        match wish:
            case reconcile.WriteAssignment(assignment, expected):
                return await self._write_assignment(assignment, expected)
            case reconcile.WriteClaim():
                return await self._write_claim(wish)
            case reconcile.ReadTraces(partitions):
                return await self._read_traces(partitions)
            case reconcile.ReadPositions(member, partitions):
                return await self._read_positions(member, partitions)

    async def _write_assignment(self, assignment: Assignment, expected: int) -> Tell | None:
        store = self._host.store
        revision = await store.write_assignment(assignment, expected)
        if revision is not None:
            self._host.metrics.count(m.REBALANCES, reason=assignment.reason)
            self._log.info("assignment.written", version=assignment.version, reason=assignment.reason)
            return partial(self._heard_assignment, assignment, revision)
        try:
            found, revision = await store.assignment()
        except PartiError:
            return None  # decided again at the leader's next check
        if found is None:
            return partial(self.assignment_gone, max(revision, expected), revision)
        return partial(self._heard_assignment, found, revision)

    async def _write_claim(self, wish: reconcile.WriteClaim) -> Tell | None:
        host, claim, expected, reason = self._host, wish.claim, wish.expected, wish.reason
        if self._overtaken(claim.partition, expected):
            return None  # the claim changed while this wish waited: the leader knows, and decides again
        if wish.fresh:
            try:
                claim = replace(claim, cursor=max(claim.cursor, await self._setup.start_cursor()))
            except PartiError as error:
                host.failed(error)
                return None  # decided again at the leader's next check
        stamped = stamp(claim, host.clock)
        write_log = self._log.debug if reason in _USUAL else self._log.warning
        write_log("claim.written", worker_id=self._member.worker, op="claim", result=reason, claim=str(claim))
        if reason == "taken over":
            host.metrics.count(m.CLAIMS_STALE)
        revision = await host.store.write_claim(stamped, expected)
        if revision is not None:
            return partial(host.heard_claim, stamped, revision)
        # Read outside this write: a broker that does not reply must not block the key.
        return partial(host.spawn, hear_again(host, host.store, claim.partition), "parti-claim")

    async def _read_traces(self, partitions: tuple[PartitionId, ...]) -> Tell | None:
        """Read the positions that any worker stored for partitions whose claims were lost."""
        try:
            found = traces_of(await self._host.store.checkpoints(), partitions)
        except PartiError:
            return None  # the leader asks again
        return partial(self._lead, reconcile.TracesRead(self._host.clock.now(), partitions, found))

    def _overtaken(self, partition: PartitionId, expected: int) -> bool:
        known = self.leader.claims.get(partition) if self.leader is not None else None
        heard = self._batch.get(partition)
        return max(known[1] if known else 0, heard[1] if heard else 0) > expected

    async def _read_positions(self, member: Member, partitions: tuple[PartitionId, ...]) -> Tell | None:
        """Read a dead member's positions."""
        try:
            checkpoint, _ = await self._host.store.checkpoint(member.worker)
        except PartiError:
            return None  # the leader asks again
        if self.leader is None:
            return None
        claims = [self.leader.claims.get(partition, (Claim(partition), 0))[0] for partition in partitions]
        return partial(self._lead, reconcile.PositionsRead.of(self._host.clock.now(), member, claims, checkpoint))
