"""The parts that all partitions of a process share: one set of limits, one courier, one dead-letter writer."""

from __future__ import annotations

from dataclasses import dataclass

from parti.clock import Clock, Randomness
from parti.config.deliver import DeliverSection
from parti.delivery.courier import Courier
from parti.delivery.endpoints import Endpoints
from parti.delivery.gate import Gate
from parti.delivery.letters import TaskLetters
from parti.delivery.names import DeliveryNames
from parti.delivery.pending import Pending, TaskReader
from parti.delivery.policy import DeliveryAttempt
from parti.delivery.recorder import DeliveryRecorder


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """The parts that deliver; the consumer builds them once."""

    config: DeliverSection
    names: DeliveryNames
    clock: Clock
    rng: Randomness
    reader: TaskReader
    gate: Gate
    courier: Courier
    letters: TaskLetters
    endpoints: Endpoints
    recorder: DeliveryRecorder

    def is_disabled(self, held: Pending) -> bool:
        return held.task is not None and self.endpoints.is_disabled(held.task)

    async def disable(self, held: Pending, attempt: DeliveryAttempt) -> None:
        """Send nothing more to the endpoint, in any process, until an operator enables it again."""
        assert held.task is not None
        await self.endpoints.disable(held.task, held.host, f"status {attempt.status}", self.clock.wall())
        self.recorder.event("deliver.endpoint_disabled", warn=True, trigger=held.trigger, host=held.host)
