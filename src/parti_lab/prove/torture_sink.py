"""The checking sink of a torture run, over a loopback socket: refuses stale epochs, knows which messages misbehaved."""

from __future__ import annotations

import time
from typing import Any

from parti_lab.prove.asking import Answering
from parti_lab.prove.torture_judge import Happened, TortureLedger


class TortureSink(Answering):
    """Records effects in a ledger, in the order in which they took effect."""

    def __init__(self, ledger: TortureLedger, misbehaved: set[str] | None = None) -> None:
        """`misbehaved`: messages that have misbehaved already, also at another sink that shares this set."""
        self.ledger = ledger
        self.lives: dict[str, list[str]] = {}
        """Value of a poisonous message -> the owners in which a handler of it was started."""
        self.misbehaved: set[str] = set() if misbehaved is None else misbehaved

    def answer(self, said: list[Any]) -> bool:
        if said[0] == "misbehave":  # once per message: its next handler must be able to finish
            first = said[1] not in self.misbehaved
            self.misbehaved.add(said[1])
            return first
        if said[0] == "life":  # of a message that kills every process that handles it
            self.lives.setdefault(said[1], []).append(said[2])
            return True
        _, partition, unit, counter, owner, epoch, began, sequence, attempt = said
        effect = Happened(time.monotonic(), owner, epoch, began, sequence, attempt)
        return self.ledger.happen(partition, unit, counter, effect)
