"""Whether any client can know of a pin, from a consumer's info alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from parti.groups.common import holder, pinned_id, stray_pin

SECOND = "2026-11-16T15:36:14"


def info(pinned: int | None, sent: int | None, **config: Any) -> dict[str, Any]:
    group: dict[str, Any] = {"group": "PCG", "pinned_ts": "0001-01-01T00:00:00Z"}
    if pinned is not None:
        group |= {"pinned_client_id": "p", "pinned_ts": f"{SECOND}.{pinned:09d}Z"}
    delivered = {} if sent is None else {"last_active": f"{SECOND}.{sent:09d}Z"}
    return {"config": config, "delivered": delivered, "priority_groups": [group]}


NANOSECONDS = st.integers(0, 999_999_999)


@given(pinned=st.none() | NANOSECONDS, sent=st.none() | NANOSECONDS)
def test_a_pin_under_which_nothing_was_sent_is_nobodys(pinned: int | None, sent: int | None) -> None:
    seen = info(pinned, sent)
    stray = pinned is not None and (sent is None or sent < pinned)
    assert stray_pin(seen) == ("p" if stray else None)
    assert holder(seen) == (None if stray else pinned_id(seen))


def test_where_the_server_may_pause_before_it_sends_nothing_is_said() -> None:
    assert stray_pin(info(5, None, rate_limit_bps=1_000)) is None


def test_a_consumer_without_priority_groups_has_no_pin() -> None:
    assert stray_pin({"config": {}, "delivered": {}}) is None
