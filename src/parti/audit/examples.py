"""Examples of faults as text: which message, which key, which owner. Looked up only when there is a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from parti.audit.scan import ROWS, Find
from parti.audit.sources import Published
from parti.audit.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COLUMNS: Final = ("sequence", "order", "finished", "partition", "key", "epoch", "owner", "subject")
_SAID: Final = 4  # effects of one message that an example lists
Row = dict[str, str | None]


class Examples:
    """Describes a few sequences with what is known about them."""

    def __init__(self, spark: SparkSession, published: Published, effects: Table) -> None:
        self._spark = spark
        self._published = published
        self._effects = effects

    def of_effects(self, sequences: list[int]) -> dict[int, str]:
        """The effects of these messages, in their order."""
        texts: dict[int, str] = {}
        for sequence, rows in self._find(self._effects, sequences).items():
            rows.sort(key=lambda row: (int(row.get("order") or 0), row.get("finished") or ""))
            by = ", then ".join(
                f"{row.get('owner') or 'unknown owner'} in epoch {row.get('epoch')}" for row in rows[:_SAID]
            )
            first = rows[0]
            texts[sequence] = (
                f"sequence {sequence} of key {first.get('key')} in partition {first.get('partition')}, by {by}"
            )
        return texts

    def of_messages(self, sequences: list[int]) -> dict[int, str]:
        """The published messages with these sequences."""
        if not sequences:
            return {}
        texts = {}
        for sequence, (row, *_) in self._find(self._published.table(self._spark, keyed=True), sequences).items():
            key, subject = row.get("key") or row.get("subject"), row.get("subject")
            texts[sequence] = f"sequence {sequence} of key {key}" + (f", subject {subject}" if subject != key else "")
        return texts

    def _find(self, table: Table, sequences: list[int]) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = {}
        if sequences:
            for row in table.run(self._spark, Find(tuple(sequences)), ROWS, _COLUMNS).collect():
                found.setdefault(row["low"], []).append(msgspec.msgpack.decode(row["data"], type=Row))
        return found
