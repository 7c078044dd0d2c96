"""The worker's fence under a manager: only a member with a valid lease pulls messages or starts handlers."""

from __future__ import annotations

from parti.manager.agent import Agent
from parti.model import Lease


class ManagedFence:
    """One object for all members of a process, one after the other; `agent` is the current member."""

    def __init__(self) -> None:
        self.agent: Agent | None = None

    def may_pull(self) -> bool:
        return self.agent is not None and self.agent.may_act()

    def may_start(self, lease: Lease) -> bool:
        return self.agent is not None and self.agent.allows(lease)
