"""The parked documents, as their owner knows them: which wait for a time, which for a line, and which are strangers.

A parked document has a wake-up to come, or waits outside a line that will call it, or is a stranger: parked by a
previous owner, without a wake-up, so that this owner has to look. Each costs a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parti.delivery.gate import Gate
from parti.delivery.line import Line

_STRANGERS = 64  # read at once


class ParkedDocument:
    """A document in the park; it may have no lane in memory."""

    __slots__ = ("attempts", "born", "due", "head", "known", "noted", "through")

    def __init__(self, *, known: bool = False, noted: bool = False) -> None:
        self.through = 0  # up to this stream sequence every task is parked or handled; 0: not known
        self.known = known  # whether this process wrote the rest itself, or has read it
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
    """The parked documents of one partition. `call` gives a document's parked head its turn."""

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
        """Whether the document waits outside a line, or is to be read: it will be called."""
        return key in self._outside or key in self._strangers

    def entry(self, key: str) -> ParkedDocument:
        """The entry of a document that this process parks itself."""
        return self.parked.setdefault(key, ParkedDocument(known=True))

    def wait_outside(self, key: str, line: Line) -> None:
        self._outside[key] = line
        self._gate.wait_outside(line, (self._slot, key), lambda: self._call(key))

    def expect(self, keys: Iterable[str]) -> None:
        """Parked documents without a wake-up: each is to be placed in a line, or read."""
        self._strangers.update(dict.fromkeys(keys))

    def place(self, key: str, line: Line, born: float) -> None:
        """The document, if still a stranger, waits for this line: a glance shows no more."""
        if key in self._strangers and key not in self._looking and not self._stopped:
            del self._strangers[key]
            self.parked[key].born = born
            self.wait_outside(key, line)

    def look_at_all(self) -> None:
        """Call the documents that were not placed, a few at a time."""
        self._next()

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    def called(self, key: str) -> None:
        """The document was called, by a line or by a wake-up."""
        self._strangers.pop(key, None)
        if (line := self._outside.pop(key, None)) is not None:
            line.outside.pop((self._slot, key), None)

    def looked_at(self, key: str) -> None:
        """The document's turn is over."""
        if key in self._looking:
            self._looking.discard(key)
            self._next()

    def call_aged(self, oldest: float) -> None:
        """Call the documents outside whose head was published before `oldest`: they are too old to wait."""
        for key in [key for key in self._outside if key in self.parked and 0 < self.parked[key].born <= oldest]:
            self._call(key)

    def forget(self) -> None:
        """This process owns none of them any more."""
        self._stopped = True
        for key in list(self._outside):
            self.called(key)
        self._strangers.clear()

    def _next(self) -> None:
        while self._strangers and len(self._looking) < _STRANGERS and not self._stopped:
            key = next(iter(self._strangers))
            self._looking.add(key)
            self._call(key)
