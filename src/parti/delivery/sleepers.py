"""The documents in the park, as their owner knows them: who waits for a time, who for a line, and who is a stranger.

A document in the park has a wake-up coming, or waits outside a line that will call it, or is a stranger: left by an
owner before us, without a wake-up, so that somebody has to look. Whoever it is, it costs a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parti.delivery.gate import Gate
from parti.delivery.line import Line

_STRANGERS = 64  # looked at at once


class ParkedDocument:
    """A document in the park; it may have no lane in memory."""

    __slots__ = ("attempts", "born", "due", "head", "known", "noted", "through")

    def __init__(self, *, known: bool = False, noted: bool = False) -> None:
        self.through = 0  # up to this task of the stream everything is parked or dealt with; 0: not known
        self.known = known  # whether we wrote the rest ourselves, or have looked
        self.noted = noted  # whether the server has a note about the head
        self.head = ""  # the task that was tried, how often, and until when it waits (by the clock)
        self.attempts = 0
        self.due = 0.0
        self.born = 0.0  # when the head was published

    def __repr__(self) -> str:
        return f"<ParkedDocument through={self.through} attempts={self.attempts}>"

    def tried(self, head: str, attempts: int, due: float = 0.0) -> None:
        self.head, self.attempts, self.due = head, attempts, due


class Sleepers:
    """Those of one partition. `call` gives a document's parked head its turn."""

    def __init__(self, slot: int, gate: Gate, call: Callable[[str], None]) -> None:
        self.parked: dict[str, ParkedDocument] = {}
        self._slot = slot
        self._gate = gate
        self._call = call
        self._outside: dict[str, Line] = {}
        self._strangers: dict[str, None] = {}
        self._looking: set[str] = set()
        self._stopped = False

    def __repr__(self) -> str:
        return f"<Sleepers {len(self.parked)} outside={len(self._outside)} strangers={len(self._strangers)}>"

    def __contains__(self, key: str) -> bool:
        """Whether it waits outside, or is to be looked at: somebody will call it."""
        return key in self._outside or key in self._strangers

    def entry(self, key: str) -> ParkedDocument:
        """What is known of a document that we park ourselves."""
        return self.parked.setdefault(key, ParkedDocument(known=True))

    def wait_outside(self, key: str, line: Line) -> None:
        self._outside[key] = line
        self._gate.wait_outside(line, (self._slot, key), lambda: self._call(key))

    def expect(self, keys: Iterable[str]) -> None:
        """Parked documents that nobody will wake: each is to be placed, or looked at."""
        self._strangers.update(dict.fromkeys(keys))

    def place(self, key: str, line: Line, born: float) -> None:
        """The document, if it is still a stranger, waits for this line: that is all a glance can tell."""
        if key in self._strangers and key not in self._looking and not self._stopped:
            del self._strangers[key]
            self.parked[key].born = born
            self.wait_outside(key, line)

    def look_at_all(self) -> None:
        """Those that were not placed have their turn, a few at a time."""
        self._next()

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def called(self, key: str) -> None:
        """It has its turn, whoever called it."""
        self._strangers.pop(key, None)
        if (line := self._outside.pop(key, None)) is not None:
            line.outside.pop((self._slot, key), None)

    def looked_at(self, key: str) -> None:
        """Its turn is over."""
        if key in self._looking:
            self._looking.discard(key)
            self._next()

    def call_aged(self, oldest: float) -> None:
        """Call those outside whose head was published before: they are too old to wait on."""
        for key in [key for key in self._outside if key in self.parked and 0 < self.parked[key].born <= oldest]:
            self._call(key)

    def forget(self) -> None:
        """None of them is ours any more."""
        self._stopped = True
        for key in list(self._outside):
            self.called(key)
        self._strangers.clear()

    def _next(self) -> None:
        while self._strangers and len(self._looking) < _STRANGERS and not self._stopped:
            key = next(iter(self._strangers))
            self._looking.add(key)
            self._call(key)
