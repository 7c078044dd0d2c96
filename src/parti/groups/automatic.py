"""Automatic membership: members register by lease, and a leader among them keeps the group's record in step.

Scaling is then starting and stopping processes. Everything that other languages see is the record, which they follow as
if an administrator had written it; members that never registered here are theirs, and are never dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from parti.clock import Clock
from parti.errors import PartiError, UnknownOutcome
from parti.groups.distribution import assignment, filters_of, next_mapping
from parti.groups.errors import BadTemplate, GroupError, GroupNotFound
from parti.groups.names import check_group
from parti.groups.records import ElasticRecord
from parti.groups.store import NewMembership, RecordStore
from parti.observe.logs import get_logger
from parti.wire.errors import WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyExists, KeyNotFound, Operation

BUCKET = "parti-group-members"
log = get_logger("groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticMembership:
    """Take part in automatic membership."""

    lease: int = 6  # seconds; a crashed member is dropped after this, and a renewal may be missed twice
    settle: float = 0.2  # seconds of quiet before the record is written: ten processes started at once are one change
    listed: bool = False  # mappings move the fewest partitions; a list is what others can be added to
    """Write the members as a list, as an administrator would: then `cg add` and `cg drop` admit members in other
    languages at any time, and each change cuts the partitions anew. The same in every instance of the group."""

    def __post_init__(self) -> None:
        if self.lease < 1:
            raise BadTemplate(f"a lease has whole seconds, at least 1, not {self.lease}")


def next_membership(record: ElasticRecord, live: set[str], known: set[str], *, listed: bool = False) -> NewMembership:
    """What the record's membership should be: the live members and the foreign ones, moving as little as possible.

    `known` are the members that ever registered here. A list with foreign members stays one: the reference refuses to
    add and drop members of a mapped group, and with several filters it cannot work with mappings at all (10138).
    """
    foreign = set(record.member_names) - known
    current = assignment(record)
    # Those who own something stay when there are more members than partitions.
    wanted = sorted(live | foreign, key=lambda name: (not current.get(name), name))[: record.max_members]
    if listed or (foreign and (record.members or len(filters_of(record)) > 1)):
        # In whatever order they stand there: to the reference another order is a change for every member.
        same = set(wanted) == set(record.members)
        return NewMembership(members=record.members if same else tuple(sorted(wanted)))
    return NewMembership(mappings=next_mapping(record, wanted))


class Registrar:
    """One instance's part: its lease, its turn as leader, and its goodbye."""

    def __init__(
        self,
        store: RecordStore[ElasticRecord],
        place: tuple[str, str, str],
        options: AutomaticMembership,
        *,
        clock: Clock,
    ) -> None:
        stream, group, self.member = place
        check_group(self.member)  # it becomes part of a key
        self._store = store
        self._stream, self._group = stream, group
        self._options = options
        self._clock = clock
        self._instance = secrets.token_hex(6)
        self._scope = f"{stream}.{group}"
        self._own_key = f"m.{self._scope}.{self.member}.{self._instance}"
        self._leader_key = f"l.{self._scope}"
        self._kv = KeyValue(store.kv.api, BUCKET)
        self._lease_revision = self._leader_revision = 0
        self._leads_until = 0.0
        self._leader_seen = False
        self._live: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return (
            f"<Registrar {self._scope}/{self.member} {'leader' if self.leads else 'follower'} live={len(self._live)}>"
        )

    @property
    def leads(self) -> bool:
        """Whether this instance is the leader, by its own clock: a frozen leader finds that it is none any more."""
        return self._clock.now() < self._leads_until

    async def start(self) -> None:
        """Register; when this returns, the leader knows of this member or will at once."""
        info = await self._kv.api.stream_info(self._stream)
        self._kv = await KeyValue.ensure(self._kv.api, BUCKET, replicas=int(info["config"]["num_replicas"]))
        await self._renew()
        loops = (self._renewing(), self._watching(), self._leading())
        self._tasks = [asyncio.create_task(loop, name="parti-group-registrar") for loop in loops]

    async def stop(self) -> None:
        """Say goodbye: the member is dropped at once, not after its lease."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(PartiError):
            await self._kv.purge(self._own_key, ttl=self._options.lease)
            if self.leads:
                self._live.pop(self._own_key, None)
                await self._reconcile()
                await self._kv.delete(self._leader_key, revision=self._leader_revision)

    # -- the lease -------------------------------------------------------------------------------------------------

    async def _renewing(self) -> None:
        while True:
            await self._clock.sleep(self._options.lease / 3)
            try:
                await self._renew()
                if self.leads:
                    await self._lead()
            except PartiError as error:
                log.warning("group.lease_not_renewed", member=self.member, error=str(error))

    async def _renew(self) -> None:
        value = json.dumps({"member": self.member, "instance": self._instance}).encode()
        try:
            if self._lease_revision:
                self._lease_revision = await self._kv.update(
                    self._own_key, value, self._lease_revision, ttl=self._options.lease
                )
                return
        except (WrongLastSequence, UnknownOutcome):
            pass  # it ran out meanwhile, or the answer got lost: nobody else writes this key
        self._lease_revision = await self._kv.put(self._own_key, value, ttl=self._options.lease)

    # -- who is there ----------------------------------------------------------------------------------------------

    async def _watching(self) -> None:
        prefix = f"m.{self._scope}."
        async with asyncio.TaskGroup() as both:
            both.create_task(self._follow(f"{prefix}>", self._on_member))
            both.create_task(self._follow(self._leader_key, self._on_leader))
            both.create_task(self._follow_record())

    async def _follow(self, pattern: str, tell: Callable[[Change], None]) -> None:
        async for change in self._kv.watch(pattern):
            if isinstance(change, Change):
                tell(change)
                self._changed.set()

    async def _follow_record(self) -> None:
        async for change in self._store.watch(self._stream, self._group):
            if isinstance(change, Change):
                self._changed.set()  # somebody else may have added or dropped members

    def _on_member(self, change: Change) -> None:
        if change.operation is Operation.PUT:
            self._live[change.key] = change.key.split(".")[3]
        else:
            self._live.pop(change.key, None)

    def _on_leader(self, change: Change) -> None:
        self._leader_seen = change.operation is Operation.PUT

    # -- leading ---------------------------------------------------------------------------------------------------

    async def _leading(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.lease / 2):
                    await self._changed.wait()
            await self._clock.sleep(self._options.settle)
            self._changed.clear()
            try:
                if not self.leads and not self._leader_seen:
                    await self._lead()
                if self.leads:
                    await self._reconcile()
            except GroupNotFound:
                return  # the group is deleted: its members end by themselves
            except (GroupError, PartiError) as error:
                log.warning("group.not_reconciled", member=self.member, error=str(error))

    async def _lead(self) -> None:
        """Take or keep the lead, counted from before the request: our clock never says longer than the server's."""
        asked = self._clock.now()
        value, lease = self._instance.encode(), self._options.lease
        try:
            if self._leader_revision and self.leads:
                self._leader_revision = await self._kv.update(self._leader_key, value, self._leader_revision, ttl=lease)
            else:
                self._leader_revision = await self._kv.create(self._leader_key, value, ttl=lease)
                log.info("group.leads", scope=self._scope, member=self.member)
        except (KeyExists, WrongLastSequence):
            self._leader_seen, self._leads_until = True, 0.0
            return
        self._leads_until = asked + lease

    async def _reconcile(self) -> None:
        live = set(self._live.values())
        known = {key.split(".")[3] for key in await self._kv.keys(f"k.{self._scope}.*")}
        for name in sorted(live - known):
            # Before it is in the record: a member that is there and unknown would count as foreign for ever.
            with contextlib.suppress(KeyExists):
                await self._kv.create(f"k.{self._scope}.{name}", b"")
        known |= live
        before = (await self._store.get(self._stream, self._group)).record
        if not self.leads:
            return
        listed = self._options.listed
        stored = await self._store.edit(
            self._stream, self._group, lambda record: next_membership(record, live, known, listed=listed)
        )
        if stored.record.member_names != before.member_names:
            log.info("group.members_changed", scope=self._scope, members=list(stored.record.member_names))
        for name in sorted(known - live - set(stored.record.member_names)):
            with contextlib.suppress(KeyNotFound, WrongLastSequence):
                await self._kv.purge(f"k.{self._scope}.{name}", ttl=self._options.lease)
