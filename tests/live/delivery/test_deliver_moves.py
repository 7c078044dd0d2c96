"""Partition moves and stops: trigger limits hold meanwhile, and no task waits for one that was never sent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from parti.clock import SystemClock
from parti.delivery import AddressGuard
from parti.delivery.guard import AddrInfo
from parti.delivery.transport import HttpTransport
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer, ReceivedRequest, Reply
from support.delivery import Scene, scene

_TAKES = 0.3


class AtOnce:
    """An endpoint that takes its time, and knows how many requests it had at once."""

    def __init__(self, stage: Scene) -> None:
        self._clock = SystemClock()
        self._ends: list[float] = []
        self.most = 0
        stage.endpoint.otherwise(self._reply)

    def _reply(self, _request: ReceivedRequest) -> Reply:
        now = self._clock.now()
        self._ends = [end for end in self._ends if end > now] + [now + _TAKES]
        self.most = max(self.most, len(self._ends))
        return Answer(200, delay=_TAKES)


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


@pytest.mark.slow
async def test_a_trigger_never_has_more_requests_at_once_than_it_may_while_processes_come_and_go(stage: Scene) -> None:
    endpoint = AtOnce(stage)
    await stage.publish_many(120, documents=40)
    config = stage.config(partitions=4, triggers=("t1: concurrency=4",))
    async with stage.delivering(config, ready=4):
        await stage.endpoint.wait_for(8)
        assert endpoint.most == 4
        async with stage.delivering(config, ready=2):
            await stage.endpoint.wait_for(50, timeout=60)
        # The second one has gone again, with requests under way.
        await stage.endpoint.wait_for(80, timeout=60)
        async with stage.delivering(config, ready=1), stage.delivering(config, ready=1):
            await stage.endpoint.wait_for(120, timeout=60)
            await eventually(lambda: len(stage.endpoint.received) >= 120)
    assert endpoint.most == 4
    assert len(stage.endpoint.received) == 120
    assert all(numbers == [1, 2, 3] for numbers in stage.order("/hook").values())


async def test_who_waits_for_requests_to_end_before_a_move_waits_no_longer_than_a_stop_may_take(stage: Scene) -> None:
    free = asyncio.Event()
    stage.endpoint.otherwise(Answer(200, gate=free))
    await stage.publish_many(40, documents=40)
    config = stage.config(partitions=2, shutdown=0.5, triggers=("t1: concurrency=4",))
    async with stage.delivering(config, ready=2) as first:
        await stage.endpoint.wait_for(4)
        async with stage.delivering(config, ready=1):
            assert len(first.partitions) == 1
            free.set()
            await eventually(lambda: len({r.headers["webhook-id"] for r in stage.endpoint.received}) == 40, 60)


async def test_a_stop_does_not_wait_for_a_name_that_hangs_and_no_attempt_is_spent(stage: Scene) -> None:
    asked, free = threading.Event(), threading.Event()

    def look_up(_host: str) -> list[AddrInfo]:
        asked.set()
        free.wait(120)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    config = stage.config(dns_timeout=100.0, shutdown=100.0)
    guard = AddressGuard(config.allow_addresses)
    url = stage.endpoint.url.replace("127.0.0.1", "hangs.test")
    await stage.publish(stage.task("a", url=f"{url}/hook"))
    try:
        async with asyncio.timeout(60):
            async with stage.delivering(config, guard=guard, transport=HttpTransport(config, guard, lookup=look_up)):
                await asyncio.to_thread(asked.wait, 30)
    finally:
        free.set()
    async with stage.delivering(config, guard=guard, transport=HttpTransport(config, guard, lookup=look_up)):
        (request,) = await stage.endpoint.wait_for(1)
    assert request.headers["x-parti-attempt"] == "1"
