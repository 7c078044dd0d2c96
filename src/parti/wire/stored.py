"""A message as stored in a stream, from the two ways to read one: the leader's JSON and Direct Get's headers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from parti.errors import ProtocolError, TransientError

if TYPE_CHECKING:  # Spark tasks parse times here, and should not import the asyncio client
    from parti.wire.requests import Reply

_OWN_HEADERS = frozenset(
    {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence"}
)


class AnsweredElsewhere(TransientError):
    """A mirror answered, which may lack messages or still have deleted ones: retry, or ask the leader."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message of a stream; `headers` are the publisher's, without those added by Direct Get."""

    subject: str
    seq: int
    time_ns: int
    """Unix nanoseconds when the leader stored it."""
    data: bytes = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> StoredMessage:
        """From the `message` object of STREAM.MSG.GET."""
        headers = parse_headers(base64.b64decode(message["hdrs"])) if message.get("hdrs") else {}
        data = base64.b64decode(message.get("data") or "")
        return cls(message["subject"], int(message["seq"]), parse_time(message["time"]), data, headers)

    @classmethod
    def from_direct(cls, reply: Reply) -> StoredMessage:
        """From one reply of DIRECT.GET."""
        headers = reply.headers
        try:
            subject, seq, time = headers["Nats-Subject"], int(headers["Nats-Sequence"]), headers["Nats-Time-Stamp"]
        except KeyError as error:
            raise ProtocolError(f"an answer of Direct Get lacks the header {error}") from None
        own = {key: value for key, value in headers.items() if key not in _OWN_HEADERS}
        return cls(subject, seq, parse_time(time), reply.data, own)


def parse_time(text: str) -> int:
    """Unix nanoseconds of an RFC 3339 time; datetime alone would drop the last three digits."""
    whole, _, rest = text.partition(".")
    fraction = ""
    if rest:
        fraction = rest.rstrip("Z")
        for sign in "+-":
            fraction = fraction.partition(sign)[0]
        whole += rest[len(fraction) :]
    moment = datetime.fromisoformat(whole.replace("Z", "+00:00"))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp()) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))


def parse_headers(block: bytes) -> dict[str, str]:
    """The headers of a NATS/1.0 block; for a repeated name the last value counts, as in nats-py."""
    headers: dict[str, str] = {}
    for line in block.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return headers
