"""Writes letters: each is stored once, and certainly stored before its message counts as done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from parti.backoff import PATIENT, Backoff, retry
from parti.clock import Clock
from parti.dead_letters.format import letter_id
from parti.dead_letters.letter import DeadLetter, LetterExtension, Unhandled, dead_letter_stream, letter_of
from parti.dead_letters.parts import letter_messages
from parti.errors import PartiError
from parti.outcomes import Bury
from parti.wire.api import JetStreamApi, Outgoing
from parti.wire.errors import MessageNotFound, MessageTooLarge, StreamNameExists
from parti.wire.requests import headers_size

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

    async def store(self, letter: DeadLetter, identity: str) -> None:
        """When this returns, the letter is stored under this id, now or earlier, and still exists.

        Where it does not fit into one message it is stored in parts: nothing of the message is left out.
        """
        try:
            await self._store(letter, identity, self._js.connection.max_payload)
        except MessageTooLarge:  # the stream has a limit of its own
            await self._store(letter, identity, await largest_message(self._js, self._stream))

    async def _store(self, letter: DeadLetter, identity: str, room: int) -> None:
        """If the server reports a duplicate of what was removed since, store the whole letter again under a new id.

        The parts too: whoever removes the earlier letter may be about to remove its parts.
        """
        room -= headers_size(self._fence)
        while (gone := await self._publish(letter_messages(letter, identity, room))) is not None:
            identity = f"{identity}:after-{gone}"

    async def _publish(self, messages: list[Outgoing]) -> int | None:
        """None when all are stored; the sequence of one that was stored earlier, and is gone."""
        for message in messages:
            headers = {**message.headers, **self._fence}
            stored = await self._js.publish(message.subject, message.data, headers=headers)
            if stored.duplicate:
                try:
                    await self._js.msg_get(stored.stream, seq=stored.seq)
                except MessageNotFound:
                    return stored.seq
        return None

    async def _stream_created(self) -> str:
        now = asyncio.get_running_loop().time()
        if now - self._looked > _LOOK_EVERY:
            self._created = (await self._js.stream_info(self._stream))["created"]
            self._looked = now
        return self._created


async def largest_message(js: JetStreamApi, stream: str) -> int:
    """The most bytes that a message of the dead-letter stream may have, with its headers."""
    limit = int((await js.stream_info(dead_letter_stream(stream)))["config"]["max_msg_size"])
    most: int = js.connection.max_payload
    return min(limit, most) if limit > 0 else most


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
