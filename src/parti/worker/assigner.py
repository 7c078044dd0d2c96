"""Applies an assignment to the consumer's filters and to the ledger, without a gap between the two.

An update takes effect as a whole, or the last good state stays in force. The pull loop keeps running throughout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from parti.model import Lease, PartitionId, Retention
from parti.wire.errors import ConsumerDoesNotExist
from parti.worker.channel import Channel, Interrupted
from parti.worker.durable import Durable, Memory
from parti.worker.inbox import Inbox
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.mending import Mender
from parti.worker.routing import Routes, SubjectTemplate
from parti.worker.runtime import Runtime
from parti.worker.takeovers import TakeOvers
from parti.worker.updates import Diff, Wanted


class Assigner:
    """Applies wanted states one after the other. It and the session never change the consumer concurrently."""

    def __init__(
        self,
        runtime: Runtime,
        durable: Durable,
        ledger: Ledger,
        channel: Channel,
        inbox: Inbox,
        take_overs: TakeOvers,
        mender: Mender,
    ) -> None:
        self._config = runtime.config
        self._durable = durable
        self._ledger = ledger
        self._channel = channel
        self._inbox = inbox
        self._take_overs = take_overs
        self._mender = mender
        self._recorder = runtime.recorder
        self._template = SubjectTemplate(runtime.config.subject_template)

    # -- applying -----------------------------------------------------------------------------------------------------

    async def apply(self, wanted: Wanted) -> bool:
        """Apply this assignment; False when nothing had to change on the server."""
        durable = self._durable
        if not durable.known:
            return await self._begin(wanted)
        renamed = durable.name_for(wanted.worker_id) != durable.name
        filters = self._filters(wanted)
        states = self._ledger.states
        removed = [state for key, state in states.items() if key not in wanted.routes.partitions]
        added = [key for key in wanted.routes.partitions if key not in states]
        for key, lease in wanted.leases.items():
            if key in states:
                states[key].lease = lease
        if filters is None:
            return await self._pause(wanted, removed)
        diff = Diff.between(durable.filters, filters)
        if not diff and not renamed and not added and not removed:
            self._channel.resume()
            return False
        at_work = [state for state in removed if not state.stopped]
        await self._stop_all(removed)
        # Read them before the update: once a filter is removed, deliveries say nothing about that partition.
        cursors = {state.id: self._ledger.cursor(state.id) for state in removed}
        fresh = {key: self._new_state(wanted, key) for key in added}
        try:
            async with self._durable.changing:
                self._place(fresh)
                if renamed:
                    await self._rename(wanted, filters)
                elif diff:
                    await self._update(filters)
                await self._join(wanted, list(fresh.values()))
        except BaseException:
            for key, state in fresh.items():
                if self._ledger.has(state):  # not when it was cancelled while it waited for the durable
                    self._inbox.drop(states.pop(key))
            for state in at_work:  # a partition that was only held, or stopped before, must not start here
                self.go_on(state)
            self._ledger.forget_places()
            raise
        self._forget(removed, cursors)
        self._ledger.assign(wanted.routes)
        self._recorder.subjects(len(wanted.routes.subjects), len(diff.added), len(diff.removed))
        self._channel.resume()
        return True

    async def _pause(self, wanted: Wanted, removed: list[PartitionState]) -> bool:
        """No partition is assigned; the consumer keeps its filters, and pulling pauses until one is assigned."""
        before = len(self._ledger.routes.subjects)
        await self._stop_all(removed)
        self._channel.pause()
        self._forget(removed, {state.id: self._ledger.cursor(state.id) for state in removed})
        self._ledger.assign(wanted.routes)
        self._recorder.subjects(0, 0, before)
        self._recorder.event("worker.paused", op="update", result="paused")
        return bool(removed)

    def _filters(self, wanted: Wanted) -> tuple[str, ...] | None:
        """The filters the consumer should have; None to keep the current ones and pause."""
        if wanted.routes.subjects:
            return wanted.routes.subjects
        if self._config.on_empty_assignment == "pause-pull-loop" and self._durable.known:
            # With claims the partitions have another owner: ours would retain its messages, or block its filter.
            return (
                None if not (wanted.claimed and self._ledger.by_reset) else (self._template.nothing(wanted.worker_id),)
            )
        return (self._template.nothing(wanted.worker_id),)

    async def _update(self, filters: tuple[str, ...]) -> None:
        try:
            await self._mender.update(filters, self._mender.memory())
            await self._mender.finish()
        except ConsumerDoesNotExist:
            await self._mender.recreate("not_found", filters)
            self._channel.interrupt(Interrupted("the consumer was recreated by an update"))

    async def _rename(self, wanted: Wanted, filters: tuple[str, ...]) -> None:
        """Continue under another worker id: create a new durable at our position and delete the old one.

        See docs/evidence/go-library.md#w9.
        """
        old, durable, ledger = self._durable.name, self._durable, self._ledger
        if self._ledger.retention is Retention.WORKQUEUE:
            await durable.delete()
        durable.name = durable.name_for(wanted.worker_id)
        self._set_worker(wanted.worker_id)
        memory = self._mender.memory()
        durable.known = False
        if await durable.info() is None:
            await durable.create(filters, memory, after=ledger.floor(), retention=self._ledger.retention)
        else:
            await self._mender.update(filters, memory)
        self._channel.interrupt(Interrupted("the worker id changed"))
        if self._ledger.retention is not Retention.WORKQUEUE:
            new, durable.name = durable.name, old
            try:
                await durable.delete()
            finally:
                durable.name = new

    # -- the first time -----------------------------------------------------------------------------------------------

    async def _begin(self, wanted: Wanted) -> bool:
        """Create the consumer, or continue with the one that an earlier process of this worker left."""
        durable, channel = self._durable, self._channel
        filters = self._filters(wanted)
        assert filters is not None
        facts = await durable.facts()
        self._mender.meet_stream(facts)
        durable.name = durable.name_for(wanted.worker_id)
        self._set_worker(wanted.worker_id)
        async with self._durable.changing:
            info = await durable.info()
            fresh = {key: self._new_state(wanted, key) for key in wanted.routes.partitions}
            self._place(fresh)
            waiting: list[PartitionState]
            try:
                if wanted.claimed:
                    waiting = await self._begin_claimed(filters, fresh, info, facts.last_seq)
                elif info is None:
                    await self._create_first(wanted, filters, fresh, facts.last_seq)
                    waiting = [fresh[key] for key in fresh if key in wanted.hold]
                else:
                    waiting = await self._continue(wanted, filters, fresh, info)
                await self._join(wanted, waiting)
            except BaseException:
                self._ledger.states.clear()
                durable.known = False
                raise
        self._ledger.assign(wanted.routes)
        self._recorder.subjects(len(wanted.routes.subjects), len(wanted.routes.subjects), 0)
        if wanted.routes.subjects or self._config.on_empty_assignment == "apply-empty-filter":
            channel.resume()
        return True

    async def _create_first(
        self, wanted: Wanted, filters: tuple[str, ...], fresh: Mapping[PartitionId, PartitionState], last: int
    ) -> None:
        # "new" means now, not when the server creates the consumer, and not when it is recreated after a deletion.
        unknown = last if self._config.start == "new" and self._ledger.retention is not Retention.WORKQUEUE else 0
        begins = {key: wanted.positions.get(key, unknown) for key in fresh}
        after = min(begins.values(), default=unknown)
        await self._durable.create(filters, Memory(), after=after, retention=self._ledger.retention)
        self._channel.stale = False
        self._channel.next_sequence = 1
        for key, state in fresh.items():
            if key in wanted.hold:
                continue
            state.target = None  # nothing was delivered yet: the consumer itself starts early enough
            state.received_through = begins[key]
        self._ledger.stand_at(after)

    async def _begin_claimed(
        self,
        filters: tuple[str, ...],
        fresh: Mapping[PartitionId, PartitionState],
        info: Mapping[str, object] | None,
        last: int,
    ) -> list[PartitionState]:
        """Range reads bring everything up to T, so the consumer need not deliver anything older.

        On an interest stream an existing consumer is kept: it may be the only one that retains its unacked messages.
        """
        durable, channel = self._durable, self._channel
        if info is None:
            await durable.create(filters, Memory(), after=last, retention=self._ledger.retention)
            channel.stale, channel.next_sequence = False, 1
        else:
            await self._mender.update(filters, Memory())
            channel.stale = True
        if self._ledger.retention is Retention.LIMITS:
            self._ledger.stand_at(last)
        return list(fresh.values())

    async def _continue(
        self,
        wanted: Wanted,
        filters: tuple[str, ...],
        fresh: Mapping[PartitionId, PartitionState],
        info: Mapping[str, object],
    ) -> list[PartitionState]:
        """Continue with an existing durable; returns the partitions that need a catch-up."""
        ledger, durable, channel = self._ledger, self._durable, self._channel
        memory, filtered = durable.memory(), set(durable.filters)
        floor = int(info["ack_floor"]["stream_seq"])  # type: ignore[index]
        # Ignore the floor on a work queue (what remains there is not done) and that of a durable of another stream.
        void = self._ledger.retention is Retention.WORKQUEUE or not durable.of_this_stream
        if void:
            floor, memory = 0, Memory()
        ledger.owed = {sequence for sequence in memory.left if sequence > floor}
        ledger.stand_at(memory.high if ledger.owed else floor)
        waiting = []
        for key, state in fresh.items():
            subject = self._template.subject(wanted.routes.partitions[key])
            if subject in filtered and key not in wanted.positions and key not in memory.catching:
                state.target = None
                state.received_through = ledger.high
            else:
                state.received_through = wanted.positions.get(key, memory.catching.get(key, state.received_through))
                state.target = state.received_through
                waiting.append(state)
        if set(filters) != filtered or memory.left or memory.catching or waiting or not durable.sealed:
            catching = {state.id: state.received_through for state in waiting}
            await self._mender.update(filters, Memory(catching, memory.high, tuple(sorted(ledger.owed))))
        delivered = int(info["delivered"]["consumer_seq"])  # type: ignore[index]
        channel.stale = bool(info["num_ack_pending"] or ledger.owed or void)
        channel.next_sequence = delivered + 1
        return waiting

    # -- partitions that are added ------------------------------------------------------------------------------------

    def _new_state(self, wanted: Wanted, key: PartitionId) -> PartitionState:
        lease = wanted.leases.get(key) or Lease(key, 0)
        state = PartitionState(wanted.routes.partitions[key], lease)
        state.received_through = wanted.positions.get(key, self._ledger.former.get(key, 0))
        state.target = state.received_through  # hold everything until the target is known
        state.stopped = key in wanted.hold
        return state

    def _place(self, fresh: Mapping[PartitionId, PartitionState]) -> None:
        """Accept messages for the new partitions from now on, and still those of the old ones."""
        self._ledger.states.update(fresh)
        self._ledger.assign(Routes(self._template, [state.partition for state in self._ledger.states.values()]))

    async def _join(self, wanted: Wanted, states: list[PartitionState]) -> None:
        """The filter is in force: live deliveries bring everything above T, and a range read everything up to T."""
        if not states:
            return
        last = await self._durable.last_sequence()
        queue = self._ledger.retention is Retention.WORKQUEUE
        for state in states:
            known = state.id in wanted.positions or state.id in self._ledger.former or state.received_through
            if not known and self._config.start == "new" and state.id not in wanted.hold and not queue:
                state.received_through = last
            self._inbox.extend(state, max(last, state.target or 0))
        self._take_overs.begin([state for state in states if not state.stopped])

    # -- partitions that are removed ----------------------------------------------------------------------------------

    def go_on(self, state: PartitionState) -> None:
        """Resume a stopped partition at its cursor."""
        state.stopped = False
        if state.catching_up:
            self._take_overs.begin([state])
        else:
            self._inbox.resume(state)

    async def _stop_all(self, states: Iterable[PartitionState]) -> None:
        async with asyncio.TaskGroup() as group:
            for state in states:
                group.create_task(self._inbox.stop(state))

    def _forget(self, states: Iterable[PartitionState], cursors: Mapping[PartitionId, int]) -> None:
        for state in states:
            self._inbox.drop(state)
            self._ledger.remove(state, cursors[state.id])
        self._ledger.forget_places()

    def _set_worker(self, worker_id: str) -> None:
        self._recorder.worker_id, self._recorder.consumer_name = worker_id, self._durable.name
