"""The per-partition layout: each partition's durable keeps its position, and a move resets it for the next owner.

Decisions are those of `parti.control.per_partition`. All partitions of the worker share one connection, one pool of
handlers and one limit on messages in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from parti.backoff import FOREVER
from parti.control import per_partition, signals
from parti.control.per_partition import Phase
from parti.dead_letters import DeadLetterWriter
from parti.errors import ConfigError, PartiError
from parti.manager.host import Host
from parti.manager.layouts.per_partition.acks import AcksUnconfirmed, confirm
from parti.manager.layouts.per_partition.durable import SlotDurable, SlotIdentity, subjects_of
from parti.manager.layouts.per_partition.flow import SlotFlow
from parti.manager.layouts.per_partition.inbox import SlotInbox
from parti.manager.layouts.per_partition.progress import SlotProgress
from parti.model import Ahead, Claim, Member, PartitionId, Retention
from parti.observe import worker_metrics as m
from parti.wire.api_consumers import filters_of
from parti.wire.errors import MessageNotFound, SequenceNotFound
from parti.wire.live import LiveConnection, ReaderBroke
from parti.worker.attempts import Attempts
from parti.worker.health import Part
from parti.worker.info import Shown
from parti.worker.ledger import PartitionState
from parti.worker.message import Message
from parti.worker.routing import consumer_name, consumer_stem
from parti.worker.runtime import Runtime
from parti.worker.watch import HandlerWatch

_CLEARED: Final = 256  # leftovers of a subject checked at once
_LOOK_EVERY: Final = 2.0  # seconds between two checks of all durables
_REMOVALS: Final = 2.0  # seconds for one removal: it must not make a release fail
_RESETS: Final = 64  # in flight at once: a worker that takes over many partitions must not flood the server


class PerPartitionPlane(SlotProgress):
    """Performs the effects of `control.slot`."""

    def __init__(
        self,
        host: Host,
        member: Member,
        runtime: Runtime,
        retention: Retention,
        subjects: Callable[[PartitionId], Sequence[str]] | None = None,
    ) -> None:
        super().__init__(host, member)
        template = runtime.config.subject_template
        self._subjects = subjects or (lambda partition: subjects_of(template, partition))
        self._runtime = runtime
        self._retention = retention
        self._durables: dict[PartitionId, SlotDurable] = {}
        self._identity = SlotIdentity(runtime, host.store.kv.stream, host.stream_created)
        self._attempts = Attempts(runtime, let_go=self._let_go, on_bug=self._bug)
        self._pool = self._attempts.pool
        scope = consumer_stem(runtime.config.consumer_prefix, runtime.namespace)
        consumer = consumer_name(runtime.config.consumer_prefix, member.worker, runtime.namespace)
        self._attempts.office = DeadLetterWriter(runtime.js, runtime.config.stream, consumer, scope)
        self._inbox = SlotInbox(runtime)
        self._watch = HandlerWatch(runtime, self._attempts, self._taken)
        self._watch.start()
        runtime.recorder.worker_id, runtime.recorder.consumer_name = member.worker, consumer
        self._connection: LiveConnection | None = None
        self._connecting = asyncio.Lock()
        self._resets = asyncio.Semaphore(_RESETS)
        self._filtered: set[str] = set()
        self._left_over: dict[str, int] = {}
        """Subject -> the highest sequence that was done and still in the queue at the last check."""
        self._next_beat = 0.0

    def _taken(self) -> tuple[int, list[PartitionState]]:
        return self._inbox.in_hand, [flow.state for flow in self._flows.values()]

    # -- what the agent asks ------------------------------------------------------------------------------------------

    def claim_seen(self, claim: Claim, revision: int) -> None:
        if self._closed:
            return
        if claim.owner == self._member and claim.partition not in self._flows:
            try:
                self._subjects(claim.partition)
            except ConfigError as error:  # not accepted, so that another worker gets it
                self._host.failed(error)
                return
        self._feed(claim.partition, signals.ClaimSeen(claim, revision))

    def begin(self) -> None:
        """Nothing to prepare: a durable is changed, and then checked, only while this worker owns its partition."""
        self._host.spawn(self._look_after_durables(), "parti-durables")

    async def _look_after_durables(self) -> None:
        """Repair a durable whose filters were edited; it continues from the partition's own position."""
        js, stream = self._runtime.js, self._runtime.config.stream
        while not self._closed:
            await self._host.clock.sleep(_LOOK_EVERY)
            try:
                infos = {info["name"]: info for info in await js.consumer_list(stream)}
            except PartiError:
                continue  # the pulls fail in the same way, and report it
            ours = [infos.get(self._durables[p].name) for p in self.owned() if p in self._flows]
            self._inbox.waits(sum(int(info.get("num_pending") or 0) for info in ours if info is not None))
            filters = {name: filters_of(info["config"]) for name, info in infos.items()}
            for partition in [p for p in self.owned() if p in self._flows and self._flows[p].pulling]:
                durable = self._durables[partition]
                if filters.get(durable.name, durable.filters) == durable.filters:
                    continue
                self._runtime.recorder.metrics.count(m.CONSUMER_REPAIRS)
                self._runtime.recorder.event(
                    "worker.consumer_changed", op="verify", result="mended", partition=partition, warn=True
                )
                self._feed(partition, signals.Gap())
            if self._retention is Retention.WORKQUEUE:
                with contextlib.suppress(PartiError):
                    await self._clear_leftovers()

    async def _clear_leftovers(self) -> None:
        """Remove done messages that stay in the queue because their ack got lost: the durable begins above them.

        Runs when nothing is in flight, and only on messages seen by the previous check too: an ack may still arrive.
        """
        js, stream, before = self._runtime.js, self._runtime.config.stream, self._left_over
        self._tell_all()
        self._left_over = {}
        for partition in [p for p in self.owned() if p in self._flows and not self._flows[p].state.open]:
            for subject in self._durables[partition].filters:
                at = 1
                for _ in range(_CLEARED):
                    try:
                        at = (await js.msg_get(stream, seq=at, next_by_subj=subject)).seq
                    except MessageNotFound:
                        break
                    held = self._slots[partition]
                    if held.lease is None or at > held.cursor or not self._host.may_act():
                        break
                    if at > before.get(subject, 0):
                        self._left_over[subject] = max(at, self._left_over.get(subject, 0))
                    else:
                        self._runtime.recorder.event("slot.leftover", op="ack", result="removed", sequence=at)
                        await js.msg_delete(stream, at)
                    at += 1

    def shown(self) -> Shown:
        """The state that an operator needs first; the same fields as in the other layout."""
        self._tell_all()
        return Shown(
            worker_id=self._member.worker,
            consumer=f"{self._runtime.config.consumer_prefix}-slot",
            subjects=tuple(sorted(s for p in self.owned() for s in self._subjects(p))),
            in_hand=self._inbox.in_hand,
            batch_size=self._runtime.config.pull_batch_size,
            pulling=any(flow.pulling for flow in self._flows.values()),
            partitions=tuple(self._flows[p].info(self._slots[p].cursor) for p in sorted(self.owned())),
        )

    def tick(self, now: float) -> None:
        self._share()
        for flow in self._flows.values():
            flow.look()
        third = self._runtime.config.ack_wait / 3
        if now >= self._next_beat:
            self._next_beat = now + third
            for flow in self._flows.values():
                flow.heartbeat(third * 0.9)

    def ahead(self) -> dict[PartitionId, Ahead]:
        return {p: flow.state.ahead for p, flow in self._flows.items() if flow.state.ahead is not None}

    async def stop(self) -> dict[PartitionId, tuple[int, int]]:
        self._tell_all()
        self._closed = True
        for partition, flow in self._flows.items():
            self._lane_stopped(partition, *flow.stop())
        await asyncio.gather(*(self._drain(partition) for partition in self._flows))
        final = self.positions()
        for partition in final:
            if self._connection is not None:
                await self._settled(partition, self._connection)
        await self._end()
        return final

    async def abandon(self) -> bool:
        if self._connection is not None:
            self._connection.abort()
        self._tell_all()
        self._fence()
        return await self._end() and self._attempts.handler.still

    async def _drain(self, partition: PartitionId) -> None:
        """Within `drain_timeout` the lanes end, or running handlers are cancelled and left to the next owner."""
        self._lane_stopped(partition, *await self._flows[partition].drained())

    def _lane_stopped(self, partition: PartitionId, last_started: int, dropped_from: int | None) -> None:
        """Dropped messages leave the queue: the position must not pass them, whatever finishes later."""
        if dropped_from is None:
            return
        if self._closed:
            held = self._slots[partition]
            self._slots[partition] = replace(held, queued=dropped_from - 1, tail=last_started)
        else:
            self._feed(partition, signals.LaneStopped(last_started, dropped_from))

    async def _end(self) -> bool:
        quiet = await self._attempts.halt()
        self._watch.stop()
        for flow in self._flows.values():
            flow.end_pull()
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        return quiet

    # -- steps --------------------------------------------------------------------------------------------------------

    def _perform(self, partition: PartitionId, effect: per_partition.Effect) -> None:
        match effect:
            case signals.ResetConsumer(_, sequence, ticket):
                self._flow(partition).resetting()
                self._host.spawn(self._reset(partition, sequence, ticket), "parti-reset")
            case signals.Settle(_, ticket):
                self._host.spawn(self._settle(partition, ticket), "parti-settle")
            case signals.StopLane():
                self._feed(partition, signals.LaneStopped(*self._flow(partition).stop()))
                if self._flows[partition].state.running or self._flows[partition].state.unfinished:
                    self._host.spawn(self._drain(partition), "parti-drain")
            case signals.Discard():
                if partition in self._flows:
                    self._flows[partition].discard()
            case signals.WriteClaim(claim, expected):
                self._host.spawn(self._write(claim, expected), "parti-claim")
            case signals.Granted(lease):
                held = self._slots[partition].claim
                self._host.begun(lease, self._flow(partition).state, held.previous if held is not None else None)
                self._flow(partition).go(lease, held.ahead if held is not None else None)
                self._host.granted(lease)
                self._show_subjects()
            case signals.Revoked(lease):
                self._host.revoked(lease)
                self._show_subjects()

    def _show_subjects(self) -> None:
        subjects = {subject for partition in self.owned() for subject in self._subjects(partition)}
        before, self._filtered = self._filtered, subjects
        if subjects != before:
            self._runtime.recorder.subjects(len(subjects), len(subjects - before), len(before - subjects))

    def _flow(self, partition: PartitionId) -> SlotFlow:
        flow = self._flows.get(partition)
        if flow is None:
            flow = SlotFlow(partition, self._runtime, self._pool, self._inbox, self._retention, self)
            self._flows[partition] = flow
            subjects = self._subjects(partition)
            self._durables[partition] = SlotDurable(self._runtime, partition, self._retention, subjects, self._identity)
        return flow

    def gap(self, partition: PartitionId) -> None:
        self._feed(partition, signals.Gap())

    def may_pull(self) -> bool:
        return self._host.may_act() and not self._closed

    def _share(self) -> None:
        """Partitions about to begin here count too: the first must not request the capacity of all others."""
        claims = [held.claim for held in self._slots.values()]
        self._inbox.flows = max(1, sum(claim is not None and claim.owner == self._member for claim in claims))

    def _let_go(self, message: Message) -> None:
        partition = message._lane.state.id
        if self._flows[partition].done(message):
            self.skipped(partition)

    async def _write(self, claim: Claim, expected: int) -> None:
        """The durable exists before the claim is accepted, so that a producer that sees an owner may publish."""
        if claim.owner != self._member:
            ahead = self._flows[claim.partition].state.ahead if claim.partition in self._flows else None
            claim = replace(claim, ahead=ahead if ahead is not None and ahead.upto > claim.cursor else None)
        if claim.accepted:
            self._flow(claim.partition)
            await self._durables[claim.partition].ensure(claim.cursor + 1)
        self._writer.write(claim, expected)

    # -- the server ---------------------------------------------------------------------------------------------------

    def _asked(self, partition: PartitionId, ticket: int) -> Callable[[], bool]:
        return lambda: not self._closed and self._slots[partition].ticket == ticket

    async def _reset(self, partition: PartitionId, sequence: int, ticket: int) -> None:
        """Close the inbox, set the durable, open a new inbox; a reset that is still running is abandoned."""
        current = self._asked(partition, ticket)
        waits = FOREVER.delays()
        async with self._resets:
            while current() and self._host.may_act():
                try:
                    connection = await self._live()
                    if self._retention is not Retention.LIMITS:
                        await self._confirm(partition, connection)  # a reset forgets acks that got lost
                    await self._durables[partition].set_to(sequence)
                    break
                except PartiError as error:
                    self._host.failed(error)
                    self._runtime.recorder.failed(Part.ITERATOR, self._runtime.clock.now(), error)
                    await self._host.clock.sleep(next(waits))
            else:
                return
        if current():
            self._feed(partition, signals.ResetDone(ticket))
            if current() and self._slots[partition].phase is Phase.LIVE:
                self._share()
                self._flow(partition).begin(connection, self._durables[partition].name, ticket)

    async def _settle(self, partition: PartitionId, ticket: int) -> None:
        """Confirm that every ack is applied; the claim carries the exact position in any case."""
        if self._connection is not None:
            await self._settled(partition, self._connection)
        self._feed(partition, signals.Settled(ticket))

    async def _settled(self, partition: PartitionId, connection: LiveConnection) -> None:
        """On a work queue no done message stays stored: the next owner begins above it, and would never see it."""
        await self._confirm(partition, connection)
        flow = self._flows[partition]
        for sequence in flow.acked_in_vain if self._retention is Retention.WORKQUEUE else ():
            try:
                async with asyncio.timeout(_REMOVALS):
                    await self._runtime.js.msg_delete(self._runtime.config.stream, sequence)
            except (MessageNotFound, SequenceNotFound):
                pass  # its ack was applied meanwhile
            except (PartiError, TimeoutError) as error:
                self._runtime.recorder.event("slot.settle", op="ack", result="unknown", error=str(error), warn=True)
                return
            flow.removed(sequence)

    def _bug(self, bug: BaseException) -> None:
        """A lane that ended on a bug would stall silently: other workers get this worker's partitions instead."""
        self._runtime.recorder.broke(bug, self._runtime.clock.now())

    async def _confirm(self, partition: PartitionId, connection: LiveConnection) -> None:
        try:
            await confirm(connection, self._flows[partition], self._durables[partition], self._retention)
        except AcksUnconfirmed as error:
            self._runtime.recorder.event("slot.settle", op="ack", result="unknown", error=str(error), warn=True)

    async def _live(self) -> LiveConnection:
        async with self._connecting:
            if self._connection is None or self._connection.lost.done():
                options = self._runtime.js.connection.connect_options
                self._connection = await LiveConnection.open(options, name=f"parti-{self._member.worker}")
                self._host.spawn(self._until_lost(self._connection), "parti-live")
            return self._connection

    async def _until_lost(self, connection: LiveConnection) -> None:
        await asyncio.wait({connection.lost})
        if isinstance(reason := connection.lost.result(), ReaderBroke):
            self._bug(reason.bug)
            return
        for partition in list(self._slots):
            self._feed(partition, signals.Gap())
