"""parti's headers in dead letters, and those that identify a replayed task."""

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
"""Optional fields of a letter, as JSON."""

TASK_ID: Final = "Parti-Task-Id"
HISTORY: Final = "Parti-History"
"""Earlier letters of a replayed task, as JSON. A replay adds this header and `TASK_ID` to a delivery task."""
MSG_ID: Final = "Nats-Msg-Id"


def steers(name: str) -> bool:
    """Whether the server acts on this header when the message is published."""
    return name.lower().startswith("nats-")


def whole(text: str | None) -> int:
    """The integer in a header; 0 if it holds none."""
    return int(text[:20]) if text and text.isdecimal() else 0


def read_history(text: str | None) -> tuple[dict[str, Any], ...]:
    """A task's earlier letters, from its header; none when parti did not write that header."""
    try:
        return msgspec.json.decode(text or "[]", type=tuple[dict[str, Any], ...])
    except (msgspec.DecodeError, RecursionError):
        return ()
