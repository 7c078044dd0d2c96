"""From frames to columns: ack subjects of every form, headers unchanged, and the headers that Direct Get adds."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.errors import ProtocolError
from parti.wire.columns import (
    SCHEMA,
    _ack_numbers_plain,
    consumer_deliveries,
    direct_deliveries,
    header_column,
    is_delivery,
)
from parti.wire.frames import Frames, _scan_vector, scan_plain

NANOSECONDS = 1_790_000_000_123_456_789


STREAM = b"S"


def frames_of(*raw: bytes) -> Frames:
    joined = b"".join(raw)
    frames = scan_plain(np.frombuffer(joined, dtype=np.uint8), len(joined))
    assert frames.consumed == len(joined)
    return frames


def message(subject: str, reply: str, payload: bytes = b"", header: bytes = b"") -> bytes:
    line = f"{subject} 2 {reply} " if reply else f"{subject} 2 "
    if header:
        return b"HMSG %s%d %d\r\n%s%s\r\n" % (line.encode(), len(header), len(header) + len(payload), header, payload)
    return b"MSG %s%d\r\n%s\r\n" % (line.encode(), len(payload), payload)


def ack(shape: int, numbers: tuple[int, ...]) -> str:
    tail = ".".join(str(number) for number in numbers)
    if shape == 9:
        return f"$JS.ACK.ORDERS.c-1.{tail}"
    if shape == 11:
        return f"$JS.ACK.hub.AAAA.ORDERS.c-1.{tail}"
    return f"$JS.ACK._.AAAA.ORDERS.c-1.{tail}.xyz"


def direct(subject: str, sequence: int, time: str, own: bytes = b"", payload: bytes = b"", pending: int = 0) -> bytes:
    header = (
        b"NATS/1.0\r\n%sNats-Stream: S\r\nNats-Subject: %s\r\nNats-Sequence: %d\r\nNats-Time-Stamp: %s\r\n"
        b"Nats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n"
    ) % (own, subject.encode(), sequence, time.encode(), pending, sequence - 1)
    return message("_INBOX.x.1", "", payload, header)


numbers = st.tuples(
    st.integers(1, 99),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
)


@given(st.lists(st.tuples(st.sampled_from([9, 11, 12]), numbers), min_size=1, max_size=20))
@settings(deadline=None)
def test_positions_are_read_from_ack_subjects_of_any_and_of_mixed_length(
    rows: list[tuple[int, tuple[int, int, int, int, int]]],
) -> None:
    frames = frames_of(*(message("s", ack(shape, values), b"x") for shape, values in rows))
    assert is_delivery(frames).all()
    deliveries = consumer_deliveries(frames)
    assert deliveries.numbers.T.tolist() == [list(values) for _, values in rows]


runs = st.lists(
    st.tuples(
        st.sampled_from([9, 11, 12]),
        st.tuples(*[st.integers(0, 18).map(lambda digits: max(10**digits - 40, 1)) | st.integers(0, 2**62)] * 5),
        st.sampled_from([(0, 1, 1, 17, -1), (1, 1, 1, 1, 1), (0, 10**15, 3, 10**17, 0)]),
        st.integers(1, 90),
    ),
    min_size=2,
    max_size=6,
)


@given(runs, st.none() | st.sampled_from(["1.2.3.4", "1.2.x.4.5", "1.2.3.4.", "1.2.3.4.5.6.7.8.9", "1.2.:.4.5"]))
@settings(deadline=None, max_examples=60)
def test_a_large_batch_is_read_in_runs_as_each_reply_alone(
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int]], bad: str | None
) -> None:
    """Runs of one consumer, whose numbers get longer and shorter on the way, of several shapes, and a broken reply."""
    values = [
        (shape, tuple(min(max(number + step * row, 0), 2**63 - 1) for number, step in zip(first, steps, strict=True)))
        for shape, first, steps, count in rows
        for row in range(count)
    ]
    values += [(9, (1, 10**6 + row, row, NANOSECONDS + row, 500 - row)) for row in range(300)]
    raw = [message("s", ack(shape, numbers), b"x") for shape, numbers in values]
    if bad is not None:
        raw[len(raw) // 2] = message("s", f"$JS.ACK.S.c.{bad}", b"x")
        with pytest.raises(ProtocolError, match=r"no acknowledgement subject"):
            consumer_deliveries(frames_of(*raw))
        return
    assert consumer_deliveries(frames_of(*raw)).numbers.T.tolist() == [list(numbers) for _, numbers in values]
    some = consumer_deliveries(frames_of(*raw), (1, 2))
    assert some.numbers[1:3].T.tolist() == [list(numbers[1:3]) for _, numbers in values]
    assert some.pending_behind_last() == values[-1][1][4]


@given(
    st.sampled_from([9, 11, 12]),
    st.sampled_from([(1, 10**5, 10**5, NANOSECONDS, 9 * 10**5), (7, 10**18, 10**8, NANOSECONDS, 500)]),
    st.lists(st.binary(max_size=9), min_size=128, max_size=300),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_lines_of_one_layout_are_read_together_as_each_alone(
    shape: int, first: tuple[int, ...], payloads: list[bytes], data: st.DataObject
) -> None:
    """Cut anywhere; payloads with line feeds and without, and one byte that is not what the server sent."""
    values = [(first[0], *(number + row % 90 for number in first[1:])) for row in range(len(payloads))]
    raw = b"".join(
        message("s" * (1 + row % 5), ack(shape, numbers), payload)
        for row, (numbers, payload) in enumerate(zip(values, payloads, strict=True))
    )
    raw = raw[: data.draw(st.integers(len(raw) * 9 // 10, len(raw)))]
    frames = _scan_vector(np.frombuffer(raw, dtype=np.uint8), len(raw))
    plain = scan_plain(np.frombuffer(raw, dtype=np.uint8), len(raw))
    if frames is not None:
        assert frames.positions.tolist() == plain.positions.tolist()
        assert frames.consumed == plain.consumed
        assert len(frames) < 128 or frames.tails is not None
        assert is_delivery(frames).all()
        found = consumer_deliveries(frames)
        assert found.numbers.T.tolist() == [list(numbers) for numbers in values[: len(plain)]]
        assert found.to_arrow(("data",)).column(0).to_pylist() == payloads[: len(plain)]
    broken = bytearray(raw)
    broken[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    frames = _scan_vector(np.frombuffer(broken, dtype=np.uint8), len(broken))
    with contextlib.suppress(ProtocolError):  # what only the plain loop refuses is a blank where no server sends one
        plain = scan_plain(np.frombuffer(broken, dtype=np.uint8), len(broken))
        expected = _ack_numbers_plain(plain.select(is_delivery(plain))).tolist()
        assert frames is None or frames.positions.tolist() == plain.positions.tolist()
        assert frames is None or consumer_deliveries(frames.select(is_delivery(frames))).numbers.tolist() == expected


@pytest.mark.parametrize("shape", [9, 11, 12])
def test_each_number_of_an_ack_subject_has_its_name(shape: int) -> None:
    deliveries = consumer_deliveries(frames_of(message("a.b", ack(shape, (3, 17, 5, NANOSECONDS, 9)), b"hi")))
    assert deliveries.delivered.tolist() == [3]
    assert deliveries.stream_seq.tolist() == [17]
    assert deliveries.consumer_seq.tolist() == [5]
    assert deliveries.timestamp.tolist() == [NANOSECONDS]
    assert deliveries.pending.tolist() == [9]


@pytest.mark.parametrize(
    "reply",
    ["$JS.ACK.S.c.1.2.3.4", "$JS.ACK.S.c.1.2.x.4.5", "$JS.ACK.S.c.1.2.3.4.", "$JS.ACK.a.b.c.d.e.f.g.h.i.j.k.l"],
)
def test_a_reply_that_is_no_ack_subject_raises_and_is_shown(reply: str) -> None:
    good = message("s", ack(9, (1, 1, 1, 1, 1)))
    with pytest.raises(ProtocolError, match=r"no acknowledgement subject"):
        consumer_deliveries(frames_of(good, message("s", reply)))


def test_statuses_and_answers_are_told_from_deliveries() -> None:
    frames = frames_of(
        message("_INBOX.x.1", "", header=b"NATS/1.0 404 No Messages\r\n\r\n"),
        message("s", ack(9, (1, 1, 1, 1, 1))),
        message("s", "_INBOX.reply"),
        message("s", "$JS.ACK"),
        message("s", "$JS.ACK."),
    )
    assert is_delivery(frames).tolist() == [False, True, False, False, False]


def test_the_batch_has_the_schema_and_the_values_and_owns_its_memory() -> None:
    raw = bytearray(
        message("a.b", ack(9, (1, 7, 1, NANOSECONDS, 1)), b"one")
        + message("käse.🧀", ack(9, (1, 9, 2, NANOSECONDS + 1, 0)), b"", b"NATS/1.0\r\nk: v\r\n\r\n")
    )
    batch = consumer_deliveries(scan_plain(np.frombuffer(raw, dtype=np.uint8), len(raw))).to_arrow(tuple(SCHEMA.names))
    raw[:] = bytes(len(raw))
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    assert batch.column("subject").to_pylist() == ["a.b", "käse.🧀"]
    assert batch.column("sequence").to_pylist() == [7, 9]
    assert batch.column("timestamp").cast("int64").to_pylist() == [NANOSECONDS, NANOSECONDS + 1]
    assert batch.column("data").to_pylist() == [b"one", b""]
    assert batch.column("headers").to_pylist() == [None, [{"key": "k", "value": b"v"}]]


def test_only_the_asked_columns_are_made() -> None:
    deliveries = consumer_deliveries(frames_of(message("a", ack(9, (1, 7, 1, 1, 1)), b"x")))
    assert deliveries.to_arrow(("data", "sequence")).to_pylist() == [{"data": b"x", "sequence": 7}]


def test_a_subject_that_is_no_utf8_does_not_stop_the_batch() -> None:
    raw = b"MSG s.\xff 2 " + ack(9, (1, 7, 1, 1, 1)).encode() + b" 1\r\nx\r\n"
    deliveries = consumer_deliveries(frames_of(raw, message("ok", ack(9, (1, 8, 2, 1, 0)))))
    assert deliveries.subjects().to_pylist() == ["s.�", "ok"]


def headers_of(*blocks: bytes) -> list[object]:
    frames = frames_of(*(message("s", "", b"payload: no header\r\n", block) for block in blocks))
    column = header_column(frames.data, frames.header_start, frames.payload_start)
    column.validate(full=True)
    return [
        None if entries is None else [(entry["key"], entry["value"]) for entry in entries]
        for entries in column.to_pylist()
    ]


def test_headers_keep_order_repeats_and_empty_values() -> None:
    assert headers_of(
        b"NATS/1.0\r\na: 1\r\nb:2\r\na: 3\r\nempty:\r\nblank: \r\ntwo:  2\r\nurl: http://h:1/x\r\n\r\n",
        b"",
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nlast: yes\r\n\r\n",
    ) == [
        [
            ("a", b"1"),
            ("b", b"2"),
            ("a", b"3"),
            ("empty", b""),
            ("blank", b""),
            ("two", b" 2"),
            ("url", b"http://h:1/x"),
        ],
        None,
        None,
        [("last", b"yes")],
    ]


def test_a_status_line_inside_a_stored_message_is_no_header() -> None:
    assert headers_of(b"NATS/1.0 503 No: Responders\r\nk: v\r\n\r\n") == [[("k", b"v")]]


def test_header_values_may_be_any_bytes_and_names_that_are_no_utf8_are_marked() -> None:
    assert headers_of(b"NATS/1.0\r\nk: \xff\x00\r\n\xffx: 1\r\n\r\n") == [[("k", b"\xff\x00"), ("\ufffdx", b"1")]]


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.text("abcXYZ-_1", min_size=1, max_size=6),
                st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=8),
                st.sampled_from([":", ": "]),
            ),
            max_size=4,
        ),
        max_size=8,
    )
)
@settings(deadline=None)
def test_headers_come_out_as_they_were_written(blocks: list[list[tuple[str, str, str]]]) -> None:
    raw = [
        b"NATS/1.0\r\n" + b"".join(f"{key}{colon}{value}\r\n".encode() for key, value, colon in block) + b"\r\n"
        for block in blocks
    ]

    def expected(block: list[tuple[str, str, str]]) -> object:
        pairs = [
            (key, (value[1:] if colon == ":" and value.startswith(" ") else value).encode())
            for key, value, colon in block
        ]
        return pairs or None

    assert headers_of(*raw) == [expected(block) for block in blocks]


def test_direct_get_gives_subject_sequence_time_and_the_messages_own_headers() -> None:
    frames = frames_of(
        direct("a.b", 41, "2026-11-15T11:56:36.68246033Z", b"k: v\r\n", b"one", 3),
        direct("c", 44, "2026-11-15T11:56:36Z", payload=b"", pending=2),
        direct("d", 45, "2026-11-15T11:56:36.1Z", payload=b"three", pending=1),
        message("_INBOX.x.1", "", header=b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 1\r\nNats-Last-Sequence: 45\r\n\r\n"),
    )
    deliveries, statuses = direct_deliveries(frames, STREAM)
    assert statuses == [3]
    batch = deliveries.to_arrow(tuple(SCHEMA.names))
    batch.validate(full=True)
    second = 1_794_743_796_000_000_000
    assert batch.column("subject").to_pylist() == ["a.b", "c", "d"]
    assert batch.column("sequence").to_pylist() == [41, 44, 45]
    assert batch.column("timestamp").cast("int64").to_pylist() == [second + 682_460_330, second, second + 100_000_000]
    assert batch.column("headers").to_pylist() == [[{"key": "k", "value": b"v"}], None, None]
    assert batch.column("data").to_pylist() == [b"one", b"", b"three"]
    assert deliveries.pending.tolist() == [3, 2, 1]


def test_direct_get_headers_that_the_message_itself_carries_stay_its_own() -> None:
    """Republished messages carry the same names; only the last lines are the server's."""
    own = (
        b"Nats-Stream: OTHER\r\nNats-Subject: x.y\r\nNats-Sequence: 7\r\nNats-Time-Stamp: 2001-01-01T00:00:00Z\r\n"
        b"Nats-Num-Pending: 1\r\nNats-Last-Sequence: 3\r\n"
    )
    deliveries, statuses = direct_deliveries(frames_of(direct("a", 100, "2026-11-15T11:56:36Z", own, b"p")), STREAM)
    assert statuses == []
    row = deliveries.to_arrow(tuple(SCHEMA.names)).to_pylist()[0]
    assert (row["subject"], row["sequence"], row["data"]) == ("a", 100, b"p")
    assert [(entry["key"], entry["value"]) for entry in row["headers"]] == [
        ("Nats-Stream", b"OTHER"),
        ("Nats-Subject", b"x.y"),
        ("Nats-Sequence", b"7"),
        ("Nats-Time-Stamp", b"2001-01-01T00:00:00Z"),
        ("Nats-Num-Pending", b"1"),
        ("Nats-Last-Sequence", b"3"),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        [],
        [message("_INBOX.x.1", "", header=b"NATS/1.0 404 Message Not Found\r\n\r\n")],
        [message("_INBOX.x.1", "", b"no header at all")],
        [message("_INBOX.x.1", "", header=b"NATS/1.0 408 a\r\nb: 1\r\nc: 1\r\nd: 1\r\ne: 1\r\nf: 1\r\ng: 1\r\n\r\n")],
        [message("_INBOX.x.1", "", header=b"x")],
    ],
)
def test_an_answer_of_statuses_alone_has_no_messages(raw: list[bytes]) -> None:
    deliveries, statuses = direct_deliveries(frames_of(*raw), STREAM)
    assert len(deliveries) == 0
    assert statuses == list(range(len(raw)))
    assert deliveries.to_arrow(tuple(SCHEMA.names)).num_rows == 0


def test_selecting_keeps_messages_and_their_positions_together() -> None:
    deliveries = consumer_deliveries(
        frames_of(*(message(f"s.{i}", ack(9, (1, i, i, i, 0)), b"%d" % i) for i in range(1, 6)))
    )
    picked = deliveries.select(deliveries.stream_seq % 2 == 1)
    assert picked.to_arrow(("subject", "sequence", "data")).to_pylist() == [
        {"subject": f"s.{i}", "sequence": i, "data": b"%d" % i} for i in (1, 3, 5)
    ]
