"""Joins a static group: a durable stores the member's position; a lost durable is restored at that position."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from parti.errors import PartiError
from parti.groups.common import is_group_consumer
from parti.groups.distribution import partition_filters
from parti.groups.errors import ForeignConsumer, GroupChanged, GroupNotFound, NotListed
from parti.groups.events import EventKind, MemberState
from parti.groups.member import GroupConsumer
from parti.groups.message import GroupHandler
from parti.groups.names import GroupKind, check_group, check_member, check_stream, static_consumer
from parti.groups.options import MemberOptions
from parti.groups.records import StaticRecord
from parti.groups.store import static_store
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.errors import ConsumerAlreadyExists

_NOTE_EVERY = 0.25  # seconds; work since the last note may repeat if durable and pinned instance are lost together
_RESETTABLE = frozenset({"all", "by_start_sequence"})
"""Deliver policies of a durable that allow a reset; with any other the server refuses it (10204)."""


async def static_consume(
    connection: Connection,
    stream: str,
    group: str,
    member: str,
    handler: GroupHandler,
    options: MemberOptions | None = None,
) -> StaticMember:
    """Join the group as an instance of `member`; messages arrive while this instance is pinned.

    Raises `GroupNotFound`, `NotListed`, `StreamNotFound`, `ForeignConsumer`; waits out later outages. End it with
    `await consumer.stop()`, or use it in `async with`.
    """
    options = options or MemberOptions()
    options.template.check_kind(GroupKind.STATIC)
    check_stream(stream), check_group(group), check_member(member)
    api = JetStreamApi(connection)
    await api.stream_info(stream)
    store = static_store(api, options.clock)
    stored = await store.get(stream, group)
    if member not in stored.record.member_names:
        raise NotListed(
            f"member {member!r} is not in static group {group!r}: it has {', '.join(stored.record.member_names)}"
        )
    consumer = StaticMember(connection, store, stored, (stream, group, member), handler, options)
    await consumer.start()
    return consumer


class StaticMember(GroupConsumer[StaticRecord]):
    """An instance of a member of a static group."""

    kind = GroupKind.STATIC
    _floor: int | None = None
    """Every message of this member up to here is acknowledged or was excluded, as far as this instance knows."""
    _floor_revision = 0
    """The record's revision at that time: another group of the same name has its own start."""
    _outdated = False
    """The record now gives this member other partitions: its durable is no longer used."""

    def _consumer_place(self) -> tuple[str, str]:
        return self.stream, static_consumer(self.group, self.member)

    async def _supervise(self) -> None:
        noting = asyncio.create_task(self._noting())
        try:
            await super()._supervise()
        finally:
            noting.cancel()
            await asyncio.gather(noting, return_exceptions=True)

    async def _join(self, filters: tuple[str, ...]) -> dict[str, Any] | None:
        same = not self._own.created or await self._same_group()
        if same is None:
            self._later(next(self._waits))  # the group is deleted; the watch reports that, or it was recreated
            return None
        config = self._template.config(self.kind, self._own.name, filters)
        wanted = self._resumed(config) if same else config
        info: dict[str, Any] | None
        try:
            info = await self._make(wanted)
        except ConsumerAlreadyExists:
            info = await self._existing(filters)
        if info is None:
            return None
        if self._own.created and info["created"] != self._own.created:
            if not same:
                self._in_flight.forget_done()
                self._floor = None
            elif self._floor is not None and not info["delivered"]["consumer_seq"]:
                info = await self._put_back(info, config, wanted, self._floor)
        self._note(info)
        return info

    def _resumed(self, config: dict[str, Any]) -> dict[str, Any]:
        """The durable's configuration with a start after the last done message, where a reset cannot move it later."""
        if self._floor is None or (self._api.can_reset and config["deliver_policy"] in _RESETTABLE):
            return config
        start = {"deliver_policy": "by_start_sequence", "opt_start_seq": self._floor + 1}
        return {name: value for name, value in config.items() if name != "opt_start_time"} | start

    async def _same_group(self) -> bool | None:
        """Whether the record is the one under which the position was noted; None when there is no record.

        A process that was frozen while the group was deleted and recreated sees only another revision; with a new
        durable, that is another group, which starts where its members configure it.
        """
        try:
            stored = await self._store.get(self.stream, self.group)
        except GroupNotFound:
            return None
        return stored.revision == self._floor_revision

    async def _put_back(
        self, info: dict[str, Any], config: dict[str, Any], wanted: dict[str, Any], floor: int
    ) -> dict[str, Any]:
        """Set a recreated durable to the position of the deleted one.

        Without this it would replay the stream, or skip messages that came meanwhile. Uses a reset if the server
        supports it, so that the configuration stays the one that other instances send. Otherwise `wanted` contains the
        position, and a durable that another instance created without it is recreated.
        """
        if wanted is config:
            await self._api.consumer_reset(self.stream, self._own.name, floor + 1)
        elif _start_of(info["config"]) == _start_of(config):
            await self._api.consumer_delete(self.stream, self._own.name)
            await self._api.consumer_create(self.stream, wanted, action="create")
        return await self._api.consumer_info(self.stream, self._own.name)

    async def _existing(self, filters: tuple[str, ...]) -> dict[str, Any]:
        info = await self._api.consumer_info(self.stream, self._own.name)
        config = info["config"]
        if not is_group_consumer(config):
            raise ForeignConsumer(
                f"the consumer {self._own.name!r} of {self.stream!r} was not made by a member of the group: choose "
                "other names"
            )
        if tuple(config.get("filter_subjects") or ()) != filters:
            raise ForeignConsumer(
                f"the consumer {self._own.name!r} of {self.stream!r} was left by an earlier group with other "
                "partitions: remove it, and choose where the new one shall start"
            )
        self._tell(EventKind.TEMPLATE_DIFFERS, detail="the durable was made with other settings; following them")
        return info

    async def _changed(self, before: StaticRecord) -> None:
        same = before.max_members == self.record.max_members
        if not same or partition_filters(before, self.member) != partition_filters(self.record, self.member):
            self._outdated = True
            self._refuse_change("the partitions or filters")

    async def _group_deleted(self) -> None:
        await self._remove_outdated()

    async def _leave(self) -> None:
        # As the reference does: a durable with other filters blocks the new ones (10148). The error has its position.
        if self._outdated and (done := await self._remove_outdated()) is not None:
            self._failure = GroupChanged(
                f"{self._failure}; its durable is removed. All of this member up to sequence {done} was done: "
                f"start_sequence={done + 1} goes on there"
            )

    async def _noting(self) -> None:
        """Track the position, also as a standby: the instance that restores a lost durable must know it.

        The pinned instance knows what it has done; a standby knows only this.
        """
        beats = 0
        while True:
            await self._clock.sleep(_NOTE_EVERY)
            beats += 1
            if self.state is MemberState.STANDBY or (self.state is MemberState.ACTIVE and beats % 4 == 0):
                self._signal(self._note_floor)

    async def _note_floor(self) -> None:
        if self._puller.pulling:
            with contextlib.suppress(PartiError):
                info = await self._api.consumer_info(self.stream, self._own.name)
                if info["created"] == self._own.created:
                    self._note(info)
                    await self._clear_stray(info)

    def _note(self, info: dict[str, Any]) -> None:
        self._floor = max(self._floor or 0, int(info["ack_floor"]["stream_seq"]))
        self._floor_revision = self._revision


def _start_of(config: dict[str, Any]) -> tuple[str, int]:
    return str(config.get("deliver_policy", "all")), int(config.get("opt_start_seq") or 0)
