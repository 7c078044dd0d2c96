"""Working with dead letters: list them, look at one, send them back, throw them away."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from parti.errors import UsageError
from parti.subjects import matches
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.stored import AnsweredElsewhere, StoredMessage
from parti.worker.dead_letters import DeadLetter, dead_letter_stream, original_headers

_PAGE = 256
_PAGE_BYTES = 8 << 20


class DeadLetterReader:
    """The dead letters of one stream."""

    def __init__(self, js: JetStreamApi, stream: str) -> None:
        self.js = js
        self.stream = stream
        self.name = dead_letter_stream(stream)

    async def count(self) -> int:
        """How many there are; 0 when none was ever written."""
        try:
            return int((await self.js.stream_info(self.name))["state"]["messages"])
        except StreamNotFound:
            return 0

    async def walk(self, *, subject: str = ">", start: int = 1) -> AsyncIterator[DeadLetter]:
        """The letters of messages whose subject matches, oldest first; one page is held at a time."""
        try:
            info = await self.js.stream_info(self.name)
        except StreamNotFound:
            return
        first, last = int(info["state"]["first_seq"]), int(info["state"]["last_seq"])
        position = max(start, first)
        while position <= last:
            page = await self._page(position)
            if not page:
                return
            for stored in page:
                letter = DeadLetter.from_stored(stored)
                position = letter.sequence + 1
                # What names no stream is no letter: a pipeline with a standby keeps its epoch marker here.
                if letter.stream and letter.sequence <= last and matches(subject, letter.subject):
                    yield letter

    async def _page(self, position: int) -> tuple[StoredMessage, ...]:
        """Some letters from `position` on; none only when the stream's leader has none.

        Direct Get is answered by replicas that lag, and by mirrors of the stream: what it lacks, the leader is asked.
        """
        with contextlib.suppress(AnsweredElsewhere):
            page = await self.js.direct_get_batch(self.name, batch=_PAGE, seq=position, max_bytes=_PAGE_BYTES)
            if page.messages:
                return page.messages
        try:
            return (await self.js.msg_get(self.name, seq=position, next_by_subj=">"),)
        except MessageNotFound:
            return ()

    async def get(self, sequence: int) -> DeadLetter:
        """One letter by its sequence in the dead-letter stream."""
        return DeadLetter.from_stored(await self.stored(sequence))

    async def stored(self, sequence: int) -> StoredMessage:
        """The same as it is stored."""
        try:
            return await self.js.msg_get(self.name, seq=sequence)
        except (MessageNotFound, StreamNotFound):
            raise UsageError(f"{self.name} has no letter {sequence}: see `parti dlq ls {self.stream}`") from None

    async def replay(self, letter: DeadLetter) -> int:
        """Publish the message again where it came from, then remove the letter; returns its new stream sequence.

        Safe to repeat: the stream takes a letter's message once within its duplicate window.
        """
        # By its time as well: letters of a stream that was made anew have the numbers of others, and one that passes
        # for a repetition would be gone without its message being stored.
        headers = original_headers(letter) | {"Nats-Msg-Id": f"replay:{self.name}:{letter.sequence}:{letter.time:.6f}"}
        ack = await self.js.publish(letter.subject, letter.data, headers=headers)
        await self.js.msg_delete(self.name, letter.sequence)
        return ack.seq

    async def purge(self, *, subject: str | None = None, sequences: Sequence[int] = ()) -> int:
        """Remove letters: those named, those whose message's subject matches, or all; returns how many."""
        if sequences:
            for sequence in sequences:
                letter = await self.get(sequence)
                await self.js.msg_delete(self.name, letter.sequence)
            return len(sequences)
        if subject:  # by the message's own subject: that of a letter of `parti deliver` tells its reason instead
            found = [letter.sequence async for letter in self.walk(subject=subject)]
            for sequence in found:
                await self.js.msg_delete(self.name, sequence)
            return len(found)
        try:
            return await self.js.stream_purge(self.name)
        except StreamNotFound:
            return 0
