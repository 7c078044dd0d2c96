"""Converts Arrow columns into publish frames, thousands at a time, without a Python object per message.

Three guarantees: a row that the server would reject or misread (a blank in a subject, a line break in a header) is
refused here with its number; the same rows are cut into the same chunks and get the same ids, whatever Arrow batches
they arrived in; and nothing of a row is dropped except the headers in `NOT_COPIED`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from parti.errors import ConfigError, FatalError
from parti.subjects import validate_subject
from parti.wire.errors import MessageTooLarge

CHUNK_ROWS = 1000  # the server's limit for an atomic batch (ADR-50)
CHUNK_BYTES = 2 << 20  # a few of these are in flight per task; the server closes a connection with 64 MB pending
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

NOT_COPIED = "Nats-Msg-Id, Nats-Expected-*, Nats-Batch-*, Nats-Stream, Nats-Subject, Nats-Sequence, Nats-Time-Stamp"
"""Headers of a row that are left out: they belong to the message's first publish, and would affect ours."""
_LEFT_OUT = r"(?i)\A(nats-msg-id|nats-(expected|batch)-.*|nats-(stream|subject|sequence|time-stamp))\z"
_BAD_SUBJECT = r"(\A|\.)(\.|\z)|[\s\x00]|(\A|\.)[*>](\.|\z)|\A\$(JS|SYS)\."
_BAD_KEY = r"\A\z|[\x00-\x20:\x7f]"
_BAD_TEXT = "[\r\n\x00]"


class RowRefused(FatalError):
    """A row cannot be published as it is: correct the row that the message names."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Messages as columns of equal length: binary values and subjects, and optionally headers and message ids."""

    value: pa.Array
    subject: pa.Array
    headers: pa.Array | None = None
    msg_id: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.value)

    @property
    def columns(self) -> tuple[pa.Array | None, ...]:
        return (self.value, self.subject, self.headers, self.msg_id)

    def slice(self, start: int, length: int) -> Rows:
        """Some of the rows, without a copy."""
        return Rows(*(column if column is None else column.slice(start, length) for column in self.columns))

    def joined(self, following: Rows) -> Rows:
        """These rows followed by the others."""
        pairs = zip(self.columns, following.columns, strict=True)
        return Rows(*(None if a is None or b is None else pa.concat_arrays([a, b]) for a, b in pairs))

    def subject_at(self, index: int) -> str:
        text: bytes = self.subject[index].as_py()
        return text.decode(errors="replace")


def checked(rows: Rows, first: int = 0) -> Rows:
    """The same rows, each valid to send; RowRefused names the first invalid one, counted from `first`."""
    for name, column in (("value", rows.value), ("subject", rows.subject)):
        if column.null_count:
            row = _first(pc.is_null(column))
            raise RowRefused(f"row {first + row}: {name} is null; filter such rows, or give them a {name}")
    text = _texts(rows.subject, "subject", first)
    if (row := _first(pc.match_substring_regex(text, _BAD_SUBJECT))) >= 0:
        raise RowRefused(f"row {first + row}: {_why_subject(text[row].as_py())}")
    if rows.msg_id is not None:
        bad = pc.or_(pc.match_substring_regex(rows.msg_id, _BAD_TEXT), pc.equal(pc.binary_length(rows.msg_id), 0))
        if (row := _first(bad)) >= 0:
            raise RowRefused(f"row {first + row}: msg_id is empty or holds a line break; use null for a generated one")
    if rows.headers is not None:
        _check_headers(rows.headers, first)
    return rows


def check_sizes(frames: OutgoingFrames, rows: Rows, limit: int, first: int = 0) -> None:
    """MessageTooLarge if a message with headers exceeds max_payload: the server would close the connection."""
    if len(frames.sizes) and int(frames.sizes.max()) > limit:
        row = int(np.flatnonzero(frames.sizes > limit)[0])
        raise MessageTooLarge(
            f"row {first + row} to {rows.subject_at(row)!r} has {frames.sizes[row]} bytes with its headers; the server "
            f"takes {limit} (max_payload): shorten it, or raise max_payload on the server",
        )


def chunks(batches: Iterable[Rows], most: int = CHUNK_ROWS) -> Iterator[Rows]:
    """The rows cut into chunks of at most `most` rows or 2 MiB: depends on the rows alone, not on their batches."""
    rest: Rows | None = None
    for batch in batches:
        rows = batch if rest is None or not len(rest) else rest.joined(batch)
        ends = np.cumsum(_sizes(rows))
        start = 0
        while True:
            done = int(ends[start - 1]) if start else 0
            by_bytes = int(np.searchsorted(ends, done + CHUNK_BYTES, side="right"))
            end = max(min(by_bytes, start + most), start + 1)
            # A chunk is known to be full only when there is a further row that did not fit.
            if end >= len(rows):
                break
            yield rows.slice(start, end - start)
            start = end
        rest = rows.slice(start, len(rows) - start)
    if rest is not None and len(rest):
        yield rest


def chunk_id(scope: str, number: int, rows: Rows, salt: str = "") -> str:
    """`scope-number-digest`: the same for the same rows at the same place, and never the same for other rows.

    `salt` is the full text that the scope abbreviates; it is part of the digest.

    The digest makes a replay with *other* rows safe. With ids by place alone the stream would drop a row whose place a
    shuffle changed since the first attempt; with the digest it is stored, at worst twice.
    """
    digest = hashlib.blake2b(f"{salt} {scope}".encode(), digest_size=8)
    for column in rows.columns:
        if column is not None:
            _update(digest, column)
    return f"{scope}-{number}-{digest.hexdigest()}"


def row_ids(rows: Rows, chunk: str) -> pa.Array:
    """The message id of each row: its own where it has one, else the chunk's with the row's place in it."""
    places = _decimal(np.arange(len(rows)))
    made = _join(_bytes(chunk.encode() + b"-"), places)
    return made if rows.msg_id is None else pc.coalesce(rows.msg_id, made)


@dataclass(frozen=True, slots=True)
class OutgoingFrames:
    """Publish frames, one per row, and the bytes that each counts against max_payload."""

    frames: pa.Array
    sizes: npt.NDArray[np.int64]


def build(rows: Rows, replies: pa.Array, extra: pa.Array) -> OutgoingFrames:
    """An HPUB frame for each row; `extra` is its block of control header lines, `replies` its reply (may be empty)."""
    blocks = [] if rows.headers is None else [header_blocks(rows.headers)]
    head = _join(_bytes(b"NATS/1.0\r\n"), extra, *blocks, _bytes(b"\r\n"))
    head_size = pc.binary_length(head)
    size = pc.add(head_size, pc.binary_length(rows.value))
    frames = _join(
        _bytes(b"HPUB "), rows.subject, _bytes(b" "), replies, _bytes(b" "), _decimal(head_size), _bytes(b" "),
        _decimal(size), _bytes(b"\r\n"), head, rows.value, _bytes(b"\r\n"),
    )  # fmt: skip
    return OutgoingFrames(frames, np.asarray(size, dtype=np.int64))


def single_frames(rows: Rows, inbox: str, first_reply: int, chunk: str, constant: bytes) -> OutgoingFrames:
    """Each row with its id, acknowledged at `inbox.N`, counting from `first_reply`."""
    replies = _join(_bytes(f"{inbox}.".encode()), _decimal(np.arange(first_reply, first_reply + len(rows))))
    ids = _join(_bytes(constant + b"Nats-Msg-Id: "), row_ids(rows, chunk), _bytes(b"\r\n"))
    return build(rows, replies, ids)


def atomic_frames(rows: Rows, inbox: str, first_reply: int, batch: str, chunk: str, constant: bytes) -> OutgoingFrames:
    """The rows as one atomic batch; its first row is acknowledged at `first_reply`, its last (the commit) at the next.

    If the rows have no own ids, only the first message carries one: as all are stored or none, it covers all, and the
    server remembers one id instead of a thousand.
    """
    n = len(rows)
    replies = np.full(n, b"", dtype=object)
    replies[0], replies[-1] = f"{inbox}.{first_reply}".encode(), f"{inbox}.{first_reply + 1}".encode()
    numbers = _join(
        _bytes(constant + f"Nats-Batch-Id: {batch}\r\nNats-Batch-Sequence: ".encode()),
        _decimal(np.arange(1, n + 1)),
        _bytes(b"\r\n"),
    )
    ends = np.full(n, b"", dtype=object)
    ends[-1] = b"Nats-Batch-Commit: 1\r\n"
    if rows.msg_id is None:
        ends[0] = f"Nats-Msg-Id: {chunk}\r\n".encode() + ends[0]
        extra = [numbers, pa.array(ends, pa.binary())]
    else:
        ids = _join(_bytes(b"Nats-Msg-Id: "), row_ids(rows, chunk), _bytes(b"\r\n"))
        extra = [numbers, ids, pa.array(ends, pa.binary())]
    return build(rows, pa.array(replies, pa.binary()), _join(*extra))


def header_blocks(headers: pa.Array) -> pa.Array:
    """The header lines of each row (`key: value`, CRLF); those of `NOT_COPIED` are left out."""
    entries = pc.list_flatten(headers)
    keys, values = pc.struct_field(entries, 0), pc.struct_field(entries, 1)
    kept = pc.invert(pc.match_substring_regex(keys, _LEFT_OUT))
    lines = _join(keys.cast(pa.binary()), _bytes(b": "), values, _bytes(b"\r\n")).filter(kept)
    owners = np.asarray(pc.list_parent_indices(headers).filter(kept))
    offsets = np.zeros(len(headers) + 1, dtype=np.int32)
    np.cumsum(np.bincount(owners, minlength=len(headers)), out=offsets[1:])
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), lines), _bytes(b""))


def joined_bytes(frames: pa.Array) -> pa.Buffer:
    """The frames as one contiguous buffer for the socket, without a copy."""
    if not len(frames):
        return pa.py_buffer(b"")
    _, offsets, data = frames.buffers()
    cut = np.frombuffer(offsets, dtype=np.int32)[frames.offset : frames.offset + len(frames) + 1]
    return data.slice(int(cut[0]), int(cut[-1]) - int(cut[0]))


def _check_headers(headers: pa.Array, first: int) -> None:
    entries = pc.list_flatten(headers)
    if not len(entries):
        return
    keys, values = pc.struct_field(entries, 0), pc.struct_field(entries, 1)
    for what, bad in (
        ("a header has no key or no value", pc.or_(pc.is_null(keys), pc.is_null(values))),
        ("a header key is empty, or holds a blank or a colon", pc.match_substring_regex(keys, _BAD_KEY)),
        ("a header value holds a line break", pc.match_substring_regex(values, _BAD_TEXT)),
    ):
        if (at := _first(bad)) >= 0:
            row = first + pc.list_parent_indices(headers)[at].as_py()
            raise RowRefused(f"row {row}: {what} (key {keys[at].as_py()!r}); correct or drop that header")


def _why_subject(subject: str) -> str:
    try:
        validate_subject(subject)
    except ConfigError as error:
        return str(error)
    return f"subject {subject!r} belongs to the server itself; publish to a subject of a stream"


def _texts(column: pa.Array, name: str, first: int) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        for row, value in enumerate(column):
            try:
                value.as_py().decode()
            except UnicodeDecodeError as error:
                raise RowRefused(f"row {first + row}: {name} is no valid UTF-8: {error}") from None
        raise


def _first(mask: pa.Array) -> int:
    return int(pc.index(pc.fill_null(mask, False), True).as_py())


def _sizes(rows: Rows) -> npt.NDArray[np.int64]:
    """Bytes per row; unchecked rows may contain nulls, which count as 0."""
    total = np.zeros(len(rows), dtype=np.int64)
    for column in (rows.value, rows.subject):
        total += np.asarray(pc.fill_null(pc.binary_length(column), 0), dtype=np.int64)
    if rows.headers is not None:
        values = pc.fill_null(pc.binary_length(pc.struct_field(pc.list_flatten(rows.headers), 1)), 0)
        owners = np.asarray(pc.list_parent_indices(rows.headers))
        total += np.bincount(owners, weights=np.asarray(values), minlength=len(rows)).astype(np.int64)
    return total


def _update(digest: hashlib.blake2b, column: pa.Array) -> None:
    """Hash lengths before bytes, and null different from empty, so that no two different columns hash alike."""
    if pa.types.is_list(column.type):
        digest.update(np.asarray(pc.fill_null(pc.list_value_length(column), -1)).tobytes())
        _update(digest, pc.list_flatten(column))
    elif pa.types.is_struct(column.type):
        for field in range(column.type.num_fields):
            _update(digest, pc.struct_field(column, field))
    else:
        digest.update(np.asarray(pc.fill_null(pc.binary_length(column), -1)).tobytes())
        texts = column if column.type == pa.binary() else column.cast(pa.binary())
        digest.update(joined_bytes(texts.fill_null(b"") if texts.null_count else texts))


def _decimal(numbers: npt.NDArray[np.int64] | pa.Array) -> pa.Array:
    return pa.array(numbers).cast(pa.string()).cast(pa.binary())


def _bytes(text: bytes) -> pa.Scalar:
    return pa.scalar(text, pa.binary())


def _join(*parts: pa.Array | pa.Scalar) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _bytes(b""))
