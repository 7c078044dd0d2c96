"""Static groups: create, inspect, delete. Their membership never changes."""

from __future__ import annotations

from collections.abc import Sequence

from parti.groups.common import DeletePlan, GroupCalls, is_group_consumer
from parti.groups.distribution import assignment
from parti.groups.errors import BadFilter, GroupExists, GroupNotFound, NameCollision, NoMembersGiven
from parti.groups.names import (
    GroupKind,
    can_exist,
    check_group,
    check_member,
    check_stream,
    given_members,
    static_consumer,
)
from parti.groups.records import MemberMapping, StaticRecord, encode
from parti.groups.rules import check_static
from parti.groups.store import Stored, static_store
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import ConsumerNotFound, StreamNotFound
from parti.wire.kv_model import KeyExists


class StaticGroups(GroupCalls[StaticRecord]):
    """Groups on streams whose subjects begin with the partition number."""

    kind = GroupKind.STATIC

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, static_store(JetStreamApi(connection)))

    def consumer_place(self, stream: str, group: str, member: str) -> tuple[str, str]:
        return stream, static_consumer(group, member)

    async def create(
        self,
        stream: str,
        group: str,
        *,
        max_members: int,
        members: Sequence[str] = (),
        mappings: Sequence[MemberMapping] = (),
        filters: Sequence[str] = (),
    ) -> Stored[StaticRecord]:
        """The group, created if missing; the same settings are accepted, different ones raise `GroupExists`."""
        check_stream(stream)
        check_group(group)
        for mapping in mappings:
            check_member(mapping.member)
        record = StaticRecord(
            max_members=max_members, members=given_members(members), mappings=tuple(mappings), filters=tuple(filters)
        )
        if not record.member_names:
            raise NoMembersGiven("a static group never changes: give its members or mappings now")
        check_static(record)
        if record.mappings and record.filters:
            raise BadFilter(
                "a mapped static group takes every subject of its partitions, whatever its filters are: leave the "
                "filters out, or give members instead of mappings"
            )
        info = await self.api.stream_info(stream)
        await self.store.ensure_bucket(int(info["config"]["num_replicas"]))
        try:
            return self._same(await self.store.get(stream, group), record)
        except GroupNotFound:
            pass
        await self._refuse_collisions(stream, group, record)
        try:
            return await self.store.create(stream, group, encode(record))
        except KeyExists:
            return self._same(await self.store.get(stream, group), record)

    @staticmethod
    def _same(stored: Stored[StaticRecord], wanted: StaticRecord) -> Stored[StaticRecord]:
        found = stored.record
        differences = [
            what
            for what, a, b in (
                ("max_members", found.max_members, wanted.max_members),
                ("filters", found.filters, wanted.filters),
                ("members", _owners(found), _owners(wanted)),
            )
            if a != b
        ]
        if differences:
            raise GroupExists(f"the group exists with other {' and '.join(differences)}: use those, or delete it")
        return stored

    async def _refuse_collisions(self, stream: str, group: str, record: StaticRecord) -> None:
        """`a-b` + `c` and `a` + `b-c` make the same durable: two groups, or a user's own, would share a position."""
        names = {static_consumer(group, member): member for member in record.member_names}
        for name, (other, member) in (await self._claimed(stream, except_group=group)).items():
            if name in names:
                raise NameCollision(
                    f"member {names[name]!r} of {group!r} and member {member!r} of group {other!r} would both use the "
                    f"consumer {name!r}: choose other names"
                )
        for name, member in names.items():
            try:
                info = await self.api.consumer_info(stream, name)
            except ConsumerNotFound:
                continue
            if not is_group_consumer(info["config"]):
                raise NameCollision(
                    f"the consumer {name!r}, which member {member!r} would use, exists and belongs to no group: "
                    "choose other names"
                )

    async def _claimed(self, stream: str, *, except_group: str) -> dict[str, tuple[str, str]]:
        """Consumer names of the stream's other groups, each with its group and member."""
        claimed: dict[str, tuple[str, str]] = {}
        for other in await self.names(stream):
            if other != except_group:
                try:
                    record = (await self.store.get(stream, other)).record
                except GroupNotFound:
                    continue
                claimed |= {static_consumer(other, member): (other, member) for member in record.member_names}
        return claimed

    async def plan_delete(self, stream: str, group: str) -> DeletePlan:
        """What `delete` would remove: the record, and only those consumers that belong to the group."""
        stored = await self.get(stream, group)
        claimed = await self._claimed(stream, except_group=group)
        own = []
        for member in stored.record.member_names:
            name = static_consumer(group, member)
            if not can_exist(name):
                continue
            try:
                info = await self.api.consumer_info(stream, name)
            except (ConsumerNotFound, StreamNotFound):
                continue
            if name not in claimed and is_group_consumer(info["config"]):
                own.append(name)
        return DeletePlan(self.kind, stream, group, stored.revision, tuple(own), (), 0)

    async def delete(self, stream: str, group: str) -> DeletePlan:
        """After this returns the group and its members' consumers are deleted, and no other consumer."""
        plan = await self.plan_delete(stream, group)
        await self.store.delete(stream, group, revision=plan.revision)
        for consumer in plan.consumers:
            try:
                await self.api.consumer_delete(stream, consumer)
            except ConsumerNotFound:
                continue  # its own instance was faster: it notices the deletion too
        return plan


def _owners(record: StaticRecord) -> dict[str, tuple[int, ...]]:
    return {name: tuple(sorted(owned)) for name, owned in assignment(record).items()}
