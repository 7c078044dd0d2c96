"""The driver's connection to NATS: temporary errors are waited out, whatever name the server gives them."""

from __future__ import annotations

import pytest

from parti.spark.source.outage import DriverLink
from parti.testing import NatsServer
from parti.wire.errors import API_ERRORS, STATUS_ERRORS, ApiError, StatusError
from parti.wire.options import ConnectOptions

MOMENTARY = [kind("?", code=503, err_code=code) for code, kind in API_ERRORS.items() if kind.retriable]
STATUSES = {entry.error for entry in STATUS_ERRORS if entry.error.retriable}


@pytest.mark.parametrize(
    "error",
    [*MOMENTARY, *(kind("?", status=503, description="?") for kind in sorted(STATUSES, key=str))],
    ids=lambda error: type(error).__name__,
)
def test_whatever_the_server_says_is_for_the_moment_is_waited_out(
    server: NatsServer, error: ApiError | StatusError
) -> None:
    """A leader that stepped down said 10008 to one question, and the query ended."""
    link = DriverLink(ConnectOptions(servers=(server.url,)), budget=30.0)
    pending = [error]

    def question(_reader: object) -> str:
        if pending:
            raise pending.pop()
        return "answered"

    assert link.ask(question) == "answered"
    link.close()
