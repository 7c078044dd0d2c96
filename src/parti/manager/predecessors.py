"""What a fenced process passes to its next member: proof that the previous member stopped, and its positions.

Without it, all members would wait one TTL for a process that is alive, and repeat the messages it did after its last
stored position record.
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
    """The earlier members of this process."""

    lives: Mapping[Member, float] = field(default_factory=lambda: MappingProxyType({}))
    """See `control.identity.Identity.former`."""
    worker: WorkerId | None = None
    """The worker id of the last of them."""
    done: Positions = field(default_factory=lambda: MappingProxyType({}))
    """Its positions when it was fenced."""
    last: Life | None = None
    """Its final life record, which it may not have stored."""

    def and_then(
        self, lives: Mapping[Member, float], worker: WorkerId | None, done: Positions, last: Life | None
    ) -> Predecessors:
        """Add one member. Its positions are added to earlier ones that may not have been stored."""
        return Predecessors(lives, worker, later(self.positions_of(worker), done), last) if worker is not None else self

    def positions_of(self, worker: WorkerId) -> Positions:
        """Positions that the stored record of this id may lack."""
        return self.done if worker == self.worker else {}

    def without_positions(self) -> Predecessors:
        """For another stream: positions of the previous stream are invalid there."""
        return Predecessors(self.lives, self.worker)
