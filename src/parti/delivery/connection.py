"""The one fast connection of a process: reopened whenever it breaks, until the process stops."""

from __future__ import annotations

import asyncio

from parti.backoff import FOREVER
from parti.clock import Clock
from parti.delivery.recorder import DeliveryRecorder
from parti.errors import PartiError
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions


class KeptConnection:
    """`connected()` returns the connection that works now."""

    def __init__(self, options: ConnectOptions, recorder: DeliveryRecorder, clock: Clock) -> None:
        self._options = options
        self._recorder = recorder
        self._clock = clock
        self._connection: LiveConnection | None = None
        self._up = asyncio.Event()

    async def run(self) -> None:
        """Keep a connection open until cancelled; then send what is queued, and close it."""
        waits = FOREVER.delays()
        try:
            while True:
                try:
                    connection = await LiveConnection.open(self._options, name=f"{self._options.name}-deliver")
                except PartiError as error:
                    if not error.retriable:
                        raise
                    await self._clock.sleep(next(waits))
                    continue
                self._connection = connection
                self._recorder.write = connection.publish
                self._up.set()
                waits = FOREVER.delays()
                reason = await asyncio.shield(connection.lost)
                self._up.clear()
                self._recorder.write = None
                self._recorder.event("deliver.disconnected", warn=True, error=str(reason))
        finally:
            self._recorder.write = None
            if self._connection is not None:
                await self._connection.close()

    async def connected(self) -> LiveConnection:
        """Return the connection, as soon as there is one."""
        await self._up.wait()
        assert self._connection is not None
        return self._connection
