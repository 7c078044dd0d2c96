"""The streams, subjects, keys and headers of task delivery, in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parti.dead_letters.headers import ATTEMPTS as ATTEMPTS
from parti.dead_letters.headers import HISTORY as HISTORY
from parti.dead_letters.headers import MSG_ID as MSG_ID
from parti.dead_letters.headers import SUBJECT as SUBJECT
from parti.dead_letters.headers import TASK_ID as TASK_ID
from parti.dead_letters.letter import dead_letter_stream

FIRST_SEEN = "Parti-First-Seen"
ORIGIN = "Parti-Origin"
"""Stream and sequence of the first publish."""
DUE = "Parti-Due"
"""Unix seconds before which a task with its own schedule must not be tried."""
DROPPED = "Parti-Dropped-Headers"
"""How many of the publisher's headers could not be carried over into our messages."""
FROM_PUBLISHERS = frozenset({TASK_ID, HISTORY})
"""The Parti- headers that are accepted from the task stream, where anyone may write. One keeps the id of a replayed
task (a publisher could choose the id by Nats-Msg-Id as well); the other is only displayed."""
SOURCED = "Nats-Stream-Source"

_UNFIT = re.compile(r"[^A-Za-z0-9_=-]")


@dataclass(frozen=True, slots=True)
class DeliveryNames:
    """The names of everything that belongs to one task stream."""

    stream: str

    @property
    def lanes(self) -> str:
        """The work queue with one subject per partition, when several processes share the work."""
        return f"{self.stream}_LANES"

    @property
    def park(self) -> str:
        """The stream where documents wait that should not stay in memory that long."""
        return f"{self.stream}_PARK"

    @property
    def dead_letters(self) -> str:
        return dead_letter_stream(self.stream)

    @property
    def attempts(self) -> str:
        return f"{self.stream}_ATTEMPTS"

    @property
    def bucket(self) -> str:
        """Key-value bucket: members, owners of partitions, disabled endpoints."""
        return f"{self.stream}_DELIVER"

    def parked(self, slot: int, key: str) -> str:
        """The queue of one parked document."""
        return f"{self.park}.q.{slot}.{key}"

    def wake(self, slot: int, key: str) -> str:
        """Where the schedule puts the message that wakes a document."""
        return f"{self.park}.w.{slot}.{key}"

    def wake_schedule(self, slot: int, key: str) -> str:
        """One pending schedule per document: a new one replaces the old."""
        return f"{self.park}.s.{slot}.{key}"

    def alone(self, slot: int, key: str) -> str:
        """Where a task comes back that was scheduled by itself."""
        return f"{self.park}.t.{slot}.{key}"

    def alone_schedule(self, slot: int, key: str, task: str) -> str:
        """One pending schedule per task; `task` is a token that no other task of the document has."""
        return f"{self.park}.s.{slot}.{key}.{task}"

    def note(self, slot: int, key: str) -> str:
        """How often a document's head was tried, while it waits for its host and not for a time."""
        return f"{self.park}.n.{slot}.{key}"

    def marker(self, slot: int) -> str:
        """Who may write to the park of a partition: the owner that wrote the last message here."""
        return f"{self.park}.e.{slot}"

    def journal(self, slot: int) -> str:
        """What is done above a task that is still open."""
        return f"{self.park}.d.{slot}"

    def letter(self, database: str, collection: str, reason: str) -> str:
        """The subject of a dead letter: can be listed by database, collection or reason."""
        return f"{self.dead_letters}.{token(database)}.{token(collection)}.{reason}"


def token(text: str) -> str:
    """Any text as one token of a subject; characters that are not allowed become underscores."""
    return _UNFIT.sub("_", text[:128]) or "_"
