"""The checking sink of a torture run, over a socket on loopback: refuses stale epochs, remembers who misbehaved."""

from __future__ import annotations

import time
from typing import Any

from parti_lab.prove.asking import Answering
from parti_lab.prove.torture_judge import Happened, TortureLedger


class TortureSink(Answering):
    """Takes effects into a ledger, in the order in which they took effect."""

    def __init__(self, ledger: TortureLedger, misbehaved: set[str] | None = None) -> None:
        """`misbehaved`: messages that had their turn, also at another sink that shares this set."""
        self.ledger = ledger
        self.lives: dict[str, list[str]] = {}
        """Value of a poisonous message -> the owners that a handler of it was started in."""
        self.misbehaved: set[str] = set() if misbehaved is None else misbehaved

    def answer(self, said: list[Any]) -> bool:
        if said[0] == "misbehave":  # once a message: the next one who gets it must be able to go on
            first = said[1] not in self.misbehaved
            self.misbehaved.add(said[1])
            return first
        if said[0] == "life":  # of a message that kills whoever handles it
            self.lives.setdefault(said[1], []).append(said[2])
            return True
        _, partition, unit, counter, owner, epoch, began, sequence, attempt = said
        effect = Happened(time.monotonic(), owner, epoch, began, sequence, attempt)
        return self.ledger.happen(partition, unit, counter, effect)
