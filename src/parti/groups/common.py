"""Administration shared by both kinds of groups: read records, inspect members, step down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic

from parti.groups.distribution import assignment
from parti.groups.errors import NoActiveInstance
from parti.groups.names import PRIORITY_GROUP, GroupKind, can_exist, check_group, check_member, check_stream
from parti.groups.store import R, RecordStore, Stored
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import ConsumerNotFound, StreamNotFound
from parti.wire.stored import parse_time


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """One member, from the record and from the server's current state."""

    member: str
    listed: bool
    partitions: tuple[int, ...]
    active: bool
    """An instance is joined: a static member has a waiting pull, an elastic one a consumer."""
    pinned: str | None
    """The server's id of the instance that receives the messages, or None."""
    waiting: int
    """Pulls waiting at the server; about the number of joined instances."""
    pending: int
    """Messages not delivered yet."""
    in_flight: int
    """Messages delivered and not acknowledged."""
    redelivered: int
    ack_floor: int
    """Stream sequence up to which every message of this member is acknowledged."""


@dataclass(frozen=True, slots=True)
class DeletePlan:
    """What deleting the group would remove, for a person to check first."""

    kind: GroupKind
    stream: str
    group: str
    revision: int
    consumers: tuple[str, ...]
    streams: tuple[str, ...]
    messages: int
    """Messages in those streams that were not processed."""


class GroupCalls(ABC, Generic[R]):
    """The administration of one kind of group over one connection."""

    kind: GroupKind

    def __init__(self, connection: Connection, store: RecordStore[R]) -> None:
        self.connection = connection
        self.api: JetStreamApi = store.kv.api
        self.store: RecordStore[R] = store

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.connection!r}>"

    @abstractmethod
    def consumer_place(self, stream: str, group: str, member: str) -> tuple[str, str]:
        """Stream and name of the member's consumer."""

    async def get(self, stream: str, group: str) -> Stored[R]:
        """The group's record; raises `GroupNotFound`."""
        return await self.store.get(check_stream(stream), group)

    async def names(self, stream: str) -> list[str]:
        """The groups of this kind on the stream, sorted."""
        return [group for _, group in await self.store.names(check_stream(stream))]

    async def members(self, stream: str, group: str) -> list[MemberInfo]:
        """Every listed member with its partitions and the state of its consumer."""
        stored = await self.get(stream, group)
        return [await self._info(stored, stream, group, member) for member in stored.record.member_names]

    async def active_members(self, stream: str, group: str) -> list[str]:
        """The listed members with a joined instance."""
        return [info.member for info in await self.members(stream, group) if info.active]

    async def member_info(self, stream: str, group: str, member: str) -> MemberInfo:
        """One member, listed or not."""
        stored = await self.get(stream, group)
        return await self._info(stored, stream, group, check_member(member))

    async def step_down(self, stream: str, group: str, member: str) -> None:
        """Unpin the member's pinned instance; the server at once pins another waiting one, if there is one."""
        await self.get(stream, group)
        place = self.consumer_place(stream, check_group(group), check_member(member))
        try:
            await self.api.consumer_unpin(*place, PRIORITY_GROUP)
        except (ConsumerNotFound, StreamNotFound):
            raise NoActiveInstance(f"no instance of member {member!r} of group {group!r} is joined") from None

    async def _info(self, stored: Stored[R], stream: str, group: str, member: str) -> MemberInfo:
        listed = member in stored.record.member_names
        partitions = assignment(stored.record).get(member, ())
        place = self.consumer_place(stream, group, member)
        if not all(can_exist(name) for name in place):
            return MemberInfo(member, listed, partitions, False, None, 0, 0, 0, 0, 0)
        try:
            info = await self.api.consumer_info(*place)
        except (ConsumerNotFound, StreamNotFound):
            return MemberInfo(member, listed, partitions, False, None, 0, 0, 0, 0, 0)
        if not is_group_consumer(info["config"]):
            return MemberInfo(member, listed, partitions, False, None, 0, 0, 0, 0, 0)
        waiting = int(info.get("num_waiting") or 0)
        return MemberInfo(
            member,
            listed,
            partitions,
            active=waiting > 0 or self.kind is not GroupKind.STATIC,
            pinned=pinned_id(info),
            waiting=waiting,
            pending=int(info["num_pending"]),
            in_flight=int(info["num_ack_pending"]),
            redelivered=int(info.get("num_redelivered") or 0),
            ack_floor=int(info["ack_floor"]["stream_seq"]),
        )


def is_group_consumer(config: dict[str, Any]) -> bool:
    """Whether a group member created this consumer: no other client uses this priority group."""
    return list(config.get("priority_groups") or []) == [PRIORITY_GROUP]


def pinned_id(info: dict[str, Any]) -> str | None:
    """The id of the pinned instance, from a consumer's info."""
    return _pin(info).get("pinned_client_id") or None


def pinned_at(info: dict[str, Any]) -> int:
    """When that instance was pinned, in nanoseconds; grows with every change."""
    return parse_time(_pin(info)["pinned_ts"])


def stray_pin(info: dict[str, Any]) -> str | None:
    """A pin that no instance holds, though the server reports it: it blocks every instance until its TTL ends.

    The server pins a waiting pull and checks only afterwards whether its client still listens (2.15.1): an instance
    that has just ended can get the pin. Pin ids travel only with messages, so no instance knows a pin without a message
    sent. With a rate limit the server may pause between pinning and sending: then this cannot be decided.
    """
    pin = pinned_id(info)
    if pin is None or info["config"].get("rate_limit_bps"):
        return None
    sent = info["delivered"].get("last_active")
    return pin if sent is None or parse_time(sent) < pinned_at(info) else None


def holder(info: dict[str, Any]) -> str | None:
    """The id of the pinned instance, unless the pin is stray."""
    return None if stray_pin(info) else pinned_id(info)


def _pin(info: dict[str, Any]) -> dict[str, Any]:
    groups: list[dict[str, Any]] = info.get("priority_groups") or []
    return next((group for group in groups if group.get("group") == PRIORITY_GROUP), {})
