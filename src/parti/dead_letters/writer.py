"""Writing letters: stored once, and certain before the message is let go."""

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
_LOOK_EVERY = 1.0  # seconds that the stream's creation time is trusted; the message's own time covers what is between


async def until_stored(
    store: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    on_failure: Callable[[PartiError, float], None],
    backoff: Backoff = PATIENT,
    final: tuple[type[PartiError], ...] = (),
) -> T:
    """The result of `store`, however long the server cannot take it; only a cancellation or a `final` error ends it.

    `on_failure` gets each error, and the wait that follows: health and the log say what is the matter meanwhile.
    """
    return await retry(
        store,
        backoff=replace(backoff, max_tries=None),
        clock=clock,
        classify=lambda error: not isinstance(error, final),
        on_retry=lambda _, wait, error: on_failure(error, wait),
    )


class DeadLetterWriter:
    """Buries messages of one stream; makes the dead-letter stream when the first letter needs it."""

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
        """`scope`: what all have in common who may bury the same message; the consumer when only it may.

        `subject_of`: for a stream that takes a message again under another subject than its own. `fence`: headers by
        which the server refuses the letters of an owner that another one has followed.
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
        """When this returns, the letter is stored. Errors are the caller's to retry: the message must not be let go."""
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
            self._ready = False  # somebody may have deleted the stream
            raise

    async def store(self, letter: DeadLetter, identity: str, *, shorten: bool = False) -> None:
        """When this returns, the letter is stored under this identity, or was before and rests there still.

        With `shorten`, a letter over the server's max_payload leaves out what is least missed, at last the data: only
        where the stream itself still has the message.
        """
        *longer, last = _shorter(letter) if shorten else (letter,)
        for each in longer:
            with contextlib.suppress(UsageError):
                return await self._store(each, identity)
        return await self._store(last, identity)

    async def _store(self, letter: DeadLetter, identity: str) -> None:
        """One that passes for a repetition of a letter that has left since is none."""
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
    """The letter, then ever shorter ones; without its data it names the place in the stream, which still has it."""
    brief = replace(letter, extension=structs.replace(letter.extension, response=b""))
    cut = replace(brief, data=b"", extension=structs.replace(brief.extension, cut=len(letter.data)))
    return letter, brief, replace(brief, headers={}), cut, replace(cut, headers={})


async def ensure_stream(js: JetStreamApi, stream: str, **settings: Any) -> None:
    """The dead-letter stream exists; it is made with storage and replicas of the stream it serves, and `settings`."""
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
    # Somebody made it with other limits: theirs stand.
    with contextlib.suppress(StreamNameExists):
        await js.stream_create(config | settings)
