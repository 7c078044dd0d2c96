"""Batches of a query that is a member of a group: what may be read when, and what is committed when a batch is done.

The group's record and the member's pin decide. A batch is planned only while the pin is held, and the partitions stay
until the batch has ended. Then the batch is committed, and only then a change of the membership takes effect. So a
planned move loses, repeats and reorders nothing.

- elastic: the work queue is the truth. What a batch has done is purged, partition by partition; everything that remains
  is not done. So every lease starts at the first remaining message.
- static: the member's durable keeps the position, moved by CONSUMER.RESET, only forward and only under the pin.
"""

from __future__ import annotations

import threading
from typing import Any

from parti.clock import Clock
from parti.errors import ConfigError, FatalError
from parti.groups.errors import WorkQueueMissing
from parti.groups.names import GroupKind, static_consumer
from parti.spark.member.columns import GroupRange
from parti.spark.member.lookup import FoundGroup, read_filters
from parti.spark.member.offsets import GroupOffset, write_partitions
from parti.spark.member.pin_holder import MemberThread, PinStatus
from parti.spark.source.admission import Admission
from parti.spark.source.options import GroupSetting, SourceOptions
from parti.spark.source.outage import DriverLink
from parti.wire.errors import ConsumerNotFound, StreamNotFound
from parti.wire.ranges import RangeReader, StreamState

_LOOK_AGAIN = 0.1  # seconds between two checks of what another member has to finish


class PartitionsElsewhere(FatalError):
    """A batch cannot be replayed: other members own its partitions and do not finish them. See who owns them."""


class GroupProgress:
    """The driver's side of the membership; exists while the query runs."""

    def __init__(self, options: SourceOptions, setting: GroupSetting, link: DriverLink, clock: Clock) -> None:
        self._options = options
        self._setting = setting
        self._link = link
        self._clock = clock
        self._admission = Admission.of(options)
        self._member = MemberThread(options.connect, options.stream, setting)
        self._found: FoundGroup = self._member.start()
        if self._elastic and options.starting.at != "earliest":
            self._member.close()
            raise ConfigError("a member of an elastic group begins where its queue does: leave out startingOffsets")
        self._target: int | None = None
        self._committed: GroupOffset | None = None

    def __repr__(self) -> str:
        return f"<GroupProgress {self._member!r}>"

    @property
    def _stream(self) -> str:
        return self._found.stream

    @property
    def _elastic(self) -> bool:
        return self._found.kind is not GroupKind.STATIC

    # -- what Spark asks -------------------------------------------------------------------------------------------

    def initial(self) -> GroupOffset:
        """A position before everything; the first lease decides where to start."""
        state = self._link.ask(self._state)
        first = 1 if self._elastic else self._link.ask(lambda reader: self._first(reader, state))
        return GroupOffset(state.name, state.created, first - 1, first - 1, 0, "")

    def latest(self, start: dict[str, Any], *, finite: bool) -> GroupOffset:
        """The end of the next batch, or `start` while there is none or another instance has the pin."""
        begin = GroupOffset.from_json(start, stream=self._stream)
        ask = self._link.ask if finite else self._link.ask_briefly
        if ask(lambda reader: self._commit(reader, begin)) is None:
            return begin
        self._member.take_back(begin.lease, begin.sequence)
        while True:
            found = ask(lambda reader: self._next(reader, begin))
            if found is not None and found != begin:
                return found
            if not finite or found is None or not self._link.ask(self._something_left):
                return begin
            self._pause()

    def report(self) -> GroupOffset | None:
        """The end of the stream, for Spark's progress."""
        state = self._link.ask_briefly(self._state)
        return None if state is None else GroupOffset(state.name, state.created, state.last_seq, 0, 0, "")

    def prepare_available_now(self) -> None:
        self._target = self._link.ask(self._state).last_seq

    def ranges(self, start: dict[str, Any], end: dict[str, Any]) -> GroupRange | None:
        """What the batch reads; None for nothing. After this the partitions stay until the batch has ended."""
        begin, finish = (GroupOffset.from_json(each, stream=self._stream) for each in (start, end))
        after = begin.begin_of(finish)
        if finish.sequence <= after:
            return None
        partitions, after, goes_on = self._right_to(finish, after)
        if not partitions or finish.sequence <= after:
            return None
        floors: dict[int, int] = {}
        if self._elastic and not (goes_on and begin.lease == finish.lease):
            # A lagging replica may still hold messages that were done under another lease.
            floors = dict.fromkeys(partitions, finish.sequence)
            floors |= self._link.ask(lambda reader: self._floors(reader, partitions))
        subjects = read_filters(self._member.record, self._setting.member, partitions)
        return GroupRange(
            self._stream, finish.created, after, finish.sequence, subjects, self._found.depth, self._elastic, floors
        )

    def commit(self, end: dict[str, Any]) -> None:
        offset = GroupOffset.from_json(end, stream=self._stream)
        self._link.ask_briefly(lambda reader: self._commit(reader, offset))

    def close(self) -> None:
        self._member.close()

    # -- planning --------------------------------------------------------------------------------------------------

    def _next(self, reader: RangeReader, begin: GroupOffset) -> GroupOffset:
        standing = self._member.lend()
        if standing is None:
            return begin
        found = begin
        try:
            found = self._end(reader, begin, standing)
        finally:
            if found == begin:
                self._member.take_back(standing.lease, 0)
        return found

    def _end(self, reader: RangeReader, begin: GroupOffset, standing: PinStatus) -> GroupOffset:
        state = self._state(reader)
        if not self._elastic and state.created != begin.created:
            raise ConfigError(
                f"stream {state.name!r} was deleted and recreated at {state.created}; the query was at sequence "
                f"{begin.sequence} of the one made at {begin.created}: start with a new checkpoint"
            )
        if not self._pending(reader):
            return begin
        started, sequence = begin.started, begin.sequence
        if begin.lease != standing.lease:
            started = sequence = self._position(reader, begin, state, standing)
        target = state.last_seq if self._target is None else min(state.last_seq, self._target)
        end = self._admission.end(state, sequence, target) if target > sequence else sequence
        if end <= sequence:
            return begin
        partitions = write_partitions(standing.partitions)
        return GroupOffset(state.name, state.created, end, started, standing.lease, partitions)

    def _position(self, reader: RangeReader, begin: GroupOffset, state: StreamState, standing: PinStatus) -> int:
        """Where a new lease starts: after everything that is done."""
        if not self._elastic:
            return max(begin.sequence, self._durable_floor(reader))
        floors = self._floors(reader, standing.partitions)
        return min(floors.values(), default=state.last_seq)

    def _right_to(self, finish: GroupOffset, after: int) -> tuple[tuple[int, ...], int, bool]:
        """Which partitions of a planned batch to read, after which sequence, and whether its own lease still holds.

        When a batch is replayed, partitions may have moved: then their owner finishes them, and the batch waits. Until
        then nothing of them is skipped, because the commit of the batch covers all of them.
        """
        deadline = self._clock.now() + self._options.retry_budget
        while True:
            standing = self._member.lend(finish.lease)
            if standing is not None and standing.lease == finish.lease:
                return finish.owned, after, True
            left = self._link.ask(lambda reader: self._left(reader, finish))
            if not left:
                if standing is not None:
                    self._member.take_back(standing.lease, 0)
                return (), after, False
            if standing is not None and set(left) <= set(standing.partitions):
                floor = 0 if self._elastic else self._link.ask(self._durable_floor)
                return left, max(after, floor), False
            if standing is not None:
                self._member.take_back(standing.lease, 0)
            if self._clock.now() > deadline:
                raise PartitionsElsewhere(
                    f"the batch up to {finish.sequence} has messages of partitions {write_partitions(left)} of group "
                    f"{self._setting.group!r}, which other instances have and have not finished: see `parti group info`"
                )
            self._pause()

    def _left(self, reader: RangeReader, finish: GroupOffset) -> tuple[int, ...]:
        """The partitions of the batch that are not completely done."""
        if not self._elastic:
            return finish.owned if self._durable_floor(reader) < finish.sequence else ()
        floors = self._floors(reader, finish.owned)
        return tuple(partition for partition, floor in floors.items() if floor < finish.sequence)

    # -- what the server knows -------------------------------------------------------------------------------------

    def _state(self, reader: RangeReader) -> StreamState:
        try:
            return reader.state(self._stream)
        except StreamNotFound as error:
            self._member.check()
            what = f"the stream {self._stream!r} of group {self._setting.group!r} was deleted while it was read"
            raise WorkQueueMissing(what) from error

    def _first(self, reader: RangeReader, state: StreamState) -> int:
        return max(self._options.starting.first_sequence(reader, state), self._durable_floor(reader) + 1)

    def _consumer(self, reader: RangeReader) -> dict[str, Any] | None:
        name = self._setting.member
        if not self._elastic:
            name = static_consumer(self._setting.group, name)
        try:
            return reader.connection.api(f"CONSUMER.INFO.{self._stream}.{name}")
        except ConsumerNotFound:
            return None

    def _pending(self, reader: RangeReader) -> bool:
        """Whether the member has messages that are not done: batches of other members' messages would be empty."""
        info = self._consumer(reader)
        return info is not None and int(info["num_pending"]) + int(info["num_ack_pending"]) > 0

    def _something_left(self, reader: RangeReader) -> bool:
        """Whether a query that ends when all is done must wait for its pin."""
        self._member.check()
        target = self._target if self._target is not None else self._state(reader).last_seq
        info = self._consumer(reader)
        if info is None or not int(info["num_pending"]) + int(info["num_ack_pending"]):
            return False
        return self._elastic or int(info["ack_floor"]["stream_seq"]) < target

    def _durable_floor(self, reader: RangeReader) -> int:
        info = self._consumer(reader)
        return 0 if info is None else int(info["ack_floor"]["stream_seq"])

    def _floors(self, reader: RangeReader, partitions: tuple[int, ...]) -> dict[int, int]:
        """For each partition with messages: the sequence before the first of them, as the leader knows it."""
        record, floors = self._member.record, {}
        for partition in partitions:
            (subject,) = read_filters(record, self._setting.member, (partition,))
            first = reader.next_sequence(self._stream, 1, subject)
            if first is not None:
                floors[partition] = first - 1
        return floors

    def _commit(self, reader: RangeReader, offset: GroupOffset) -> bool:
        """After this the group knows that the batch is done; repeating it changes nothing. True: it was answered."""
        if not offset.lease or offset == self._committed or self._state(reader).created != offset.created:
            return True
        if self._elastic:
            record, done = self._member.record, {"seq": offset.sequence + 1}
            everything = len(offset.owned) == record.max_members
            for subject in read_filters(record, self._setting.member, (0,) if everything else offset.owned):
                body = done if everything else done | {"filter": subject}
                reader.connection.api(f"STREAM.PURGE.{self._stream}", body)
            self._committed = offset
        elif self._durable_floor(reader) >= offset.sequence:
            self._committed = offset
        elif self._member.pinned():  # another instance may be ahead by now: only the pinned one moves the durable
            name = static_consumer(self._setting.group, self._setting.member)
            reader.connection.api(f"CONSUMER.RESET.{self._stream}.{name}", {"seq": offset.sequence + 1})
        return True

    def _pause(self) -> None:
        self._member.check()
        threading.Event().wait(_LOOK_AGAIN)
