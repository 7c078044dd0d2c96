"""The per-worker layout: one durable per worker, filters that follow the claims, catch-up by range reads.

`parti.control.per_worker_partition` decides, one state per partition. The WorkerConsumer handles the messages: it
holds, reads ranges, detects gaps and resyncs. This module translates: a wanted filter becomes an update of the
consumer, a grant becomes `take_over`, and the consumer's exact cursor goes into the claim.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from parti.backoff import FOREVER
from parti.control import per_worker_partition, signals
from parti.control.per_worker_partition import PerWorkerPartition, Phase
from parti.errors import PartiError, UsageError
from parti.manager.claim_writer import ClaimWriter
from parti.manager.host import Host
from parti.manager.layouts.conflicts import OwnDurables, clear_conflicts
from parti.manager.old_names import OldNames
from parti.manager.sweep import held_ids
from parti.model import Ahead, Claim, ClaimState, Lease, Member, Partition, PartitionId, Retention
from parti.observe.logs import get_logger
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ConsumerDoesNotExist, ConsumerNotFound, WorkQueueFilterNotUnique
from parti.worker import MaxSubjectsExceeded, WorkerClosed, WorkerConsumer
from parti.worker.errors import ForeignDurable
from parti.worker.routing import SubjectTemplate, consumer_name
from parti.worker.updates import Pace

_DROPS = 4  # update intervals that the removal of an unused filter may wait for an addition


class PerWorkerPlane:
    """Performs the effects of `control.holding` with one WorkerConsumer."""

    def __init__(self, host: Host, member: Member, consumer: WorkerConsumer, retention: Retention) -> None:
        self._host = host
        self._member = member
        self._consumer = consumer
        self._retention = retention
        self._holdings: dict[PartitionId, PerWorkerPartition] = {}
        self._adding: dict[PartitionId, int] = {}
        self._catching: dict[PartitionId, tuple[int, int]] = {}
        """Partition -> (up to, ticket) of a take-over that the consumer is performing."""
        self._applied: frozenset[PartitionId] = frozenset()
        self._ahead: dict[PartitionId, Ahead | None] = {}
        """Messages done above the cursor of a stopped partition."""
        self._claimed: set[PartitionId] = set()
        """Partitions with a claim; filled until `begin`."""
        self._inherited: set[PartitionId] = set()
        """Partitions that the previous process filtered, with unknown owner: see `_inherit`."""
        self._wake = asyncio.Event()
        config = consumer.config
        self._pace = Pace(window=config.update_coalescing_window, interval=config.min_update_interval, clock=host.clock)
        self._closed = False
        self._spoken = 0
        self._writer = ClaimWriter(host, self._feed)
        consumer.expect_stream(host.stream_created, host.stream_replaced)
        self._old = OldNames(consumer.js, consumer.config.stream, host.store.kv.stream)

    def __repr__(self) -> str:
        return f"<PerWorkerPlane {self._member} owns={len(self.owned())} filters={len(self._applied)}>"

    # -- what the agent asks ------------------------------------------------------------------------------------------

    def claim_seen(self, claim: Claim, revision: int) -> None:
        if not claim.lost:  # a lost claim does not say whose filter keeps the partition's messages
            self._inherited.discard(claim.partition)
            if not self._consumer.worker_id:
                self._claimed.add(claim.partition)
        if not self._closed and (claim.partition in self._holdings or self._concerns_us(claim)):
            self._feed(claim.partition, signals.ClaimSeen(claim, revision))

    def _concerns_us(self, claim: Claim) -> bool:
        """Every worker sees all claims, and most concern only other workers: no state is kept for those."""
        return any(
            m is not None and m.worker == self._member.worker for m in (claim.owner, claim.pending, claim.previous)
        )

    def claim_lost(self, partition: PartitionId, revision: int, expected: int) -> None:
        if partition in self._holdings:
            self._feed(partition, signals.ClaimLost(revision, expected))

    def spoken(self, revision: int) -> int:
        if not self._closed:  # while stopping, events are ignored: the last positions are not stored yet
            unspoken = (h.unspoken - 1 for h in self._holdings.values() if h.unspoken is not None)
            self._spoken = min([revision, *unspoken])
        return self._spoken

    def begin(self) -> None:
        self._host.spawn(self._update_loop(), "parti-filters")
        self._wake.set()

    def allows(self, lease: Lease) -> bool:
        held = self._holdings.get(lease.partition)
        return held is not None and held.lease == lease

    def holds_nothing(self) -> bool:
        done = (Phase.IDLE, Phase.RELEASED)
        return all(h.lease is None and h.phase in done and not h.filtered for h in self._holdings.values())

    def owned(self) -> frozenset[PartitionId]:
        return frozenset(p for p, h in self._holdings.items() if h.lease is not None)

    def positions(self) -> dict[PartitionId, tuple[int, int]]:
        found = {}
        for partition, held in self._holdings.items():
            if held.lease is not None and partition in self._applied and held.phase is not Phase.ADDING:
                found[partition] = (held.lease.epoch, self._consumer.position(partition).cursor)
            elif (unreleased := held.unreleased) is not None:
                found[partition] = unreleased
        return found

    def tick(self, now: float) -> None:  # noqa: ARG002 - the protocol's signature
        """Report each completed take-over: everything up to T is processed, not only read."""
        self._let_retired_go()
        for partition, (upto, ticket) in list(self._catching.items()):
            held = self._holdings[partition]
            if held.ticket != ticket or held.phase is not Phase.CATCHING_UP or partition not in self._applied:
                del self._catching[partition]
                continue
            where = self._consumer.position(partition)
            if where.target is None and where.cursor >= upto:
                del self._catching[partition]
                self._feed(partition, signals.ReadUpTo(upto, ticket))

    def ahead(self) -> dict[PartitionId, Ahead]:
        return {p: known for p, known in self._ahead.items() if known is not None}

    async def stop(self) -> dict[PartitionId, tuple[int, int]]:
        self._closed = True
        leases = {p: h.lease for p, h in self._holdings.items() if h.lease is not None and p in self._applied}
        cursors = await asyncio.gather(*(self._consumer.stop_partition(p) for p in leases))
        self._ahead = {p: self._consumer.ahead_of(p) for p in leases}
        final = {p: (lease.epoch, cursor) for (p, lease), cursor in zip(leases.items(), cursors, strict=True)}
        final |= {p: h.unreleased for p, h in self._holdings.items() if h.unreleased is not None}
        try:
            await self._consumer.close()
        except Exception as bug:  # it ended the worker earlier and was reported then; the positions are still valid
            self._host.failed(bug)
        return final

    async def abandon(self) -> bool:
        self._closed = True
        for partition in list(self._holdings):
            self._holdings[partition], effects = per_worker_partition.step(self._holdings[partition], signals.Fenced())
            for effect in effects:
                if isinstance(effect, signals.Revoked):
                    self._host.revoked(effect.lease)
        return await self._consumer.abandon()

    # -- steps --------------------------------------------------------------------------------------------------------

    def _state(self, partition: PartitionId) -> PerWorkerPartition:
        held = self._holdings.get(partition)
        if held is None:
            held = self._holdings[partition] = PerWorkerPartition(partition, self._member, retention=self._retention)
        return held

    def _feed(self, partition: PartitionId, event: per_worker_partition.Event) -> None:
        if self._closed:
            return
        self._holdings[partition], effects = per_worker_partition.step(self._state(partition), event)
        for effect in effects:
            self._perform(partition, effect)

    def _perform(self, partition: PartitionId, effect: per_worker_partition.Effect) -> None:
        match effect:
            case signals.AddFilter(_, ticket):
                self._adding[partition] = ticket
                claim = self._holdings[partition].claim
                self._want_update(urgent=claim is not None and claim.owner == self._member)
            case signals.DropFilter():
                self._adding.pop(partition, None)
                self._want_update(urgent=not self._retention.overlap)
            case signals.ReadLast(_, ticket):
                self._host.spawn(self._read_last(partition, ticket), "parti-read-last")
            case signals.CatchUp(_, _, upto, ticket):
                self._catching[partition] = (upto, ticket)
                self._engage(partition)
            case signals.StopLane():
                self._host.spawn(self._stop_lane(partition), "parti-stop-lane")
            case signals.WriteClaim(claim, expected, exact):
                if claim.owner != self._member and claim.state is not ClaimState.PREPARE:
                    claim = replace(claim, ahead=self._ahead.get(partition))
                elif exact and partition in self._applied:
                    claim = replace(claim, cursor=max(claim.cursor, self._consumer.position(partition).cursor))
                self._writer.write(claim, expected)
            case signals.Granted(lease):
                self._engage(partition)
                self._host.granted(lease)
            case signals.Revoked(lease):
                self._host.revoked(lease)

    def _engage(self, partition: PartitionId) -> None:
        """If we have the lease: begin at the cursor, continue where we had stopped, or only adopt the new epoch.

        A partition that an aborted move gives back may have to wait for its filter: it begins at the next call.
        """
        held = self._holdings[partition]
        lease = held.lease
        if lease is None or held.phase is Phase.ADDING or partition not in self._applied:
            return
        where = self._consumer.position(partition)
        if where.stopped or where.lease != lease:
            previous = held.claim.previous if held.claim is not None else None
            self._host.begun(lease, self._consumer.state_of(partition), previous)
        if not where.stopped or held.phase is Phase.STOPPING:
            self._consumer.renew_lease(lease)
        elif where.held:
            ahead = held.claim.ahead if held.claim is not None else None
            self._consumer.take_over(partition, after=max(held.queued, where.cursor), lease=lease, ahead=ahead)
        else:
            self._consumer.resume_partition(partition, lease)

    async def _stop_lane(self, partition: PartitionId) -> None:
        try:
            cursor = await self._consumer.stop_partition(partition)
            self._ahead[partition] = self._consumer.ahead_of(partition)
        except UsageError:
            # An aborted move whose filter was already removed is retried before the filter is back: nothing of the
            # partition is held here, and its last reported position is still valid.
            cursor = self._holdings[partition].cursor
        # Messages that had not started are dropped here too: the next owner reads them after the cursor.
        self._feed(partition, signals.LaneStopped(cursor, cursor + 1))
        self._feed(partition, signals.MessageDone(cursor))

    async def _read_last(self, partition: PartitionId, ticket: int) -> None:
        waits = FOREVER.delays()
        while True:
            try:
                last = await self._consumer.last_sequence()
                break
            except PartiError as error:
                self._host.failed(error)
                await self._host.clock.sleep(next(waits))
        self._feed(partition, signals.LastRead(last, ticket))

    def _want_update(self, *, urgent: bool) -> None:
        """An update is urgent when a partition has no owner meanwhile; others are batched (docs/requirements.md#r-112).

        While the next owner prepares, the old one continues: a short wait causes no pause in a planned move.
        """
        self._wake.set()
        self._pace.changed(urgent=urgent)

    # -- the durable --------------------------------------------------------------------------------------------------

    async def _update_loop(self) -> None:
        """One update at a time, always with the whole set; changes made meanwhile go into the next update."""
        waits = FOREVER.delays()
        while not self._closed:
            await self._wake.wait()
            if self._consumer.worker_id:
                await self._pace.due(self._host.clock.now(), self._patience)
            self._wake.clear()
            self._pace.begin()
            wanted = self._wanted()
            adding = dict(self._adding)
            if (wanted == self._applied and not adding and self._consumer.worker_id) or not self._host.may_act():
                self._tell_dropped()
                continue
            try:
                if not self._consumer.worker_id and self._retention is Retention.INTEREST:
                    await self._inherit()
                    wanted = self._wanted()
                await self._apply(wanted, adding)
                self._pace.updated()
                waits = FOREVER.delays()
            except WorkerClosed:
                return
            except PartiError as error:
                self._host.failed(error)
                self._want_update(urgent=True)
                await self._host.clock.sleep(next(waits))

    def _tell_dropped(self) -> None:
        """No update is needed: report filters as dropped that were never applied."""
        for partition, held in list(self._holdings.items()):
            if held.phase is Phase.RELEASING and not held.filtered and partition not in self._applied:
                self._feed(partition, signals.FilterDropped())

    def _patience(self) -> int:
        """The old owner drops a filter one round trip after the new owner added it. Waiting a little for the next
        partition to add merges both into one update, and during many moves there always is a next one.
        """
        # On other retention policies a filter keeps messages stored, so an unused one is removed as soon as possible.
        return 1 if self._adding or self._retention is not Retention.LIMITS else _DROPS

    async def _inherit(self) -> None:
        """Keep the filters of partitions without records, which the previous process had: on an interest stream only
        our durable keeps their messages until an owner is found."""
        consumer = self._consumer
        name = consumer_name(consumer.config.consumer_prefix, self._member.worker, self._host.config.namespace)
        try:
            info = await consumer.js.consumer_info(consumer.config.stream, name)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            return
        template = SubjectTemplate(consumer.config.subject_template)
        nothing = template.nothing(self._member.worker)
        found = {template.partition_of(subject) for subject in filters_of(info["config"]) if subject != nothing}
        for partition in sorted(p for p in found if p is not None and p not in self._claimed):
            self._inherited.add(partition)
            unknown = PerWorkerPartition(
                partition, self._member, retention=self._retention, phase=Phase.RELEASED, filtered=True
            )
            self._holdings[partition] = unknown
        if self._inherited:
            get_logger("control", worker=self._member.worker).warning(
                "filters.inherited", op="begin", result="kept", count=len(self._inherited), first=min(self._inherited)
            )

    def _let_retired_go(self) -> None:
        """Drop the filter of a partition that is not in the assignment: no worker needs it."""
        assignment = self._host.assignment
        retired = [p for p in self._inherited if p not in assignment.owners] if assignment.version else []
        for partition in retired:
            self._inherited.discard(partition)
            del self._holdings[partition]
            self._want_update(urgent=False)

    def _wanted(self) -> frozenset[PartitionId]:
        wanted = frozenset(p for p, h in self._holdings.items() if h.filtered)
        limit = self._consumer.config.max_subjects
        if len(wanted) <= limit:
            return wanted
        # More subjects than one consumer can have: owned partitions stay, the rest is not accepted and goes to others.
        extra = sorted(wanted - self._applied)[max(0, limit - len(wanted & self._applied)) :]
        self._host.failed(MaxSubjectsExceeded(f"{len(wanted)} partitions are more than worker.max_subjects ({limit})"))
        return wanted - set(extra)

    async def _apply(self, wanted: frozenset[PartitionId], adding: dict[PartitionId, int]) -> None:
        again = [p for p in adding if p in self._applied and p in wanted]
        try:
            await self._update(wanted)
        except WorkQueueFilterNotUnique:
            # A dead owner's durable still has the filter. By the claim, no other worker may own these partitions.
            try:
                removed = await self._clear_conflicts(wanted - self._applied)
            except ForeignDurable as foreign:
                self._consumer.cannot_update(foreign)
                raise
            if not removed:
                raise
            await self._update(wanted)
        dropped, self._applied = self._applied - wanted, wanted
        for partition in sorted(dropped):
            self._feed(partition, signals.FilterDropped())
        for partition, ticket in adding.items():
            if partition in wanted and self._adding.get(partition) == ticket:
                target = await self._target(partition, fresh=partition not in again)
                if self._adding.get(partition) == ticket:  # else it was requested again meanwhile, or withdrawn
                    del self._adding[partition]
                    self._feed(partition, signals.FilterAdded(target, ticket))

    async def _update(self, wanted: frozenset[PartitionId]) -> None:
        await self._consumer.update_worker_consumer(
            self._member.worker,
            [Partition(tuple(p.split("."))) for p in sorted(wanted)],
            hold=wanted - self._applied,
            flush=True,
            claimed=True,
        )

    async def _clear_conflicts(self, partitions: frozenset[PartitionId]) -> int:
        consumer, members = self._consumer, self._host.members
        claims = (self._holdings[p].claim for p in partitions if p in self._holdings)
        gone = {claim.taken_from for claim in claims if claim is not None and claim.taken_from is not None}
        held = held_ids(members, gone) if members is not None else frozenset()
        template = SubjectTemplate(consumer.config.subject_template)
        return await clear_conflicts(
            consumer.js,
            consumer.config.stream,
            [template.subject(Partition(tuple(p.split(".")))) for p in partitions],
            OwnDurables(
                consumer.config.consumer_prefix,
                self._host.config.namespace,
                self._old,
                own=consumer.consumer_name,
                own_old=consumer_name(consumer.config.consumer_prefix, self._member.worker),
            ),
            in_use=lambda worker: worker in held,
        )

    async def _target(self, partition: PartitionId, *, fresh: bool) -> int:
        """T of a partition whose filter is applied: our own consumer delivers everything above T."""
        where = self._consumer.position(partition)
        if fresh and where.target is not None:
            return where.target
        if not where.stopped:
            raise UsageError(f"partition {partition} is running: its claim cannot ask for it to be added")
        return await self._consumer.hold_partition(partition)
