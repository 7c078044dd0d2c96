"""Automatic membership: members register by lease, and an elected leader keeps the group's record up to date.

To scale, start or stop processes. Clients in other languages see only the record, as if an administrator had written
it. Members that never registered here are theirs, and are never dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from dataclasses import dataclass

from parti.clock import Clock
from parti.control.lease import LeaseTerms
from parti.errors import PartiError
from parti.groups.distribution import assignment, filters_of, next_mapping
from parti.groups.errors import BadTemplate, GroupError, GroupNotFound
from parti.groups.names import check_group
from parti.groups.records import ElasticRecord
from parti.groups.store import NewMembership, RecordStore
from parti.model import Member, WorkerId
from parti.observe.logs import get_logger
from parti.wire.errors import WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_election import KvElection, LeaderKey
from parti.wire.kv_model import Change, KeyExists, KeyNotFound, Operation

BUCKET = "parti-group-members"
log = get_logger("groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticMembership:
    """Take part in automatic membership."""

    lease: int = 6  # seconds until a crashed member is dropped; two missed renewals are tolerated
    settle: float = 0.2  # seconds to collect changes before a write: ten processes started together are one change
    listed: bool = False  # mappings move the fewest partitions; only a list can be extended by others
    """Write the members as a list, as an administrator would: then `cg add` and `cg drop` admit members in other
    languages at any time, and each change redistributes all partitions. Use the same value in all instances."""

    def __post_init__(self) -> None:
        if self.lease < 1:
            raise BadTemplate(f"a lease has whole seconds, at least 1, not {self.lease}")


def next_membership(record: ElasticRecord, live: set[str], known: set[str], *, listed: bool = False) -> NewMembership:
    """The membership to write: the live and the foreign members, with as few partitions moved as possible.

    `known` are the members that ever registered here. A list with foreign members stays a list: the reference refuses
    to add and drop members of a mapped group, and with several filters it does not support mappings at all (10138).
    """
    foreign = set(record.member_names) - known
    current = assignment(record)
    # With more members than partitions, members that own partitions stay.
    wanted = sorted(live | foreign, key=lambda name: (not current.get(name), name))[: record.max_members]
    if listed or (foreign and (record.members or len(filters_of(record)) > 1)):
        # Keep the stored order: for the reference another order is a change for every member.
        same = set(wanted) == set(record.members)
        return NewMembership(members=record.members if same else tuple(sorted(wanted)))
    return NewMembership(mappings=next_mapping(record, wanted))


class Registrar:
    """One instance in automatic membership: its lease, its work as leader, and its departure."""

    def __init__(
        self,
        store: RecordStore[ElasticRecord],
        place: tuple[str, str, str],
        options: AutomaticMembership,
        *,
        clock: Clock,
    ) -> None:
        stream, group, self.member = place
        check_group(self.member)  # the member name becomes part of a key
        self._store = store
        self._stream, self._group = stream, group
        self._options = options
        self._clock = clock
        self._instance = secrets.token_hex(6)
        self._scope = f"{stream}.{group}"
        self._own_key = f"m.{self._scope}.{self.member}.{self._instance}"
        self._kv = KeyValue(store.kv.api, BUCKET)
        self._election: KvElection | None = None
        self._stopped = asyncio.Event()
        self._live: dict[str, str] = {}
        self._informed = False
        """Whether all current members are known: a leader that acts earlier would drop the unknown ones."""
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return (
            f"<Registrar {self._scope}/{self.member} {'leader' if self.leads else 'follower'} live={len(self._live)}>"
        )

    @property
    def leads(self) -> bool:
        """Whether this instance leads, by its own clock: after a freeze a former leader sees that it does not."""
        return self._election is not None and self._election.leading

    async def start(self) -> None:
        """Register this member; when this returns, the leader knows of it or will at once."""
        info = await self._kv.api.stream_info(self._stream)
        self._kv = await KeyValue.ensure(self._kv.api, BUCKET, replicas=int(info["config"]["num_replicas"]))
        await self._register()
        lease = self._options.lease
        self._election = KvElection(
            LeaderKey(self._kv, f"l.{self._scope}", ttl=lease),
            Member(WorkerId(self.member), self._instance),
            LeaseTerms(lease, lease / 3, lease / 20),
            self._clock,
            elected=self._elected,
            deposed=lambda _term, reason: log.info("group.leads_no_more", scope=self._scope, reason=reason),
            failed=lambda error: log.warning("group.not_elected", member=self.member, error=str(error)),
        )
        loops = (self._election.run(self._stopped), self._registering(), self._watching(), self._reconciling())
        self._tasks = [asyncio.create_task(loop, name="parti-group-registrar") for loop in loops]

    async def stop(self) -> None:
        """Deregister: the member is dropped at once, not after its lease."""
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks[1:], return_exceptions=True)
        with contextlib.suppress(PartiError):
            await self._kv.purge(self._own_key, ttl=self._options.lease)
            if self.leads and self._informed:
                self._live.pop(self._own_key, None)
                await self._reconcile()
        self._stopped.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _registering(self) -> None:
        while True:
            await self._clock.sleep(self._options.lease / 3)
            try:
                await self._register()
            except PartiError as error:
                log.warning("group.lease_not_renewed", member=self.member, error=str(error))

    async def _register(self) -> None:
        """Write this instance's key, which no other process writes."""
        value = json.dumps({"member": self.member, "instance": self._instance}).encode()
        await self._kv.put(self._own_key, value, ttl=self._options.lease)

    # -- who is there ----------------------------------------------------------------------------------------------

    async def _watching(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._follow_members(f"m.{self._scope}.>"))
            both.create_task(self._follow_record())

    async def _follow_members(self, pattern: str) -> None:
        async for change in self._kv.watch(pattern):
            if isinstance(change, Change):
                if change.operation is Operation.PUT:
                    self._live[change.key] = change.key.split(".")[3]
                else:
                    self._live.pop(change.key, None)
            else:
                self._informed = True
            self._changed.set()

    async def _follow_record(self) -> None:
        async for change in self._store.watch(self._stream, self._group):
            if isinstance(change, Change):
                self._changed.set()  # another process may have added or dropped members

    # -- leading ---------------------------------------------------------------------------------------------------

    def _elected(self, _term: int) -> None:
        log.info("group.leads", scope=self._scope, member=self.member)
        self._changed.set()

    async def _reconciling(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.lease / 2):
                    await self._changed.wait()
            await self._clock.sleep(self._options.settle)
            self._changed.clear()
            try:
                if self.leads and self._informed:
                    await self._reconcile()
            except GroupNotFound:
                return  # the group was deleted: its members end by themselves
            except (GroupError, PartiError) as error:
                log.warning("group.not_reconciled", member=self.member, error=str(error))

    async def _reconcile(self) -> None:
        live = set(self._live.values())
        known = {key.split(".")[3] for key in await self._kv.keys(f"k.{self._scope}.*")}
        for name in sorted(live - known):
            # Before it is in the record: a member there that is not known would count as foreign permanently.
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
