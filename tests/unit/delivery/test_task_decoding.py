"""Delivery tasks: decoded strictly, keyed by their document, and sent without private fields."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.delivery.errors import Malformed, TooLarge
from parti.delivery.task import decode_task, duration_seconds, is_bad_duration, lane_key, request_body, task_id

TASK: dict[str, Any] = {
    "triggerId": "t1",
    "database": "shop",
    "collection": "orders",
    "documentId": "o-1",
    "event": "update",
    "lsn": "",
    "seq": 0,
    "ts": 0,
    "url": "https://example.com/hook?token=s3cret",
    "headers": {"Authorization": "Bearer s3cret"},
    "secretsRef": "billing-key",
    "retryPolicy": {"maxAttempts": 3, "initialBackoff": "1s", "maxBackoff": 5_000_000_000},
    "timeout": "10s",
    "preIssuedToken": "jwt",
    "payload": {"total": 12.50, "name": "Zoë"},
}


def task(**changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (TASK | changes).items() if value is not ...}).encode()


def test_a_task_as_syntrix_writes_it_is_understood() -> None:
    decoded = decode_task(task(before=None, headers=None, after={"a": 1}, subjectHashed=True))
    assert decoded.unknown_fields == 0
    found = decoded.task
    assert (found.trigger_id, found.document_id, found.subject_hashed) == ("t1", "o-1", True)
    assert found.retry_policy is not None
    assert duration_seconds(found.retry_policy.initial_backoff) == 1.0
    assert duration_seconds(found.retry_policy.max_backoff) == 5.0


def test_fields_that_nobody_knows_are_ignored_and_counted() -> None:
    assert decode_task(task(colour="red", size=3)).unknown_fields == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        task(documentId=...),
        task(url=...),
        task(database=...),
        task(triggerId=...),
        task(documentId=""),
        task(url=""),
        task(documentId=7),
        task(headers=["a"]),
        task(headers={"a": 1}),
        task(seq="1"),
        task(retryPolicy="often"),
        task(event=None),
        task(subjectHashed="yes"),
    ],
)
def test_what_is_no_task_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_task(data)


def test_deep_nesting_is_no_crash() -> None:
    deep = task(payload=...)[:-1] + b', "payload": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"
    with contextlib.suppress(Malformed):
        decode_task(deep)


def test_a_task_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(TooLarge, match=r"deliver\.max_task"):
        decode_task(b"x" * 1001, max_size=1000)
    with pytest.raises(TooLarge, match=r"deliver\.max_body"):
        request_body(decode_task(task()).task, "id", max_size=100)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_task_or_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_task(data)


@given(
    st.dictionaries(
        st.sampled_from([*TASK, "before", "after", "x"]),
        st.from_type(type(None))
        | st.integers()
        | st.floats()
        | st.text()
        | st.booleans()
        | st.lists(st.integers())
        | st.dictionaries(st.text(), st.text()),
    )
)
def test_any_value_in_any_field_is_understood_or_refused(changes: dict[str, Any]) -> None:
    try:
        decoded = decode_task(json.dumps(TASK | changes).encode())
    except Malformed:
        return
    found = decoded.task
    duration_seconds(found.timeout)
    is_bad_duration(found.timeout)
    assert len(lane_key(found)) == 32


def test_the_body_holds_the_event_and_nothing_else() -> None:
    body = request_body(decode_task(task()).task, "msg_1")
    found = json.loads(body)
    assert found == {
        "id": "msg_1",
        "triggerId": "t1",
        "event": "update",
        "database": "shop",
        "collection": "orders",
        "documentId": "o-1",
        "lsn": "",
        "seq": 0,
        "ts": 0,
        "payload": TASK["payload"],
    }
    for secret in (b"s3cret", b"billing-key", b"jwt", b"example.com", b"maxAttempts"):
        assert secret not in body


def test_the_payload_is_passed_on_byte_for_byte() -> None:
    raw = b'{"b": 1.10,   "a":"\\u00eb", "n": 12345678901234567890}'
    data = task(payload=...)[:-1] + b', "payload": ' + raw + b"}"
    assert raw in request_body(decode_task(data).task, "m")


def test_bytes_that_are_no_text_are_refused_also_where_nobody_looks() -> None:
    data = task(payload=...)[:-1] + b', "payload": {"a": "\xff"}}'
    with pytest.raises(Malformed, match="utf-8"):
        decode_task(data)


def test_a_task_shows_no_secret_when_printed() -> None:
    shown = repr(decode_task(task()).task)
    assert shown == "<DeliveryTask t1 update shop/orders/o-1>"


def test_documents_whose_names_only_join_to_the_same_text_are_two() -> None:
    def key(database: str, collection: str, document: str) -> str:
        return lane_key(decode_task(task(database=database, collection=collection, documentId=document)).task)

    assert key("ab", "c", "d") != key("a", "bc", "d")
    assert key("a", "bc", "d") != key("a", "b", "cd")
    assert key("a", "b", "c") == key("a", "b", "c")


def test_a_lane_may_be_split_by_trigger() -> None:
    one, two = decode_task(task()).task, decode_task(task(triggerId="t2")).task
    assert lane_key(one) == lane_key(two)
    assert lane_key(one, per_trigger=True) != lane_key(two, per_trigger=True)


def test_an_id_is_fixed_by_the_place_in_the_stream() -> None:
    assert task_id("TRIGGERS", 7) == task_id("TRIGGERS", 7)
    assert task_id("TRIGGERS", 7) != task_id("TRIGGERS", 8)
    assert task_id("A", 17) != task_id("A:1", 7)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1s", 1.0),
        ("1m30s", 90.0),
        ("500ms", 0.5),
        (10_000_000_000, 10.0),
        (None, None),
        (0, None),
        ("", None),
        ("-1s", None),
        ("soon", None),
        (-5, None),
        (1e400, None),
        (10**40, None),
        ("1e99s", None),
        ("9" * 5_000 + "s", None),
        (1, None),
        ("900us", None),
        (1_000_000, 0.001),
    ],
)
def test_durations_are_go_texts_or_nanoseconds(value: Any, seconds: float | None) -> None:
    assert duration_seconds(value) == seconds


@pytest.mark.parametrize(
    ("value", "bad"), [(None, False), (0, False), ("0s", False), ("1s", False), ("x", True), (-1, True)]
)
def test_a_duration_that_means_nothing_is_noticed(value: Any, bad: bool) -> None:
    assert is_bad_duration(value) is bad


def test_absent_and_null_documents_are_left_out_of_the_body() -> None:
    body = json.loads(request_body(decode_task(task(payload=None, before=None)).task, "m"))
    assert not {"payload", "before", "after"} & body.keys()
    assert isinstance(decode_task(task()).task.payload, msgspec.Raw)
