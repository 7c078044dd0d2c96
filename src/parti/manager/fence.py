"""The worker's fence under a manager: nothing is pulled or started but by a member that has its lease."""

from __future__ import annotations

from parti.manager.agent import Agent
from parti.model import Lease


class ManagedFence:
    """Stays the same while members come and go; `agent` is the one that counts."""

    def __init__(self) -> None:
        self.agent: Agent | None = None

    def may_pull(self) -> bool:
        return self.agent is not None and self.agent.may_act()

    def may_start(self, lease: Lease) -> bool:
        return self.agent is not None and self.agent.allows(lease)
