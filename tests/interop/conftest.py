"""A connection to the shared server, for every test beside members in other languages."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from parti.testing import NatsServer
from parti.wire.connect import Connection, connect
from parti.wire.options import ConnectOptions


@pytest.fixture
async def connection(server: NatsServer) -> AsyncIterator[Connection]:
    async with await connect(ConnectOptions(servers=(server.url,))) as opened:
        yield opened
