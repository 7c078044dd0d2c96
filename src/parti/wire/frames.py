"""Cuts a buffer of NATS protocol bytes into frames, thousands at a time, without a Python object per message.

`scan` finds all frames of a buffer with NumPy and *proves* the framing: every line that starts like a frame is a
candidate, and the result is accepted only when each declared end is the next candidate's start. A payload that contains
a frame-like line breaks that chain, and the plain loop (`scan_plain`) parses the buffer instead. Both return the same
`Frames`, which a property test checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from parti.errors import ProtocolError
from parti.wire.digits import LONGEST_NUMBER, Bytes, Ints, rows_before, uints_of_rows, word_of, words

# `[H]MSG <subject> <sid> [reply] [header bytes] <total bytes>`; 18 digits always fit 64 bits.
_MESSAGE_LINE = re.compile(rb"(H)?MSG ([^ \n]*) (\d{1,18}) (?:([^ \n]*) )??(?(1)(\d{1,18}) )(\d{1,18})\r\n")
_DIGITS = 18
_LONGEST_LINE = 1 << 16  # the server's own default limit (max_control_line) is 4,096 bytes

# Below this many bytes the plain loop (1.5 us per frame) is cheaper than ~60 NumPy calls (150 us in all).
_PLAIN_BELOW = 16_384

_MANY = 128  # lines from which NumPy is faster
_FEW = 16  # lines parsed one by one instead of by another NumPy pass
_MODELS = 8  # layouts of lines; few, because a number in a line rarely changes its length
ACK = b"$JS.ACK."
ACK_SHAPES = {8: 0, 10: 0, 11: 1}
"""How many dots a delivery's reply subject has, and how many of its last tokens come after the numbers (ADR-15)."""

_CR, _LF, _SPACE, _ZERO = 13, 10, 32, 48
_MESSAGE_VERBS = (b"MSG ", b"HMSG ")
_CONTROL_VERBS = (b"PING", b"PONG", b"+OK\r", b"-ERR", b"INFO")


_FOUR_BYTES, _FIVE_BYTES = word_of(b"\xff" * 4), word_of(b"\xff" * 5)
_MSG, _HMSG = (word_of(verb) for verb in _MESSAGE_VERBS)
_CONTROL_WORDS = np.array([word_of(verb[:4]) for verb in _CONTROL_VERBS])
_MSG_START = np.frombuffer(b"MSG ", dtype="<u4")[0]
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
    tails: Bytes | None = None
    """If all are deliveries with the line layout of the first: one row with the last bytes of each line."""

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
        """Equal to `reply_start` if the message has no reply subject."""
        return self.positions[_REPLY_END]

    @property
    def header_start(self) -> Ints:
        """Equal to `payload_start` if the message has no headers."""
        return self.positions[_HEADER]

    @property
    def payload_start(self) -> Ints:
        return self.positions[_PAYLOAD]

    @property
    def payload_end(self) -> Ints:
        return self.positions[_PAYLOAD_END]

    def select(self, mask: npt.NDArray[np.bool_]) -> Frames:
        """The frames where `mask` is true, in order; control lines are not copied."""
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
    """Every complete frame in `data[:length]`; the bytes from `consumed` on belong to an incomplete frame."""
    if length >= _PLAIN_BELOW:
        frames = _scan_vector(data, length)
        if frames is not None:
            return frames
    return scan_plain(data, length)


def scan_plain(data: Bytes, length: int) -> Frames:
    """The reference loop: one frame after the other. Raises ProtocolError on anything that is not a frame."""
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
    """The length of the message frame at the start of the buffer; 0 while its line is incomplete."""
    line = _MESSAGE_LINE.match(data[: min(length, _LONGEST_LINE)].tobytes())
    return line.end() + int(line[6]) + 2 if line else 0


def _scan_vector(data: Bytes, length: int) -> Frames | None:
    """The same as `scan_plain`, or None when the framing cannot be proven this way."""
    newline = np.flatnonzero(data[:length] == _LF)
    if newline.size == 0 or length < 8:
        return None
    frames = _scan_pairs(data, newline) if newline.size >= 2 * _MANY else None
    return frames or _scan_lines(data, length, newline)


def _scan_pairs(data: Bytes, newline: Ints) -> Frames | None:
    """The frames, if all are deliveries without headers and without a line feed in the payload; else None.

    Then each frame has exactly two line feeds, and no search is needed: half the cost of `_scan_lines`.
    """
    line_end, ends = newline[: newline.size & -2 : 2] - 1, newline[1::2] - 1
    starts = np.empty_like(ends)
    starts[0] = 0
    np.add(ends[:-1], 2, out=starts[1:])
    verbs = np.ndarray((len(data) - 3,), dtype="<u4", buffer=data, strides=(1,))
    if starts[-1] >= len(verbs) or not (verbs[starts] == _MSG_START).all():
        return None
    consumed = int(ends[-1]) + 2
    if newline.size % 2:  # one extra line: of an incomplete message, or of anything else
        line = _MESSAGE_LINE.match(data[consumed : newline[-1] + 1].tobytes())
        if line is None or line[1]:
            return None
    positions, tails = _message_positions(data, starts, line_end, np.zeros(len(starts), dtype=bool))
    if positions is None or not np.array_equal(positions[_PAYLOAD_END], ends):
        return None
    if not ((data[ends] == _CR).all() and (data[line_end] == _CR).all()):
        return None
    return Frames(data, positions, (), consumed, tails)


def _scan_lines(data: Bytes, length: int, newline: Ints) -> Frames | None:
    """Frames of any kind, from every line that starts like a frame."""
    starts = np.empty_like(newline)
    starts[0] = 0
    starts[1:] = newline[:-1] + 1
    lines = np.flatnonzero(_FIRST_BYTES[data[starts]])
    starts = starts[lines]
    if starts.size == 0 or starts[0] != 0:
        return None
    word = words(data, np.minimum(starts, len(data) - 8))  # a start nearer to the end matches nothing
    is_msg, is_hmsg = word & _FOUR_BYTES == _MSG, word & _FIVE_BYTES == _HMSG
    known = is_msg | is_hmsg
    if not known.all():
        known |= np.isin(word & _FOUR_BYTES, _CONTROL_WORDS)
        starts, lines, is_msg, is_hmsg = starts[known], lines[known], is_msg[known], is_hmsg[known]
    line_end = newline[lines] - 1
    if starts.size == 0 or starts[0] != 0 or not (data[line_end] == _CR).all():
        return None

    message = is_msg | is_hmsg
    frame_end = line_end + 2
    positions, tails = _message_positions(data, starts[message], line_end[message], is_hmsg[message])
    if positions is None:
        return None
    frame_end[message] = positions[_PAYLOAD_END] + 2

    whole = frame_end <= length
    if not whole[:-1].all() or not np.array_equal(frame_end[:-1], starts[1:]):
        return None
    consumed = int(frame_end[-1]) if whole[-1] else int(starts[-1])
    if whole[-1] and newline[-1] >= consumed:
        return None  # there is a complete line that is not a frame: the plain loop reports it
    if not whole[-1] and message[-1]:
        positions, tails = positions[:, :-1], None if tails is None else tails[:-1]
    ends = positions[_PAYLOAD_END]
    if not ((data[ends] == _CR) & (data[ends + 1] == _LF)).all():
        return None
    controls = tuple(
        data[starts[i] : line_end[i]].tobytes() for i in np.flatnonzero(~message) if frame_end[i] <= length
    )
    return Frames(data, positions, controls, consumed, tails)


def _message_positions(
    data: Bytes, starts: Ints, line_end: Ints, is_hmsg: npt.NDArray[np.bool_]
) -> tuple[Ints | None, Bytes | None]:
    """Positions and tails of `Frames` for these message lines; no positions if one of them cannot be parsed."""
    if len(starts) < _MANY:
        return _by_spaces(data, starts, line_end, is_hmsg), None
    positions = np.empty((8, len(starts)), dtype=np.int64)
    like, tails = _like_first(data, starts, line_end, is_hmsg, positions)
    if like.all():
        return positions, tails
    rest = np.flatnonzero(~like)
    for _ in range(_MODELS):
        if len(rest) < _FEW:
            break
        some = np.empty((8, len(rest)), dtype=np.int64)
        like, _ = _like_first(data, starts[rest], line_end[rest], is_hmsg[rest], some)
        if not like[0]:
            break
        positions[:, rest[like]] = some[:, like]
        rest = rest[~like]
    if len(rest):
        read = _one_by_one if len(rest) < _FEW else _by_spaces
        odd = read(data, starts[rest], line_end[rest], is_hmsg[rest])
        if odd is None:
            return None, None
        positions[:, rest] = odd
    return positions, None


def _like_first(
    data: Bytes, starts: Ints, line_end: Ints, is_hmsg: npt.NDArray[np.bool_], positions: Ints
) -> tuple[npt.NDArray[np.bool_], Bytes | None]:
    """Parse all lines with the layout of the first one, a delivery; returns which lines have it, and tails.

    Lines of one consumer differ only in digits and subjects, until a number gains a digit. So everything after the
    subject is at the same offset as in the first line, counted from the line's end: a third of the cost of searching
    for blanks. This assumes that the server puts no blank into a subject or a reply.
    """
    line = _MESSAGE_LINE.match(data[starts[0] : line_end[0] + 2].tobytes())
    reply = (line[4] or b"") if line else b""
    dots = reply.count(b".")
    if line is None or not reply.startswith(ACK) or dots not in ACK_SHAPES:
        return np.zeros(len(starts), dtype=bool), None
    sid, header, size = (len(line[group] or b"") for group in (3, 5, 6))
    sizes = size + (header + 1 if header else 0)
    width = len(line[0]) - 2 - line.start(4) - len(reply.rsplit(b".", 5 + ACK_SHAPES[dots])[0])
    tails = rows_before(data, line_end, width + 8 + -width % 8)  # eight digits are read even if there are fewer
    width = tails.shape[1]
    reply_end, reply_start, body = positions[_REPLY_END], positions[_REPLY], positions[_HEADER]
    np.subtract(line_end, sizes + 1, out=reply_end)
    np.subtract(reply_end, len(reply), out=reply_start)
    np.subtract(reply_start, sid + 2, out=positions[_SUBJECT_END])
    np.add(starts, line.start(2), out=positions[_SUBJECT])
    np.add(line_end, 2, out=body)
    positions[_SID] = int(line[3])
    total, like = uints_of_rows(tails, width, size)
    like &= is_hmsg == bool(header)
    like &= tails[:, width - sizes - 1] == _SPACE
    like &= positions[_SUBJECT] < positions[_SUBJECT_END]
    between = b" %s %s" % (line[3], ACK)  # subject and tokens of the reply
    for place in (*range(0, sid + 2, 8), sid + 2):
        like &= words(data, positions[_SUBJECT_END] + place) == word_of(between[place : place + 8])
    positions[_PAYLOAD] = body
    if header:
        own, right = uints_of_rows(tails, width - size - 1, header)
        like &= right & (own <= total) & (tails[:, width - size - 1] == _SPACE)
        positions[_PAYLOAD] += own
    np.add(body, total, out=positions[_PAYLOAD_END])
    return like, tails


def _one_by_one(data: Bytes, starts: Ints, line_end: Ints, is_hmsg: npt.NDArray[np.bool_]) -> Ints | None:  # noqa: ARG001
    """The positions for a few lines: statuses between deliveries, and other lines with a unique layout."""
    rows: list[int] = []
    for start, end in zip(starts.tolist(), line_end.tolist(), strict=True):
        line = _MESSAGE_LINE.fullmatch(data[start : end + 2].tobytes())
        if line is None or (header := int(line[5] or 0)) > int(line[6]):
            return None
        reply, reply_end = line.span(4)
        if reply < 0:
            reply = reply_end = line.end(3) + 1
        body = end + 2
        rows += (line.start(2) + start, line.end(2) + start, int(line[3]), reply + start, reply_end + start)
        rows += (body, body + header, body + int(line[6]))
    return np.array(rows, dtype=np.int64).reshape(-1, 8).T


def _by_spaces(data: Bytes, starts: Ints, line_end: Ints, is_hmsg: npt.NDArray[np.bool_]) -> Ints | None:
    """The positions for lines of any kind, found by their blanks."""
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


def binary_array(data: Bytes, starts: Ints, ends: Ints) -> pa.Array:
    """The slices [starts, ends) of the buffer as one Arrow binary array that owns its memory.

    Slices must be in order and not overlap: then slices and the gaps between them are a valid zero-copy binary array
    over the buffer, of which `take` copies every second value (0.5 us per message less than building it in Python).
    Arrow reserves space by the mean length of all values, and copies everything again if that is too little: so the
    last gap, which is never taken, extends into an unused part of the buffer far enough to make the mean right.
    """
    n = len(starts)
    offsets = np.empty(2 * n + 1, dtype=np.int32)
    offsets[0 : 2 * n : 2] = starts
    offsets[1 : 2 * n : 2] = ends
    offsets[2 * n] = max(ends[-1], min(len(data), starts[0] + 2 * int((ends - starts).sum()))) if n else 0
    everything = pa.Array.from_buffers(pa.binary(), 2 * n, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return everything.take(pa.array(np.arange(0, 2 * n, 2, dtype=np.int32)))


def compact(data: Bytes, starts: Ints, ends: Ints) -> tuple[Bytes, Ints]:
    """The slices in one contiguous buffer, and their n + 1 offsets: later passes then read no payload."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, offsets, values = binary_array(data, starts, ends).buffers()
    cut = np.frombuffer(offsets, dtype=np.int32)[: len(starts) + 1].astype(np.int64)
    return np.frombuffer(values, dtype=np.uint8)[: cut[-1]], cut


def uints(data: Bytes, starts: Ints, ends: Ints, digits: int = LONGEST_NUMBER) -> Ints | None:
    """The decimal numbers at [starts, ends), or None if one is not a number, too long, or does not fit 64 bits."""
    if len(starts) == 0:
        return np.empty(0, dtype=np.int64)
    width = ends - starts
    widest, narrowest = int(width.max()), int(width.min())
    if narrowest < 1 or widest > digits:
        return None
    value = np.zeros(len(starts), dtype=np.int64)
    wrong = np.zeros(len(starts), dtype=bool)
    at = ends - widest  # may be before a shorter number, where a digit counts as zero
    for column in range(widest, 0, -1):
        digit = data[at] - np.uint8(_ZERO)
        if column > narrowest:
            digit[width < column] = 0
        wrong |= digit > 9
        value *= 10
        value += digit
        at += 1
    return None if wrong.any() or value.min() < 0 else value
