"""Cut a buffer of NATS protocol bytes into frames, thousands at a time, without a Python object per message.

`scan` finds all frames of a buffer with NumPy and *proves* the framing: it takes every line that starts like a frame
as a candidate, and accepts the result only when each declared end is the next candidate's start. A payload that
contains something frame-like breaks that chain, and the plain loop (`scan_plain`) takes the buffer instead. Both give
the same `Frames`, which a property test checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from parti.errors import ProtocolError
from parti.wire.digits import LONGEST_NUMBER, Bytes, Ints, aligned_uints, word_of, words

# `[H]MSG <subject> <sid> [reply] [header bytes] <total bytes>`; 18 digits always fit 64 bits.
_MESSAGE_LINE = re.compile(rb"(H)?MSG ([^ \n]*) (\d{1,18}) (?:([^ \n]*) )??(?(1)(\d{1,18}) )(\d{1,18})\r\n")
_DIGITS = 18
_LONGEST_LINE = 1 << 16  # the server's own default limit (max_control_line) is 4,096 bytes

# Below this many bytes the plain loop (1.5 us a frame) is cheaper than ~60 NumPy calls (150 us in all).
_PLAIN_BELOW = 16_384

_MANY = 128  # lines from which reading them in runs pays
_RUNS = 6  # a scan seldom sees more: each number in a line changes its length once in a while
_ACK = b"$JS.ACK."
_ACK_WORD = word_of(_ACK)

_CR, _LF, _SPACE, _ZERO = 13, 10, 32, 48
_MESSAGE_VERBS = (b"MSG ", b"HMSG ")
_CONTROL_VERBS = (b"PING", b"PONG", b"+OK\r", b"-ERR", b"INFO")


def _word(verb: bytes) -> int:
    return int.from_bytes(verb[:4], "little")


_MSG, _HMSG = _word(b"MSG "), _word(b"HMSG")
_CONTROL_WORDS = np.array([_word(verb) for verb in _CONTROL_VERBS], dtype=np.uint32)
_FIRST_BYTES = np.zeros(256, dtype=bool)
_FIRST_BYTES[list(b"MHP+-I")] = True


# The rows of `Frames.positions`, in this order.
_SUBJECT, _SUBJECT_END, _SID, _REPLY, _REPLY_END, _HEADER, _PAYLOAD, _PAYLOAD_END = range(8)


@dataclass(frozen=True, slots=True)
class Frames:
    """The message frames of a buffer as columns of positions into it, and the control lines between them."""

    data: Bytes
    positions: Ints  # 8 x n
    controls: tuple[bytes, ...]
    consumed: int

    def __len__(self) -> int:
        return self.positions.shape[1]

    @property
    def subject_start(self) -> Ints:
        return self.positions[_SUBJECT]

    @property
    def subject_end(self) -> Ints:
        return self.positions[_SUBJECT_END]

    @property
    def sid(self) -> Ints:
        return self.positions[_SID]

    @property
    def reply_start(self) -> Ints:
        return self.positions[_REPLY]

    @property
    def reply_end(self) -> Ints:
        """Equal to `reply_start` where the message has no reply subject."""
        return self.positions[_REPLY_END]

    @property
    def header_start(self) -> Ints:
        """Equal to `payload_start` where the message has no headers."""
        return self.positions[_HEADER]

    @property
    def payload_start(self) -> Ints:
        return self.positions[_PAYLOAD]

    @property
    def payload_end(self) -> Ints:
        return self.positions[_PAYLOAD_END]

    def select(self, mask: npt.NDArray[np.bool_]) -> Frames:
        """The frames where `mask` is true, in order; the control lines stay with the whole."""
        return self if mask.all() else Frames(self.data, self.positions[:, mask], (), self.consumed)

    def subject(self, index: int) -> bytes:
        return self._slice(_SUBJECT, _SUBJECT_END, index)

    def reply(self, index: int) -> bytes:
        return self._slice(_REPLY, _REPLY_END, index)

    def header(self, index: int) -> bytes:
        return self._slice(_HEADER, _PAYLOAD, index)

    def payload(self, index: int) -> bytes:
        return self._slice(_PAYLOAD, _PAYLOAD_END, index)

    def _slice(self, start: int, end: int, index: int) -> bytes:
        return self.data[self.positions[start, index] : self.positions[end, index]].tobytes()


def scan(data: Bytes, length: int) -> Frames:
    """Every complete frame in `data[:length]`; the bytes from `consumed` on belong to a frame still to come."""
    if length >= _PLAIN_BELOW:
        frames = _scan_vector(data, length)
        if frames is not None:
            return frames
    return scan_plain(data, length)


def scan_plain(data: Bytes, length: int) -> Frames:
    """The reference loop: one frame after the other. Raises ProtocolError on anything that is no frame."""
    view = data[:length].tobytes()
    rows: list[int] = []
    controls: list[bytes] = []
    position = 0
    while position < length:
        line = _MESSAGE_LINE.match(view, position)
        if line is None:
            line_end = view.find(b"\r\n", position)
            if line_end < 0:
                break
            controls.append(_control_line(view[position:line_end]))
            position = line_end + 2
            continue
        sid, header, total = line.group(3, 5, 6)
        body = line.end()
        end = body + int(total)
        payload = body + int(header) if header else body
        if payload > end:
            raise ProtocolError(f"header longer than message in {line[0][:200]!r}")
        if end + 2 > length:
            break
        if not view.startswith(b"\r\n", end):
            raise ProtocolError(f"message of {end - body} bytes does not end in CRLF: {line[0][:200]!r}")
        subject, subject_end = line.span(2)
        reply, reply_end = line.span(4)
        if reply < 0:
            reply = reply_end = subject_end + len(sid) + 2
        rows += (subject, subject_end, int(sid), reply, reply_end, body, payload, end)
        position = end + 2
    positions = np.array(rows, dtype=np.int64).reshape(-1, 8).T
    return Frames(data, positions, tuple(controls), position)


def _control_line(line: bytes) -> bytes:
    if line.startswith(_MESSAGE_VERBS):
        raise ProtocolError(f"malformed message line {line[:200]!r}")
    if not line.startswith(_CONTROL_VERBS) and line != b"+OK":
        raise ProtocolError(f"no NATS frame starts with {line[:60]!r}; the connection is out of step")
    return line


def bytes_of_first(data: Bytes, length: int) -> int:
    """How long the message frame at the start of the buffer is, as soon as its line is there; else 0."""
    line = _MESSAGE_LINE.match(data[: min(length, _LONGEST_LINE)].tobytes())
    return line.end() + int(line[6]) + 2 if line else 0


def _scan_vector(data: Bytes, length: int) -> Frames | None:
    """The same as `scan_plain`, or None when the framing cannot be proven this way."""
    newline = np.flatnonzero(data[:length] == _LF)
    if newline.size == 0:
        return None
    starts = np.empty_like(newline)
    starts[0] = 0
    starts[1:] = newline[:-1] + 1
    lines = np.flatnonzero(_FIRST_BYTES[data[starts]])
    starts = starts[lines]
    if starts.size == 0 or starts[0] != 0:
        return None
    word = _words_at(data, starts, length)
    is_msg = word == _MSG
    is_hmsg = (word == _HMSG) & (data[np.minimum(starts + 4, length - 1)] == _SPACE)
    known = is_msg | is_hmsg
    if not known.all():
        known |= np.isin(word, _CONTROL_WORDS)
        starts, lines, is_msg, is_hmsg = starts[known], lines[known], is_msg[known], is_hmsg[known]
    line_end = newline[lines] - 1
    if starts.size == 0 or starts[0] != 0 or not (data[line_end] == _CR).all():
        return None

    message = is_msg | is_hmsg
    frame_end = line_end + 2
    positions = _message_positions(data, starts[message], line_end[message], is_hmsg[message])
    if positions is None:
        return None
    frame_end[message] = positions[_PAYLOAD_END] + 2

    whole = frame_end <= length
    if not whole[:-1].all() or not np.array_equal(frame_end[:-1], starts[1:]):
        return None
    consumed = int(frame_end[-1]) if whole[-1] else int(starts[-1])
    if whole[-1] and newline[-1] >= consumed:
        return None  # a whole line stands there that is no frame: the plain loop says which
    if not whole[-1] and message[-1]:
        positions = positions[:, :-1]
    ends = positions[_PAYLOAD_END]
    if not ((data[ends] == _CR) & (data[ends + 1] == _LF)).all():
        return None
    controls = tuple(
        data[starts[i] : line_end[i]].tobytes() for i in np.flatnonzero(~message) if frame_end[i] <= length
    )
    return Frames(data, positions, controls, consumed)


def _words_at(data: Bytes, starts: Ints, length: int) -> npt.NDArray[np.uint32]:
    """The four bytes at each position as one number; positions near the end read short and match nothing."""
    word = data[starts].astype(np.uint32)
    for offset in (1, 2, 3):
        word |= data[np.minimum(starts + offset, length - 1)].astype(np.uint32) << np.uint32(8 * offset)
    return word


def _message_positions(data: Bytes, starts: Ints, line_end: Ints, is_hmsg: npt.NDArray[np.bool_]) -> Ints | None:
    """The positions of `Frames` for these message lines."""
    if len(starts) >= _MANY and not is_hmsg.any():
        positions = _positions_in_runs(data, starts, line_end)
        if positions is not None:
            return positions
    lines, offsets = compact(data, starts, line_end)
    first, last = offsets[:-1], offsets[1:]
    spaces = np.flatnonzero(lines == _SPACE)
    at = np.searchsorted(spaces, first)
    count = np.append(at[1:], spaces.size) - at
    arguments = count - is_hmsg
    if not ((arguments == 3) | (arguments == 4)).all():
        return None
    subject_start, subject_end, sid_end = spaces[at] + 1, spaces[at + 1], spaces[at + 2]
    reply_start = sid_end + 1
    reply_end = np.where(arguments == 4, spaces[np.minimum(at + 3, spaces.size - 1)], reply_start)
    size_at = at + count - 1
    total = uints(lines, spaces[size_at] + 1, last, _DIGITS)
    sid = uints(lines, subject_end + 1, sid_end, _DIGITS)
    if total is None or sid is None:
        return None
    header = np.zeros_like(total)
    if is_hmsg.any():
        before = size_at[is_hmsg]
        parsed = uints(lines, spaces[before - 1] + 1, spaces[before], _DIGITS)
        if parsed is None or (parsed > total[is_hmsg]).any():
            return None
        header[is_hmsg] = parsed
    shift = starts - first
    body = line_end + 2
    positions = np.empty((8, len(starts)), dtype=np.int64)
    positions[_SUBJECT] = subject_start + shift
    positions[_SUBJECT_END] = subject_end + shift
    positions[_SID] = sid
    positions[_REPLY] = reply_start + shift
    positions[_REPLY_END] = reply_end + shift
    positions[_HEADER] = body
    positions[_PAYLOAD] = body + header
    positions[_PAYLOAD_END] = body + total
    return positions


def _positions_in_runs(data: Bytes, starts: Ints, line_end: Ints) -> Ints | None:
    """The same for deliveries of one consumer without headers, whose lines differ in digits and in their subjects only.

    Then everything behind the subject stands where it stands in the first line of the run, counted from the line's end:
    a third of the cost. That the server puts no blank into a subject or a reply is taken for granted here.
    """
    positions = np.empty((8, len(starts)), dtype=np.int64)
    first = 0
    for _ in range(_RUNS):
        line = _MESSAGE_LINE.match(data[starts[first] : line_end[first] + 2].tobytes())
        if line is None or line[4] is None or not line[4].startswith(_ACK):
            return None
        ends, rows = line_end[first:], positions[:, first:]
        sid, reply, size = len(line[3]), len(line[4]), len(line[6])
        np.subtract(ends, size + 1, out=rows[_REPLY_END])
        np.subtract(rows[_REPLY_END], reply, out=rows[_REPLY])
        np.subtract(rows[_REPLY], sid + 2, out=rows[_SUBJECT_END])
        np.add(starts[first:], 4, out=rows[_SUBJECT])
        total, alike = aligned_uints(data, ends, size)
        rows[_SID], right = aligned_uints(data, rows[_REPLY] - 1, sid)
        alike &= right
        alike &= rows[_SUBJECT] < rows[_SUBJECT_END]
        for row in (_REPLY_END, _SUBJECT_END):
            alike &= data[rows[row]] == _SPACE
        alike &= data[rows[_REPLY] - 1] == _SPACE
        alike &= words(data, rows[_REPLY]) == _ACK_WORD
        np.add(ends, 2, out=rows[_HEADER])
        rows[_PAYLOAD] = rows[_HEADER]
        np.add(rows[_HEADER], total, out=rows[_PAYLOAD_END])
        if alike.all():
            return positions
        first += int(np.argmin(alike))
    return None


def binary_array(data: Bytes, starts: Ints, ends: Ints) -> pa.Array:
    """The slices [starts, ends) of the buffer as one Arrow binary array that owns its memory.

    Slices must be in order and not overlap: then slices and the gaps between them are a valid zero-copy binary array
    over the buffer, of which `take` copies out every second value (0.5 us a message less than building by hand).
    """
    n = len(starts)
    offsets = np.empty(2 * n + 1, dtype=np.int32)
    offsets[0 : 2 * n : 2] = starts
    offsets[1 : 2 * n : 2] = ends
    offsets[2 * n] = ends[-1] if n else 0
    everything = pa.Array.from_buffers(pa.binary(), 2 * n, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return everything.take(pa.array(np.arange(0, 2 * n, 2, dtype=np.int32)))


def compact(data: Bytes, starts: Ints, ends: Ints) -> tuple[Bytes, Ints]:
    """The slices back to back, and the n + 1 offsets of them: later passes then touch no payload."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets, values = binary_array(data, starts, ends).buffers()
    cut = np.frombuffer(offsets, dtype=np.int32)[: len(starts) + 1].astype(np.int64)
    return np.frombuffer(values, dtype=np.uint8)[: cut[-1]], cut


def uints(data: Bytes, starts: Ints, ends: Ints, digits: int = LONGEST_NUMBER) -> Ints | None:
    """The decimal numbers at [starts, ends), or None when one is no number, too long, or does not fit 64 bits."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.int64)
    width = ends - starts
    widest, narrowest = int(width.max()), int(width.min())
    if narrowest < 1 or widest > digits:
        return None
    value = np.zeros(len(starts), dtype=np.int64)
    wrong = np.zeros(len(starts), dtype=bool)
    at = ends - widest  # may lie before a shorter number, where its digit counts as zero
    for column in range(widest, 0, -1):
        digit = data[at] - np.uint8(_ZERO)
        if column > narrowest:
            digit[width < column] = 0
        wrong |= digit > 9
        value *= 10
        value += digit
        at += 1
    return None if wrong.any() or value.min() < 0 else value
