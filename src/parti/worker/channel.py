"""The worker's channel to its consumer: the connection, the pull on it, and whether the pull must restart.

The session opens, starts and ends it. Any code that changes the consumer reports here what this means for the pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from parti.errors import PartiError, TransientError
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions
from parti.wire.pull import LivePull


class Interrupted(TransientError):
    """The pull loop must attach again because of our own action; not a failure."""


class FellBehind(Interrupted):
    """The backlog is better read by range."""


class Channel:
    """Open or not, pulling or not. While it is not open, writes are discarded: a reset redelivers those messages."""

    def __init__(self) -> None:
        self.connection: LiveConnection | None = None
        self.pull: LivePull | None = None
        self.stale = True
        """The consumer must be reset to our position before the next pull."""
        self.next_sequence: int | None = None
        """The consumer sequence of the next delivery; None when it is unknown."""
        self.running = asyncio.Event()
        """Set while there are partitions to pull for."""
        self.quiet = asyncio.Event()
        """Set while no pull is active."""
        self.quiet.set()
        self._trouble: asyncio.Future[PartiError] | None = None

    def __repr__(self) -> str:
        return f"<Channel {'pulling' if self.pulling else 'not pulling'}{' stale' if self.stale else ''}>"

    @property
    def pulling(self) -> bool:
        return self.pull is not None

    # -- for the session ----------------------------------------------------------------------------------------------

    async def open(self, options: ConnectOptions, name: str, *, anew: bool) -> None:
        """When this returns the connection is up; `anew`: replace the existing one."""
        if anew:
            await self.close()
        if self.connection is None or self.connection.lost.done():
            self.connection = None
            self.stale = True
            self.connection = await LiveConnection.open(options, name=name)

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    def begin(self, pull: LivePull) -> asyncio.Future[PartiError]:
        """Start pulling; the future completes with the first error."""
        self._trouble = asyncio.get_running_loop().create_future()
        self.pull = pull
        pull.start()
        self.quiet.clear()
        return self._trouble

    def end(self) -> None:
        """Stop receiving; the next pull starts with a reset."""
        self.stop_pull()
        self.stale = True
        self._trouble = None
        self.quiet.set()

    def stop_pull(self) -> None:
        if self.pull is not None:
            self.pull.stop()
            self.pull = None

    def report(self, error: PartiError) -> None:
        """Report an error of the pull."""
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(error)

    # -- for every component ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close the connection at once: unsent data is discarded."""
        if self.connection is not None:
            self.connection.abort()

    def write(self, frames: Iterable[bytes]) -> None:
        """Send these frames in one write."""
        if self.connection is not None and (joined := b"".join(frames)):
            self.connection.write(joined)

    def kick(self) -> None:
        """Check again whether there is room to request more."""
        if self.pull is not None:
            self.pull.kick()

    def resume(self) -> None:
        """Pull, now or as soon as it is possible."""
        self.running.set()
        self.kick()

    def pause(self) -> None:
        """Stop pulling until `resume`; open messages are still handled. Messages in transit are redelivered later."""
        if self.running.is_set():
            self.running.clear()
            self.interrupt(Interrupted("paused"))

    def interrupt(self, reason: PartiError) -> None:
        """Make the pull loop attach again at once."""
        self.stale = True
        self.report(reason)
