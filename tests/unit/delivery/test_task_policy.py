"""The consequences of an attempt: outcome classes, schedules, Retry-After, and where a failed task waits."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.config.deliver import DeliverSection
from parti.delivery.errors import Reason
from parti.delivery.order import OrderHold, OrderRules, RuleBook, TaskOrder, hold
from parti.delivery.policy import (
    UNSPENT,
    AttemptOutcome,
    DeliveryAttempt,
    classify,
    decide,
    is_out_of_bounds,
    parse_retry_after,
    request_timeout,
    retry_policy,
)
from parti.delivery.task import TaskRetryPolicy, is_bad_duration
from parti.errors import ConfigError
from parti.observe import delivery_metrics
from parti.observe.metric import Metric
from parti.outcomes import DONE, Again, Bury, Decision

CONFIG = DeliverSection()
NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "delivered"),
        (204, "delivered"),
        (299, "delivered"),
        (300, "redirected"),
        (302, "redirected"),
        (304, "redirected"),
        (400, "rejected"),
        (401, "rejected"),
        (404, "rejected"),
        (408, "throttled"),
        (410, "gone"),
        (422, "rejected"),
        (425, "throttled"),
        (429, "throttled"),
        (500, "server_error"),
        (503, "server_error"),
        (599, "server_error"),
        (600, "server_error"),
        (101, "server_error"),
    ],
)
def test_a_status_has_its_class(status: int, outcome: str) -> None:
    assert classify(status) == outcome


def test_which_4xx_are_tried_again_is_configurable() -> None:
    assert classify(404, (404,)) is AttemptOutcome.THROTTLED
    assert classify(429, (404,)) is AttemptOutcome.REJECTED


@pytest.mark.parametrize(
    ("status", "value", "wait"),
    [
        (429, "2", 2.0),
        (503, " 10 ", 10.0),
        (500, "2", None),
        (200, "2", None),
        (429, None, None),
        (429, "soon", None),
        (429, "-1", None),
        (429, "1.5", None),
        (429, "9" * 400, 999999999999.0),
        (429, "Mon, 99 Foo", None),
        (429, format_datetime(datetime.fromtimestamp(NOW + 30, UTC), usegmt=True), 30.0),
        (429, format_datetime(datetime.fromtimestamp(NOW - 30, UTC), usegmt=True), 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_heard_from_429_and_503_alone(
    status: int, value: str | None, wait: float | None
) -> None:
    assert parse_retry_after(status, value, NOW) == wait


@given(st.text(max_size=50))
def test_any_retry_after_is_understood_or_ignored(value: str) -> None:
    parse_retry_after(429, value, NOW)


def after(
    outcome: AttemptOutcome,
    attempts: int = 1,
    *,
    age: float = 0.0,
    policy: TaskRetryPolicy | None = None,
    retry_after: float | None = None,
    reason: Reason | None = None,
) -> Decision:
    attempt = DeliveryAttempt(outcome, retry_after=retry_after, reason=reason)
    tries = retry_policy(policy, CONFIG)
    return decide(attempt, attempts=attempts, age=age, policy=tries, config=CONFIG, rng=random.Random(1))


def test_a_delivery_is_done_and_a_refusal_is_buried() -> None:
    assert after(AttemptOutcome.DELIVERED) == DONE
    assert after(AttemptOutcome.REJECTED) == Bury(Reason.REJECTED, "")
    assert after(AttemptOutcome.REDIRECTED) == Bury(Reason.REJECTED, "")
    assert after(AttemptOutcome.GONE) == Bury(Reason.GONE, "")
    assert after(AttemptOutcome.BLOCKED, reason=Reason.SSRF_BLOCKED) == Bury(Reason.SSRF_BLOCKED, "")
    assert after(AttemptOutcome.REFUSED, reason=Reason.NO_SECRET) == Bury(Reason.NO_SECRET, "")


@pytest.mark.parametrize("outcome", ["throttled", "server_error", "timeout", "network", "dns", "tls"])
def test_what_may_pass_is_tried_again_nine_times_over_ten_hours(outcome: str) -> None:
    waits = []
    for attempts in range(1, 9):
        decision = after(AttemptOutcome(outcome), attempts)
        assert isinstance(decision, Again)
        waits.append(decision.delay)
    for wait, step in zip(waits, (1, 5, 30, 120, 600, 3600, 10800, 21600), strict=True):
        assert 0.8 * step <= wait <= 1.2 * step
    assert after(AttemptOutcome(outcome), 9) == Bury(Reason.EXHAUSTED, "")


@pytest.mark.parametrize("outcome", [AttemptOutcome.STORE, AttemptOutcome.LOCAL])
@given(attempts=st.integers(0, 60), wanted=st.none() | st.integers(0, 60))
def test_our_own_trouble_is_tried_again_soon_and_spends_nothing(
    outcome: AttemptOutcome, attempts: int, wanted: int | None
) -> None:
    assert outcome in UNSPENT
    assert not outcome.hurts_host
    decision = after(outcome, attempts, policy=TaskRetryPolicy(wanted))
    assert isinstance(decision, Again)
    assert decision.delay <= 1.2


@given(st.sampled_from([AttemptOutcome.TIMEOUT, AttemptOutcome.LOCAL]), st.integers(0, 8), st.floats(0, 90_000))
def test_no_wait_outlasts_the_age_limit(outcome: AttemptOutcome, attempts: int, age: float) -> None:
    decision = after(outcome, attempts, age=age, retry_after=3600)
    if age >= CONFIG.max_task_age:
        assert decision == Bury(Reason.EXPIRED, "")
    else:
        assert isinstance(decision, Again)
        assert 0 <= decision.delay <= CONFIG.max_task_age - age


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([10**400, -(10**400), 1e308]))
DURATIONS = st.one_of(
    NUMBERS, st.none(), st.text(), st.sampled_from(["9" * 5_000 + "s", "1" * 400 + "h", "1e9s", "²s"])
)


@given(NUMBERS | st.none(), DURATIONS, DURATIONS, DURATIONS, st.integers(1, 10**6))
def test_no_policy_raises(attempts: float | None, initial: Any, most: Any, timeout: Any, number: int) -> None:
    schedule = retry_policy(TaskRetryPolicy(attempts, initial, most), CONFIG)
    assert 1 <= schedule.max_deliver <= 50
    assert 0 < schedule.wait(number) <= 6 * 3600
    assert 0 < request_timeout(timeout, CONFIG) <= 30
    assert isinstance(is_bad_duration(initial), bool)


def test_retry_after_lengthens_and_never_shortens() -> None:
    longer = after(AttemptOutcome.THROTTLED, 1, retry_after=50.0)
    assert longer == Again(50.0, "")
    shorter = after(AttemptOutcome.THROTTLED, 3, retry_after=2.0)
    assert isinstance(shorter, Again)
    assert shorter.delay >= 24
    assert after(AttemptOutcome.THROTTLED, 1, retry_after=1e9) == Again(CONFIG.retry_after_max, "")


def test_a_task_of_yesterday_is_not_tried_again() -> None:
    assert after(AttemptOutcome.TIMEOUT, 2, age=86_400.0) == Bury(Reason.EXPIRED, "")


def test_the_policy_of_a_task_is_honoured() -> None:
    schedule = retry_policy(TaskRetryPolicy(4, "2s", "10s"), CONFIG)
    assert [schedule.wait(n) for n in (1, 2, 3, 4, 5)] == [2, 4, 8, 10, 10]
    assert after(AttemptOutcome.TIMEOUT, 4, policy=TaskRetryPolicy(4, "2s", "10s")) == Bury(Reason.EXHAUSTED, "")
    assert not is_out_of_bounds(TaskRetryPolicy(4, "2s", "10s"))
    only_attempts = retry_policy(TaskRetryPolicy(2), CONFIG)
    assert (only_attempts.max_deliver, only_attempts.wait(1)) == (2, 1.0)


def test_a_policy_out_of_bounds_is_clamped_and_said_so() -> None:
    for policy in (
        TaskRetryPolicy(-1),
        TaskRetryPolicy(51),
        TaskRetryPolicy(0.5),
        TaskRetryPolicy(None, "x"),
        TaskRetryPolicy(None, -4),
    ):
        schedule = retry_policy(policy, CONFIG)
        assert is_out_of_bounds(policy)
        assert (schedule.max_deliver, schedule.wait(1)) == (9, 1.0)


@given(st.integers(1, 10**9), st.sampled_from(["1ns", "1s", "100h"]), st.sampled_from([None, "1s", "200h"]))
def test_no_wait_overflows_or_exceeds_six_hours(attempt: int, initial: str, most: str | None) -> None:
    assert 0 < retry_policy(TaskRetryPolicy(50, initial, most), CONFIG).wait(attempt) <= 6 * 3600


@pytest.mark.parametrize(("wanted", "seconds"), [(None, 10), ("2s", 2), ("1h", 30), (-1, 10), ("x", 10), (10**9, 1)])
def test_the_timeout_of_a_task_stays_in_bounds(wanted: str | int | None, seconds: float) -> None:
    assert request_timeout(wanted, CONFIG) == seconds


def where(order: TaskOrder, wait: float, blocked: float = 0.0, queued: int = 0) -> OrderHold:
    return hold(order, wait=wait, blocked=blocked, queued=queued, config=CONFIG)


def test_a_blocked_document_waits_in_memory_for_a_minute_and_is_parked_then() -> None:
    assert where(TaskOrder.BLOCK, 1.0) is OrderHold.MEMORY
    assert where(TaskOrder.BLOCK, 30.0, blocked=6.0) is OrderHold.MEMORY
    assert where(TaskOrder.BLOCK, 30.0, blocked=40.0) is OrderHold.PARK
    assert where(TaskOrder.BLOCK, 120.0) is OrderHold.PARK
    assert where(TaskOrder.BLOCK, 1.0, queued=100) is OrderHold.PARK
    assert where(TaskOrder.PARK, 1.0) is OrderHold.PARK
    assert where(TaskOrder.SKIP, 1.0) is OrderHold.ALONE
    assert where(TaskOrder.LATEST, 1.0) is OrderHold.MEMORY


def test_each_trigger_has_its_rules_and_the_star_the_rest() -> None:
    book = RuleBook(["billing: order=park rate=10 concurrency=4", "*: order=skip"], "block")
    assert book.of("billing") == OrderRules(TaskOrder.PARK, 10.0, 4)
    assert book.of("other") == OrderRules(TaskOrder.SKIP)
    assert RuleBook([], "latest").of("x").order is TaskOrder.LATEST


@pytest.mark.parametrize("entry", ["billing", ": order=park", "a: order=never", "a: rate=0", "a: rate=x", "a: size=2"])
def test_a_malformed_rule_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"deliver\.triggers"):
        RuleBook([entry], "block")


def listed(metric: Metric, label: str) -> tuple[str, ...]:
    values = metric.labels[label]
    assert isinstance(values, tuple)
    return values


def test_every_reason_and_outcome_has_its_label() -> None:
    assert set(listed(delivery_metrics.DEAD_LETTERS, "reason")) >= {reason.value for reason in Reason}
    assert set(listed(delivery_metrics.ATTEMPTS, "outcome")) >= {outcome.value for outcome in AttemptOutcome}
