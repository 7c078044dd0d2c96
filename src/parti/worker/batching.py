"""The size of one pull: as many messages as the handlers finish in a tenth of a second. Pure."""

from __future__ import annotations

_PERIOD = 0.1  # seconds between two adjustments; also the amount of work that one pull should bring
_SMALLEST = 10


class BatchSize:
    """Changes by at most a factor of two per adjustment, between 10 and `limit`; starts as configured (50).

    A slow handler gets small batches, so that messages wait at the server and not here; a fast one gets large batches.
    """

    def __init__(self, start: int, *, limit: int) -> None:
        self.size = max(1, min(start, limit))
        self.done = 0
        """Messages finished since the last adjustment; the owner of this object counts them."""
        self._smallest = min(_SMALLEST, self.size)
        self._limit = limit
        self._since: float | None = None

    def __repr__(self) -> str:
        return f"<BatchSize {self.size}>"

    def adapt(self, now: float) -> bool:
        """Adjust the size if it is time to; True when it changed."""
        if self._since is None:
            self._since, self.done = now, 0
            return False
        elapsed = now - self._since
        if elapsed < _PERIOD:
            return False
        wanted = int(self.done / elapsed * _PERIOD)
        before = self.size
        # After a pause the rate says nothing about the handlers' speed.
        if elapsed < 10 * _PERIOD:
            self.size = min(max(wanted, before // 2, self._smallest), before * 2, self._limit)
        self._since, self.done = now, 0
        return self.size != before
