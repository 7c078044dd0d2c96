"""Rows into publish frames: the bytes are right, bad rows are refused by number, ids depend on rows alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.wire.errors import MessageTooLarge
from parti.wire.outgoing import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    HEADERS,
    RowRefused,
    Rows,
    atomic_frames,
    check_sizes,
    checked,
    chunk_id,
    chunks,
    joined_bytes,
    single_frames,
)


def rows(values: Any, subject: Any = "o.1", headers: Any = None, msg_id: Any = None) -> Rows:
    n = len(values)
    return Rows(
        pa.array(values, pa.binary()),
        pa.array([subject.encode()] * n if isinstance(subject, str) else subject, pa.binary()),
        None if headers is None else pa.array(headers, HEADERS),
        None if msg_id is None else pa.array(msg_id, pa.binary()),
    )


def test_a_frame_is_what_the_protocol_asks_for() -> None:
    built = single_frames(rows([b"hello", b""]), "_INBOX.x", 7, "q-1-0-0-d", b"")
    head = b"NATS/1.0\r\nNats-Msg-Id: q-1-0-0-d-0\r\n\r\n"
    second = head.replace(b"d-0", b"d-1")
    assert joined_bytes(built.frames).to_pybytes() == (
        b"HPUB o.1 _INBOX.x.7 %d %d\r\n%shello\r\n" % (len(head), len(head) + 5, head)
        + b"HPUB o.1 _INBOX.x.8 %d %d\r\n%s\r\n" % (len(head), len(head), second)
    )


def test_an_atomic_batch_numbers_its_messages_and_commits_with_the_last() -> None:
    frames = atomic_frames(rows([b"a", b"b", b"c"]), "_INBOX.x", 7, "B", "id", b"").frames.to_pylist()
    assert [b"Nats-Batch-Sequence: %d\r\n" % n in frame for n, frame in enumerate(frames, 1)] == [True] * 3
    assert [b"Nats-Batch-Commit: 1\r\n" in frame for frame in frames] == [False, False, True]
    assert [b"Nats-Msg-Id: id\r\n" in frame for frame in frames] == [True, False, False]
    assert frames[0].startswith(b"HPUB o.1 _INBOX.x.7 ")
    assert frames[1].startswith(b"HPUB o.1  ")
    assert frames[2].startswith(b"HPUB o.1 _INBOX.x.8 ")


def test_headers_are_written_in_order_with_repeats_and_without_those_of_the_first_publish() -> None:
    given = [
        [("a", b"1"), ("Nats-Msg-Id", b"old"), ("a", b"2"), ("nats-expected-last-sequence", b"4")],
        None,
        [("b", b"")],
        [],
    ]
    built = single_frames(rows([b"x"] * 4, headers=[_entries(e) for e in given]), "i", 1, "c", b"").frames.to_pylist()
    assert [frame.split(b"Nats-Msg-Id: c-")[1].split(b"\r\n", 1)[1] for frame in built] == [
        b"a: 1\r\na: 2\r\n\r\nx\r\n",
        b"\r\nx\r\n",
        b"b: \r\n\r\nx\r\n",
        b"\r\nx\r\n",
    ]


def _entries(entries: Any) -> Any:
    return None if entries is None else [{"key": key, "value": value} for key, value in entries]


def test_a_slice_of_rows_builds_its_own_frames_only() -> None:
    whole = rows([b"a", b"b", b"c"], headers=[_entries([("k", b"%d" % n)]) for n in range(3)])
    part = single_frames(whole.slice(1, 1), "i", 1, "c", b"").frames.to_pylist()
    assert len(part) == 1
    assert part[0].endswith(b"k: 1\r\n\r\nb\r\n")
    assert chunk_id("s", 0, whole.slice(1, 1)) == chunk_id("s", 0, rows([b"b"], headers=[_entries([("k", b"1")])]))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b"a b", "blank"),
        (b"a\r\nPUB x 0", "blank"),
        (b"", "empty"),
        (b"a..b", "token 2 is empty"),
        (b".a", "token 1 is empty"),
        (b"a.", "token 2 is empty"),
        (b"a.*", "wildcard"),
        (b">", "wildcard"),
        (b"$JS.API.STREAM.DELETE.ORDERS", "belongs to the server"),
        (b"$SYS.REQ.SERVER", "belongs to the server"),
        (b"a.\xff", "UTF-8"),
    ],
)
def test_a_subject_that_cannot_be_published_to_is_refused_by_row(bad: Any, why: Any) -> None:
    with pytest.raises(RowRefused, match=f"row 12.*{why}"):
        checked(rows([b"1", b"2", b"3"], subject=[b"fine.x", b"a*b.c>d.$KV.$JS", bad]), first=10)


def test_nulls_are_refused_by_row() -> None:
    with pytest.raises(RowRefused, match="row 1: value is null"):
        checked(rows([b"1", None]))
    with pytest.raises(RowRefused, match="row 0: subject is null"):
        checked(rows([b"1", b"2"], subject=[None, b"a"]))


@pytest.mark.parametrize(
    "entry", [("", b"x"), ("a b", b"x"), ("a:b", b"x"), ("a\r\nb", b"x"), ("a", b"x\r\ny: z"), ("a", None)]
)
def test_a_header_that_would_become_another_is_refused_by_row(entry: Any) -> None:
    with pytest.raises(RowRefused, match="row 1: a header"):
        checked(rows([b"1", b"2"], headers=[None, _entries([("fine", b"x"), entry])]))


@pytest.mark.parametrize("bad", [b"", b"a\nb"])
def test_a_message_id_that_is_empty_or_breaks_the_line_is_refused_and_null_is_generated(bad: Any) -> None:
    ids = checked(rows([b"1"], msg_id=[None])).msg_id
    assert ids is not None
    assert ids.null_count == 1
    frame = single_frames(rows([b"1", b"2"], msg_id=[None, b"mine"]), "i", 1, "c", b"").frames.to_pylist()
    assert b"Nats-Msg-Id: c-0\r\n" in frame[0]
    assert b"Nats-Msg-Id: mine\r\n" in frame[1]
    with pytest.raises(RowRefused, match="row 0: msg_id"):
        checked(rows([b"1"], msg_id=[bad]))


def test_a_message_above_the_limit_is_refused_with_its_headers_counted() -> None:
    built = single_frames(rows([b"x" * 10, b"x" * 100]), "i", 1, "c", b"")
    check_sizes(built, rows([b"", b""]), int(built.sizes[1]))
    with pytest.raises(MessageTooLarge, match=r"row 6 to 'o.1'.*max_payload"):
        check_sizes(built, rows([b"", b""]), int(built.sizes[1]) - 1, first=5)


def test_chunks_end_at_the_servers_batch_limit_and_at_the_byte_limit() -> None:
    assert [len(c) for c in chunks([rows([b""] * 2500)])] == [CHUNK_ROWS, CHUNK_ROWS, 500]
    assert [len(c) for c in chunks([rows([b"x" * (CHUNK_BYTES // 2)] * 5, subject="")])] == [2, 2, 1]
    assert [len(c) for c in chunks([rows([b"x" * (2 * CHUNK_BYTES)] * 2)])] == [1, 1]
    assert list(chunks([])) == []
    assert list(chunks([rows([])])) == []


@given(st.lists(st.binary(max_size=4), max_size=60), st.lists(st.integers(1, 20), max_size=8))
def test_the_same_rows_get_the_same_ids_however_spark_batches_them(values: Any, cuts: Any) -> None:
    whole = rows(values)
    parts, start = [], 0
    for cut in [*cuts, len(values)]:
        parts.append(whole.slice(start, cut))
        start += cut
    ids = [chunk_id("s", n, c) for n, c in enumerate(chunks([whole]))]
    assert [chunk_id("s", n, c) for n, c in enumerate(chunks(parts))] == ids


def test_other_rows_at_the_same_place_get_another_id() -> None:
    base = rows([b"ab", b"c"], headers=[None, None], msg_id=[None, None])
    others = [
        rows([b"a", b"bc"], headers=[None, None], msg_id=[None, None]),
        rows([b"c", b"ab"], headers=[None, None], msg_id=[None, None]),
        rows([b"ab", b"c"], subject="o.2", headers=[None, None], msg_id=[None, None]),
        rows([b"ab", b"c"], headers=[_entries([("k", b"v")]), None], msg_id=[None, None]),
        rows([b"ab", b"c"], headers=[None, _entries([("k", b"v")])], msg_id=[None, None]),
        rows([b"ab", b"c"], headers=[None, None], msg_id=[b"x", None]),
    ]
    assert len({chunk_id("s", 0, each) for each in (base, *others)}) == len(others) + 1
    assert chunk_id("s", 0, base, salt="q1") != chunk_id("s", 0, base, salt="q2")
