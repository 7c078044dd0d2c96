"""Headers on their way through a shuffle: as text, because Spark hands an array to Python three times slower.

Measured on 400,000 messages without any header: 115,000 rows a second with the array, 310,000 without the column.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa

from parti.spark.columns import HEADERS
from parti.wire.columns import HEADER_TYPE


def with_packed_headers(frame: Any) -> Any:
    """The frame with its headers as JSON text, null where a message has none; `with_headers` undoes it."""
    if HEADERS not in frame.columns:
        return frame
    from pyspark.sql import functions as f

    return frame.withColumn(HEADERS, f.when(f.size(HEADERS) > 0, f.to_json(HEADERS)))


def with_headers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with its headers as the source gave them."""
    index = batch.schema.get_field_index(HEADERS)
    if index < 0 or not pa.types.is_string(batch.schema.field(index).type):
        return batch
    packed = batch.column(index)
    if packed.null_count == len(packed):
        headers = pa.nulls(len(packed), HEADER_TYPE)
    else:
        headers = pa.array([_unpacked(text) for text in packed.to_pylist()], HEADER_TYPE)
    return batch.set_column(index, pa.field(HEADERS, HEADER_TYPE), headers)


def _unpacked(text: str | None) -> list[dict[str, Any]] | None:
    if text is None:
        return None
    return [{"key": entry["key"], "value": base64.b64decode(entry["value"])} for entry in json.loads(text)]
