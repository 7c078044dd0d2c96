"""What every partition of a process shares: one place to look, one set of limits, one way out."""

from __future__ import annotations

from dataclasses import dataclass

from parti.clock import Clock, Randomness
from parti.config.deliver import DeliverSection
from parti.tasks.courier import Courier
from parti.tasks.dead_letters import DeadLetters
from parti.tasks.endpoints import Endpoints
from parti.tasks.gate import Gate
from parti.tasks.held import Held, Reader
from parti.tasks.names import Names
from parti.tasks.policy import Attempt
from parti.tasks.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Tools:
    """The parts that deliver; built once by the consumer."""

    config: DeliverSection
    names: Names
    clock: Clock
    rng: Randomness
    reader: Reader
    gate: Gate
    courier: Courier
    letters: DeadLetters
    endpoints: Endpoints
    recorder: Recorder

    def is_disabled(self, held: Held) -> bool:
        return held.task is not None and self.endpoints.is_disabled(held.task)

    async def disable(self, held: Held, attempt: Attempt) -> None:
        """Send nothing more to the endpoint, in any process, until somebody enables it again."""
        assert held.task is not None
        await self.endpoints.disable(held.task, held.host, f"status {attempt.status}", self.clock.wall())
        self.recorder.event("deliver.endpoint_disabled", warn=True, trigger=held.trigger, host=held.host)
