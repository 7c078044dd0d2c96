"""The dead letter of an undeliverable task: the task's own bytes and headers, and how its last attempt ended.

It is stored before the task is released, and only once, however often it is sent. A task that is replayed and fails
again gets a new letter, with the history of the earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from parti.dead_letters import DeadLetter, DeadLetterWriter, LetterExtension, LetterKind
from parti.dead_letters.headers import read_history, whole
from parti.delivery import names as n
from parti.delivery.pending import Pending
from parti.delivery.policy import DeliveryAttempt
from parti.outcomes import clean
from parti.wire.api import JetStreamApi

_LONGEST_ERROR = 500
_LONGEST_NAME = 300


class TaskLetters:
    """Stores tasks as dead letters."""

    def __init__(
        self, js: JetStreamApi, names: n.DeliveryNames, scope: str = "", fence: Mapping[str, str] | None = None
    ) -> None:
        """`scope` separates the letters of a run over old tasks: the same task may fail once in each run.

        `fence`: headers by which the server refuses the letters of an owner that was replaced.
        """
        self._writer = DeadLetterWriter(js, names.stream, fence=fence)
        self._names = names
        self._scope = scope

    async def bury(self, held: Pending, reason: StrEnum, attempt: DeliveryAttempt) -> None:
        """When this returns, the letter is stored. On an error the caller must retry, and not release the task."""
        # By the stream sequence: a replay that fails again is another letter, not a duplicate of this one. And by the
        # time, because a recreated stream counts from 1 again. As in earlier versions: two may run at once.
        identity = f"dlq:{self._scope}{held.source}:{held.first_seen:.3f}"
        await self._writer.store(task_letter(held, reason, attempt, self._names), identity)


def task_letter(held: Pending, reason: StrEnum, attempt: DeliveryAttempt, names: n.DeliveryNames) -> DeadLetter:
    """The letter of a task, not stored yet."""
    carried = held.carried()
    stream, _, sequence = held.source.rpartition(":")
    return DeadLetter(
        stream=stream,
        subject=held.subject,
        original_sequence=whole(sequence),
        reason=reason.value,
        error=clean(attempt.error, _LONGEST_ERROR),
        attempts=held.attempts,
        data=held.data,
        headers={k: v for k, v in carried.items() if not k.startswith("Parti-") or k == n.DROPPED},
        extension=LetterExtension(
            kind=LetterKind.DELIVERY,
            id=held.id,
            outcome=attempt.outcome.value,
            status=attempt.status,
            trigger=clean(held.trigger, _LONGEST_NAME),
            host=clean(held.host, _LONGEST_NAME),
            first_seen=round(held.first_seen, 3),
            response=attempt.response,
            history=read_history(carried.get(n.HISTORY)),
        ),
        place=names.letter(held.database, held.task.collection if held.task is not None else "", reason.value),
    )
