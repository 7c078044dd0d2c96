"""The effects that the workers' sink accepted, stored as Parquet for the audit; memory is bounded by one file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from parti.testing.history import Effect

_ROWS: Final = 50_000
_SCHEMA: Final = pa.schema(
    [
        ("stream", pa.string()),
        ("sequence", pa.int64()),
        ("order", pa.int64()),
        ("partition", pa.string()),
        ("key", pa.string()),
        ("attempts", pa.int32()),
        ("took", pa.float64()),
        ("epoch", pa.int64()),
        ("owner", pa.string()),
        ("timestamp", pa.float64()),
        ("finished", pa.float64()),
    ]
)


class EffectLog:
    """Takes accepted effects in the order they took effect; call `close` after the last one."""

    def __init__(self, folder: Path, stream: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._stream = stream
        self._rows: list[tuple[Any, ...]] = []
        self._taken = 0
        self._files = 0

    def take(self, effect: Effect, sequence: int, stored: float, attempt: int, began: float) -> None:
        """Add one effect; its handler ran from its start until now."""
        self._taken += 1
        now = time.time()
        where = (effect.partition, effect.key, attempt, max(0.0, now - began), effect.epoch, effect.owner)
        self._rows.append((self._stream, sequence, self._taken, *where, stored, now))
        if len(self._rows) >= _ROWS:
            self.close()

    def close(self) -> None:
        """Write the remaining effects."""
        if not self._rows:
            return
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*self._rows, strict=True), _SCHEMA, strict=True)
        ]
        pq.write_table(pa.Table.from_arrays(columns, schema=_SCHEMA), self._folder / f"{self._files:05}.parquet")
        self._rows.clear()
        self._files += 1
