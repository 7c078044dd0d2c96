"""The park: where a document waits on the server for longer than memory should hold it, with its order kept.

A parked document is a queue of its tasks (one subject) and one schedule that will wake it. Nothing of it occupies the
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
    """What a wake-up says: which task is the head, how often it was tried, and when it may be tried again."""

    head: str = ""
    attempts: int = 0
    due: float = 0.0
    """Unix seconds."""


_MOST_ATTEMPTS = 1_000_000
_CLOCK_AHEAD = 1.0  # seconds that the server's clock may be ahead of ours; more is no reason to wait
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGE, _LARGE_AT_ONCE = 32 << 10, 4  # bytes of a task, and how many such are stored at once
_AHEAD, _AHEAD_BYTES = 64, 1 << 18  # tasks and bytes that are read with the head of a document
_GLANCE, _GLANCE_BYTES = 256, 1 << 20  # messages and bytes in one answer
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(WakeUp)


def decode_wake(data: bytes) -> WakeUp:
    """What a wake-up says; a damaged one says nothing about the head, which is then tried from its own count."""
    try:
        said = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return WakeUp()
    return said if 0 <= said.attempts <= _MOST_ATTEMPTS else WakeUp(said.head)


def came_due(due: float, clock: Clock) -> float:
    """Until when to wait, by the clock, with what the server says has come due: its clock may be ahead of ours."""
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
        """`keep`: so many bytes of what we park may stay in memory as well."""
        self._js = js
        self._names = names
        self._slot = slot
        self._clock = clock
        self._fence: dict[str, str] = {}
        self._kept = Kept(keep)
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    def begin(self, key: str, count: int = 0) -> None:
        """The document has so many tasks here, as far as its owner knows, who alone writes to it."""
        self._kept.begin(key, count)

    def end(self, key: str) -> None:
        """The document goes on elsewhere."""
        self._kept.forget(key)

    async def claim(self, epoch: int) -> None:
        """After this returns, nothing that an owner before us still has on its way reaches the park.

        A process that froze between its last look at the lease and the write would put a task behind newer ones, and
        the document would pass for parked up to there: what is in the new owner's hands would pass for done.
        """
        subject = self._names.marker(self._slot)
        self._fence = (await put_marker(self._js, subject, epoch)).expected
        await self._js.stream_purge(self._names.park, filter=subject, keep=1)

    async def keys(self) -> dict[str, int]:
        """The documents that are parked now, and how many tasks of each."""
        found: dict[str, int] = {}
        async for page in self._js.stream_subjects(self._names.park, self._names.parked(self._slot, "*")):
            found |= {subject.rpartition(".")[2]: count for subject, count in page.items()}
        return found

    async def scheduled(self) -> set[str]:
        """The documents that have a wake-up coming: scheduled, or waiting to be taken."""
        found: set[str] = set()
        for pattern in (self._names.wake_schedule(self._slot, "*"), self._names.wake(self._slot, "*")):
            async for page in self._js.stream_subjects(self._names.park, pattern):
                found.update(subject.rpartition(".")[2] for subject in page)
        return found

    async def noted(self) -> set[str]:
        """The documents that there is a note about."""
        found: set[str] = set()
        async for page in self._js.stream_subjects(self._names.park, self._names.note(self._slot, "*")):
            found.update(subject.rpartition(".")[2] for subject in page)
        return found

    async def append(self, held: Pending, key: str = "") -> None:
        """When this returns, the task stands at the end of its document's queue; a second time changes nothing.

        The id names the message in hand: a task that was parked, drained, scheduled alone and came back is another
        one. Under the id of the first time the server would drop it and say that it is stored.
        """
        carried, key = held.carried(), key or held.key
        headers = carried | {n.MSG_ID: f"q:{held.source}:{held.first_seen:.3f}:{held.sequence}"}
        subject = self._names.parked(self._slot, key)
        stored = await self._store(subject, held.data, headers)
        if stored.duplicate:
            self._kept.forget(key)  # whether it was counted, nobody knows
        elif key in self._kept:
            time = int(self._clock.wall() * 1e9)
            self._kept.append(key, StoredMessage(subject, stored.seq, time, held.data, carried))

    async def wake_after(self, key: str, wait: float, head: str, attempts: int) -> None:
        """When this returns, the document will be woken after `wait` seconds, by whoever owns it then."""
        headers = self._schedule(wait, self._names.wake(self._slot, key))
        subject = self._names.wake_schedule(self._slot, key)
        await self._store(subject, _ENCODER.encode(WakeUp(head, attempts, self._clock.wall() + wait)), headers)

    async def note(self, key: str, head: str, attempts: int) -> None:
        """When this returns, the next owner will know how often the head was tried, although no wake-up says it."""
        subject = self._names.note(self._slot, key)
        await self._store(subject, _ENCODER.encode(WakeUp(head, attempts)), {})

    async def forget_note(self, key: str) -> None:
        await self._js.stream_purge(self._names.park, filter=self._names.note(self._slot, key))

    async def said(self, key: str, *, noted: bool) -> WakeUp | None:
        """What the owner before has left about the head: in a wake-up that is still to come, or in a note."""
        subjects = [self._names.wake_schedule(self._slot, key)] + [self._names.note(self._slot, key)] * noted
        for subject in subjects:
            try:
                return decode_wake((await self._js.msg_get(self._names.park, last_by_subj=subject)).data)
            except MessageNotFound:
                continue
        return None

    async def alone(self, held: Pending, wait: float) -> None:
        """When this returns, the task alone will come back after `wait` seconds."""
        headers = held.carried() | self._schedule(wait, self._names.alone(self._slot, held.key))
        headers[n.DUE] = f"{self._clock.wall() + wait:.3f}"
        # Two tasks must not share a schedule: the later replaces the earlier.
        subject = self._names.alone_schedule(self._slot, held.key, alone_token(held))
        await self._store(subject, held.data, headers)

    async def has_alone(self, held: Pending) -> bool:
        """Whether the task waits here by itself as well: scheduled, put aside, or come due and not taken yet.

        An owner that died between that and its acknowledgement leaves both, and both would be sent.
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
        """Everything in the queues of all documents, in few answers, from any replica: good for a guess, not for more.

        Asking for one head after the other costs a message each: ten thousand documents kept a start busy for long.
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
        """The head of a document's queue: as it is kept, or from the stream's leader."""
        kept = self._kept
        if key in kept and (kept.first(key) is not None or not kept.left(key)):
            return kept.first(key)
        head = await self._next(key, 0)
        if key in kept:
            if head is None:
                kept.begin(key)  # somebody has emptied it
            else:
                kept.took(key, [head])
                await self._read_ahead(key)
        return head

    async def _read_ahead(self, key: str) -> None:
        """Keep what stands behind the head: many in one answer, where each would be asked for by itself.

        Any replica answers. One that lags lacks the end, which is asked for later; it may have more than there is only
        where tasks were taken out of the middle (`order=latest`), and is not believed then.
        """
        kept = self._kept
        if not (head := kept.first(key)) or not (left := kept.left(key)) or kept.room < _AHEAD_BYTES:
            return
        with contextlib.suppress(PartiError):  # then one by one
            batch = await self._js.direct_get_batch(
                self._names.park,
                batch=min(left + 1, _AHEAD),
                seq=head.seq + 1,
                next_by_subj=self._names.parked(self._slot, key),
                max_bytes=_AHEAD_BYTES,
            )
            if kept.first(key) is not head or kept.left(key) != left:
                return  # it has moved on meanwhile
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
        """The next of the document's queue behind a place."""
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
        """When this returns, that task is no longer parked; also when an earlier try, whose answer got lost, did it."""
        try:
            await self._js.msg_delete(self._names.park, sequence)
        except ApiError:
            # The server has no code for this: file storage says 10057 and memory 10043, and both mean trouble as well.
            if await self._holds(sequence):
                raise
        self._kept.removed(key, sequence)

    async def remove_before(self, key: str, sequence: int) -> int:
        """Forget the tasks of the document that stand before `sequence`; returns how many there were."""
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
        async with self._large:  # each is copied on its way out: all of a host that hangs at once would fill the memory
            return await self._publish(subject, data, headers)

    async def _publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        try:
            return await self._js.publish(subject, data, headers={**headers, **self._fence})
        except WrongLastSequence:
            raise LeaseLost(f"the park of partition {self._slot} has been claimed by another owner") from None

    def _schedule(self, wait: float, target: str) -> dict[str, str]:
        # Rounded up: what comes due early would be tried early.
        at = _EPOCH + timedelta(milliseconds=math.ceil((self._clock.wall() + max(wait, 0.0)) * 1000))
        return {
            "Nats-Schedule": f"@at {at.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}",
            "Nats-Schedule-Target": target,
        }
