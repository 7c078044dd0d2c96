"""SQL options: Spark's additions are allowed, a table's options are read back, those it must not store are refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
from pyspark.sql.types import StructType

from parti.errors import ConfigError
from parti.spark.plain_errors import plainly
from parti.spark.source.schema import default_schema
from parti.spark.table_options import effective, is_create_table, kept_in, of_new_table

COLUMNS = default_schema(include_headers=False)
CREATED = {"provider": "jetstream", "owner": "me", "stream": "S", "option.stream": "S", "option.startingoffsets": "7"}


def test_the_options_of_a_table_come_back_from_its_columns_and_those_of_a_query_count_more() -> None:
    assert is_create_table(CREATED)
    options = of_new_table(CREATED)
    assert options == {"stream": "S", "startingoffsets": "7"}
    stored = StructType.fromJson(kept_in(COLUMNS, options).jsonValue())  # as the catalog keeps it
    assert [field.name for field in stored] == [field.name for field in COLUMNS]
    assert all(field.nullable for field in stored)  # INSERT fills columns that it does not name with nulls
    assert effective(stored, {}) == options
    assert effective(stored, {"startingOffsets": "9"}) == {"stream": "S", "startingoffsets": "9"}


def test_a_read_or_write_without_any_option_is_refused_for_it_might_go_anywhere() -> None:
    with pytest.raises(ConfigError, match="Leave the columns out, or use CREATE TEMPORARY VIEW"):
        effective(COLUMNS, {})


def test_a_path_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="has no path: name the stream with the option stream"):
        effective(COLUMNS, {"path": "S", "stream": "S"})
    with pytest.raises(ConfigError, match="leave LOCATION out"):
        of_new_table(CREATED | {"location": "file:/x"})


@pytest.mark.parametrize(
    "secret", [{"nats.password": "x"}, {"nats.token": "x"}, {"nats.nkeyseed": "x"}, {"servers": "nats://me:pw@host"}]
)
def test_a_secret_does_not_go_into_a_catalog(secret: Any) -> None:
    with pytest.raises(ConfigError, match="holds a secret"):
        of_new_table(CREATED | {f"option.{name}": text for name, text in secret.items()})


def test_a_table_with_properties_in_place_of_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="USING jetstream OPTIONS"):
        of_new_table({"provider": "jetstream", "stream": "S"})


def test_only_our_own_errors_are_shown_without_frames_and_only_in_sparks_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    for runtime, error, hidden in (("", ConfigError("x"), False), ("PYTHON_WORKER", ValueError("x"), False),
                                   ("PYTHON_WORKER", ConfigError("x"), True)):  # fmt: skip
        monkeypatch.setenv("SPARK_PYTHON_RUNTIME", runtime)
        with pytest.raises(type(error)), plainly():
            raise error
        assert ("SPARK_HIDE_TRACEBACK" in os.environ) is hidden
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
