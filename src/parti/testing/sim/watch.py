"""A watch of the bucket as the shipped one: every change once and in order, and after a lost one whatever was missed.

No state is told twice, so a member that was not listening when it was told never hears it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from parti.testing.sim.world import SimMachine, World

if TYPE_CHECKING:
    from parti.testing.sim.kv import Key, SimKv

_NOTICED: Final = (0.05, 0.3)  # seconds until a gap is noticed: at the next change or heartbeat
_COMPARE_EVERY: Final = 0.6  # seconds; a purged key leaves no change behind

Told = tuple["Key", Any, int]


class SimWatch:
    """One member's watch; each consumer it creates has a number, and frames of earlier ones are dropped."""

    def __init__(
        self,
        kv: SimKv,
        world: World,
        host: SimMachine,
        tell: Callable[[Key, Any, int], None],
        complete: Callable[[], None],
    ) -> None:
        """`complete`: called once, when the current state has been told."""
        self.host = host
        self._kv = kv
        self._world = world
        self._tell = tell
        self._complete: Callable[[], None] | None = complete
        self._alive: dict[Key, int] = {}
        self._written: dict[Key, int] = {}
        self._told = 0
        self._consumer = 0
        self._sending = False
        self._arrives = 0.0
        self._subscribe()
        world.after(_COMPARE_EVERY, host, self._compare)

    def changed(self, key: Key, value: Any, revision: int) -> None:
        """The bucket has a new state."""
        if self._sending:
            self._send([(key, value, revision)])

    def wrote(self, key: Key, revision: int) -> None:
        """The host wrote this: if it is purged before it was told, it has vanished, too."""
        if revision > self._told:
            self._written[key] = revision

    def _subscribe(self) -> None:
        self._consumer += 1
        self._sending = False
        if self._world.lost(self.host):
            self._again()
        else:
            self._world.after(self._world.delay(), None, self._created, self._consumer)

    def _again(self) -> None:
        self._sending = False
        self._world.after(self._world.rng.uniform(*_NOTICED), self.host, self._subscribe)

    def _created(self, consumer: int) -> None:
        if consumer == self._consumer:
            self._sending = True
            self._arrives = 0.0
            self._send(self._kv.later_than(self._told))

    def _send(self, changes: Sequence[Told]) -> None:
        if self._world.lost(self.host):
            self._again()
            return
        self._arrives = max(self._arrives, self._world.now + self._world.delay())
        self._world.at(self._arrives, self.host, self._arrived, self._consumer, changes)

    def _arrived(self, consumer: int, changes: Sequence[Told]) -> None:
        if consumer != self._consumer:
            return
        for key, value, revision in changes:
            self._told = revision
            if self._written.get(key, revision + 1) <= revision:
                del self._written[key]
            if value is None:
                self._alive.pop(key, None)
            else:
                self._alive[key] = revision
            self._tell(key, value, revision)
        if self._complete is not None:
            complete, self._complete = self._complete, None
            complete()

    def _compare(self) -> None:
        before = {**self._written, **self._alive}

        def answered(present: set[Key]) -> None:
            for key, revision in before.items():
                if key not in present and revision in (self._alive.get(key), self._written.get(key)):
                    self._alive.pop(key, None)
                    self._written.pop(key, None)
                    self._tell(key, None, 0)

        self._world.call(self.host, lambda: set(self._kv.present()), answered, lambda: None)
        self._world.after(_COMPARE_EVERY, self.host, self._compare)
