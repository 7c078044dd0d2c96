"""A key-value bucket as the control plane uses it: CAS on revisions, watches, stale reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from parti.testing.sim.watch import SimWatch, Told
from parti.testing.sim.world import SimMachine, World

Key = tuple[str, str]
"""(kind, name), for example ("claim", "p-3")."""

Entry = tuple[Any, int]
"""Value and revision; (None, 0) for a key that does not exist, (None, revision) for a marker or garbage."""

_NOTHING: Entry = (None, 0)


class SimKv:
    """One bucket for all records, numbered like a stream: a revision is never used twice."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries: dict[Key, Entry] = {}
        self._before: dict[Key, Entry] = {}
        self._watches: list[SimWatch] = []
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

    def later_than(self, revision: int) -> Sequence[Told]:
        """What a watch is told that was told everything up to this revision; positions are not watched."""
        found = [(key, value, at) for key, (value, at) in self._entries.items() if at > revision and _watched(key)]
        return sorted(found, key=lambda entry: entry[2])

    def watch(self, host: SimMachine, tell: Callable[[Key, Any, int], None], complete: Callable[[], None]) -> SimWatch:
        """Tell the current state, then call `complete`, then tell every later change."""
        self._watches = [watch for watch in self._watches if not watch.host.dead]
        watch = SimWatch(self, self._world, host, tell, complete)
        self._watches.append(watch)
        return watch

    def _tell(self, key: Key, entry: Entry) -> None:
        if _watched(key):
            for watch in self._watches:
                if not watch.host.dead:
                    watch.changed(key, *entry)


def _watched(key: Key) -> bool:
    return key[0] != "checkpoint"
