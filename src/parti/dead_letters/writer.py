"""Writes letters: each is stored once, and certainly stored before its message counts as done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from msgspec import structs

from parti.backoff import PATIENT, Backoff, retry
from parti.clock import Clock
from parti.dead_letters.format import letter_headers, letter_id, letter_subject
from parti.dead_letters.letter import DeadLetter, LetterExtension, Unhandled, dead_letter_stream, letter_of
from parti.errors import PartiError, UsageError
from parti.outcomes import Bury
from parti.wire.api import JetStreamApi
from parti.wire.errors import MessageNotFound, StreamNameExists

T = TypeVar("T")
_LOOK_EVERY = 1.0  # seconds to cache the stream's creation time; the message's own time covers the rest


async def until_stored(
    store: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    on_failure: Callable[[PartiError, float], None],
    backoff: Backoff = PATIENT,
    final: tuple[type[PartiError], ...] = (),
) -> T:
    """Retry `store` until it succeeds, and return its result; only a cancellation or a `final` error ends it.

    `on_failure` gets each error and the wait that follows, so that health and log show the problem meanwhile.
    """
    return await retry(
        store,
        backoff=replace(backoff, max_tries=None),
        clock=clock,
        classify=lambda error: not isinstance(error, final),
        on_retry=lambda _, wait, error: on_failure(error, wait),
    )


class DeadLetterWriter:
    """Stores dead letters of one stream; creates the dead-letter stream for the first letter."""

    def __init__(
        self,
        js: JetStreamApi,
        stream: str,
        consumer: str = "",
        scope: str = "",
        *,
        extension: LetterExtension | None = None,
        subject_of: Callable[[Any], str] | None = None,
        fence: Mapping[str, str] | None = None,
    ) -> None:
        """`scope`: shared by all processes that may bury the same message; the consumer if only it may.

        `subject_of`: for a stream that accepts a message again only under another subject. `fence`: headers with which
        the server refuses letters of a former owner.
        """
        self._js = js
        self._stream = stream
        self._consumer = consumer
        self._scope = scope or consumer
        self._extension = extension
        self._subject_of = subject_of
        self._fence = dict(fence or {})
        self._ready = False
        self._created = ""
        self._looked = float("-inf")

    def __repr__(self) -> str:
        return f"<DeadLetterWriter {dead_letter_stream(self._stream)} of {self._consumer}>"

    async def bury(self, message: Unhandled, decision: Bury) -> None:
        """When this returns, the letter is stored. On an error the caller must retry: the message is not done."""
        if not self._ready:
            await ensure_stream(self._js, self._stream)
            self._ready = True
        letter = letter_of(message, decision, stream=self._stream, consumer=self._consumer, extension=self._extension)
        if self._subject_of is not None:
            letter = replace(letter, subject=self._subject_of(message))
        identity = letter_id(
            letter, created=await self._stream_created(), scope=self._scope, timestamp=message.timestamp
        )
        try:
            await self.store(letter, identity)
        except PartiError:
            self._ready = False  # the stream may have been deleted
            raise

    async def store(self, letter: DeadLetter, identity: str, *, shorten: bool = False) -> None:
        """When this returns, the letter is stored under this id, now or earlier, and still exists.

        With `shorten`, a letter above the server's max_payload omits its least important parts, the data last: use it
        only where the stream itself still has the message.
        """
        *longer, last = _shorter(letter) if shorten else (letter,)
        for each in longer:
            with contextlib.suppress(UsageError):
                return await self._store(each, identity)
        return await self._store(last, identity)

    async def _store(self, letter: DeadLetter, identity: str) -> None:
        """If the server reports a duplicate of a letter that was removed since, store it again."""
        while True:
            headers = letter_headers(letter, identity) | self._fence
            stored = await self._js.publish(letter_subject(letter), letter.data, headers=headers)
            if not stored.duplicate:
                return
            try:
                await self._js.msg_get(stored.stream, seq=stored.seq)
            except MessageNotFound:
                identity = f"{identity}:after-{stored.seq}"
            else:
                return

    async def _stream_created(self) -> str:
        now = asyncio.get_running_loop().time()
        if now - self._looked > _LOOK_EVERY:
            self._created = (await self._js.stream_info(self._stream))["created"]
            self._looked = now
        return self._created


def _shorter(letter: DeadLetter) -> tuple[DeadLetter, ...]:
    """Yields the letter, then shorter versions; one without data names the stream sequence that still has it."""
    brief = replace(letter, extension=structs.replace(letter.extension, response=b""))
    cut = replace(brief, data=b"", extension=structs.replace(brief.extension, cut=len(letter.data)))
    return letter, brief, replace(brief, headers={}), cut, replace(cut, headers={})


async def ensure_stream(js: JetStreamApi, stream: str, **settings: Any) -> None:
    """Ensure that the dead-letter stream exists; created with its source stream's storage, replicas, and `settings`."""
    source = (await js.stream_info(stream))["config"]
    name = dead_letter_stream(stream)
    config = {
        "name": name,
        "subjects": [f"{name}.>"],
        "retention": "limits",
        "storage": source["storage"],
        "num_replicas": source["num_replicas"],
        "allow_direct": True,
        "description": f"messages of {stream} that no handler could take",
    }
    # It exists with other limits: keep them.
    with contextlib.suppress(StreamNameExists):
        await js.stream_create(config | settings)
