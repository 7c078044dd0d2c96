"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from worker_bench import Bench, bench_on

from parti.testing import NatsServer


@pytest.fixture
def layout() -> str:
    """The layout that `bench` uses; a module that holds for both parametrizes it."""
    return "per-worker"


@pytest.fixture
async def bench(server: NatsServer, name: str, layout: str) -> AsyncIterator[Bench]:
    async with bench_on(server, name, layout=layout) as made:
        await made.create()
        yield made
