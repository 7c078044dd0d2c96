"""Messages between the managers of a namespace outside the bucket: nudges, and requests to read the source again.

They are hints only: correctness never depends on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from parti.errors import PartiError
from parti.manager.agent import Agent
from parti.model import Member, PartitionId
from parti.wire.connect import Connection
from parti.wire.events import ConnectionEvent, ConnectionEventKind


class Bus:
    """Sends and receives these messages for one manager. `agent` is its current member, if any."""

    def __init__(self, nc: Connection, namespace: str, agent: Callable[[], Agent | None]) -> None:
        self._nc = nc
        self._subject = f"parti.{namespace}"
        self._agent = agent
        self._unwatch: Callable[[], None] = lambda: None
        self._subscriptions: list[Any] = []

    async def listen(self) -> None:
        """Subscribe: from now on the member receives these messages, and learns when NATS is back."""
        self._unwatch = self._nc.add_listener(self._on_connection)
        self._subscriptions = [
            await self._nc.subscribe(f"{self._subject}.nudge.*", cb=self._nudged),
            await self._nc.subscribe(f"{self._subject}.refresh", cb=self._asked_to_refresh),
        ]

    async def close(self) -> None:
        self._unwatch()
        for subscription in self._subscriptions:
            if not self._nc.is_closed:
                await subscription.unsubscribe()
        self._subscriptions = []

    async def ask_to_refresh(self) -> None:
        """Ask the leader, in any process, to read its partition source again."""
        await self._nc.publish(f"{self._subject}.refresh", b"")

    def nudge(self, member: Member, partition: PartitionId) -> None:
        """Ask that member to read a claim again: its watch may have missed a change."""
        agent = self._agent()
        if agent is not None and self._nc.is_connected:
            agent.spawn(self._send_nudge(member, partition), "parti-nudge")

    async def _send_nudge(self, member: Member, partition: PartitionId) -> None:
        await self._nc.publish(f"{self._subject}.nudge.{member.worker}", partition.encode())

    async def _nudged(self, message: Any) -> None:
        agent = self._agent()
        worker = message.subject.rpartition(".")[2]
        if agent is not None and agent.member is not None and agent.member.worker == worker:
            agent.read_claim_again(PartitionId(message.data.decode(errors="replace")))

    async def _asked_to_refresh(self, _: Any) -> None:
        agent = self._agent()
        if agent is not None and agent.leading and agent.leadership is not None:
            with contextlib.suppress(PartiError):  # the partition feed has reported it
                await agent.leadership.refresh()

    def _on_connection(self, event: ConnectionEvent) -> None:
        agent = self._agent()
        if event.kind is ConnectionEventKind.RECONNECTED and agent is not None:
            agent.renew_soon()
