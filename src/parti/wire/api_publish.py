"""Acknowledged publishes: single messages with expectations, and atomic batches."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from parti.errors import ConnectionLost, RequestTimeout, UnknownOutcome, UsageError
from parti.wire.api_call import ApiCaller, Json, decode_answer

# ADR-50: the server refuses larger batches (10199).
MAX_ATOMIC_BATCH = 1000


@dataclass(frozen=True, slots=True)
class PubAck:
    """The stream has stored the message (or all of an atomic batch, whose last sequence is `seq`)."""

    stream: str
    seq: int
    duplicate: bool = False
    count: int = 1

    @classmethod
    def from_json(cls, answer: Json) -> PubAck:
        return cls(answer["stream"], int(answer["seq"]), bool(answer.get("duplicate")), int(answer.get("count") or 1))


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message to publish; `headers` may include those of `expectations`."""

    subject: str
    data: bytes = field(default=b"", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def expectations(
    *,
    stream: str | None = None,
    last_seq: int | None = None,
    last_subject_seq: int | None = None,
    last_subject_filter: str | None = None,
    last_msg_id: str | None = None,
    msg_id: str | None = None,
    ttl: int | None = None,
) -> dict[str, str]:
    """The headers with which the stream stores a message only if its state is as expected (0: no message yet).

    `last_subject_filter` applies `last_subject_seq` to more subjects than the message's own. `ttl` is in whole seconds,
    because the server truncates fractions: a lease of 1.9 s would end after 1 s.
    """
    if ttl is not None and (ttl < 1 or ttl != int(ttl)):
        raise UsageError(f"a TTL has whole seconds, at least 1, not {ttl}")
    named = {
        "Nats-Expected-Stream": stream,
        "Nats-Expected-Last-Sequence": last_seq,
        "Nats-Expected-Last-Subject-Sequence": last_subject_seq,
        "Nats-Expected-Last-Subject-Sequence-Subject": last_subject_filter,
        "Nats-Expected-Last-Msg-Id": last_msg_id,
        "Nats-Msg-Id": msg_id,
        "Nats-TTL": f"{int(ttl)}s" if ttl is not None else None,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


class PublishCalls(ApiCaller):
    """Publish and wait for the stream's ack."""

    async def publish(
        self, subject: str, data: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> PubAck:
        """When this returns, the stream has stored the message (see `expectations` for possible conditions).

        Without a reply the outcome is unknown and `UnknownOutcome` is raised. With a `Nats-Msg-Id` a retry is safe (the
        stream drops duplicates), so then the retriable `RequestTimeout` or `ConnectionLost` is raised.
        """
        headers = dict(headers or {})
        if "Nats-TTL" in headers:
            self.require((2, 11, 0), "a TTL per message")
        try:
            reply = await self.connection.requests.call(
                subject, data, headers=headers or None, timeout=timeout or self.timeout
            )
        except (RequestTimeout, ConnectionLost) as error:
            if "Nats-Msg-Id" in headers:
                raise
            raise UnknownOutcome(f"the publish to {subject} may or may not be stored: {error}") from error
        return PubAck.from_json(decode_answer(reply.data, request=f"publish to {subject}"))

    async def publish_atomic(self, messages: Sequence[Outgoing], *, timeout: float | None = None) -> PubAck:
        """Store all messages, consecutively and in this order, or none of them (ADR-50).

        The stream needs allow_atomic. Without a reply to the last message `UnknownOutcome` is raised.
        """
        self.require((2, 12, 0), "an atomic batch")
        if not 1 <= len(messages) <= MAX_ATOMIC_BATCH:
            raise UsageError(f"an atomic batch has 1 to {MAX_ATOMIC_BATCH} messages, not {len(messages)}")
        batch_id, limit = secrets.token_hex(16), timeout or self.timeout
        requests = self.connection.requests
        for position, message in enumerate(messages, start=1):
            headers = {**message.headers, "Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": str(position)}
            if position == len(messages):
                break
            if position == 1:
                # The reply to the first message shows early whether the stream accepts batches at all.
                reply = await requests.call(message.subject, message.data, headers=headers, timeout=limit)
                if reply.data:
                    decode_answer(reply.data, request=f"atomic batch to {message.subject}")
            else:
                await requests.send(message.subject, message.data, headers=headers)
        headers["Nats-Batch-Commit"] = "1"
        try:
            reply = await requests.call(message.subject, message.data, headers=headers, timeout=limit)
        except (RequestTimeout, ConnectionLost) as error:
            raise UnknownOutcome(f"the atomic batch of {len(messages)} may or may not be stored: {error}") from error
        return PubAck.from_json(decode_answer(reply.data, request=f"commit of the batch to {message.subject}"))
