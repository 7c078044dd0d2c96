"""Dead letters of groups: a letter's subject is one under which its stream takes the message again."""

from __future__ import annotations

import copy

from parti.groups.message import GroupMessage
from parti.groups.names import GroupKind
from parti.wire.api import JetStreamApi
from parti.worker.dead_letters import DeadLetterWriter
from parti.worker.outcomes import Bury


class StaticLetters:
    """The office of a static group: its stream takes only subjects that begin with the partition."""

    def __init__(self, office: DeadLetterWriter) -> None:
        self._office = office

    def __repr__(self) -> str:
        return f"<StaticLetters {self._office!r}>"

    async def bury(self, message: GroupMessage, decision: Bury) -> None:
        """When this returns, the letter is stored, under the subject with the partition: `parti dlq replay` uses it."""
        whole = copy.copy(message)
        whole.subject = message.queue_subject
        await self._office.bury(whole, decision)


def letters_of(api: JetStreamApi, kind: GroupKind, stream: str, group: str) -> StaticLetters | DeadLetterWriter:
    office = DeadLetterWriter(api, stream, group)
    return StaticLetters(office) if kind is GroupKind.STATIC else office
