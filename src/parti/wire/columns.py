"""From frames to columns: sequences and times out of reply subjects or headers, and the Arrow batch of a range read.

A message arrives in one of two forms. A consumer delivers it with its own subject and the position in the reply subject
(`$JS.ACK...`, 9, 11 or 12 tokens: ADR-15). Direct Get sends it to our inbox with subject, sequence and time as the last
header lines. Both become the same columns; no Python object is created per message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from parti.errors import ProtocolError
from parti.wire.digits import LONGEST_NUMBER, Bytes, Ints, rows_before, uints_of_rows, word_of, words
from parti.wire.frames import ACK, ACK_SHAPES, Frames, binary_array, compact, uints
from parti.wire.stored import AnsweredElsewhere

_DOT, _COLON, _SPACE, _LF = 46, 58, 32, 10
_ACK_WORD = word_of(ACK)
# Below this many messages a plain loop (2 us each) beats the fixed 300 us of the NumPy passes; a worker near the tail
# of its stream gets one to three messages per read.
_FEW = 128
NUMBERS = (0, 1, 2, 3, 4)
"""The rows of `Deliveries.numbers`. Parsing all is a third of a range read's cost, so a caller may select rows."""
_SPANS = np.array([0, 1, 6])  # rows of `Frames.positions`: subject start, subject end, payload start
_MODELS = 6  # layouts of replies; few, because each of four numbers rarely changes its length
# The lines that Direct Get adds after the message's own headers, in this order (nats-server 2.11 to 2.15).
_DIRECT_LINES = (
    b"Nats-Stream: ",
    b"Nats-Subject: ",
    b"Nats-Sequence: ",
    b"Nats-Time-Stamp: ",
    b"Nats-Num-Pending: ",
    b"Nats-Last-Sequence: ",
)
_SUBJECT, _SEQUENCE, _TIME, _PENDING = 1, 2, 3, 4
HEADER_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

SCHEMA = pa.schema(
    [
        pa.field("subject", pa.string(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ns", tz="UTC"), nullable=False),
        pa.field("headers", HEADER_TYPE),
        pa.field("data", pa.binary(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Messages with their stream positions; `frames` still has the offsets of headers and payload."""

    frames: Frames
    numbers: Ints  # 5 x n: delivered, stream sequence, consumer sequence, nanoseconds since 1970, pending; see NUMBERS
    spans: Ints  # 3 x n: subject start, subject end, end of the message's own headers

    def __len__(self) -> int:
        return self.numbers.shape[1]

    @property
    def delivered(self) -> Ints:
        """How often the message was delivered, including this time."""
        return self.numbers[0]

    @property
    def stream_seq(self) -> Ints:
        return self.numbers[1]

    @property
    def consumer_seq(self) -> Ints:
        return self.numbers[2]

    @property
    def timestamp(self) -> Ints:
        return self.numbers[3]

    @property
    def pending(self) -> Ints:
        """How many messages the server had pending after this one."""
        return self.numbers[4]

    def pending_behind_last(self) -> int:
        """The same for the last message only, whichever numbers were requested."""
        last = Frames(self.frames.data, self.frames.positions[:, -1:], (), self.frames.consumed)
        return int(_ack_numbers_plain(last)[4, 0])

    def select(self, mask: npt.NDArray[np.bool_]) -> Deliveries:
        """The messages where `mask` is true, in order."""
        if mask.all():
            return self
        return Deliveries(self.frames.select(mask), self.numbers[:, mask], self.spans[:, mask])

    def to_arrow(self, columns: tuple[str, ...]) -> pa.RecordBatch:
        """The requested columns of SCHEMA; the batch owns its memory, so the receive buffer may be reused."""
        return pa.RecordBatch.from_arrays(
            [self._column(name) for name in columns], schema=pa.schema([SCHEMA.field(name) for name in columns])
        )

    def _column(self, name: str) -> pa.Array:
        frames = self.frames
        match name:
            case "subject":
                return self.subjects()
            case "sequence":
                return pa.array(self.stream_seq)
            case "timestamp":
                return pa.array(self.timestamp).view(pa.timestamp("ns", tz="UTC"))
            case "data":
                return binary_array(frames.data, frames.payload_start, frames.payload_end)
            case "headers":
                return header_column(frames.data, frames.header_start, self.spans[2])
        raise KeyError(name)

    def replies(self) -> pa.Array:
        """The reply subjects, to which acknowledgements go, as binary."""
        return binary_array(self.frames.data, self.frames.reply_start, self.frames.reply_end)

    def subjects(self) -> pa.Array:
        """The subjects as strings."""
        return strings(binary_array(self.frames.data, self.spans[0], self.spans[1]))


def strings(array: pa.Array) -> pa.Array:
    """Binary as text. The server does not check subjects and header names for UTF-8: invalid bytes become U+FFFD."""
    try:
        return array.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value.decode(errors="replace") for value in array.to_pylist()], pa.string())


def is_delivery(frames: Frames) -> npt.NDArray[np.bool_]:
    """True where a frame is a consumer's delivery, by its reply subject; statuses and replies have none."""
    if len(frames) < _FEW:
        return np.array([reply.startswith(ACK) and len(reply) > len(ACK) for reply in _replies(frames)], dtype=bool)
    if frames.tails is not None:
        return np.ones(len(frames), dtype=bool)
    # A position with fewer than eight bytes after it belongs to a shorter reply.
    at = np.minimum(frames.reply_start, len(frames.data) - len(ACK))
    return (words(frames.data, at) == _ACK_WORD) & (frames.reply_end - frames.reply_start > len(ACK))


def consumer_deliveries(frames: Frames, wanted: tuple[int, ...] = NUMBERS) -> Deliveries:
    """The positions of frames that are all consumer deliveries; rows of `numbers` not requested may be zeros."""
    numbers = _ack_numbers(frames, wanted) if len(frames) >= _FEW else _ack_numbers_plain(frames)
    return Deliveries(frames, numbers, frames.positions[_SPANS])


def _ack_numbers(frames: Frames, wanted: tuple[int, ...]) -> Ints:
    """The five numbers of every reply subject.

    Replies of one consumer differ in digits only, until a number gains or loses a digit. So all are parsed at the
    offsets of the first one, counted from the end, and those with another layout again by the first of them: a third of
    the cost of searching for the dots.
    """
    numbers = np.zeros((5, len(frames)), dtype=np.int64)
    like = _like_first(frames, numbers, wanted)
    if like.all():
        return numbers
    rest = np.flatnonzero(~like)
    for _ in range(_MODELS):
        if len(rest) < _FEW:
            break
        others = Frames(frames.data, frames.positions[:, rest], (), 0)
        some = np.zeros((5, len(rest)), dtype=np.int64)
        like = _like_first(others, some, wanted)
        if not like[0]:
            break
        numbers[:, rest[like]] = some[:, like]
        rest = rest[~like]
    if len(rest):
        others = Frames(frames.data, frames.positions[:, rest], (), 0)
        found = _ack_numbers_by_dots(others) if len(rest) >= _FEW else None
        numbers[:, rest] = _ack_numbers_plain(others) if found is None else found
    return numbers


def _like_first(frames: Frames, numbers: Ints, wanted: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Parse all replies with the layout of the first one; returns which ones have that layout."""
    reply = frames.reply(0)
    tokens = reply.split(b".")
    behind = ACK_SHAPES.get(len(tokens) - 1, -1)
    numerals = tokens[-5 - behind : len(tokens) - behind]
    if behind < 0 or max(map(len, numerals)) > LONGEST_NUMBER or not all(numeral.isdigit() for numeral in numerals):
        return np.zeros(len(frames), dtype=bool)
    width = sum(len(token) + 1 for token in tokens[-5 - behind :])  # starting at the dot before the first number
    like: npt.NDArray[np.bool_] = np.ones(len(frames), dtype=bool)
    if frames.tails is not None:
        rows = frames.tails
        end = rows.shape[1] - int(frames.header_start[0] - 2 - frames.reply_end[0])
    else:
        rows, end = (
            rows_before(frames.data, frames.reply_end, width + 8),
            width + 8,
        )  # eight digits are always read
        like = frames.reply_end - frames.reply_start == len(reply)
    at = end - width
    for row, numeral in enumerate(numerals):
        like &= rows[:, at] == _DOT
        at += len(numeral) + 1
        if row in wanted:
            numbers[row], right = uints_of_rows(rows, at, len(numeral))
            like &= right
    if behind:
        like &= rows[:, at] == _DOT
    return like


def _ack_numbers_by_dots(frames: Frames) -> Ints | None:
    """The same for replies of one shape whose numbers often change their length."""
    n = len(frames)
    if n == 0:
        return np.empty((5, 0), dtype=np.int64)
    text, offsets = compact(frames.data, frames.reply_start, frames.reply_end)
    dots = np.flatnonzero(text == _DOT)
    behind = ACK_SHAPES.get(dots.size // n) if dots.size % n == 0 else None
    if behind is None:
        return None
    table = dots.reshape(n, dots.size // n)
    if not ((table[:, 0] >= offsets[:-1]) & (table[:, -1] < offsets[1:])).all():
        return None
    ends = np.column_stack([table, offsets[1:]])
    last = ends.shape[1] - 1 - behind  # the column where num_pending ends
    numbers = np.empty((5, n), dtype=np.int64)
    for row, column in enumerate(range(last - 4, last + 1)):
        parsed = uints(text, ends[:, column - 1] + 1, ends[:, column])
        if parsed is None:
            return None
        numbers[row] = parsed
    return numbers


def _replies(frames: Frames) -> list[bytes]:
    """The reply subjects one by one, cut out of a single copy."""
    if not len(frames):
        return []
    starts, ends = frames.reply_start.tolist(), frames.reply_end.tolist()
    first = starts[0]
    text = frames.data[first : ends[-1]].tobytes()
    return [text[start - first : end - first] for start, end in zip(starts, ends, strict=True)]


def _ack_numbers_plain(frames: Frames) -> Ints:
    """The same for few messages, and for batches with mixed reply shapes (a stream that moved between domains)."""
    rows = []
    for reply in _replies(frames):
        tokens = reply.split(b".")
        behind = ACK_SHAPES.get(len(tokens) - 1)
        numbers = tokens[len(tokens) - 5 - (behind or 0) : len(tokens) - (behind or 0)]
        if behind is None or not all(number.isdigit() for number in numbers):
            raise ProtocolError(f"reply subject {reply[:200]!r} is no acknowledgement subject known to parti")
        rows.append([int(number) for number in numbers])
    return np.array(rows, dtype=np.int64).reshape(-1, 5).T


def direct_deliveries(frames: Frames, stream: bytes) -> tuple[Deliveries, list[int]]:
    """The messages of a Direct Get reply, and the indexes of the frames that are statuses instead.

    Raises AnsweredElsewhere for messages from another stream: mirrors answer in their origin's name.
    """
    extra = len(_DIRECT_LINES)
    text, offsets = compact(frames.data, frames.header_start, frames.payload_start)
    newline = np.flatnonzero(text == _LF)
    lines = np.searchsorted(newline, offsets)  # newline[lines[i]:lines[i + 1]] belong to message i
    # A message has `NATS/1.0`, its own headers, the extra lines and an empty line; a status has fewer.
    stored = np.diff(lines) >= extra + 2
    at = lines[1:][stored] - 1 - extra  # the newline that ends the first extra line
    ends = newline[at + np.arange(extra)[:, np.newaxis]] - 1
    starts = newline[at - 1 + np.arange(extra)[:, np.newaxis]] + 1
    named = np.ones(len(at), dtype=bool)
    for row, name in enumerate(_DIRECT_LINES):
        named &= _starts_with(text, starts[row], name)
        starts[row] += len(name)
    stored[stored] = named
    starts, ends = starts[:, named], ends[:, named]
    own = (ends[0] - starts[0] == len(stream)) & _starts_with(text, starts[0], stream)
    if not own.all():
        other = int(np.argmin(own))
        mirror = text[starts[0, other] : ends[0, other]].tobytes().decode(errors="replace")
        raise AnsweredElsewhere(f"Direct Get on {stream.decode()!r} was answered by its mirror {mirror!r}")
    sequence, pending = uints(text, starts[_SEQUENCE], ends[_SEQUENCE]), uints(text, starts[_PENDING], ends[_PENDING])
    if sequence is None or pending is None:
        raise ProtocolError("a Direct Get answer carries a sequence that is no number")
    ones = np.ones_like(sequence)
    timestamp = _rfc3339_nanoseconds(text, starts[_TIME], ends[_TIME])
    header_end = starts[0] - len(_DIRECT_LINES[0])
    shift = (frames.header_start - offsets[:-1])[stored]
    deliveries = Deliveries(
        frames.select(stored),
        np.stack([ones, sequence, ones, timestamp, pending]),
        np.stack([starts[_SUBJECT], ends[_SUBJECT], header_end]) + shift,
    )
    return deliveries, np.flatnonzero(~stored).tolist()


def _starts_with(text: Bytes, at: Ints, name: bytes) -> npt.NDArray[np.bool_]:
    index = at[:, np.newaxis] + np.arange(len(name))
    np.minimum(index, len(text) - 1, out=index)
    found: npt.NDArray[np.bool_] = (text[index] == np.frombuffer(name, dtype=np.uint8)).all(axis=1)
    return found


def _rfc3339_nanoseconds(text: Bytes, starts: Ints, ends: Ints) -> Ints:
    """Unix nanoseconds of times such as `2026-11-15T11:56:36.68246033Z`; Go drops trailing zeros of the fraction."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.int64)
    times = binary_array(text, starts, ends).cast(pa.string()).cast(pa.timestamp("ns", tz="UTC"))
    return np.asarray(times.view(pa.int64()).to_numpy(zero_copy_only=False))


def header_column(data: Bytes, starts: Ints, ends: Ints) -> pa.Array:
    """The headers of each message as list<struct<key, value>>, in order, with repeats; null if it has none."""
    n = len(starts)
    if not (ends > starts).any():
        return pa.nulls(n, HEADER_TYPE)
    text, offsets = compact(data, starts, ends)
    newline = np.flatnonzero(text == _LF)
    line_start = np.concatenate([np.zeros(1, dtype=np.int64), newline[:-1] + 1]) if newline.size else newline
    owner = np.searchsorted(offsets[1:], line_start, side="right")
    first = np.isin(line_start, offsets[:-1])  # `NATS/1.0`, with or without a status
    colons = np.flatnonzero(text == _COLON)
    at = np.searchsorted(colons, line_start)
    colon = colons[np.minimum(at, max(colons.size - 1, 0))] if colons.size else np.full_like(line_start, -1)
    keep = ~first & (colon > line_start) & (colon < newline)
    line_start, colon, line_end, owner = line_start[keep], colon[keep], newline[keep], owner[keep]
    value_start = colon + 1
    if value_start.size:
        value_start = value_start + (text[value_start] == _SPACE)
    value_end = np.maximum(line_end - 1, value_start)  # before CRLF
    entries = pa.StructArray.from_arrays(
        [
            strings(binary_array(text, line_start, colon)),
            binary_array(text, value_start, value_end),
        ],
        fields=list(HEADER_TYPE.value_type),
    )
    count = np.bincount(owner, minlength=n)
    list_offsets = np.zeros(n + 1, dtype=np.int32)
    list_offsets[1:] = np.cumsum(count)
    return pa.ListArray.from_arrays(pa.array(list_offsets), entries, type=HEADER_TYPE, mask=pa.array(count == 0))
