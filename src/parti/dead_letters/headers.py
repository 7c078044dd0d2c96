"""The headers of ours that letters have, and those by which a replayed task is known again."""

from __future__ import annotations

from typing import Any, Final

import msgspec

REASON: Final = "Parti-Reason"
ERROR: Final = "Parti-Error"
ATTEMPTS: Final = "Parti-Attempts"
STREAM: Final = "Parti-Stream"
SUBJECT: Final = "Parti-Subject"
SEQUENCE: Final = "Parti-Sequence"
CONSUMER: Final = "Parti-Consumer"
WORKER: Final = "Parti-Worker"
EPOCH: Final = "Parti-Epoch"
EXTENSION: Final = "Parti-Extension"
"""What only some letters tell, as JSON."""

TASK_ID: Final = "Parti-Task-Id"
HISTORY: Final = "Parti-History"
"""The letters that a replayed task had before, as JSON. It and `TASK_ID` are what a replay gives a task of ours."""
MSG_ID: Final = "Nats-Msg-Id"


def steers(name: str) -> bool:
    """Whether a header tells the server what to do with its message."""
    return name.lower().startswith("nats-")


def whole(text: str | None) -> int:
    """The number that a header holds; 0 where it holds none."""
    return int(text[:20]) if text and text.isdecimal() else 0


def read_history(text: str | None) -> tuple[dict[str, Any], ...]:
    """The letters that a task had before, as its header tells them; none when that is not one that we wrote."""
    try:
        return msgspec.json.decode(text or "[]", type=tuple[dict[str, Any], ...])
    except (msgspec.DecodeError, RecursionError):
        return ()
