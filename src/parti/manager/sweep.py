"""Removes unused durables: those of worker ids without a holder, and those with names of earlier versions.

On an interest stream such a durable keeps messages that others have handled; on a work queue it blocks their filters;
on limits it only wastes resources. It is removed when nothing depends on it: each of its partitions is STABLE with a
live owner, whose own consumer has the filter and has processed everything below. A durable in use by a live member is
never changed: a read-modify-write of its filters could undo the member's own update. So the leader handles ids without
a holder, and each member the old name of its own id, because only it knows that name to be unused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from parti.clock import Clock
from parti.config.control import ControlConfig
from parti.control.identity import LeaseStatus
from parti.control.membership import Membership
from parti.errors import PartiError
from parti.manager.kv_store import Store, bucket_of
from parti.manager.old_names import OldNames
from parti.model import Claim, ClaimState, Layout, Member, Partition, PartitionId, Retention, WorkerId
from parti.observe.logs import get_logger
from parti.wire.api import JetStreamApi
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ConsumerDoesNotExist, ConsumerNotFound
from parti.worker import WorkerConsumer
from parti.worker.routing import SubjectTemplate, consumer_name
from parti.worker.seal import Seal

_EVERY: Final = 1.0  # seconds between checks of known state; no server call when there is nothing to do
_LIST_EVERY: Final = 60.0  # seconds between lists of all consumers, if no worker id changed its holder
_AT_ONCE: Final = 16  # durables that one check changes or removes


class SweepView(Protocol):
    """What the sweeper needs from the agent."""

    member: Member | None
    claims: dict[PartitionId, tuple[Claim, int]]
    store: Store

    @property
    def members(self) -> Membership | None: ...

    @property
    def leading(self) -> bool: ...

    def may_act(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Unused:
    """A durable that no live member uses."""

    name: str
    worker: WorkerId
    config: Mapping[str, Any]
    sealed: bool


def held_ids(members: Membership, gone: Collection[Member] = ()) -> frozenset[WorkerId]:
    """Worker ids with a holder, also one that will return: only the holder may change their durables.

    `gone`: members that another member found dead (`Claim.taken_from`). A new member counts a dead member's lease from
    its own first read, and would treat it as live for that much longer.
    """
    return frozenset(
        worker
        for worker, seat in members.seats.items()
        if not seat.dead and seat.record.status is not LeaseStatus.LEFT and seat.record.member not in gone
    )


def still_needed(unused: Unused, retention: Retention, claims: Mapping[str, Claim], members: Membership) -> list[str]:
    """The filters of an unused durable that something depends on; `claims` by subject. Pure.

    Except on an interest stream, deleting a durable loses no message: there it is kept only for partitions that are
    moving or not yet taken over, so that its state can still be inspected.
    """

    def needed(subject: str) -> bool:
        claim = claims.get(subject)
        if claim is not None and claim.state is ClaimState.STABLE:
            return claim.owner is None or not members.healthy(claim.owner)
        if retention is Retention.INTEREST or not unused.sealed:
            return True
        return claim is not None and claim.state is not ClaimState.UNASSIGNED

    return [subject for subject in filters_of(unused.config) if needed(subject)]


async def sweep(
    js: JetStreamApi,
    config: ControlConfig,
    consumer: object,
    retention: Retention,
    view: Callable[[], SweepView | None],
    clock: Clock,
) -> None:
    """Sweep until cancelled; returns at once in a layout without a durable per worker."""
    if not isinstance(consumer, WorkerConsumer) or Layout(config.layout) is not Layout.PER_WORKER:
        return
    sweeper = Sweeper(js, config, consumer, retention, clock)
    while True:
        await clock.sleep(_EVERY)
        seen = view()
        if seen is None:
            continue
        try:
            await sweeper.look(seen)
        except PartiError as error:
            get_logger("control", namespace=config.namespace).info("durable.sweep_failed", error=str(error))


class Sweeper:
    """Removes unused durables, a few calls at a time."""

    def __init__(
        self, js: JetStreamApi, config: ControlConfig, consumer: WorkerConsumer, retention: Retention, clock: Clock
    ) -> None:
        settings = consumer.config
        self._js = js
        self._stream = settings.stream
        self._prefix = settings.consumer_prefix
        self._namespace = config.namespace
        self._template = SubjectTemplate(settings.subject_template)
        self._retention = retention
        self._clock = clock
        self._ids = re.compile(rf"{re.escape(config.worker_id_prefix)}-\d+")
        self._old = OldNames(js, settings.stream, f"KV_{bucket_of(config.namespace)}")
        self._cleared: Member | None = None
        """The member whose id has no durable of an earlier version left."""
        self._held: frozenset[WorkerId] | None = None
        self._unused: list[Unused] = []
        self._list_at = float("-inf")
        self._log = get_logger("control", namespace=config.namespace)

    def __repr__(self) -> str:
        return f"<Sweeper {self._stream} unused={len(self._unused)}>"

    async def look(self, view: SweepView) -> None:
        """Remove what can be removed now."""
        member, members = view.member, view.members
        if member is None or members is None or not view.may_act():
            return
        if self._cleared != member:
            await self._look_at_own_old_name(view, member, members)
        if view.leading:
            await self._look_at_the_dead(view, members)
        else:
            self._held = None

    # -- what is unused -----------------------------------------------------------------------------------------------

    async def _look_at_own_old_name(self, view: SweepView, member: Member, members: Membership) -> None:
        name = consumer_name(self._prefix, member.worker)
        info = await self._old.find(name, self._clock.now())
        if info is None:
            self._cleared = member
        elif not info["num_waiting"]:  # else another namespace, or a former holder of our id, pulls from it
            unused = Unused(name, member.worker, info["config"], sealed=False)
            if self._retention is Retention.INTEREST:
                claims = self._by_subject(view)
                if self._ready(unused, self._needed(unused, claims, members)):
                    await self._clear(unused, claims, members)
            else:  # we hold the id and claims hold positions: nothing needs it, and on a work queue it blocks us
                await self._remove(unused, len(filters_of(unused.config)))

    async def _look_at_the_dead(self, view: SweepView, members: Membership) -> None:
        held, now = held_ids(members), self._clock.now()
        if held != self._held or now >= self._list_at:
            self._unused = await self._list(held)
            self._held, self._list_at = held, now + _LIST_EVERY
        claims = self._by_subject(view) if self._unused else {}
        calls = 0
        for unused in list(self._unused):
            if not self._ready(unused, self._needed(unused, claims, members)):
                continue
            calls += 1
            if calls > _AT_ONCE or not view.leading:
                return
            if await self._is_nobodys(view, members, unused.worker):
                self._unused.remove(unused)
                self._unused += await self._clear(unused, claims, members)

    async def _list(self, held: frozenset[WorkerId]) -> list[Unused]:
        """The stream's durables with our names whose ids have no holder."""
        found = []
        for info in await self._js.consumer_list(self._stream):
            name, seal = info["name"], Seal.read(info["config"])
            if seal is not None:
                worker = WorkerId(seal.worker)
                ours = bool(worker) and seal.namespace == self._namespace
                ours = ours and name == consumer_name(self._prefix, worker, self._namespace)
            else:
                worker = WorkerId(name.removeprefix(f"{self._prefix}-"))
                ours = name != worker and self._ids.fullmatch(worker) is not None and not info["num_waiting"]
                ours = ours and await self._old.is_ours(info)
            if ours and worker not in held:
                found.append(Unused(name, worker, info["config"], sealed=seal is not None))
        return found

    def _by_subject(self, view: SweepView) -> dict[str, Claim]:
        subject = self._template.subject
        return {subject(Partition(tuple(p.split(".")))): claim for p, (claim, _) in view.claims.items()}

    def _needed(self, unused: Unused, claims: Mapping[str, Claim], members: Membership) -> list[str]:
        nothing = self._template.nothing(unused.worker)
        return [s for s in still_needed(unused, self._retention, claims, members) if s != nothing]

    def _ready(self, unused: Unused, needed: Sequence[str]) -> bool:
        """Whether it can be changed now. Except on interest, it is deleted as a whole or kept (layouts.conflicts)."""
        fewer = len(needed) < len(filters_of(unused.config))
        return not needed or (fewer and self._retention is Retention.INTEREST)

    async def _is_nobodys(self, view: SweepView, members: Membership, worker: WorkerId) -> bool:
        """Read from the bucket's leader right before a change: a process may just have acquired the id."""
        record, _ = await view.store.lease(worker)
        if record is None or record.status is LeaseStatus.LEFT:
            return True
        seat = members.seats.get(worker)
        return seat is not None and seat.dead and seat.record == record

    # -- what is done -------------------------------------------------------------------------------------------------

    async def _clear(self, unused: Unused, claims: Mapping[str, Claim], members: Membership) -> list[Unused]:
        """Remove unneeded filters, based on the durable's current state; returns what is left of it."""
        try:
            config = (await self._js.consumer_info(self._stream, unused.name))["config"]
            unused = replace(unused, config=config)
            needed = self._needed(unused, claims, members)
            if not self._ready(unused, needed):
                return [unused]
            before = len(filters_of(config))
            if needed:
                info = await self._js.consumer_update(self._stream, {**config, "filter_subjects": needed})
                dropped = before - len(needed)
                self._log.info("durable.filters_dropped", consumer=unused.name, dropped=dropped, left=len(needed))
                return [replace(unused, config=info["config"])]
            await self._remove(unused, before)
        except (ConsumerNotFound, ConsumerDoesNotExist):
            pass
        return []

    async def _remove(self, unused: Unused, filters: int) -> None:
        with contextlib.suppress(ConsumerNotFound, ConsumerDoesNotExist):
            await self._js.consumer_delete(self._stream, unused.name)
        self._log.info("durable.removed", consumer=unused.name, worker=unused.worker, filters=filters)
