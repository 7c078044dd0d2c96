"""A publisher's own connection: opened on demand, reopened after a loss, with an inbox for the replies."""

from __future__ import annotations

import secrets

from parti.wire.blocking import BlockingConnection, ClosedOnExit
from parti.wire.options import ConnectOptions


class Replying(ClosedOnExit):
    """Base of publishers that store rows and receive acks. Close it, or use it as a context."""

    def __init__(self, options: ConnectOptions, name: str) -> None:
        self.options = options
        self._name = name
        self._inbox = f"{options.inbox_prefix}.{secrets.token_hex(8)}"
        self._sid = -1
        self._connection: BlockingConnection | None = None

    def close(self) -> None:
        """Drop the connection; rows not yet acknowledged may or may not be stored."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connected(self) -> BlockingConnection:
        if self._connection is None or self._connection.closed:
            self._connection = BlockingConnection.open(self.options, name=self._name)
            self._sid = self._connection.subscribe(f"{self._inbox}.*")
        return self._connection
