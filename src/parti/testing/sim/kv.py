"""A key-value bucket as the control plane uses it: CAS on revisions, watches that may miss changes, stale reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from parti.testing.sim.world import SimMachine, World

Key = tuple[str, str]
"""(kind, name), for example ("claim", "p-3")."""

Entry = tuple[Any, int]
"""Value and revision; (None, 0) for a key that does not exist, (None, revision) for a marker or garbage."""

Watcher = Callable[[Key, Any, int], None]

_NOTHING: Entry = (None, 0)


class SimKv:
    """One bucket for all records, numbered like a stream: a revision is never used twice."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries: dict[Key, Entry] = {}
        self._before: dict[Key, Entry] = {}
        self._watchers: list[tuple[SimMachine, Watcher]] = []
        self._markers: set[Key] = set()
        self._revision = 0
        self.writes: Counter[str] = Counter()
        self.conflicts: Counter[str] = Counter()

    def cas(self, key: Key, value: Any, expected: int) -> Entry | None:
        """The new entry, or None when another writer was faster."""
        current = self._entries.get(key, _NOTHING)
        self.writes[key[0]] += 1
        if current[1] != expected and not (expected == 0 and key in self._markers):
            self.conflicts[key[0]] += 1
            return None
        self._markers.discard(key)
        self._revision += 1
        self._before[key] = current
        entry = self._entries[key] = (value, self._revision)
        if key[0] != "checkpoint":
            self._tell(key, entry)
        return entry

    @property
    def revision(self) -> int:
        """The highest revision assigned so far."""
        return self._revision

    def present(self) -> list[Key]:
        """All entries with a value."""
        return sorted(key for key, (value, _) in self._entries.items() if value is not None)

    def tamper(self, key: Key, how: str) -> None:
        """Delete a record (a marker stays), purge it from the stream (nothing stays), or write garbage."""
        if how == "purge":
            self._entries.pop(key, None)
            self._before.pop(key, None)
            return
        self._revision += 1
        entry = self._entries[key] = (None, self._revision)
        if how == "delete":
            self._markers.add(key)
        if key[0] != "checkpoint":
            self._tell(key, entry)

    def get(self, key: Key) -> Entry:
        """The value at the leader of the bucket."""
        return self._entries.get(key, _NOTHING)

    def get_anywhere(self, key: Key) -> Entry:
        """The value at some replica: stale in up to 15 % of the reads right after a write.

        See docs/evidence/cluster.md#c5.
        """
        if self._world.rng.random() < 0.1:
            return self._before.get(key, self._entries.get(key, _NOTHING))
        return self._entries.get(key, _NOTHING)

    def list(self, kind: str) -> dict[str, Entry]:
        """All keys of a kind."""
        return {key[1]: entry for key, entry in sorted(self._entries.items()) if key[0] == kind}

    def watch(self, host: SimMachine, tell: Watcher) -> None:
        """Receive every later change, unless the network loses it."""
        self._watchers = [(h, t) for h, t in self._watchers if not h.dead]
        self._watchers.append((host, tell))

    def _tell(self, key: Key, entry: Entry) -> None:
        world = self._world
        for host, tell in self._watchers:
            if not host.dead and not world.lost(host):
                world.after(world.delay(), host, tell, key, *entry)
