"""Connect, work, close: shared by every command that makes requests to the server and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from parti.cli.settings import log_quietly
from parti.config import LoadedConfig

if TYPE_CHECKING:
    from parti.wire.connect import Connection

T = TypeVar("T")


def run_connected(loaded: LoadedConfig, work: Callable[[Connection], Awaitable[T]]) -> T:
    """The result of `work` over one connection as configured; the connection is always closed."""
    from parti.wire.configured import configured_options
    from parti.wire.connect import connect

    log_quietly(loaded)

    async def main() -> T:
        async with await connect(configured_options(loaded).options) as connection:
            return await work(connection)

    return asyncio.run(main())
