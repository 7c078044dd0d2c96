"""Local failures use up no attempt and do not affect other hosts; and waiting is bounded."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from parti.dead_letters import DeadLetterReader
from parti.delivery import AddressGuard, HttpTransport
from parti.delivery.guard import AddrInfo
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer, Drip, Hang
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def reasons(stage: Scene) -> list[str]:
    return [letter.reason async for letter in DeadLetterReader(stage.js, stage.stream).walk()]


async def test_descriptors_that_run_out_spend_no_attempt(stage: Scene) -> None:
    left = 12

    def create(family: int, kind: int, protocol: int) -> socket.socket:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return socket.socket(family, kind, protocol)

    metrics = PrometheusMetrics()
    guard = AddressGuard((stage.endpoint.allowed,), create=create)
    await stage.publish_many(6, documents=3, retryPolicy={"maxAttempts": 1})
    async with stage.delivering(stage.config(breaker_calls=2), guard=guard, metrics=metrics):
        await stage.endpoint.wait_for(6)
        await eventually(stage.settled)
    assert {request.headers["x-parti-attempt"] for request in stage.endpoint.received} == {"1"}
    assert await reasons(stage) == []
    assert metrics.registry.get_sample_value("parti_delivery_attempts_total", {"outcome": "local"}) == 12
    assert metrics.registry.get_sample_value("parti_delivery_breaker_opened_total") in (None, 0)


async def test_names_that_are_never_resolved_cost_the_other_hosts_nothing(stage: Scene) -> None:
    let_go = threading.Event()

    def look_up(host: str) -> Sequence[AddrInfo]:
        if host.startswith("hang"):
            let_go.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    config = stage.config(dns_timeout=0.5, order="park", schedule=("500ms",) * 3)
    guard = AddressGuard(config.allow_addresses)
    port = stage.endpoint.port
    for number in range(200):  # eight names hang; each has as many tasks as a host may have at once
        await stage.publish(stage.task(f"h{number}", url=f"http://hang{number % 8}.test:{port}/hung"))
    for number in range(50):
        await stage.publish(stage.task(f"w{number}", url=f"http://well{number}.test:{port}/well"))
    transport = HttpTransport(config, guard, lookup=look_up)
    try:
        async with stage.delivering(config, guard=guard, transport=transport):
            await stage.endpoint.wait_for(50, path="/well")
            assert not [request for request in stage.endpoint.received if request.path == "/hung"]
            let_go.set()
            hung = await stage.endpoint.wait_for(200, path="/hung")
            assert {request.headers["x-parti-attempt"] for request in hung} == {"1"}
    finally:
        let_go.set()
    assert await reasons(stage) == []


async def test_documents_of_a_name_that_is_not_resolved_wait_for_it_without_messages(stage: Scene) -> None:
    let_go = threading.Event()

    def look_up(_host: str) -> Sequence[AddrInfo]:
        let_go.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    config = stage.config(dns_timeout=0.3, order="park", schedule=("100ms",) * 3)
    guard = AddressGuard(config.allow_addresses)
    for number in range(400):
        await stage.publish(stage.task(f"h{number}", url=f"http://hang.test:{stage.endpoint.port}/hung"))
    try:
        transport = HttpTransport(config, guard, lookup=look_up)
        async with stage.delivering(config, guard=guard, transport=transport) as consumer:
            await eventually(stage.settled)  # all are parked
            wakes = f"{stage.stream}_PARK.s.>"
            scheduled = 0
            async for page in stage.js.stream_subjects(f"{stage.stream}_PARK", wakes):
                scheduled += len(page)
            assert scheduled <= 64  # those that had asked; the others wait for the name, not for a time
            assert consumer.health() is None
            let_go.set()
            hung = await stage.endpoint.wait_for(400, path="/hung")
            assert {request.headers["x-parti-attempt"] for request in hung} == {"1"}
    finally:
        let_go.set()
    assert await reasons(stage) == []


async def test_hosts_that_hang_leave_places_to_the_others(stage: Scene) -> None:
    """Eight hosts at 32 requests each had all 256 places; one that has not answered yet has four."""
    stage.endpoint.on("/hung", Hang())
    config = stage.config(total_timeout=30.0, shutdown=0.1)

    def look_up(host: str) -> Sequence[AddrInfo]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    guard = AddressGuard(config.allow_addresses)
    port = stage.endpoint.port
    for number in range(8 * 40):
        await stage.publish(stage.task(f"h{number}", url=f"http://hung{number % 8}.test:{port}/hung"))
    transport = HttpTransport(config, guard, lookup=look_up)
    async with stage.delivering(config, guard=guard, transport=transport):
        await stage.endpoint.wait_for(8 * 4, path="/hung")
        for number in range(50):
            await stage.publish(stage.task(f"w{number}", url=f"http://well{number}.test:{port}/well"))
        await stage.endpoint.wait_for(50, path="/well")
        # Nothing that hung has ended: only what was free served them.
        assert len(stage.endpoint.received) == 8 * 4 + 50


@pytest.mark.slow
@pytest.mark.parametrize("order", ["block", "park"])
async def test_a_task_grows_too_old_behind_a_host_that_is_down(stage: Scene, order: str) -> None:
    stage.endpoint.on("/down", Answer(503))
    config = stage.config(
        order=order, max_task_age=1.5, breaker_calls=2, breaker_open=1.0, host_concurrency=2, schedule=("300ms",) * 20
    )
    for number in range(30):
        await stage.publish(stage.task(f"d{number}", "/down"))
        await stage.publish(stage.task(f"d{number}", "/down"))
    async with stage.delivering(config):

        async def expired() -> bool:
            return await reasons(stage) == ["expired"] * 60

        await eventually(expired)
        assert len(stage.endpoint.received) < 30  # most were never sent: the host was down


async def test_a_status_of_success_is_done_whatever_becomes_of_the_body(stage: Scene) -> None:
    stage.endpoint.on(
        "/hook", Drip(size=10_000, interval=0.05), Drip(size=10_000, interval=0.05, status=503), Answer(200)
    )
    await stage.publish_many(2, documents=1)
    async with stage.delivering():
        await stage.endpoint.wait_for(3)
        await eventually(stage.settled)
    assert stage.order() == {"d0": [1, 2, 2]}


@pytest.mark.parametrize("where", ["memory", "park"])
async def test_of_tasks_that_wait_the_latest_by_its_own_order_is_kept(stage: Scene, where: str) -> None:
    """A replay brings an old event behind newer ones, and must not take their place."""
    release = asyncio.Event()
    stage.endpoint.on("/hook", lambda _request: Answer(200 if release.is_set() else 503))
    config = stage.config(order="latest", schedule=("300ms",) * 50, block_for=60.0 if where == "memory" else 0.1)
    for seq in (1, 5, 2, 4):
        await stage.publish(stage.task("a", seq=seq))
    async with stage.delivering(config):
        await stage.endpoint.wait_for(1)
        for seq in (9, 3, 7):
            await stage.publish(stage.task("a", seq=seq))
        await eventually(stage.settled) if where == "park" else await stage.endpoint.wait_for(4)
        await stage.publish(stage.task("a", seq=6))
        release.set()

        async def arrived() -> bool:
            return release.is_set() and stage.endpoint.bodies("/hook")[-1]["seq"] == 9

        await eventually(arrived)
        await eventually(stage.settled)
    seen = [body["seq"] for body in stage.endpoint.bodies("/hook")]
    assert seen == sorted(seen)
    assert seen[-1] == 9
