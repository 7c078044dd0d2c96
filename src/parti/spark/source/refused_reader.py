"""Replaces a streaming reader that cannot be created: it raises the reason at the first call.

If a source returns no reader, Spark's runner of streaming sources fails itself and shows that failure instead of the
error (`UnboundLocalError`, Spark 4.3). So the error is raised one call later, in one sentence as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from parti.errors import PartiError
from parti.spark.plain_errors import plainly


class RefusedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises the error at the first call, whichever Spark makes."""

    def __init__(self, error: PartiError) -> None:
        self._error = error

    def getDefaultReadLimit(self) -> ReadLimit:
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:
        self._refuse()

    def initialOffset(self) -> dict[str, Any]:
        self._refuse()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: ARG002
        self._refuse()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:  # noqa: ARG002
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[Any]:  # noqa: ARG002
        self._refuse()

    @plainly()
    def _refuse(self) -> NoReturn:
        raise self._error.with_traceback(None)
