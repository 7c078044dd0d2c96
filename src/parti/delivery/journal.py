"""The journal of one partition: what is done above a task that is still open, and how often open ones were tried.

Where a partition reads the task stream itself, the server restarts after a crash behind the lowest open task, and
redelivers everything above it. So each turn of the event loop writes what is done together with the acknowledgements:
a crash repeats what was in flight, and nothing that was done before. (In the work queue of several partitions an
acknowledged task is removed, and needs no journal entry.) The attempts of a task, and the time of the next one, are
written as soon as it has failed: neither a stop nor a crash gives it an extra attempt, or an early one.
A checkpoint once per second replaces the entries that it covers, and those are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from parti.delivery.names import DeliveryNames
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound


class Try(msgspec.Struct, frozen=True, array_like=True):
    """How often a task was tried; it waits in memory until `due` (Unix seconds)."""

    sequence: int
    attempts: int
    due: float


class JournalEntry(msgspec.Struct, frozen=True, array_like=True):
    """Messages that are done, and those that were tried; valid only for this incarnation of the stream and consumer."""

    created: str
    sequences: tuple[int, ...]
    tries: tuple[Try, ...] = ()


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(JournalEntry)


def merged(high: int, owed: Set[int], said: Set[int], floor: int) -> tuple[int, set[int]]:
    """What is done, from all sources: everything up to the new `high`, except the new `owed`.

    The sources are a checkpoint in the same form (0 and empty without one), what the journal `said`, and the
    server's ack floor.
    """
    before = max(high, floor)
    top = max([before, *said])
    still = (owed | set(range(before + 1, top + 1))) - said
    return top, {sequence for sequence in still if sequence > floor}


class Journal:
    """Contains only true statements, so entries of a replaced owner do no harm."""

    def __init__(self, js: JetStreamApi, names: DeliveryNames, slot: int) -> None:
        self.subject = names.journal(slot)
        self._js = js
        self._stream = names.park

    def __repr__(self) -> str:
        return f"<Journal {self.subject}>"

    def entry(self, created: str, sequences: Sequence[int], tries: Sequence[Try] = ()) -> bytes:
        """The message to publish on `subject`."""
        return _ENCODER.encode(JournalEntry(created, tuple(sequences), tuple(tries)))

    async def done(self, created: str) -> set[int]:
        """The messages that are done according to the journal."""
        return (await self.read(created))[0]

    async def read(self, created: str) -> tuple[set[int], dict[int, Try]]:
        """The messages that are done according to the journal, and those that were tried."""
        found: set[int] = set()
        tries: dict[int, Try] = {}
        sequence = 0
        while True:
            try:
                stored = await self._js.msg_get(self._stream, seq=sequence + 1, next_by_subj=self.subject)
            except MessageNotFound:
                return found, tries
            sequence = stored.seq
            try:
                entry = _DECODER.decode(stored.data)
            except msgspec.DecodeError:
                continue  # not an entry of this library: its messages are delivered once more
            if entry.created == created:
                found.update(entry.sequences)
                tries |= {tried.sequence: tried for tried in entry.tries}

    async def end(self) -> int:
        """The sequence of the last entry; 0 when there is none."""
        try:
            return (await self._js.msg_get(self._stream, last_by_subj=self.subject)).seq
        except MessageNotFound:
            return 0

    async def forget(self, through: int) -> None:
        """Delete the entries up to this sequence."""
        await self._js.stream_purge(self._stream, filter=self.subject, seq=through + 1)
