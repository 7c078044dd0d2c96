"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from worker_bench import Bench, bench_on

from parti.testing import NatsServer


@pytest.fixture
async def bench(server: NatsServer, name: str) -> AsyncIterator[Bench]:
    async with bench_on(server, name) as made:
        await made.create()
        yield made
