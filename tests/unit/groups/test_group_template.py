"""The consumer of a member: exact to the nanosecond; settings outside the group's are free, the group's are fixed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.groups import ConsumerTemplate, GroupKind, MemberOptions, errors
from parti.groups.freeze_detector import Limits
from parti.groups.template import nanoseconds


@given(st.integers(1, 10**7))
def test_a_duration_in_decimals_is_the_number_of_nanoseconds_that_go_has(milliseconds: int) -> None:
    assert nanoseconds(milliseconds / 1000) == milliseconds * 1_000_000


def test_seconds_that_have_no_exact_float_are_rounded() -> None:
    config = ConsumerTemplate(ack_wait=4.1, backoff=(1.1, 4.1)).config(GroupKind.ELASTIC, "m", ("0.>",))
    assert config["ack_wait"] == config["inactive_threshold"] == config["priority_timeout"] == 4_100_000_000
    assert config["backoff"] == [1_100_000_000, 4_100_000_000]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"filter_subjects": ["a"]}, "the group's own"),
        ({"priority_groups": ["x"], "name": "n"}, "name, priority_groups"),
        ({"ack_wait": 1}, "the template has a field for it"),
        ({"opt_start_seq": 1}, "the template has a field for it"),
    ],
)
def test_what_is_the_groups_own_or_has_a_field_is_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.BadTemplate, match=says):
        ConsumerTemplate(extra=extra)


def test_a_start_is_given_once_and_never_for_an_elastic_member() -> None:
    with pytest.raises(errors.BadTemplate, match="another start"):
        ConsumerTemplate(extra={"deliver_policy": "last"}, start_sequence=3)
    with pytest.raises(errors.BadTemplate, match="when the group is created"):
        ConsumerTemplate(extra={"deliver_policy": "last"}).check_kind(GroupKind.ELASTIC)


def test_a_drain_has_a_time() -> None:
    with pytest.raises(errors.BadTemplate):
        MemberOptions(drain_timeout=-1)


@given(
    st.dictionaries(
        st.sampled_from(["ack_wait", "priority_timeout", "max_ack_pending", "max_batch", "max_expires"]),
        st.integers(-1, 10**12),
    )
)
def test_the_limits_of_any_consumer_can_be_followed(config: dict[str, int]) -> None:
    limits = Limits(5.0, 5.0, 1)
    limits.follow(config)
    assert limits.ack_wait > 0 or config.get("ack_wait", 1) < 0
    assert min(limits.max_pending, limits.max_batch, limits.max_expires) >= 0
