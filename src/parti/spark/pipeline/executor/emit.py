"""What a handler returns besides "done": results for the pipeline's sinks."""

from __future__ import annotations

from dataclasses import dataclass

from parti.outcomes import Ack


@dataclass(frozen=True, slots=True)
class Emit(Ack):
    """Done, with a result. In the worker plane, which has no result sink, it is just an `Ack`.

    `subject` overrides the subject of the pipeline's result sink. `more` holds further results of the same message.
    """

    value: bytes | str
    subject: str | None = None
    more: tuple[Emit, ...] = ()

    @property
    def data(self) -> bytes:
        return self.value.encode() if isinstance(self.value, str) else self.value

    def all(self) -> tuple[Emit, ...]:
        """This result and the further ones, in order."""
        return (self, *(result for more in self.more for result in more.all())) if self.more else (self,)
