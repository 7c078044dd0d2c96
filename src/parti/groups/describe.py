"""Lag and ownership of a group, partition by partition."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parti.clock import Clock, SystemClock
from parti.errors import NoResponders
from parti.groups.common import MemberInfo
from parti.groups.distribution import assignment, filters_of, partition_subject
from parti.groups.elastic_groups import ElasticGroups
from parti.groups.errors import WorkQueueMissing
from parti.groups.names import GroupKind, work_queue
from parti.groups.sourcing import next_to_source
from parti.groups.static_groups import StaticGroups
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.stored import AnsweredElsewhere

_TRIES = 5  # of a count that a lagging replica answered


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """One partition's current state. The figures of the owner's consumer are the same for all its partitions."""

    group: str
    partition: int
    owner: str | None
    pinned: str | None
    """The server's id of the owner's active instance."""
    state: str
    """`active`, `standby` (instances wait, none is pinned yet), `absent` (no instance), `unowned` (no member)."""
    ack_floor: int | None
    """Of the owner's consumer, in the stream it reads."""
    last_seq: int | None
    lag: int | None
    """Messages not acknowledged; None where the stream does not allow direct gets, or only a mirror answers them."""
    lag_seconds: float | None
    """Age of the oldest unacknowledged message."""
    in_flight: int
    redelivered: int
    next_to_source: int | None
    """The oldest message of an elastic group's stream that its work queue has not taken; of all partitions together."""


async def describe(
    groups: ElasticGroups | StaticGroups, stream: str, group: str, *, clock: Clock | None = None
) -> list[PartitionLag]:
    """Every partition of the group with its owner and lag, in order."""
    clock = clock or SystemClock()
    stored = await groups.get(stream, group)
    members = {info.member: info for info in await groups.members(stream, group)}
    owner_of = {partition: name for name, owned in assignment(stored.record).items() for partition in owned}
    elastic = groups.kind is not GroupKind.STATIC
    read = work_queue(stream, group) if elastic else stream
    try:
        info = await groups.api.stream_info(read)
    except StreamNotFound:
        raise WorkQueueMissing(
            f"the stream {read!r} of group {group!r} does not exist: create the group again"
        ) from None
    waiting = await next_to_source(groups.api, info) if elastic else None
    direct = bool(info["config"].get("allow_direct"))
    # A work queue holds only unacknowledged messages, and all messages of a mapped group belong to its members.
    filters = (">",) if elastic or not stored.record.members else filters_of(stored.record) or (">",)
    rows = []
    for partition in range(stored.record.max_members):
        owner = members.get(owner_of.get(partition, ""))
        start = 1 if elastic or owner is None else owner.ack_floor + 1
        subjects = [f"{partition}.{each}" for each in filters]
        if elastic:
            subjects = [partition_subject(stored.record, partition)]
        lag = await _lag(groups.api, read, subjects, start) if direct else None
        rows.append(_row(group, partition, owner, lag, clock.wall()))
    return [replace(row, next_to_source=waiting.seq) for row in rows] if waiting is not None else rows


@dataclass(frozen=True, slots=True)
class _Lag:
    count: int
    oldest_ns: int | None
    last_seq: int | None


async def _lag(api: JetStreamApi, stream: str, subjects: list[str], start: int) -> _Lag | None:
    """The leader's figures; None when only a mirror can count the messages."""
    count, oldest, last = 0, None, None
    for subject in subjects:
        try:
            first = await api.msg_get(stream, seq=start, next_by_subj=subject)
            counted = await _count(api, stream, subject, first.seq)
            if counted is None:
                return None
            count += counted
            oldest = first.time_ns if oldest is None else min(oldest, first.time_ns)
        except MessageNotFound:
            pass
        try:
            newest = (await api.msg_get(stream, last_by_subj=subject)).seq
            last = newest if last is None else max(last, newest)
        except MessageNotFound:
            continue
    return _Lag(count, oldest, last)


async def _count(api: JetStreamApi, stream: str, subject: str, first: int) -> int | None:
    """The number of messages of the subject from `first` on; the leader has `first`.

    Only Direct Get counts messages. A lagging replica is recognised because it lacks `first`; one that lacks the newest
    messages counts too few for a moment.
    """
    for _ in range(_TRIES):
        try:
            batch = await api.direct_get_batch(stream, batch=1, seq=first, next_by_subj=subject)
        except (AnsweredElsewhere, NoResponders):
            return None
        if batch.messages and batch.messages[0].seq == first:
            return 1 + batch.pending
    return None


def _row(group: str, partition: int, owner: MemberInfo | None, lag: _Lag | None, now: float) -> PartitionLag:
    state = "unowned"
    if owner is not None:
        state = "absent" if not owner.active else "active" if owner.pinned else "standby"
    seconds = None
    if lag is not None:
        seconds = round(max(0.0, now - lag.oldest_ns / 1e9), 3) if lag.oldest_ns is not None else 0.0
    return PartitionLag(
        group=group,
        partition=partition,
        owner=owner.member if owner is not None else None,
        pinned=owner.pinned if owner is not None else None,
        state=state,
        ack_floor=owner.ack_floor if owner is not None and owner.active else None,
        last_seq=lag.last_seq if lag is not None else None,
        lag=lag.count if lag is not None else None,
        lag_seconds=seconds,
        in_flight=owner.in_flight if owner is not None else 0,
        redelivered=owner.redelivered if owner is not None else 0,
        next_to_source=None,
    )
