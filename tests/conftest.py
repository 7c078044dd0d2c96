"""Fixtures shared by all tests: real servers, and names that keep tests on a shared server apart."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from parti.testing import NatsCluster, NatsServer
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions

# How long an example takes says nothing about the code on a machine that others use too.
settings.register_profile("parti", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("parti"), max_examples=20)  # `make test-fast`
settings.load_profile("parti")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: several processes take the tests in turn, and end together when the last ones are short."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def logging_as_nobody_configured_it() -> Iterator[None]:
    """A command that a test runs in this process leaves its log level behind: later tests would miss events."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def no_server_left_behind() -> Iterator[None]:
    """At the end of the run no nats-server that we started is alive."""
    yield
    assert child_servers() == []


@pytest.fixture(scope="session")
def server() -> Iterator[NatsServer]:
    """One server for all tests that only need *a* server; use `name` for streams, and never stop it."""
    with NatsServer() as running:
        yield running


@pytest.fixture
def options(server: NatsServer) -> ConnectOptions:
    """To connect to `server`."""
    return ConnectOptions(servers=(server.url,))


@pytest.fixture
def connection(options: ConnectOptions) -> Iterator[BlockingConnection]:
    """A connection to `server`, for what a test prepares and looks at."""
    with BlockingConnection.open(options) as opened:
        yield opened


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """A server of the test's own, that it may kill and restart."""
    with NatsServer() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    """Three nodes for the tests of a module; who kills one brings it back. Mark such tests with `cluster`."""
    with NatsServer.cluster(3) as running:
        yield running


@pytest.fixture
def name() -> str:
    """A word that no other test uses, fit for streams, subjects, buckets and consumers."""
    return f"t{secrets.token_hex(6)}"


def child_servers() -> list[int]:
    """Process ids of the nats-servers among our own children (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:  # it ended while we looked
            continue
        comm = text[text.index("(") + 1 : text.rindex(")")]
        state, parent = text[text.rindex(")") + 2 :].split()[:2]
        if comm == "nats-server" and state != "Z" and int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    return found
