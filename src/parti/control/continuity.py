"""The gap rule: a consumer's deliveries are complete only while its sequence goes up by exactly one.

A delivery can vanish on its way (a node dies, a connection breaks, leadership changes) while later ones arrive; without
this rule its redelivery looks like something already done and is acked unseen (docs/evidence/cluster.md#c3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Continuity:
    """The consumer sequence that comes next; start from `delivered.consumer_seq` + 1 before the first pull."""

    expected: int

    def check(self, consumer_seq: int) -> tuple[Continuity, bool]:
        """The next state, and whether something is missing before this delivery.

        A lower sequence is a delivery that was overtaken: its place was already reported missing.
        """
        if consumer_seq < self.expected:
            return self, False
        return replace(self, expected=consumer_seq + 1), consumer_seq != self.expected
