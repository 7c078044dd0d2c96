"""The frame parser: the vector scan agrees with the plain loop on all possible server output, and on invalid bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parti.errors import ProtocolError
from parti.wire.frames import Frames, _scan_vector, binary_array, bytes_of_first, compact, scan, scan_plain, uints

FRAME_LIKE = [
    b"MSG ",
    b"HMSG ",
    b"MSG a.b 1 3\r\nabc\r\n",
    b"HMSG a 1 12 12\r\nNATS/1.0\r\n\r\n\r\n",
    b"PING\r\n",
    b"PONG\r\n",
    b"+OK\r\n",
    b"-ERR 'x'\r\n",
    b"INFO {}\r\n",
    b"\r\n",
    b"\n",
    b"\r",
    b"\nMSG x 1 0\r\n\r\n",
    b"\r\nHMSG x 1 9 99999\r\n",
]
subjects = st.sampled_from(
    [b"a", b"orders.k7.new", b"$KV.b.k", "käse.🧀".encode(), b"x" * 300, b"$JS.ACK", b"MSG", b"INFO"]
)
replies = st.sampled_from(
    [b"", b"_INBOX.abc.1", b"$JS.ACK.S.c.1.2.3.1790000000000000000.4", b"17", b"MSG", b"$JS.ACK._.h.S.c.1.2.3.4.5.r"]
)
payloads = st.one_of(
    st.just(b""),
    st.binary(max_size=40),
    st.lists(st.sampled_from(FRAME_LIKE), max_size=4).map(b"".join),
    st.binary(min_size=1, max_size=3).map(lambda some: some * 200),
)
headers = st.one_of(st.just(b"NATS/1.0\r\n\r\n"), st.just(b"NATS/1.0 404 No Messages\r\n\r\n"), payloads)


@st.composite
def message(draw: st.DrawFn) -> bytes:
    subject, reply, payload = draw(subjects), draw(replies), draw(payloads)
    sid = draw(st.integers(0, 10**6))
    middle = b"%s %d " % (subject, sid) + (reply + b" " if reply else b"")
    if draw(st.booleans()):
        header = draw(headers)
        return b"HMSG %s%d %d\r\n%s%s\r\n" % (middle, len(header), len(header) + len(payload), header, payload)
    return b"MSG %s%d\r\n%s\r\n" % (middle, len(payload), payload)


controls = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Slow Consumer'\r\n", b'INFO {"a":1}\r\n'])
valid = st.lists(st.one_of(message(), controls), min_size=1, max_size=30)


def as_bytes(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype=np.uint8)


def outcome(parse: object, raw: bytes) -> object:
    try:
        return described(parse(as_bytes(raw), len(raw)))  # type: ignore[operator]
    except ProtocolError:
        return ProtocolError


def described(frames: Frames | None) -> object:
    if frames is None:
        return None
    texts = [
        (frames.subject(i), int(frames.sid[i]), frames.reply(i), frames.header(i), frames.payload(i))
        for i in range(len(frames))
    ]
    return frames.positions.tolist(), frames.controls, frames.consumed, texts


def assert_same(raw: bytes) -> None:
    plain = outcome(scan_plain, raw)
    vector = outcome(_scan_vector, raw)
    assert vector is None or vector == plain
    assert outcome(scan, raw) == plain


@given(valid, st.data())
@settings(max_examples=300, deadline=None)
def test_vector_and_plain_scan_agree_wherever_the_buffer_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    cut = data.draw(st.integers(0, len(raw)))
    assert_same(raw)
    assert_same(raw[:cut])


@st.composite
def deliveries(draw: st.DrawFn) -> list[bytes]:
    """Hundreds of one or more consumers, whose numbers change their length on the way, with others between them."""
    parts: list[bytes] = []
    for _ in range(draw(st.integers(1, 3))):
        consumer, sid = (
            draw(st.sampled_from([b"c", b"parti-range-0a1b2c"])),
            draw(st.sampled_from([2, 9, 10, 12345678])),
        )
        first, pending = draw(st.sampled_from([1, 95, 9_990, 10**8 - 5])), draw(st.sampled_from([10**6, 100]))
        longest = draw(st.sampled_from([1, 12, 130]))
        headed = draw(st.sampled_from([1, 3, 1_000]))  # each so many has headers
        for n in range(draw(st.integers(60, 220))):
            subject, payload = b"s" * (1 + n * 7 % longest), draw(payloads) if n % 40 == 39 else b"x" * (n % longest)
            reply = b"$JS.ACK.S.%s.1.%d.%d.1790000000%09d.%d" % (consumer, first + n, n + 1, n, max(pending - n, 0))
            if n % headed:
                parts.append(b"MSG %s %d %s %d\r\n%s\r\n" % (subject, sid, reply, len(payload), payload))
            else:
                header = b"NATS/1.0\r\nk:%s\r\n\r\n" % (b"v" * (n % longest))
                sizes = (len(header), len(header) + len(payload))
                parts.append(b"HMSG %s %d %s %d %d\r\n%s%s\r\n" % (subject, sid, reply, *sizes, header, payload))
        for _ in range(draw(st.integers(0, 2))):
            parts.insert(draw(st.integers(0, len(parts))), draw(st.one_of(message(), controls)))
    return parts


@given(deliveries(), st.data())
@settings(max_examples=30, deadline=None)
def test_deliveries_are_scanned_in_runs_as_each_alone(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    assert_same(raw)
    assert_same(raw[: data.draw(st.integers(0, len(raw)))])
    broken = bytearray(raw)
    broken[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    plain = outcome(scan_plain, bytes(broken))
    vector = outcome(_scan_vector, bytes(broken))
    # A blank more in a subject or a reply is the one thing that only the plain loop refuses; no server sends it.
    assert vector is None or vector == plain or plain is ProtocolError


@pytest.mark.parametrize(
    "rest", [b"\n\n", b"M\n\n", b"MS\n\n", b"MSG\n\n", b"MSG s 2 r 9\r\n\n\n\n", b"PING\r\n", b"MSG s 2 r 9"]
)
def test_line_feeds_at_the_end_of_deliveries_are_no_frames(rest: bytes) -> None:
    line = b"MSG s 2 $JS.ACK.S.c.1.%d.%d.1790000000000000000.9 2\r\nxx\r\n"
    whole = b"".join(line % (number, number) for number in range(1_000, 1_200))
    for raw in (whole, whole + rest, whole + line % (1_200, 1_200) + rest):
        plain = scan_plain(as_bytes(raw), len(raw))
        found = scan(as_bytes(raw), len(raw))
        assert described(found) == described(plain)
        assert outcome(_scan_vector, raw) in (None, described(plain))


@given(valid)
@settings(max_examples=200, deadline=None)
def test_plain_scan_returns_exactly_the_frames_that_were_written(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    frames = scan_plain(as_bytes(raw), len(raw))
    assert frames.consumed == len(raw)
    rebuilt, control = [], iter(frames.controls)
    index = 0
    for part in parts:
        if part.startswith((b"MSG ", b"HMSG ")):
            header, payload = frames.header(index), frames.payload(index)
            reply = frames.reply(index) + b" " if frames.reply(index) else b""
            verb, sizes = (
                (b"HMSG", b"%d %d" % (len(header), len(header) + len(payload)))
                if part.startswith(b"H")
                else (b"MSG", b"%d" % len(payload))
            )
            line = b"%s %s %d %s%s" % (verb, frames.subject(index), frames.sid[index], reply, sizes)
            rebuilt.append(line + b"\r\n" + header + payload + b"\r\n")
            index += 1
        else:
            rebuilt.append(next(control) + b"\r\n")
    assert rebuilt == parts


@given(st.lists(message(), min_size=1, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_a_stream_split_at_any_byte_gives_the_same_frames(parts: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(parts)
    whole = described(scan_plain(as_bytes(raw), len(raw)))
    cut = data.draw(st.integers(0, len(raw)))
    first = scan_plain(as_bytes(raw[:cut]), cut)
    rest = raw[first.consumed :]
    second = scan_plain(as_bytes(rest), len(rest))
    assert len(first) + len(second) == len(parts)
    payloads_seen = [frames.payload(i) for frames in (first, second) for i in range(len(frames))]
    assert payloads_seen == [text[4] for text in whole[3]]  # type: ignore[index]


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.one_of(message(), controls, st.sampled_from(FRAME_LIKE), st.binary(max_size=8)), max_size=12).map(
            b"".join
        ),
        st.tuples(
            st.lists(message(), min_size=1, max_size=6).map(b"".join), st.integers(0, 10**4), st.binary(max_size=2)
        ).map(lambda t: t[0][: t[1] % len(t[0])] + t[2] + t[0][t[1] % len(t[0]) :]),
    )
)
@settings(max_examples=500, deadline=None)
@example(b"MSG a 99999999999999999999999999 3\r\nabc\r\n")
@example(b"MSG a 1 99999999999999999999999999\r\nabc\r\n")
@example(b"MSG a 1 9999999999999999999\r\nabc\r\n")
@example(b"HMSG a 1 5 3\r\nabc\r\n")
@example(b"MSG a  1 3\r\nabc\r\n")
@example(b"MSG  1 3\r\nabc\r\n")
@example(b"MSG a 1  3\r\nabc\r\n")
@example(b"MSG a 1 -3\r\nabc\r\n")
@example(b"MSG a 1 3\nabc\r\n")
@example(b"MSG a\rb 1 3\r\nabc\r\n")
@example(b"MSG a\nb 1 3\r\nabc\r\n")
@example(b"HMSG a 1 3\r\nabc\r\n")
@example(b"HMSGa 1 3\r\nabc\r\n")
@example(b"MSG a 1 3\r\nabcd\r\n")
@example(b"+OK\r\r\n")
@example(b"+OK\n")
@example(b"MSG \xb2 \xb2 3\r\nabc\r\n")
@example(b"PINGPONG\r\n")
def test_any_bytes_parse_alike_or_raise_protocol_error_alike(raw: bytes) -> None:
    assert_same(raw)


def test_a_large_clean_buffer_is_parsed_by_the_vector_scan() -> None:
    """Otherwise the tests above would pass with a vector scan that always gives up."""
    raw = b"".join(
        b"MSG s.%d 3 $JS.ACK.S.c.1.%d.%d.1790000000000000000.0 5\r\nhello\r\n" % (i, i, i)
        if i % 3
        else b"HMSG s.%d 3 12 17\r\nNATS/1.0\r\n\r\nhello\r\n" % i
        for i in range(1000)
    )
    raw += b"PING\r\nMSG s 3 100\r\nnot all of"
    frames = _scan_vector(as_bytes(raw), len(raw))
    assert frames is not None
    assert described(frames) == described(scan_plain(as_bytes(raw), len(raw)))
    assert len(frames) == 1000
    assert frames.controls == (b"PING",)
    assert raw[frames.consumed :].startswith(b"MSG s 3 100")


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 200 OK\r\n", b"\r\n", b"MSG a 1\r\n", b"MSG a x 3\r\nabc\r\n", b"msg a 1 0\r\n\r\n"]
)
def test_bytes_that_are_no_frame_raise_and_say_which(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"starts with|malformed"):
        scan(as_bytes(raw), len(raw))


def test_the_length_of_an_unfinished_frame_is_known_from_its_line() -> None:
    raw = b"HMSG a 1 r 12 8000012\r\nNATS/1.0\r\n"
    assert bytes_of_first(as_bytes(raw), len(raw)) == 23 + 8_000_012 + 2
    assert bytes_of_first(as_bytes(raw), 10) == 0
    assert bytes_of_first(as_bytes(b"PING\r\n"), 6) == 0


@given(
    st.lists(
        st.one_of(st.integers(0, 2**63 - 1).map(lambda n: b"%d" % n), st.text(max_size=4).map(str.encode)), max_size=8
    )
)
def test_numbers_are_read_exactly_or_refused(texts: list[bytes]) -> None:
    raw = as_bytes(b" ".join(texts) + b" ")
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64) - 1
    starts = ends - np.array([len(text) for text in texts], dtype=np.int64)
    read = uints(raw, starts, ends)
    if all(text.isdigit() and len(text) <= 19 and int(text) < 2**63 for text in texts):
        assert read is not None
        assert read.tolist() == [int(text) for text in texts]
    else:
        assert read is None


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=5)), max_size=20))
def test_slices_are_copied_out_of_the_buffer(pairs: list[tuple[bytes, bytes]]) -> None:
    raw = bytearray(b"".join(kept + gap for kept, gap in pairs))
    starts = np.cumsum([0] + [len(kept) + len(gap) for kept, gap in pairs], dtype=np.int64)[:-1]
    ends = starts + np.array([len(kept) for kept, _ in pairs], dtype=np.int64)
    data = np.frombuffer(raw, dtype=np.uint8)
    array = binary_array(data, starts, ends)
    text, offsets = compact(data, starts, ends)
    raw[:] = bytes(len(raw))  # the buffer is used again
    assert array.to_pylist() == [kept for kept, _ in pairs]
    assert text.tobytes() == b"".join(kept for kept, _ in pairs)
    assert offsets.tolist() == [0, *np.cumsum([len(kept) for kept, _ in pairs]).tolist()]
