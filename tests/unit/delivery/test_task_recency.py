"""Which of two tasks is newer, by the document's own order; and which names may be shown."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.delivery.masking import looks_like_a_value, masked
from parti.delivery.recency import has_order, is_older, newest


@dataclass(frozen=True)
class Event:
    lsn: str = ""
    seq: int = 0
    ts: int = 0


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (Event("9"), Event("10")),
        (Event("0/9"), Event("0/10")),
        (Event("F/1"), Event("10/0")),
        (Event("01ARZ3NDEKTSV4RRFFQ69G5FAV"), Event("01ARZ3NDEKTSV4RRFFQ69G5FAW")),
        (Event("5", seq=9), Event("6", seq=1)),
        (Event("5", seq=1), Event("5", seq=2)),
        (Event("5", seq=1), Event("", seq=2)),
        (Event("5", seq=1), Event("0/1", seq=2)),
        (Event(seq=1, ts=9), Event(seq=2, ts=1)),
        (Event(ts=1), Event(ts=2)),
    ],
)
def test_the_documents_own_order_counts_whichever_came_first(older: Event, newer: Event) -> None:
    assert is_older(older, newer)
    assert not is_older(newer, older)
    assert newest([older, newer]) == 1
    assert newest([newer, older]) == 0


@pytest.mark.parametrize("other", [None, Event(), Event("x"), Event("5"), Event(seq=3)])
def test_where_the_document_has_no_order_the_last_that_came_is_the_newest(other: Event | None) -> None:
    assert newest([Event(), other]) == 1
    assert newest([other, Event()]) == 1
    assert not has_order(Event())


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=12), st.sampled_from(["lsn", "seq", "ts", "pg"]))
def test_of_any_number_in_any_order_the_newest_is_found(places: list[int], field: str) -> None:
    if field == "pg":
        events = [Event(lsn=f"{place >> 4:X}/{place & 15:X}") for place in places]
    else:
        events = [Event(**{field: str(place) if field == "lsn" else place}) for place in places]  # type: ignore[arg-type]
    assert places[newest(events)] == max(places)


@given(st.text(), st.text(), st.integers(), st.integers())
def test_no_text_and_no_number_raises(one: str, other: str, seq: int, ts: int) -> None:
    first, second = Event(one, seq, ts), Event(other, ts, seq)
    assert not (is_older(first, second) and is_older(second, first))


@pytest.mark.parametrize("name", ["billing", "my-secret", "shop_orders.v2", "X-Custom-Header-2", "prod-db-eu-west-1"])
def test_a_name_is_shown(name: str) -> None:
    assert masked(name) == repr(name)


@pytest.mark.parametrize(
    "value",
    [
        "whsec_" + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "9f86d081884c7d659a2feaa0c55ad015",
        "550e8400-e29b-41d4-a716-446655440000",
        "Authorization: Bearer abc",
        "eyJhbGciOiJIUzI1NiJ9.e30.x",
        "dGhpc2lzYXNlY3JldA",
        "a b",
        "",
        "x\r\ny",
    ],
)
def test_what_may_be_a_value_is_not(value: str) -> None:
    assert looks_like_a_value(value)
    assert masked(value) == f"(hidden, {len(value)} characters)"
