"""How much to ask for with one pull: as much as the handlers manage in a tenth of a second. Pure."""

from __future__ import annotations

_PERIOD = 0.1  # seconds between two looks; also the share of work that one pull should bring
_SMALLEST = 10


class BatchSize:
    """Grows and shrinks by at most a factor of two a look, between 10 and `limit`; starts as configured (50).

    A slow handler gets small batches, so that messages wait at the server and not here; a fast one gets large ones.
    """

    def __init__(self, start: int, *, limit: int) -> None:
        self.size = max(1, min(start, limit))
        self.done = 0
        """Messages that were let go since the last look; the owner counts."""
        self._smallest = min(_SMALLEST, self.size)
        self._limit = limit
        self._since: float | None = None

    def __repr__(self) -> str:
        return f"<BatchSize {self.size}>"

    def adapt(self, now: float) -> bool:
        """Look whether it is time to change the size; True when it changed."""
        if self._since is None:
            self._since, self.done = now, 0
            return False
        elapsed = now - self._since
        if elapsed < _PERIOD:
            return False
        wanted = int(self.done / elapsed * _PERIOD)
        before = self.size
        # After a pause the rate says nothing about the handlers.
        if elapsed < 10 * _PERIOD:
            self.size = min(max(wanted, before // 2, self._smallest), before * 2, self._limit)
        self._since, self.done = now, 0
        return self.size != before
