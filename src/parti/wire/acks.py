"""The ack payloads of JetStream, and the frames that carry them where no object is created per message.

An ack goes to the reply subject of the delivery; only an ack of a message's newest delivery counts.
"""

from __future__ import annotations

from typing import Final

ACK: Final = b"+ACK"
"""Ack: the message is done."""
NAK: Final = b"-NAK"
"""Nak: redeliver at once."""
IN_PROGRESS: Final = b"+WPI"
"""In progress: `ack_wait` restarts."""
TERM: Final = b"+TERM"
"""Term: never redeliver."""

ACK_FRAME: Final = b"PUB %s 4\r\n+ACK\r\n"
IN_PROGRESS_FRAME: Final = b"PUB %s 4\r\n+WPI\r\n"
"""Format with the reply subject."""


def nak_after(seconds: float) -> bytes:
    """Nak: redeliver after this many seconds."""
    return NAK + b' {"delay": %d}' % int(seconds * 1e9)


def term(reason: str) -> bytes:
    """Term: never redeliver; the server puts the reason into its advisory."""
    return TERM + b" " + reason.encode()
