"""Options of SQL users: those that Spark adds, and how the options of a catalog table reach a reader or writer.

Spark passes the OPTIONS of `CREATE TABLE ... USING jetstream` to the source once, when it asks for the table's columns.
The reader and the writer of the table get none of them, but they get the columns. So the options are stored as metadata
of a column, which the catalog keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import StructType

from parti.errors import ConfigError

SPARKS_OWN: Final = (
    "provider", "owner", "comment", "collation", "external", "is_managed_location", "location",
    "serialization.format", "transient_lastddltime",
)  # fmt: skip
"""Options that Spark adds to those of a user."""
_PREFIX: Final = "option."  # of what the user wrote in OPTIONS, beside the table's properties
_METADATA: Final = "jetstream.options"
_SECRETS: Final = ("nats.password", "nats.token", "nats.nkeyseed", "nats.nkey_seed", "nats.creds")
_NO_PATH = "format jetstream has no path: name the stream with the option stream"
_LOST = (
    "option stream is missing: Spark hands the OPTIONS of a table with a list of columns, or of CREATE TABLE ... AS "
    "SELECT, to no Python source. Leave the columns out, or use CREATE TEMPORARY VIEW ... USING jetstream OPTIONS (...)"
)


def is_create_table(options: Mapping[str, str]) -> bool:
    """Whether Spark asks for the columns of a new catalog table."""
    return "provider" in {name.lower() for name in options}


def of_new_table(options: Mapping[str, str]) -> dict[str, str]:
    """What the user wrote in OPTIONS; options that a table must not hold are refused."""
    folded = {name.lower(): text for name, text in options.items()}
    if "path" in folded or "location" in folded:
        raise ConfigError(f"{_NO_PATH}, and leave LOCATION out")
    given = {name.removeprefix(_PREFIX): text for name, text in folded.items() if name.startswith(_PREFIX)}
    if not given:
        raise ConfigError("the table has no options: write USING jetstream OPTIONS (servers '...', stream '...')")
    for name in given:
        if name in _SECRETS or (name in ("servers", "nats.servers") and "@" in given[name]):
            raise ConfigError(
                f"option {name} holds a secret, and a table's options are open to all who see it: use nats.credsFile "
                "or nats.nkeyFile, a context of the `nats` CLI, or a TEMPORARY VIEW"
            )
    return given


def kept_in(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The columns of a table, with the options in the metadata of the last.

    All are nullable: Spark's INSERT fills the columns that it does not name with nulls.
    """
    kept = StructType.fromJson(schema.jsonValue())
    for field in kept.fields:
        field.nullable = True
    kept.fields[-1].metadata = {_METADATA: json.dumps(dict(options), sort_keys=True)}
    return kept


def effective(schema: StructType, options: Mapping[str, str]) -> dict[str, str]:
    """The options of a read or write: those given with it override those of the table. A path is refused."""
    given = {name.lower(): text for name, text in options.items()}
    if "path" in given:
        raise ConfigError(f"{_NO_PATH}, as in load() and save() without an argument")
    for field in schema.fields:
        if (field.metadata or {}).get(_METADATA):
            return {**json.loads(field.metadata[_METADATA]), **given}
    if not given:
        raise ConfigError(_LOST)
    return given
