"""One durable consumer: messages in flight, acks, heartbeats, and the position.

The server delivers in stream order from the reset on, and `LivePull` detects every gap, also one before the first
delivery. So everything up to `high` was received: it is in flight or done. By this fact alone, a redelivery differs
from a new message, in this process and, through the checkpoint, in the process that takes over after a crash.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from parti.config.deliver import DeliverSection
from parti.delivery.errors import LeaseLost, NotTaken
from parti.delivery.journal import Journal, Try, merged
from parti.delivery.storage import ensure_consumer
from parti.errors import PartiError
from parti.wire.acks import ACK, NAK, nak_after
from parti.wire.api import JetStreamApi
from parti.wire.columns import Deliveries
from parti.wire.kv import KeyValue
from parti.wire.kv_model import KeyNotFound
from parti.wire.live import LiveConnection
from parti.wire.pull import LivePull, PullOwner, PullSettings
from parti.wire.stored import parse_headers

_BATCH = 256
_BEATS = 2  # thirds of AckWait: a message that is done before this needs no heartbeat
_LONG = 20  # times AckWait that a heartbeat lasts: a message that waits for its turn needs one, not one per AckWait


class Incoming(msgspec.Struct, frozen=True):
    """One message as it came; a struct, because one is created per message, and a dataclass costs five times more."""

    subject: str
    sequence: int
    time: float
    """Unix seconds when the stream stored it."""
    headers: Mapping[str, str]
    data: bytes
    tried: Try | None = None
    """The attempts that the previous owner recorded."""


class FeedCheckpoint(msgspec.Struct, frozen=True):
    """Up to `high` everything is done except `open`; valid only for this incarnation of the stream and consumer."""

    created: str = ""
    high: int = 0
    open: tuple[int, ...] = ()
    tries: tuple[Try, ...] = ()
    """Of the open messages: those that were tried, and wait in memory."""

    @classmethod
    async def load(cls, bucket: KeyValue, slot: int, what: str = "done") -> FeedCheckpoint | None:
        """The checkpoint of the partition's last owner; None when there is none, or it cannot be read."""
        try:
            return msgspec.json.decode((await bucket.get(f"{what}.{slot}")).value, type=cls)
        except (KeyNotFound, msgspec.DecodeError):
            return None

    async def save(self, bucket: KeyValue, slot: int, what: str = "done") -> None:
        """`what`: the checkpoint of tasks ("done"), or of wake-ups ("woken")."""
        await bucket.put(f"{what}.{slot}", msgspec.json.encode(self))


def made_at(stream: Mapping[str, Any], consumer: Mapping[str, Any]) -> str:
    """Identifies this incarnation of the stream and consumer, by their infos, against later ones of the same names."""
    return f"{stream['created']} {consumer['created']}"


@dataclass(frozen=True, slots=True)
class FeedSource:
    """The durable consumer that a feed reads."""

    stream: str
    durable: str
    filters: list[str]
    limit: int
    """The most messages that may be in flight."""
    keeps: bool = False
    """The stream keeps acknowledged messages."""


@dataclass(frozen=True, slots=True)
class FeedOwner:
    """The calls that a feed makes to its owner."""

    take: Callable[[Incoming], None]
    on_trouble: Callable[[PartiError], None]
    on_duplicate: Callable[[str], None]
    has_room: Callable[[], bool] = lambda: True
    """Whether memory may hold more, by bytes."""


class Feed:
    """One durable consumer of one partition. Never holds more than the source's `limit` of messages."""

    def __init__(
        self,
        js: JetStreamApi,
        config: DeliverSection,
        source: FeedSource,
        owner: FeedOwner,
        journal: Journal | None = None,
    ) -> None:
        self.source = source
        self.high = 0
        self.horizon = 0
        """The highest sequence that the previous owner may have received."""
        self._journal = journal
        self._tries: dict[int, Try] = {}  # of the messages in flight, or owed
        self._new_tries: list[int] = []  # since the journal was last written
        self._beat = 0
        self._due_beat: dict[int, int] = {}  # of the messages in flight: the heartbeat at which each is due
        self._unsaid: list[int] = []  # done and acknowledged since the journal was last written
        self._untold: list[int] = []  # done while the server could not be reached
        self._uncovered: list[int] = []  # done since the last checkpoint that was saved
        self._js = js
        self._config = config
        self._owner = owner
        self._replies: dict[int, bytes] = {}  # in flight; an empty reply: not redelivered since the last attach
        self._at_server = 0  # of those, how many the server counts as pending for this consumer
        self._owed: set[int] = set()  # at or below `high`, and not done by the previous owner
        self._connection: LiveConnection | None = None
        self._pull: LivePull | None = None
        self._created = ""
        self._kick_due = False
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Feed {self.source.durable} in_hand={len(self._replies)} high={self.high}>"

    def __len__(self) -> int:
        return len(self._replies)

    @property
    def is_crowded(self) -> bool:
        """Whether at least half of the limit is in flight."""
        return len(self._replies) * 2 >= self.source.limit

    def _capacity(self) -> int:
        return self.source.limit - self._at_server if self._owner.has_room() else 0

    async def attach(self, connection: LiveConnection, checkpoint: FeedCheckpoint | None = None) -> None:
        """Pull over this connection, from the first message that is not done, in order."""
        self.detach()
        start = min([*self._replies, *self._owed], default=self.high + 1)
        await ensure_consumer(
            self._js, self.source.stream, self.source.durable, self.source.filters, self._config, start
        )
        info = await self._js.consumer_info(self.source.stream, self.source.durable)
        stream = await self._js.stream_info(self.source.stream)
        created = made_at(stream, info)
        if self._created and stream["created"] != self._created.split(" ")[0]:
            # Messages in flight would be mistaken for messages of the new stream with the same sequences.
            raise LeaseLost(f"the stream {self.source.stream} was recreated: start over with it")
        if checkpoint is not None and checkpoint.created == created:
            self.high, self._owed = checkpoint.high, set(checkpoint.open)
            self._tries |= {tried.sequence: tried for tried in checkpoint.tries}
        if not self._created:
            self.horizon = int(info["delivered"]["stream_seq"])
        if not self._created and self._journal is not None:
            said, tries = await self._journal.read(created)
            self._tries |= tries
            if self.source.keeps:
                self.high, self._owed = merged(self.high, self._owed, said, int(info["ack_floor"]["stream_seq"]))
        # Messages pending at the previous owner (or here, before the failure) would come back after AckWait, behind
        # newer ones of the same document. After a reset they come at once, in order (docs/evidence/jetstream.md#j10).
        await self._js.consumer_reset(self.source.stream, self.source.durable)
        self._created = created  # not before: an attach that failed must read it again
        for sequence in self._replies:  # the current set: a finished message must not be in flight again forever
            self._replies[sequence] = b""
        self._at_server = 0
        self._connection = connection
        # a frozen owner's pull must not outlive its lease (docs/evidence/cluster.md#c13)
        expires = min(5.0, self._config.lease / 2)
        self._pull = LivePull(
            connection,
            self.source.stream,
            self.source.durable,
            PullOwner(self._on_batch, self._owner.on_trouble, self._capacity),
            PullSettings(
                batch=min(_BATCH, self.source.limit),
                prefetch=self.source.limit,
                expires=expires,
                heartbeat=min(1.0, expires / 2),
                # Several pulls are outstanding at once; together they must not bring much more than there is room for.
                max_bytes=max(1 << 18, self._config.max_bytes // 16 // min(self._config.partitions, 8)),
            ),
            # After a reset the server counts from 1. Another number means that a pull of the previous owner, frozen and
            # not expired yet, was served first: its messages would come back below `high`, and be mistaken for done.
            next_sequence=1,
        )
        self._pull.start()
        # What was written to a broken connection may be lost. Send all of it again at once: the next owner must not
        # read that a task is done while an older task, which it replaced, is not.
        self._untold, self._unsaid, self._new_tries = [*self._uncovered], [], [*self._tries]
        self._say()

    def detach(self) -> None:
        """Nothing more comes after this; messages in flight stay in flight."""
        if self._pull is not None:
            self._pull.stop()
            self._pull = None
        self._connection = None

    async def withdraw(self) -> None:
        """Stop pulling; messages that the server has already sent are still accepted."""
        if self._pull is not None:
            await self._pull.withdraw()

    def _on_batch(self, deliveries: Deliveries) -> None:
        frames = deliveries.frames
        first = int(frames.subject_start[0])
        raw = frames.data[first : int(frames.payload_end[-1])].tobytes()
        spans = (frames.positions - first).tolist()
        subject_at, subject_end, _, reply_at, reply_end, head_at, data_at, data_end = spans
        _, sequences, _, stamps, _ = deliveries.numbers.tolist()
        for i, sequence in enumerate(sequences):
            reply = raw[reply_at[i] : reply_end[i]]
            known = self._replies.get(sequence)
            if known is not None:
                self._at_server += not known
                self._replies[sequence] = reply
                self._due_beat[sequence] = self._beat + _BEATS  # the heartbeat of the last delivery no longer counts
                continue
            if sequence <= self.high and sequence not in self._owed:
                self._owner.on_duplicate(f"{self.source.durable}:{sequence}")
                self._write(reply, ACK)
                continue
            head = raw[head_at[i] : data_at[i]]
            headers = parse_headers(head) if head else {}
            subject = raw[subject_at[i] : subject_end[i]].decode(errors="replace")
            data, tried = raw[data_at[i] : data_end[i]], self._tries.get(sequence)
            try:
                self._owner.take(Incoming(subject, sequence, stamps[i] / 1e9, headers, data, tried))
            except Exception as error:
                # No lane took the message, so it is not in flight: it is redelivered in order, with all behind it.
                self.detach()
                self._owner.on_trouble(NotTaken(f"{self.source.durable}: message {sequence} was not taken: {error!r}"))
                return
            if sequence <= self.high:
                self._owed.discard(sequence)
            else:
                self.high = sequence
                self._owed.clear()  # they would have come before: their previous owner acknowledged them
            self._replies[sequence] = reply
            self._due_beat[sequence] = self._beat + _BEATS
            self._at_server += 1

    def done(self, sequence: int, verb: bytes = ACK) -> None:
        """Release the message. Without a connection, or before its redelivery, the acknowledgement is sent later."""
        self._kick_soon()
        self._tries.pop(sequence, None)
        self._due_beat.pop(sequence, None)
        reply = self._replies.pop(sequence, None)
        if reply:
            self._at_server -= 1
            self._write(reply, verb)
        if self.source.keeps:
            (self._unsaid if reply and self._connection is not None else self._untold).append(sequence)
            self._uncovered.append(sequence)

    def tried(self, sequence: int, attempts: int, due: float) -> None:
        """The task has failed and waits in memory until `due`: the next owner will know."""
        self.remember(sequence, attempts, due)
        self._new_tries.append(sequence)
        self._kick_soon()

    def remember(self, sequence: int, attempts: int, due: float) -> None:
        """As `tried`, for a task that is about to be parked: if a stop hands it back before, its attempts are kept."""
        self._tries[sequence] = Try(sequence, attempts, math.ceil(due * 1000) / 1000)

    def kick(self) -> None:
        """Pull more, if there is room."""
        if self._pull is not None:
            self._pull.kick()

    def heartbeat(self) -> None:
        """Every third of AckWait: send heartbeats for long-held messages. AckWait is for dead owners, not slow tasks.

        "In progress" lasts for one AckWait only. A negative acknowledgement with a delay does the same for any time:
        the message stays pending here until then, and can still be acknowledged. Nobody waits for the delay to end:
        the next heartbeat is sent before, and a new owner resets the consumer.
        """
        self._beat += 1
        if self._connection is None:
            return
        due = [sequence for sequence, beat in self._due_beat.items() if beat <= self._beat]
        self._due_beat |= dict.fromkeys(due, self._beat + 3 * (_LONG - 2))
        replies = [self._replies.get(sequence) for sequence in due]
        verb = nak_after(_LONG * self._config.ack_wait)
        if frames := [b"PUB %s %d\r\n%s\r\n" % (reply, len(verb), verb) for reply in replies if reply]:
            self._connection.write(b"".join(frames))

    def hand_back(self) -> int:
        """Hand back everything in flight, without spending an attempt. Returns the number of messages."""
        count = len(self._replies)
        for sequence in sorted(self._replies):
            if reply := self._replies[sequence]:
                self._write(reply, NAK)
        self._owed.update(self._replies)  # the checkpoint must not count them as done
        self._replies.clear()
        self._due_beat.clear()
        self._at_server = 0
        return count

    def checkpoint(self) -> FeedCheckpoint:
        """What is done, for a next owner that knows nothing more."""
        still = sorted([*self._replies, *self._owed])
        tries = tuple(self._tries[sequence] for sequence in still if sequence in self._tries)
        return FeedCheckpoint(self._created, self.high, tuple(still), tries)

    @property
    def uncovered(self) -> int:
        """How many messages are done and not covered by a saved checkpoint."""
        return len(self._uncovered)

    def covered(self, count: int) -> None:
        """A saved checkpoint covers the first `count` of them."""
        del self._uncovered[:count]

    def _write(self, reply: bytes, verb: bytes) -> None:
        if self._connection is not None:
            self._connection.write(b"PUB %s %d\r\n%s\r\n" % (reply, len(verb), verb))

    def _kick_soon(self) -> None:
        if not self._kick_due and self._pull is not None:
            self._kick_due = True
            self._loop.call_soon(self._kick)  # before the first write of this loop turn, so that one write takes all

    def _kick(self) -> None:
        self._kick_due = False
        self._say()
        if self._pull is not None:
            self._pull.kick()

    def _say(self) -> None:
        """Write what is done to the journal, unless the acknowledgements already show it."""
        if self._journal is None or self._connection is None:
            return
        # Messages in flight are in stream order: the server knows from the acks what is below the first of them.
        lowest = 0 if self._owed else next(iter(self._replies), self.high + 1)
        said = self._untold + [sequence for sequence in self._unsaid if sequence > lowest]
        tries = [self._tries[sequence] for sequence in self._new_tries if sequence in self._tries]
        self._untold, self._unsaid, self._new_tries = [], [], []
        if said or tries:
            self._connection.publish(self._journal.subject, self._journal.entry(self._created, said, tries))
