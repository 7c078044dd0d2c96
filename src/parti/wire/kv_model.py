"""The value types of a key-value bucket: entries, changes, and the meaning of messages in the bucket's stream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from parti.errors import Category, PartiError, UsageError

_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")  # ADR-8
_PATTERN = re.compile(r"[-/_=.*>a-zA-Z0-9]+")
_BUCKET = re.compile(r"[-_a-zA-Z0-9]+")


class Operation(StrEnum):
    """What happened to a key; only PUT leaves a value."""

    PUT = "put"
    DELETE = "delete"
    PURGE = "purge"
    EXPIRED = "expired"
    """Its TTL expired: the server left a marker."""
    VANISHED = "vanished"
    """The key is gone without a marker (bucket purged or recreated, or a marker that expired unseen)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The live value of a key; `revision` is the one for a compare-and-set."""

    key: str
    value: bytes = field(repr=False)
    revision: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class Change:
    """One new state of a key; `value` is None unless `operation` is PUT.

    `revision` is the stream sequence of the change; for VANISHED it is the key's last known one.
    """

    key: str
    value: bytes | None = field(repr=False)
    revision: int
    operation: Operation
    time_ns: int

    @property
    def expected(self) -> int:
        """The revision for the next compare-and-set; 0 (create) for a key that vanished without a marker."""
        return 0 if self.operation is Operation.VANISHED else self.revision


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    """Every key's state at the start of the watch was yielded; changes follow. `revision` is the highest yielded."""

    revision: int


class KeyNotFound(PartiError):
    """The key has no value: never written, deleted or expired. `revision` is that of its marker, or 0."""

    category: ClassVar[Category] = Category.NOT_FOUND

    def __init__(self, message: str, *, key: str, revision: int = 0) -> None:
        super().__init__(message)
        self.key = key
        self.revision = revision


class KeyExists(PartiError):
    """The key already has a value: read it, then decide. `revision` is that of the value."""

    category: ClassVar[Category] = Category.POLICY

    def __init__(self, message: str, *, key: str, revision: int) -> None:
        super().__init__(message)
        self.key = key
        self.revision = revision


def operation_of(headers: Mapping[str, str]) -> Operation:
    """The operation of a message in a bucket's stream; a marker written by the server counts as a removal."""
    if reason := headers.get("Nats-Marker-Reason"):
        return {"MaxAge": Operation.EXPIRED, "Purge": Operation.PURGE}.get(reason, Operation.DELETE)
    return {"DEL": Operation.DELETE, "PURGE": Operation.PURGE}.get(headers.get("KV-Operation", ""), Operation.PUT)


def check_bucket(bucket: str) -> str:
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{bucket!r} is no bucket name: use letters, digits, '-' and '_'")
    return bucket


def check_key(key: str) -> str:
    if not _KEY.fullmatch(key) or key.startswith(".") or key.endswith(".") or ".." in key:
        raise UsageError(f"{key!r} is no key: use letters, digits and -/_=. without a dot at an end or two in a row")
    return key


def check_pattern(pattern: str) -> str:
    tokens = pattern.split(".")
    fine = (
        _PATTERN.fullmatch(pattern) is not None
        and all(tokens)
        and all(token == "*" or "*" not in token for token in tokens)
        and all(">" not in token for token in tokens[:-1])
        and (tokens[-1] == ">" or ">" not in tokens[-1])
    )
    if not fine:
        raise UsageError(f"{pattern!r} is no key pattern: use a key whose tokens may be '*' and whose last may be '>'")
    return pattern
