"""The park: where a document waits on the server when it should not stay in memory, with its order kept.

A parked document is a queue of its tasks (one subject) and one schedule that will wake it. It does not occupy the
consumer: a delayed Nak would invert the order and fill MaxAckPending (docs/evidence/delivery.md#d1). Only the owner of
a document's partition writes to its queue: each write names the owner's marker, and the server refuses it once there is
a newer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from parti.clock import Clock, by_clock
from parti.delivery import names as n
from parti.delivery.document import alone_key, alone_token
from parti.delivery.errors import LeaseLost
from parti.delivery.kept import Kept
from parti.delivery.pending import Pending, TaskReader
from parti.errors import PartiError
from parti.wire.api import JetStreamApi
from parti.wire.api_publish import PubAck
from parti.wire.epoch_marker import put_marker
from parti.wire.errors import ApiError, MessageNotFound, WrongLastSequence
from parti.wire.stored import StoredMessage


class WakeUp(msgspec.Struct, frozen=True):
    """The content of a wake-up: which task is the head, how often it was tried, and when it may be tried again."""

    head: str = ""
    attempts: int = 0
    due: float = 0.0
    """Unix seconds."""


_MOST_ATTEMPTS = 1_000_000
_CLOCK_AHEAD = 1.0  # seconds that the server's clock may be ahead of ours; a larger difference is not waited for
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGE, _LARGE_AT_ONCE = 32 << 10, 4  # bytes of a large task, and how many such are stored at once
_AHEAD, _AHEAD_BYTES = 64, 1 << 18  # tasks and bytes that are read with the head of a document
_GLANCE, _GLANCE_BYTES = 256, 1 << 20  # messages and bytes in one answer
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(WakeUp)


def decode_wake(data: bytes) -> WakeUp:
    """Decode a wake-up; a damaged one says nothing about the head, which then continues from its own count."""
    try:
        said = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return WakeUp()
    return said if 0 <= said.attempts <= _MOST_ATTEMPTS else WakeUp(said.head)


def came_due(due: float, clock: Clock) -> float:
    """Until when to wait, by our clock, for something due by the server's clock, which may be ahead."""
    return min(by_clock(clock, due), clock.now() + _CLOCK_AHEAD)


def due_of(headers: Mapping[str, str], clock: Clock) -> float:
    """As `came_due`, for a task that was scheduled alone."""
    try:
        return came_due(float(headers.get(n.DUE, "")), clock)
    except (ValueError, OverflowError):
        return 0.0


class Park:
    """The park of one partition."""

    def __init__(self, js: JetStreamApi, names: n.DeliveryNames, slot: int, clock: Clock, keep: int = 0) -> None:
        """`keep`: this many bytes of parked tasks may be cached in memory."""
        self._js = js
        self._names = names
        self._slot = slot
        self._clock = clock
        self._fence: dict[str, str] = {}
        self._kept = Kept(keep)
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    def begin(self, key: str, count: int = 0) -> None:
        """The document has `count` tasks here, as far as its owner knows, the only one to write to it."""
        self._kept.begin(key, count)

    def end(self, key: str) -> None:
        """The document continues outside the park."""
        self._kept.forget(key)

    async def claim(self, epoch: int) -> None:
        """After this returns, no write of a previous owner that is still in flight reaches the park.

        A process that froze between its lease check and the write would put a task behind newer ones. The document
        would then count as parked up to there, and the tasks that the new owner holds in memory would count as done.
        """
        subject = self._names.marker(self._slot)
        self._fence = (await put_marker(self._js, subject, epoch)).expected
        await self._js.stream_purge(self._names.park, filter=subject, keep=1)

    async def keys(self) -> dict[str, int]:
        """The documents that are parked now, and the number of tasks of each."""
        found: dict[str, int] = {}
        async for page in self._js.stream_subjects(self._names.park, self._names.parked(self._slot, "*")):
            found |= {subject.rpartition(".")[2]: count for subject, count in page.items()}
        return found

    async def scheduled(self) -> set[str]:
        """The documents with a wake-up to come: scheduled, or due and not yet consumed."""
        found: set[str] = set()
        for pattern in (self._names.wake_schedule(self._slot, "*"), self._names.wake(self._slot, "*")):
            async for page in self._js.stream_subjects(self._names.park, pattern):
                found.update(subject.rpartition(".")[2] for subject in page)
        return found

    async def noted(self) -> set[str]:
        """The documents that have a note."""
        found: set[str] = set()
        async for page in self._js.stream_subjects(self._names.park, self._names.note(self._slot, "*")):
            found.update(subject.rpartition(".")[2] for subject in page)
        return found

    async def append(self, held: Pending, key: str = "") -> None:
        """When this returns, the task is at the end of its document's queue; a second call changes nothing.

        The message id names the delivery in flight: a task that was parked, drained, scheduled alone and came back has
        a new id. Under the first id the server would drop it as a duplicate and report it as stored.
        """
        carried, key = held.carried(), key or held.key
        headers = carried | {n.MSG_ID: f"q:{held.source}:{held.first_seen:.3f}:{held.sequence}"}
        subject = self._names.parked(self._slot, key)
        stored = await self._store(subject, held.data, headers)
        if stored.duplicate:
            self._kept.forget(key)  # whether the task was counted is not known
        elif key in self._kept:
            time = int(self._clock.wall() * 1e9)
            self._kept.append(key, StoredMessage(subject, stored.seq, time, held.data, carried))

    async def wake_after(self, key: str, wait: float, head: str, attempts: int) -> None:
        """When this returns, the document will be woken after `wait` seconds, at its owner of that time."""
        headers = self._schedule(wait, self._names.wake(self._slot, key))
        subject = self._names.wake_schedule(self._slot, key)
        await self._store(subject, _ENCODER.encode(WakeUp(head, attempts, self._clock.wall() + wait)), headers)

    async def note(self, key: str, head: str, attempts: int) -> None:
        """When this returns, the next owner will know the head's attempts, although no wake-up contains them."""
        subject = self._names.note(self._slot, key)
        await self._store(subject, _ENCODER.encode(WakeUp(head, attempts)), {})

    async def forget_note(self, key: str) -> None:
        await self._js.stream_purge(self._names.park, filter=self._names.note(self._slot, key))

    async def said(self, key: str, *, noted: bool) -> WakeUp | None:
        """What the previous owner recorded about the head: in a wake-up still to come, or in a note."""
        subjects = [self._names.wake_schedule(self._slot, key)] + [self._names.note(self._slot, key)] * noted
        for subject in subjects:
            try:
                return decode_wake((await self._js.msg_get(self._names.park, last_by_subj=subject)).data)
            except MessageNotFound:
                continue
        return None

    async def alone(self, held: Pending, wait: float) -> None:
        """When this returns, this task alone will come back after `wait` seconds."""
        headers = held.carried() | self._schedule(wait, self._names.alone(self._slot, held.key))
        headers[n.DUE] = f"{self._clock.wall() + wait:.3f}"
        # Two tasks must not share a schedule: the later replaces the earlier.
        subject = self._names.alone_schedule(self._slot, held.key, alone_token(held))
        await self._store(subject, held.data, headers)

    async def has_alone(self, held: Pending) -> bool:
        """Whether the task also waits here by itself: scheduled, put aside, or due and not yet consumed.

        An owner that crashed between storing it here and acknowledging it leaves both, and both would be sent.
        """
        scheduled = self._names.alone_schedule(self._slot, held.key, alone_token(held))
        for subject in (scheduled, self._names.parked(self._slot, alone_key(held))):
            if await self._last(subject) is not None:
                return True
        subject, place = self._names.alone(self._slot, held.key), held.sequence if held.ours else 0
        with contextlib.suppress(MessageNotFound):
            while True:
                stored = await self._js.msg_get(self._names.park, seq=place + 1, next_by_subj=subject)
                if stored.headers.get(n.ORIGIN) == held.source:
                    return True
                place = stored.seq
        return False

    async def glance(self) -> AsyncIterator[StoredMessage]:
        """All tasks in the queues of all documents, in few replies, from any replica: only good enough for a guess.

        Reading one head after the other costs a message each: with ten thousand documents a start took long.
        """
        place = 1
        while True:
            batch = await self._js.direct_get_batch(
                self._names.park,
                batch=_GLANCE,
                seq=place,
                next_by_subj=self._names.parked(self._slot, "*"),
                max_bytes=_GLANCE_BYTES,
            )
            for stored in batch.messages:
                yield stored
            if not batch.messages or not batch.pending:
                return
            place = batch.messages[-1].seq + 1

    async def first(self, key: str) -> StoredMessage | None:
        """The head of a document's queue: from the cache, or from the stream's leader."""
        kept = self._kept
        if key in kept and (kept.first(key) is not None or not kept.left(key)):
            return kept.first(key)
        head = await self._next(key, 0)
        if key in kept:
            if head is None:
                kept.begin(key)  # another process has emptied it
            else:
                kept.took(key, [head])
                await self._read_ahead(key)
        return head

    async def _read_ahead(self, key: str) -> None:
        """Cache the tasks behind the head: many in one reply, instead of one request for each.

        Any replica answers. A lagging replica misses the end, which is read later. It can only have too many where
        tasks were removed from the middle (`order=latest`); then its reply is not used.
        """
        kept = self._kept
        if not (head := kept.first(key)) or not (left := kept.left(key)) or kept.room < _AHEAD_BYTES:
            return
        with contextlib.suppress(PartiError):  # then they are read one by one
            batch = await self._js.direct_get_batch(
                self._names.park,
                batch=min(left + 1, _AHEAD),
                seq=head.seq + 1,
                next_by_subj=self._names.parked(self._slot, key),
                max_bytes=_AHEAD_BYTES,
            )
            if kept.first(key) is not head or kept.left(key) != left:
                return  # the queue has changed meanwhile
            if len(batch.messages) > left:
                kept.forget(key)
            else:
                kept.took(key, batch.messages)

    async def last(self, key: str) -> StoredMessage | None:
        """The end of a document's queue."""
        kept = self._kept
        if key in kept and 0 < kept.left(key) < _AHEAD:
            await self.first(key)
        if key in kept and not kept.left(key):
            return kept.last(key)
        return await self._last(self._names.parked(self._slot, key))

    async def after(self, key: str, sequence: int) -> StoredMessage | None:
        """The next task of the document's queue after a sequence."""
        kept = self._kept
        if key in kept and ((found := kept.after(key, sequence)) is not None or not kept.left(key)):
            return found
        return await self._next(key, sequence)

    def read(self, reader: TaskReader, stored: StoredMessage) -> Pending:
        """A parked task, as it was when it came."""
        return reader.read(
            stored.data,
            stored.headers,
            stream=self._names.park,
            subject=stored.subject,
            sequence=0,
            time=stored.time_ns / 1e9,
            ours=True,
        )

    async def remove(self, key: str, sequence: int) -> None:
        """When this returns, that task is no longer parked; also when an earlier try removed it and lost the reply."""
        try:
            await self._js.msg_delete(self._names.park, sequence)
        except ApiError:
            # The server has no code for "not found": file storage says 10057, memory 10043; both also mean failures.
            if await self._holds(sequence):
                raise
        self._kept.removed(key, sequence)

    async def remove_before(self, key: str, sequence: int) -> int:
        """Delete the tasks of the document before `sequence`; returns how many there were."""
        queue = self._names.parked(self._slot, key)
        count = await self._js.stream_purge(self._names.park, filter=queue, seq=sequence)
        self._kept.cut(key, sequence)
        return count

    async def _next(self, key: str, sequence: int) -> StoredMessage | None:
        subject = self._names.parked(self._slot, key)
        try:
            return await self._js.msg_get(self._names.park, seq=sequence + 1, next_by_subj=subject)
        except MessageNotFound:
            return None

    async def _last(self, subject: str) -> StoredMessage | None:
        try:
            return await self._js.msg_get(self._names.park, last_by_subj=subject)
        except MessageNotFound:
            return None

    async def _holds(self, sequence: int) -> bool:
        try:
            await self._js.msg_get(self._names.park, seq=sequence)
        except MessageNotFound:
            return False
        return True

    async def _store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        if len(data) < _LARGE:
            return await self._publish(subject, data, headers)
        async with self._large:  # each is copied when sent: all tasks of a hanging host at once would fill the memory
            return await self._publish(subject, data, headers)

    async def _publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        try:
            return await self._js.publish(subject, data, headers={**headers, **self._fence})
        except WrongLastSequence:
            raise LeaseLost(f"the park of partition {self._slot} has been claimed by another owner") from None

    def _schedule(self, wait: float, target: str) -> dict[str, str]:
        # Rounded up: a task that is due early would be tried early.
        at = _EPOCH + timedelta(milliseconds=math.ceil((self._clock.wall() + max(wait, 0.0)) * 1000))
        return {
            "Nats-Schedule": f"@at {at.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}",
            "Nats-Schedule-Target": target,
        }
