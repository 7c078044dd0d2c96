from pathlib import Path

import pytest

from parti.errors import Category, PartiError, TransientError
from parti.wire.errors import (
    API_ERRORS,
    STATUS_ERRORS,
    ApiDenied,
    ApiError,
    ApiNotFound,
    ApiRefused,
    ApiUnavailable,
    ConsumerFilesGone,
    StatusError,
    api_error,
    status_error,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"


def row(first: str, kind: type[PartiError]) -> str:
    advice = " ".join((kind.__doc__ or "").split())
    return f"| {first} | `{kind.__name__}` | {kind.category} | {'yes' if kind.retriable else 'no'} | {advice} |"


def expected_rows() -> list[str]:
    rows = [row(str(code), kind) for code, kind in API_ERRORS.items()]
    for entry in STATUS_ERRORS:
        rows.append(row(f"status {entry.status}{f' {entry.text}' if entry.text else ''}", entry.error))
    fallbacks = (
        ("10012, no such file", ConsumerFilesGone),
        ("other, code 400, 409 or 412", ApiRefused),
        ("other, code 401 or 403", ApiDenied),
        ("other, code 404", ApiNotFound),
        ("other, code 408, 429 or 5xx", ApiUnavailable),
        ("other", ApiError),
        ("status, other", StatusError),
    )
    return rows + [row(first, kind) for first, kind in fallbacks]


def test_the_document_shows_the_table_of_the_code() -> None:
    documented = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert documented == expected_rows()


def all_kinds(of: type[PartiError] = PartiError) -> set[type[PartiError]]:
    return {of}.union(*(all_kinds(kind) for kind in of.__subclasses__()))


def test_what_may_be_tried_again_is_a_transient_error_and_nothing_else_is() -> None:
    assert {kind for kind in all_kinds() if kind.retriable} == all_kinds(TransientError)
    assert {kind for kind in API_ERRORS.values() if kind.retriable} < all_kinds(TransientError)


@pytest.mark.parametrize(
    ("err_code", "category", "retriable"),
    [
        (10014, Category.NOT_FOUND, False),
        (10149, Category.NOT_FOUND, False),
        (10059, Category.POLICY, False),
        (10058, Category.POLICY, False),
        (10071, Category.POLICY, False),
        (10098, Category.POLICY, False),
        (10100, Category.POLICY, False),
        (10101, Category.POLICY, False),
        (10138, Category.POLICY, False),
        (10148, Category.POLICY, False),
        (10160, Category.POLICY, False),
        (10012, Category.POLICY, False),
        (10052, Category.POLICY, False),
        (10008, Category.TRANSIENT, True),
        (10009, Category.TRANSIENT, True),
        (10167, Category.TRANSIENT, True),
    ],
)
def test_a_server_code_has_its_category(err_code: int, category: Category, retriable: bool) -> None:
    error = api_error({"code": 400, "err_code": err_code, "description": "why"}, request="CALL")
    assert type(error) is API_ERRORS[err_code]
    assert (error.category, error.retriable, error.server_code) == (category, retriable, err_code)
    assert str(error) == f"CALL: why (code 400, err_code {err_code})"


@pytest.mark.parametrize(
    ("code", "category"),
    [
        (400, Category.POLICY),
        (401, Category.POLICY),
        (403, Category.POLICY),
        (404, Category.NOT_FOUND),
        (408, Category.TRANSIENT),
        (409, Category.POLICY),
        (412, Category.POLICY),
        (429, Category.TRANSIENT),
        (500, Category.TRANSIENT),
        (503, Category.TRANSIENT),
        (0, Category.UNKNOWN),
        (299, Category.UNKNOWN),
    ],
)
def test_a_code_that_nobody_listed_is_judged_by_its_class(code: int, category: Category) -> None:
    error = api_error({"code": code, "err_code": 99_999}, request="CALL")
    assert error.category is category
    assert error.retriable is (category is Category.TRANSIENT)


@pytest.mark.parametrize(
    ("status", "text", "name", "category"),
    [
        (409, "Consumer Deleted", "ConsumerDeleted", Category.NOT_FOUND),
        (409, "Leadership Change", "LeadershipChanged", Category.TRANSIENT),
        (409, "Server Shutdown", "ServerShutdown", Category.TRANSIENT),
        (409, "Exceeded MaxAckPending", "MaxAckPendingReached", Category.TRANSIENT),
        (409, "Exceeded MaxWaiting", "TooManyPulls", Category.TRANSIENT),
        (409, "Exceeded MaxRequestBatch of 10", "PullTooLarge", Category.POLICY),
        (409, "Message Size Exceeds MaxBytes", "MessageExceedsMaxBytes", Category.POLICY),
        (409, "Consumer is push based", "ConsumerIsPush", Category.POLICY),
        (409, "something new", "StatusError", Category.UNKNOWN),
        (401, "", "AccessDenied", Category.POLICY),
        (403, "", "AccessDenied", Category.POLICY),
        (404, "No Messages", "NoMessages", Category.TRANSIENT),
        (408, "Request Timeout", "PullExpired", Category.TRANSIENT),
        (423, "Nats-Wrong-Pin-Id", "WrongPinId", Category.TRANSIENT),
        (429, "", "Throttled", Category.TRANSIENT),
        (503, "", "NoResponder", Category.TRANSIENT),
        (418, "", "StatusError", Category.UNKNOWN),
    ],
)
def test_a_status_line_has_its_category(status: int, text: str, name: str, category: Category) -> None:
    error = status_error(status, text, request="pull")
    assert (type(error).__name__, error.category, error.status, error.description) == (name, category, status, text)


def test_retriable_and_transient_mean_the_same() -> None:
    for kind in [*API_ERRORS.values(), *(entry.error for entry in STATUS_ERRORS)]:
        assert kind.retriable is (kind.category is Category.TRANSIENT)


def test_every_error_says_what_to_do() -> None:
    for kind in [*API_ERRORS.values(), *(entry.error for entry in STATUS_ERRORS)]:
        assert ":" in (kind.__doc__ or "") or ";" in (kind.__doc__ or ""), kind
