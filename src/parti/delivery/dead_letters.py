"""The dead letters of delivery: what could not be delivered rests in `<stream>_DLQ`, complete, until somebody decides.

A letter is the task's own bytes and headers, with the reason, the last status, the first 4 KB of the response and the
attempts beside them. It is stored before the task is let go, and once, however often it is sent. It leaves only when
its task stands in the stream again; a task that fails once more gets a new letter, with the story of those before.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from parti.clock import Clock
from parti.delivery import names as n
from parti.delivery.errors import Reason
from parti.delivery.pending import Pending
from parti.delivery.policy import DeliveryAttempt
from parti.errors import FatalError, UsageError
from parti.subjects import matches
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.stored import StoredMessage

REASON = "Parti-Reason"
ERROR = "Parti-Error"
STATUS = "Parti-Status"
OUTCOME = "Parti-Outcome"
RESPONSE = "Parti-Response"
TRIGGER = "Parti-Trigger"
HOST = "Parti-Host"
CUT = "Parti-Data-Cut"
STREAM, SEQUENCE = "Parti-Stream", "Parti-Sequence"  # as in the dead letters of the worker: `parti dlq` shows both
_MARKER = "fence"  # the message by which a driver on Spark keeps its predecessors out
_LONGEST_ERROR = 500
_LONGEST_HOST = 300
_MOST_BEFORE = 10  # letters of the same task that the newest one tells of
_OF_A_LETTER = frozenset(
    {REASON, ERROR, OUTCOME, STATUS, RESPONSE, TRIGGER, HOST, CUT, STREAM, SEQUENCE}
    | {n.ATTEMPTS, n.FIRST_SEEN, n.SUBJECT, n.ORIGIN}
)
"""Headers of ours that a replayed task must not have: they tell of the time before."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter; `data` is what the publisher wrote."""

    sequence: int
    id: str
    subject: str
    reason: str
    error: str
    outcome: str
    status: int
    attempts: int
    trigger: str
    host: str
    time: float
    """Unix seconds when it was buried."""
    first_seen: float
    source: str
    response: bytes = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    data: bytes = field(repr=False)

    @property
    def history(self) -> list[dict[str, Any]]:
        """What became of the task before, oldest first: one entry for each letter that was replayed."""
        try:
            return msgspec.json.decode(self.headers.get(n.HISTORY, "[]"), type=list[dict[str, Any]])
        except (msgspec.DecodeError, RecursionError):
            return []

    @classmethod
    def from_stored(cls, stored: StoredMessage) -> Letter:
        headers = stored.headers
        try:
            response = base64.b64decode(headers.get(RESPONSE, ""))
        except binascii.Error:
            response = b""
        return cls(
            sequence=stored.seq,
            id=headers.get(n.TASK_ID, ""),
            subject=headers.get(n.SUBJECT, ""),
            reason=headers.get(REASON, ""),
            error=headers.get(ERROR, ""),
            outcome=headers.get(OUTCOME, ""),
            status=_whole(headers.get(STATUS)),
            attempts=_whole(headers.get(n.ATTEMPTS)),
            trigger=headers.get(TRIGGER, ""),
            host=headers.get(HOST, ""),
            time=stored.time_ns / 1e9,
            first_seen=_seconds(headers.get(n.FIRST_SEEN)),
            source=headers.get(n.ORIGIN, ""),
            response=response,
            headers=headers,
            data=stored.data,
        )


def one_line(text: str, longest: int = _LONGEST_ERROR) -> str:
    """Text fit for one header line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * longest]).split())[:longest]


class DeliveryDeadLetters:
    """Puts tasks to rest, and brings them back."""

    def __init__(
        self, js: JetStreamApi, names: n.DeliveryNames, scope: str = "", fence: Mapping[str, str] | None = None
    ) -> None:
        """`scope` sets the letters of a run over old tasks apart: the same task may fail once in each.

        `fence` are headers by which the server refuses the letters of an owner that another one has followed.
        """
        self._js = js
        self._names = names
        self._scope = scope
        self._fence = dict(fence or {})

    async def bury(self, held: Pending, reason: Reason, attempt: DeliveryAttempt) -> None:
        """When this returns, the letter is stored. An error is the caller's to retry: the task must not be let go."""
        collection = held.task.collection if held.task is not None else ""
        stream, _, sequence = held.source.rpartition(":")
        headers = held.carried() | {
            STREAM: stream,
            SEQUENCE: sequence,
            REASON: reason.value,
            ERROR: one_line(attempt.error),
            OUTCOME: attempt.outcome.value,
            STATUS: str(attempt.status),
            RESPONSE: base64.b64encode(attempt.response).decode(),
            TRIGGER: one_line(held.trigger, _LONGEST_HOST),
            HOST: one_line(held.host, _LONGEST_HOST),
            # By the place in the stream: a replay that fails again is another letter, not a duplicate of this one. And
            # by the time, as a stream that is made anew counts from 1 again.
            n.MSG_ID: f"dlq:{self._scope}{held.source}:{held.first_seen:.3f}",
            **self._fence,
        }
        subject = self._names.letter(held.database, collection, reason.value)
        try:
            await self._store(subject, held.data, headers)
        except UsageError:
            await self._bury_less(subject, held, headers)

    async def _bury_less(self, subject: str, held: Pending, headers: dict[str, str]) -> None:
        """The task and our headers together are over the server's max_payload: what is dropped first is least missed.

        Without its data the letter names the place in the task stream, which still has the task.
        """
        bare = {name: value for name, value in headers.items() if name.startswith(("Parti-", "Nats-"))} | {RESPONSE: ""}
        cut = {RESPONSE: "", CUT: str(len(held.data))}
        for data, rest in ((held.data, headers | {RESPONSE: ""}), (held.data, bare), (b"", headers | cut)):
            with contextlib.suppress(UsageError):
                await self._store(subject, data, rest)
                return
        await self._store(subject, b"", bare | cut)

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """When this returns the letter is there: one that passes for a repetition of a letter that left is none."""
        while True:
            stored = await self._js.publish(subject, data, headers=headers)
            if not stored.duplicate:
                return
            try:
                await self._js.msg_get(self._names.dead_letters, seq=stored.seq)
            except MessageNotFound:
                headers = headers | {n.MSG_ID: f"{headers[n.MSG_ID]}:after-{stored.seq}"}
            else:
                return

    async def letters(self, pattern: str = ">", *, after: int = 0) -> AsyncIterator[Letter]:
        """The letters whose subject behind the stream's name matches `pattern`, oldest first."""
        wanted = f"{self._names.dead_letters}.{pattern}"
        sequence = after
        while True:
            try:
                stored = await self._js.msg_get(self._names.dead_letters, seq=sequence + 1, next_by_subj=wanted)
            except MessageNotFound:
                return
            sequence = stored.seq
            if is_delivery_letter(stored):
                yield Letter.from_stored(stored)

    async def count(self) -> int:
        """How many there are; 0 when nothing was ever buried."""
        total, name = 0, self._names.dead_letters
        try:
            async for page in self._js.stream_subjects(name, f"{name}.*.*.*"):
                total += sum(page.values())
        except StreamNotFound:
            return 0
        return total

    async def get(self, sequence: int) -> Letter:
        """One letter; `UsageError` when there is none of this number."""
        try:
            stored = await self._js.msg_get(self._names.dead_letters, seq=sequence)
        except MessageNotFound:
            stored = None
        if stored is None or not is_delivery_letter(stored):
            raise UsageError(f"there is no letter {sequence}: see `parti deliver dlq ls`") from None
        return Letter.from_stored(stored)

    async def replay(
        self,
        pattern: str = ">",
        *,
        rate: float = 100.0,
        clock: Clock,
        sequences: Sequence[int] = (),
        failed: Callable[[int, FatalError], None] | None = None,
    ) -> AsyncIterator[Letter]:
        """Publish letters again, oldest first and at most `rate` a second, with the id they had; then remove them.

        Letters buried meanwhile are left alone: a task that fails again does not go round in circles. One that cannot
        be replayed stays, `failed` is told why, and the others go on; without `failed` the error ends it.
        """
        last = int((await self._js.stream_info(self._names.dead_letters))["state"]["last_seq"])
        started, done = clock.now(), 0

        def fail(sequence: int, error: FatalError) -> None:
            if failed is None:
                raise error
            failed(sequence, error)

        async for found in self._chosen(pattern, sequences, last, fail):
            await clock.sleep(max(0.0, started + done / rate - clock.now()))
            try:
                await self.replay_one(found)
            except FatalError as error:
                fail(found.sequence, error)
                continue
            done += 1
            yield found

    async def _chosen(
        self, pattern: str, sequences: Sequence[int], last: int, fail: Callable[[int, FatalError], None]
    ) -> AsyncIterator[Letter]:
        for sequence in sequences:
            try:
                letter = await self.get(sequence)
            except UsageError as error:
                fail(sequence, error)
                continue
            yield letter
        if sequences:
            return
        async for letter in self.letters(pattern):
            if letter.sequence > last:
                return
            yield letter

    async def replay_one(self, letter: Letter) -> None:
        """When this returns, the task stands in its stream again, and the letter is gone."""
        data = letter.data if CUT not in letter.headers else await self._original(letter)
        headers = {
            name: value
            for name, value in letter.headers.items()
            if name not in _OF_A_LETTER and not name.lower().startswith("nats-")
        }
        before = {
            "letter": letter.sequence,
            "reason": letter.reason,
            "status": letter.status,
            "attempts": letter.attempts,
            "buried": round(letter.time, 3),
        }
        headers |= {
            n.TASK_ID: letter.id,
            n.HISTORY: msgspec.json.encode([*letter.history, before][-_MOST_BEFORE:]).decode(),
            # By the letter's time as well: letters of a stream that was made anew have the numbers of others.
            n.MSG_ID: f"replay:{self._names.dead_letters}:{letter.sequence}:{letter.time:.6f}",
        }
        subject = letter.subject
        if not matches(f"{self._names.stream}.>", subject):
            raise UsageError(f"letter {letter.sequence} has the subject {subject!r}, which is not of the task stream")
        stored = await self._js.publish(subject, data, headers=headers)
        if stored.stream != self._names.stream:
            raise UsageError(f"{subject!r} is taken by the stream {stored.stream}, and not by {self._names.stream}")
        await self._js.msg_delete(self._names.dead_letters, letter.sequence)

    async def _original(self, letter: Letter) -> bytes:
        """The task of a letter that had no room for it: the stream may hold it still."""
        stream, _, sequence = letter.source.rpartition(":")
        try:
            stored = await self._js.msg_get(stream, seq=int(sequence))
        except (MessageNotFound, StreamNotFound, ValueError):
            stored = None
        if stored is None or abs(stored.time_ns / 1e9 - letter.first_seen) > 1:
            raise UsageError(
                f"letter {letter.sequence} holds no data, as the task was too large, and {letter.source} is gone from "
                "the task stream: publish the task again"
            )
        return stored.data

    async def purge(self, pattern: str = ">") -> int:
        """Remove the letters for good; returns how many there were."""
        letters = "*.*.*" if pattern == ">" else pattern  # a marker of a driver on Spark has two tokens, and stays
        return await self._js.stream_purge(self._names.dead_letters, filter=f"{self._names.dead_letters}.{letters}")


def is_delivery_letter(stored: StoredMessage) -> bool:
    """Whether it is one of these: a worker's letters may rest in the same stream, and a driver's marker."""
    return n.TASK_ID in stored.headers and stored.headers.get(REASON) != _MARKER


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0


def _seconds(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
