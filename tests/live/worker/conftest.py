"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from parti.testing import NatsServer
from support.worker import Bench, bench_on


@pytest.fixture
def layout() -> str:
    """The layout that `bench` uses; a module that holds for both parametrizes it."""
    return "per-worker"


@pytest.fixture
async def bench(server: NatsServer, name: str, layout: str) -> AsyncIterator[Bench]:
    async with bench_on(server, name, layout=layout) as made:
        await made.create()
        yield made
