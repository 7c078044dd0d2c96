"""The dead-letter stream `<stream>_DLQ`: where a message rests that no handler could take.

A letter is the message's data and headers, with our own headers telling why. It is stored once, however often it is
sent and by whichever worker, and the message is let go only after the server has acknowledged the letter. So its
`Nats-Msg-Id` names the stream and when that was made, the namespace, and the message's sequence and time: a stream that
was deleted and made anew counts from 1 again, and its letters are others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from parti.errors import PartiError
from parti.wire.api import JetStreamApi
from parti.wire.errors import StreamNameExists
from parti.wire.stored import StoredMessage
from parti.worker.message import Message
from parti.worker.outcomes import Bury, clean

REASON, ERROR, ATTEMPTS = "Parti-Reason", "Parti-Error", "Parti-Attempts"
STREAM, SUBJECT, SEQUENCE = "Parti-Stream", "Parti-Subject", "Parti-Sequence"
CONSUMER, WORKER, EPOCH = "Parti-Consumer", "Parti-Worker", "Parti-Epoch"
_OURS = (REASON, ERROR, ATTEMPTS, STREAM, SUBJECT, SEQUENCE, CONSUMER, WORKER, EPOCH)
_KEPT = "Parti-Original-"
"""Prefix of the headers that would steer the letter's own publish (`Nats-Msg-Id`, `Nats-TTL`, ...)."""


_LOOK_EVERY = 1.0  # seconds that the stream's creation time is trusted; the message's own time covers what is between


def dead_letter_stream(stream: str) -> str:
    return f"{stream}_DLQ"


def dead_letter_subject(stream: str, subject: str) -> str:
    """The letter's subject: the message's own behind the name of the dead-letter stream."""
    return f"{dead_letter_stream(stream)}.{subject}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A letter as `parti dlq` shows it."""

    sequence: int
    stream: str
    subject: str
    original_sequence: int
    reason: str
    error: str
    attempts: int
    worker: str
    consumer: str
    time: float
    """Unix seconds when it was buried."""
    headers: Mapping[str, str]
    data: bytes

    @classmethod
    def from_stored(cls, stored: StoredMessage) -> DeadLetter:
        headers = stored.headers
        return cls(
            sequence=stored.seq,
            stream=headers.get(STREAM, ""),
            subject=headers.get(SUBJECT, stored.subject),
            original_sequence=_number(headers.get(SEQUENCE)),
            reason=headers.get(REASON, ""),
            error=headers.get(ERROR, ""),
            attempts=_number(headers.get(ATTEMPTS)),
            worker=headers.get(WORKER, ""),
            consumer=headers.get(CONSUMER, ""),
            time=stored.time_ns / 1e9,
            headers={k.removeprefix(_KEPT): v for k, v in headers.items() if k not in _OURS and k != "Nats-Msg-Id"},
            data=stored.data,
        )


class DeadLetterWriter:
    """Buries messages of one stream; makes the dead-letter stream when the first letter needs it."""

    def __init__(self, js: JetStreamApi, stream: str, consumer: str, scope: str = "") -> None:
        """`scope`: what all have in common who may bury the same message; the consumer when only it may."""
        self._js = js
        self._stream = stream
        self._consumer = consumer
        self._scope = scope or consumer
        self._ready = False
        self._created = ""
        self._looked = float("-inf")

    async def bury(self, message: Message, decision: Bury) -> None:
        """When this returns, the letter is stored. Errors are the caller's to retry: the message must not be let go."""
        if not self._ready:
            await ensure_stream(self._js, self._stream)
            self._ready = True
        identity = f"{await self._identity()}:{self._scope}"
        headers = letter_headers(message, decision, stream=self._stream, consumer=self._consumer, identity=identity)
        try:
            await self._js.publish(dead_letter_subject(self._stream, message.subject), message.data, headers=headers)
        except PartiError:
            self._ready = False  # somebody may have deleted the stream
            raise

    async def _identity(self) -> str:
        now = asyncio.get_running_loop().time()
        if now - self._looked > _LOOK_EVERY:
            self._created = (await self._js.stream_info(self._stream))["created"]
            self._looked = now
        return self._created


def letter_headers(
    message: Message, decision: Bury, *, stream: str, consumer: str, identity: str = ""
) -> dict[str, str]:
    """The headers of the letter for a message: its own, and why it is here.

    `identity`: of the stream and of those who read it; without it the letter is that of this consumer.
    """
    place = f"{identity}:{message.sequence}:{message.timestamp:.6f}" if identity else f"{consumer}:{message.sequence}"
    return {_kept_name(name): value for name, value in message.headers.items()} | {
        REASON: decision.reason.value,
        ERROR: decision.error,
        ATTEMPTS: str(message.attempt),
        STREAM: stream,
        SUBJECT: message.subject,
        SEQUENCE: str(message.sequence),
        CONSUMER: consumer,
        WORKER: message.worker_id,
        EPOCH: str(message.lease.epoch),
        "Nats-Msg-Id": f"{stream}:{place}",
    }


async def ensure_stream(js: JetStreamApi, stream: str) -> None:
    """The dead-letter stream exists; it is made with the storage and replicas of the stream it serves."""
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
        await js.stream_create(config)


def original_headers(letter: DeadLetter) -> dict[str, str]:
    """The headers the message had, without those that belong to its first publish."""
    return {name: value for name, value in letter.headers.items() if not _steers(name)}


def _kept_name(name: str) -> str:
    return f"{_KEPT}{name}" if _steers(name) or name in _OURS else name


def _steers(name: str) -> bool:
    return name.lower().startswith("nats-")


def _number(text: str | None) -> int:
    cleaned = clean(text or "")
    return int(cleaned) if cleaned.isdecimal() else 0
