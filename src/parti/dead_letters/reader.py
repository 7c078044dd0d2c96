"""Works with dead letters: list them, read one, publish them again, remove them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from parti.clock import Clock
from parti.dead_letters.format import is_letter, read_letter
from parti.dead_letters.headers import HISTORY, MSG_ID, TASK_ID, steers
from parti.dead_letters.letter import DeadLetter, LetterExtension, LetterKind, dead_letter_stream
from parti.dead_letters.parts import PART_TOKEN, fits, joined, part_subjects
from parti.errors import FatalError, NoResponders, UsageError
from parti.subjects import matches
from parti.wire.api import JetStreamApi
from parti.wire.epoch_marker import MARKER_TOKEN
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.stored import AnsweredElsewhere, StoredMessage

_PAGE = 256
_PAGE_BYTES = 8 << 20
_AT_ONCE = 64  # letters removed concurrently
_MOST_BEFORE = 10  # earlier letters of the same task that the newest one lists


@dataclass(frozen=True, slots=True)
class ChosenLetters:
    """Selects letters: the listed ones, or all that meet every condition."""

    sequences: tuple[int, ...] = ()
    subject: str = ">"
    """Subject of the message; wildcards allowed."""
    place: str = ">"
    """Letter subject without the dead-letter stream's name; for a task `<database>.<collection>.<reason>`."""
    kind: LetterKind | None = None

    @property
    def are_all(self) -> bool:
        return self == ChosenLetters()


class DeadLetterReader:
    """The dead letters of one stream, of every kind and of every version."""

    def __init__(self, js: JetStreamApi, stream: str) -> None:
        self.js = js
        self.stream = stream
        self.name = dead_letter_stream(stream)

    def __repr__(self) -> str:
        return f"<DeadLetterReader {self.name}>"

    async def count(self) -> int:
        """The number of letters; 0 when none was ever written."""
        try:
            stored = int((await self.js.stream_info(self.name))["state"]["messages"])
            return stored - await self._others()
        except StreamNotFound:
            return 0

    async def _others(self) -> int:
        """The number of messages that are no letters: epoch markers, and parts of letters."""
        found = 0
        for token in (MARKER_TOKEN, PART_TOKEN):
            async for page in self.js.stream_subjects(self.name, f"{self.name}.{token}.>"):
                found += sum(page.values())
        return found

    async def walk(self, chosen: ChosenLetters | None = None, *, start: int = 1) -> AsyncIterator[DeadLetter]:
        """Yields the chosen letters, oldest first, with one page in memory. Letters stored meanwhile are left out."""
        async for letter in self._walk(chosen or ChosenLetters(), start):
            yield await self._joined(letter)

    async def _walk(self, chosen: ChosenLetters, start: int = 1) -> AsyncIterator[DeadLetter]:
        """The same, with letters as they are stored: without what their parts hold."""
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
                position = stored.seq + 1
                if stored.seq <= last and is_letter(stored) and self._fits(letter := read_letter(stored), chosen):
                    yield letter

    def _fits(self, letter: DeadLetter, chosen: ChosenLetters) -> bool:
        return (
            (not chosen.sequences or letter.sequence in chosen.sequences)
            and (chosen.kind is None or letter.kind is chosen.kind)
            and matches(chosen.subject, letter.subject)
            and matches(chosen.place, letter.place.removeprefix(f"{self.name}."))
        )

    async def _page(self, position: int) -> tuple[StoredMessage, ...]:
        """Some messages from `position` on; empty only when the stream's leader has none.

        Lagging replicas and mirrors of the stream answer Direct Get too: if it returns nothing, the leader is asked.
        """
        with contextlib.suppress(AnsweredElsewhere, NoResponders):  # the latter where allow_direct is off
            page = await self.js.direct_get_batch(self.name, batch=_PAGE, seq=position, max_bytes=_PAGE_BYTES)
            if page.messages:
                return page.messages
        try:
            return (await self.js.msg_get(self.name, seq=position, next_by_subj=">"),)
        except MessageNotFound:
            return ()

    async def get(self, sequence: int) -> DeadLetter:
        """One letter by its sequence in the dead-letter stream; `UsageError` when there is none."""
        with contextlib.suppress(MessageNotFound, StreamNotFound):
            stored = await self.js.msg_get(self.name, seq=sequence)
            if is_letter(stored):
                return await self._joined(read_letter(stored))
        raise UsageError(f"{self.name} has no letter {sequence}: see `parti dlq ls {self.stream}`")

    async def _joined(self, letter: DeadLetter) -> DeadLetter:
        if not letter.extension.parts:
            return letter
        return joined(letter, [part.data async for part in self._parts(letter.sequence, letter.extension)])

    async def _parts(self, sequence: int, extension: LetterExtension) -> AsyncIterator[StoredMessage]:
        """The parts of a letter that still exist: of each subject the last one in front of it."""
        for subject in part_subjects(self.name, extension):
            if (part := await self._last(subject, sequence)) is not None:
                yield part

    async def _last(self, subject: str, before: int) -> StoredMessage | None:
        """The last message of a subject below the sequence `before`."""
        found, position = None, 1
        with contextlib.suppress(MessageNotFound):
            while (stored := await self.js.msg_get(self.name, seq=position, next_by_subj=subject)).seq < before:
                found, position = stored, stored.seq + 1
        return found

    async def replay_all(
        self,
        chosen: ChosenLetters | None = None,
        *,
        clock: Clock,
        rate: float | None = None,
        failed: Callable[[int, FatalError], None] | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Publish the chosen letters again, oldest first and at most `rate` per second, and remove each that is stored.

        Letters stored meanwhile are skipped, so that a message that fails again is not replayed in a loop. One that
        cannot be replayed stays: `failed` gets the error and the rest continues, or without `failed` it is raised.
        """
        chosen = chosen or ChosenLetters()
        started, done = clock.now(), 0
        async for sequence in self._sequences(chosen):
            if rate is not None:
                await clock.sleep(max(0.0, started + done / rate - clock.now()))
            try:
                letter = await self.get(sequence)  # from the leader: another process may have replayed it meanwhile
                if not self._fits(letter, chosen):
                    raise UsageError(f"letter {sequence} does not match the filter")
                await self.replay(letter)
            except FatalError as error:
                if failed is None:
                    raise
                failed(sequence, error)
                continue
            done += 1
            yield letter

    async def _sequences(self, chosen: ChosenLetters) -> AsyncIterator[int]:
        for sequence in chosen.sequences:
            yield sequence
        if not chosen.sequences:
            async for letter in self._walk(chosen):
                yield letter.sequence

    async def replay(self, letter: DeadLetter) -> int:
        """Publish the message again to its stream, then remove the letter; returns the message's new stream sequence.

        When this returns, the message is stored in its stream again, and the letter is removed. Safe to repeat: the
        stream stores a letter's message once within its duplicate window. The exception is a message so close to the
        server's limit that it has no room for an id: repeated after an error, it may be stored twice.
        """
        data = await self._original(letter) if letter.extension.cut else letter.data
        headers = {name: value for name, value in letter.headers.items() if not steers(name)}
        if letter.kind is LetterKind.DELIVERY:
            if not matches(f"{self.stream}.>", letter.subject):
                raise UsageError(f"letter {letter.sequence} has the subject {letter.subject!r}, not of the task stream")
            headers |= {TASK_ID: letter.extension.id, HISTORY: _history(letter)}
        # The id includes the time: a recreated dead-letter stream reuses sequences, and a letter taken for a duplicate
        # would be removed without its message being stored.
        headers[MSG_ID] = f"replay:{self.name}:{letter.sequence}:{letter.time:.6f}"
        for name in (HISTORY, MSG_ID):  # the message itself comes first
            if not fits(data, headers, self.js.connection.max_payload):
                headers.pop(name, None)
        stored = await self.js.publish(letter.subject, data, headers=headers)
        if letter.kind is LetterKind.DELIVERY and stored.stream != self.stream:
            raise UsageError(f"{letter.subject!r} is taken by the stream {stored.stream}, and not by {self.stream}")
        await self._remove(letter.sequence, letter.extension)
        return stored.seq

    async def _remove(self, sequence: int, extension: LetterExtension) -> None:
        """Remove a letter, and then its parts: no letter is left without them."""
        await self.js.msg_delete(self.name, sequence)
        async for part in self._parts(sequence, extension):
            await self.js.msg_delete(self.name, part.seq)

    async def _original(self, letter: DeadLetter) -> bytes:
        """The original data of a letter that was stored without it: the stream may still hold it."""
        if letter.extension.parts:
            raise UsageError(
                f"letter {letter.sequence} lacks its message: at least one of its parts is gone from {self.name}"
            )
        with contextlib.suppress(MessageNotFound, StreamNotFound, UsageError):
            stored = await self.js.msg_get(letter.stream, seq=letter.original_sequence)
            if abs(stored.time_ns / 1e9 - letter.extension.first_seen) <= 1:
                return stored.data
        raise UsageError(
            f"letter {letter.sequence} holds no data, as the task was too large, and {letter.origin} is gone from "
            "the task stream: publish the task again"
        )

    async def purge(self, chosen: ChosenLetters) -> int:
        """Remove the chosen letters permanently; returns their number. Epoch markers stay."""
        with contextlib.suppress(StreamNotFound):
            last = int((await self.js.stream_info(self.name))["state"]["last_seq"])
            # Only up to `last`: a part stored after the check must stay for its letter, which follows.
            if chosen.are_all and not await self._others():
                return await self.js.stream_purge(self.name, seq=last + 1)
        if chosen.sequences:
            found = [(n, (await self.get(n)).extension) for n in chosen.sequences]
        else:
            found = [(letter.sequence, letter.extension) async for letter in self._walk(chosen)]
        for begin in range(0, len(found), _AT_ONCE):
            await asyncio.gather(*(self._remove(*each) for each in found[begin : begin + _AT_ONCE]))
        return len(found)


def _history(letter: DeadLetter) -> str:
    """This letter and the earlier ones, for the replayed task to carry in case it fails again."""
    before: dict[str, Any] = {
        "letter": letter.sequence,
        "reason": letter.reason,
        "status": letter.extension.status,
        "attempts": letter.attempts,
        "buried": round(letter.time, 3),
    }
    return msgspec.json.encode([*letter.extension.history, before][-_MOST_BEFORE:]).decode()
