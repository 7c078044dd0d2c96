"""The columns of a JetStream DataFrame and their types in Spark. No Arrow here.

Spark asks for the columns in a process of its own for every `load()`, which ends at once: without NumPy and Arrow it
costs 0.1 s of CPU less, a tenth of reading a million messages.
"""

from __future__ import annotations

from difflib import get_close_matches

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from parti.errors import ConfigError

HEADERS = "headers"
_HEADERS_TYPE = "array<struct<key:string,value:binary>>"
# Name -> Spark's type, and the columns of the range reader that it needs.
COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "key": ("string", ("subject",)),
    "value": ("binary", ("data",)),
    "subject": ("string", ("subject",)),
    "partition": ("int", ("subject",)),
    "sequence": ("bigint", ("sequence",)),
    "timestamp": ("timestamp", ("timestamp",)),
    "stream": ("string", ()),
    HEADERS: (_HEADERS_TYPE, (HEADERS,)),
}
_NULLABLE = ("key", "partition")  # null where a subject has too few tokens
_SPARK: dict[str, DataType] = {
    "string": StringType(),
    "binary": BinaryType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    _HEADERS_TYPE: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


def default_schema(*, include_headers: bool) -> StructType:
    """The schema when the user gives none; not from DDL, which only a process with a JVM can parse.

    Spark checks each value of a nullable column twice, so columns that are never null say so. This does not depend on
    the options: Spark refuses to continue stateful queries whose columns have become nullable.
    """
    names = [name for name in COLUMNS if name != HEADERS or include_headers]
    return StructType([StructField(name, _SPARK[COLUMNS[name][0]], name in _NULLABLE) for name in names])


def check_schema(schema: StructType) -> None:
    """Raise ConfigError unless every column of `schema` exists here, with the same type."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            near = get_close_matches(field.name.lower(), COLUMNS, n=1)
            hint = f"did you mean {near[0]!r}? There are" if near else "choose from"
            raise ConfigError(f"format jetstream has no column {field.name!r}: {hint} {', '.join(COLUMNS)}")
        expected, given = COLUMNS[field.name][0], field.dataType.simpleString()
        if given != expected:
            raise ConfigError(f"column {field.name} is of type {expected}, not {given}: cast it after reading")
