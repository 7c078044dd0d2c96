"""The observability server over real sockets: scrapes, probes, failing checks, and a stop that frees the port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from parti.config import ObserveSection
from parti.errors import ConfigError, ConnectionFailed, UsageError
from parti.observe.health import HealthCheck, ObservabilityServer, run_checks
from parti.observe.prometheus import PrometheusMetrics


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


def server(*checks: HealthCheck, port: int = 0) -> ObservabilityServer:
    metrics = PrometheusMetrics()
    return ObservabilityServer(metrics.registry, checks, port=port, metrics=metrics)


async def get(http: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, str, str]:
    async with http.get(url, headers=headers) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


async def get_json(http: aiohttp.ClientSession, url: str) -> tuple[int, dict[str, object]]:
    async with http.get(url) as answer:
        return answer.status, await answer.json()


async def test_metrics_are_served_in_the_format_the_scraper_asks_for(http: aiohttp.ClientSession) -> None:
    async with server() as running:
        status, kind, text = await get(http, f"{running.url}/metrics")
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        assert 'parti_build_info{version="' in text
        status, kind, text = await get(http, f"{running.url}/metrics", Accept="application/openmetrics-text")
        assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
        assert text.endswith("# EOF\n")


async def test_without_checks_both_probes_answer_ok(http: aiohttp.ClientSession) -> None:
    async with server() as running:
        for path in ("/healthz", "/readyz"):
            assert await get_json(http, running.url + path) == (200, {"status": "ok", "checks": {}, "failing": {}})


async def test_a_failing_check_makes_readyz_503_and_names_itself(http: aiohttp.ClientSession) -> None:
    reason: list[str | None] = ["not connected"]

    async def slow_but_fine() -> None:
        await asyncio.sleep(0)

    async with server(HealthCheck("nats", lambda: reason[0]), HealthCheck("disk", slow_but_fine)) as running:
        status, body = await get_json(http, f"{running.url}/readyz")
        assert status == 503
        assert body == {
            "status": "failing",
            "checks": {"nats": "failing", "disk": "ok"},
            "failing": {"nats": "not connected"},
        }
        assert "parti_ready 0.0" in (await get(http, f"{running.url}/metrics"))[2]
        reason[0] = None
        assert (await get_json(http, f"{running.url}/readyz"))[0] == 200
        assert "parti_ready 1.0" in (await get(http, f"{running.url}/metrics"))[2]


async def test_healthz_fails_only_by_checks_that_a_restart_would_help(http: aiohttp.ClientSession) -> None:
    async with server(HealthCheck("nats", lambda: "down")) as running:
        assert (await get_json(http, f"{running.url}/healthz"))[0] == 200
    async with server(HealthCheck("loop", lambda: "stuck", live=True)) as running:
        status, body = await get_json(http, f"{running.url}/healthz")
        assert (status, body["failing"]) == (503, {"loop": "stuck"})


async def test_checks_that_raise_or_hang_count_as_failing_and_show_no_internals() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    def broken() -> None:
        raise RuntimeError("password=hunter2")

    def typed() -> None:
        raise ConnectionFailed("nothing listens on 127.0.0.1:1")

    checks = [HealthCheck("hang", hang), HealthCheck("broken", broken), HealthCheck("typed", typed)]
    assert await run_checks(checks, timeout=0.05) == {
        "broken": "the check raised RuntimeError",
        "hang": "no answer within 0.05s",
        "typed": "nothing listens on 127.0.0.1:1",
    }


async def test_stop_frees_the_port_and_may_be_repeated(http: aiohttp.ClientSession) -> None:
    running = server()
    await running.start()
    port = running.address[1]
    assert repr(running) == f"<ObservabilityServer http://127.0.0.1:{port} checks=0>"
    await running.stop()
    await running.stop()
    assert repr(running) == "<ObservabilityServer stopped checks=0>"
    with pytest.raises(UsageError, match="not running"):
        _ = running.address
    async with server(port=port) as again:
        assert (await get_json(http, f"{again.url}/healthz"))[0] == 200


async def test_a_taken_port_is_a_clear_error_and_leaves_nothing_running() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(observe\.listen\)"):
            await server(port=port).start()


async def test_starting_twice_is_refused() -> None:
    async with server() as running:
        with pytest.raises(UsageError, match="already running"):
            await running.start()


def test_two_checks_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="share a name"):
        server(HealthCheck("nats", lambda: None), HealthCheck("nats", lambda: None))


async def test_the_configuration_decides_where_it_listens_or_that_it_does_not() -> None:
    metrics = PrometheusMetrics()
    assert ObservabilityServer.configured(ObserveSection(), metrics.registry, (), metrics) is None
    on = ObservabilityServer.configured(ObserveSection(listen="127.0.0.1:0"), metrics.registry, (), metrics)
    assert on is not None
    async with on as running:
        assert running.address[0] == "127.0.0.1"
