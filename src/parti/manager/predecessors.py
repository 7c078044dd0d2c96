"""What a fenced process may tell its next member: only it can know that the one before has stopped, and how far it got.

Without this everybody waits one TTL for a process that is standing right there, and repeats what it did after its last
position record could be stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from parti.control.lives import Life
from parti.manager.positions import Positions, later
from parti.model import Member, WorkerId


@dataclass(frozen=True, slots=True)
class Predecessors:
    """The members that this process was before."""

    lives: Mapping[Member, float] = field(default_factory=lambda: MappingProxyType({}))
    """See `control.identity.Identity.former`."""
    worker: WorkerId | None = None
    """The id of the last of them."""
    done: Positions = field(default_factory=lambda: MappingProxyType({}))
    """Its positions when it was fenced."""
    last: Life | None = None
    """What it would have told of itself, if it had got round to it."""

    def and_then(
        self, lives: Mapping[Member, float], worker: WorkerId | None, done: Positions, last: Life | None
    ) -> Predecessors:
        """One life more. Its positions are added to those it may not have got round to storing."""
        return Predecessors(lives, worker, later(self.positions_of(worker), done), last) if worker is not None else self

    def positions_of(self, worker: WorkerId) -> Positions:
        """What a record of this id may lack."""
        return self.done if worker == self.worker else {}

    def without_positions(self) -> Predecessors:
        """For another stream: what was done in the one before says nothing."""
        return Predecessors(self.lives, self.worker)
