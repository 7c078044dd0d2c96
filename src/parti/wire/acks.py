"""The words by which a consumer answers a delivery, and the frames that carry them where no object is made per message.

An answer goes to the reply subject of the delivery, and only the newest delivery of a message counts.
"""

from __future__ import annotations

from typing import Final

ACK: Final = b"+ACK"
"""Done: the server may pass it."""
NAK: Final = b"-NAK"
"""Not done: it comes again, at once."""
IN_PROGRESS: Final = b"+WPI"
"""Still at work: `ack_wait` begins anew."""
TERM: Final = b"+TERM"
"""Never again, whatever became of it."""

ACK_FRAME: Final = b"PUB %s 4\r\n+ACK\r\n"
IN_PROGRESS_FRAME: Final = b"PUB %s 4\r\n+WPI\r\n"
"""To be filled with the reply subject."""


def nak_after(seconds: float) -> bytes:
    """Not done: it comes again after so many seconds."""
    return NAK + b' {"delay": %d}' % int(seconds * 1e9)


def term(reason: str) -> bytes:
    """Never again, with the reason that the server tells in its advisory."""
    return TERM + b" " + reason.encode()
