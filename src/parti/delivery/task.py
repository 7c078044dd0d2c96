"""A delivery task as it comes from the stream: decoded strictly, and never trusted.

The fields have the names of syntrix' `DeliveryTask`. `before`, `after` and `payload` stay raw bytes: the endpoint gets
exactly what the publisher wrote, and decoding them would cost more than sending.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import msgspec

from parti.config.units import parse_duration
from parti.delivery.errors import Malformed, TooLarge
from parti.errors import ConfigError

_NANOSECONDS = 1e9
_LARGEST = 1 << 63  # Go's durations have 64 bits; a larger number is not a duration
_SHORTEST = 0.001  # seconds: `"timeout": 1` is a nanosecond by Go's rule, which nobody means
_LONG = 256  # characters of a part of a key; the cache is for many short keys, not for a few of a megabyte
_ABSENT = msgspec.Raw(b"")

GoDuration = str | int | float | None
"""A duration as Go writes it: a text such as "1m30s", or a number of nanoseconds."""


class TaskRetryPolicy(msgspec.Struct, frozen=True, rename="camel"):
    """How often and how far apart the trigger wants attempts; 0 and absent mean the configured schedule."""

    max_attempts: int | float | None = None
    initial_backoff: GoDuration = None
    max_backoff: GoDuration = None


class DeliveryTask(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One event for one endpoint. Unknown fields are ignored; wrong types and missing fields are refused."""

    trigger_id: str
    database: str
    collection: str
    document_id: str
    event: str
    url: str
    lsn: str = ""
    seq: int = 0
    ts: int = 0
    before: msgspec.Raw = _ABSENT
    after: msgspec.Raw = _ABSENT
    payload: msgspec.Raw = _ABSENT
    headers: dict[str, str] | None = None
    secrets_ref: str | None = None
    retry_policy: TaskRetryPolicy | None = None
    timeout: GoDuration = None
    pre_issued_token: str | None = None
    subject_hashed: bool = False

    def __repr__(self) -> str:
        # Neither url, headers nor token: each may hold a credential.
        return f"<DeliveryTask {self.trigger_id} {self.event} {self.database}/{self.collection}/{self.document_id}>"


class Decoded(msgspec.Struct, frozen=True):
    """A task, and its number of unknown fields."""

    task: DeliveryTask
    unknown_fields: int


class _ExactTask(DeliveryTask, frozen=True, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """A task without unknown fields: most have none, and then one pass over the bytes is enough."""


_EXACT = msgspec.json.Decoder(_ExactTask)
_DECODER = msgspec.json.Decoder(DeliveryTask)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KNOWN = frozenset(field.encode_name for field in msgspec.structs.fields(DeliveryTask))


def decode_task(data: bytes, *, max_size: int = 1 << 20) -> Decoded:
    """The task, or `Malformed` or `TooLarge` with the first problem; never any other error."""
    if len(data) > max_size:
        raise TooLarge(f"the task has {len(data)} bytes, more than deliver.max_task allows ({max_size})")
    unknown = 0
    try:
        str(data, "utf-8")  # the raw parts are not decoded, and go to the endpoint as they are
        try:
            task: DeliveryTask = _EXACT.decode(data)
        except msgspec.ValidationError:
            task = _DECODER.decode(data)
            unknown = len(_FIELDS.decode(data).keys() - _KNOWN)
    except msgspec.ValidationError as error:
        raise Malformed(f"the task does not fit its form: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the task is no JSON: {error}") from None
    for name in ("trigger_id", "database", "collection", "document_id", "url"):
        if not getattr(task, name):
            raise Malformed(f"the task's {name} is empty")
    return Decoded(task, unknown)


def lane_key(task: DeliveryTask, *, per_trigger: bool = False) -> str:
    """The document as 32 hex digits: the same for the same document, whatever the subject of its task.

    Each part is preceded by its length, so that ("ab", "c") and ("a", "bc") are two documents.
    """
    parts = task.database, task.collection, task.document_id, task.trigger_id if per_trigger else None
    size = len(task.database) + len(task.collection) + len(task.document_id) + len(task.trigger_id)
    return (_digest if size > _LONG else _cached_digest)(*parts)


def _digest(*parts: str | None) -> str:
    encoded = [part.encode(errors="surrogatepass") for part in parts if part is not None]
    return hashlib.blake2b(b"".join(b"%d:%s" % (len(raw), raw) for raw in encoded), digest_size=16).hexdigest()


_cached_digest = lru_cache(maxsize=8_192)(_digest)  # usually a document has several tasks within a short time


def task_id(stream: str, sequence: int) -> str:
    """The webhook-id of a task whose publisher gave none: derived from its stream and sequence."""
    return "msg_" + hashlib.sha256(f"{len(stream)}:{stream}:{sequence}".encode()).hexdigest()[:32]


def request_body(task: DeliveryTask, webhook_id: str, *, max_size: int = 256 << 10) -> bytes:
    """The event alone: never url, headers, secret names, retry policy or token."""
    event: dict[str, Any] = {
        "id": webhook_id,
        "triggerId": task.trigger_id,
        "event": task.event,
        "database": task.database,
        "collection": task.collection,
        "documentId": task.document_id,
        "lsn": task.lsn,
        "seq": task.seq,
        "ts": task.ts,
    }
    for name, raw in (("before", task.before), ("after", task.after), ("payload", task.payload)):
        if raw is not _ABSENT and bytes(raw) != b"null":
            event[name] = raw
    body = msgspec.json.encode(event)
    if len(body) > max_size:
        raise TooLarge(f"the request body has {len(body)} bytes, more than deliver.max_body allows ({max_size})")
    return body


def duration_seconds(value: GoDuration) -> float | None:
    """Seconds of a Go duration; None when it is absent, below a millisecond, or not a duration."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            seconds = parse_duration(value)
        except ConfigError:
            return None
    else:
        seconds = value / _NANOSECONDS if abs(value) < _LARGEST else math.inf
    return seconds if math.isfinite(seconds) and seconds >= _SHORTEST else None


def is_bad_duration(value: GoDuration) -> bool:
    """Whether a duration was given but is invalid, and so counts as absent."""
    return value not in (None, "", 0, "0", "0s") and duration_seconds(value) is None
