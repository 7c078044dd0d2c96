"""The positions of one simulated process: written a few times a second by CAS, and for the last time when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from parti.model import Checkpoint
from parti.testing.sim.kv import Entry

if TYPE_CHECKING:
    from parti.testing.sim.process import Process


class Positions:
    """Writes what changed."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._revision = 0
        self._written: Checkpoint | None = None

    def forget(self) -> None:
        """Write them again, whether anything changed or not."""
        self._written = None

    def write(self) -> None:
        assert self._process.member is not None
        assert self._process.plane is not None
        positions = self._process.plane.positions()
        if not self._process.may_act() or (self._written is not None and self._written.positions == positions):
            return
        checkpoint = Checkpoint(self._process.member, positions)
        key = ("checkpoint", str(self._process.member))

        def written(entry: Entry | None) -> None:
            if entry is not None:
                self._revision, self._written = entry[1], checkpoint
            else:
                reread()

        def reread() -> None:
            def found(entry: Entry) -> None:
                self._revision = entry[1]

            self._process.call(lambda: self._process.cluster.kv.get(key), found)

        expected = self._revision
        self._process.call(lambda: self._process.cluster.kv.cas(key, checkpoint, expected), written, reread)

    def finish(self, done: Callable[[], None]) -> None:
        assert self._process.member is not None
        assert self._process.plane is not None
        checkpoint = Checkpoint(self._process.member, self._process.plane.final_positions())
        key = ("checkpoint", str(self._process.member))

        def attempt() -> None:
            self._process.call(lambda: self._process.cluster.kv.get(key), write, attempt)

        def write(entry: Entry) -> None:
            if entry[0] == checkpoint:
                done()
            elif self._process.may_act():
                self._process.call(
                    lambda: self._process.cluster.kv.cas(key, checkpoint, entry[1]), lambda _: attempt(), attempt
                )

        attempt()
