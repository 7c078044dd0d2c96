"""Pipelines from files: `pipeline.toml`, or `app:pipeline` of a Python module.

    [pipeline]
    name = "orders"
    stream = "ORDERS"
    handler = "app:handle"
    checkpoint = "checkpoints/orders"

    [retries]
    then = "park"

    [results]
    subject = "enriched.{key}"

A key that does not exist is refused together with the nearest one that does.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from pyspark.cloudpickle import register_pickle_by_value

from parti.config.units import parse_duration
from parti.errors import ConfigError
from parti.spark.pipeline.driver.definition import Outcomes, Pipeline, Results
from parti.spark.pipeline.driver.lease import Standby
from parti.spark.pipeline.executor.policy import Retries
from parti.wire.options import ConnectOptions

_TABLES: Mapping[str, Any] = {"retries": Retries, "results": Results, "outcomes": Outcomes, "standby": Standby}
_DURATIONS = {"grace", "delays", "park_delays", "budget", "timeout", "ttl", "renew_every", "margin"}
_FOLDERS = {"checkpoint", "parquet"}
_NOT_IN_FILE = {"companion", "retries", "results", "outcomes", "standby", "nats", "spark", "write"}


def load(what: str, nats: ConnectOptions | None = None) -> Pipeline:
    """The pipeline that `what` names: a TOML file, or `module:attribute`. `nats` is used if it sets no connection."""
    make_importable(Path(what).resolve().parent if what.endswith(".toml") else Path.cwd())
    if what.endswith(".toml"):
        return from_toml(Path(what), nats)
    found = named(what)
    if not isinstance(found, Pipeline):
        raise ConfigError(f"{what} is a {type(found).__name__}: name a parti.spark.Pipeline, or a .toml file")
    if nats is not None and found.nats == ConnectOptions():
        return dataclasses.replace(found, nats=nats)
    return found


def make_importable(folder: Path) -> None:
    """Let this process, and the Spark workers it will start, import the modules of this folder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in known:  # workers of local mode inherit it, for the module's own imports
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), *known]))


def named(what: str) -> Any:
    """The object that `module:attribute` names."""
    module, colon, attribute = what.partition(":")
    if not colon or not module or not attribute:
        raise ConfigError(f"{what!r} is neither a .toml file nor module:attribute")
    try:
        imported = importlib.import_module(module)
        found = getattr(imported, attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what}: {error}; run it from the folder of the module, or set PYTHONPATH") from error
    except AttributeError:
        raise ConfigError(f"{what}: the module {module} has no {attribute!r}") from None
    source = getattr(imported, "__file__", None)
    if source is not None and str(Path(source).parent) in sys.path and "site-packages" not in source:
        register_pickle_by_value(imported)  # a module of the user's folder is sent with the job, also to a cluster
    return found


def from_toml(path: Path, nats: ConnectOptions | None = None) -> Pipeline:
    """The pipeline of a file."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    known = ("pipeline", "nats", "spark", *_TABLES)
    for table in document:
        if table not in known:
            raise ConfigError(f"{path}: unknown table [{table}]{_near(table, known)}")
    values = _table(path, "pipeline", Pipeline, document.get("pipeline") or {})
    for required in ("name", "stream", "handler", "checkpoint"):
        if required not in values:
            raise ConfigError(f"{path}: [pipeline] lacks {required}")
    values["handler"] = named(values["handler"])
    for table, kind in _TABLES.items():
        if table in document:
            values[table] = kind(**_table(path, table, kind, document[table]))
    if "nats" in document:
        given = {f"nats.{key}": _text(value) for key, value in document["nats"].items()}
        values["nats"] = ConnectOptions.resolve(given)
    elif nats is not None:
        values["nats"] = nats
    values["spark"] = _spark(path, document.get("spark") or {})
    return Pipeline(**values)


def _table(path: Path, table: str, kind: Any, found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one table, in the types of the class it fills."""
    hints = get_type_hints(kind, localns={"SparkSink": Any, "RunningPipeline": Any})
    names = [field.name for field in dataclasses.fields(kind) if field.name not in _NOT_IN_FILE]
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in names:
            raise ConfigError(f"{path}: [{table}] has no key {key!r}{_near(key, names)}")
        if key in _DURATIONS:
            values[key] = tuple(map(parse_duration, value)) if isinstance(value, list) else parse_duration(value)
        elif key == "handler":
            values[key] = str(value)
        elif key in _FOLDERS:
            values[key] = _folder(str(value))
        else:
            try:
                values[key] = msgspec.convert(value, hints[key])
            except msgspec.ValidationError as error:
                raise ConfigError(f"{path}: [{table}] {key} = {value!r}: {error}") from None
    return values


def _spark(path: Path, table: Mapping[str, Any]) -> dict[str, str]:
    """Settings by Spark's names; in TOML a dotted name is a nested table, or quoted."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(f"{prefix}.{key}", inner)
        else:
            flat[prefix] = str(value).lower() if isinstance(value, bool) else str(value)

    for key, value in table.items():
        walk(key if key.startswith("spark.") else f"spark.{key}", value)
    if "spark.master" in flat:
        raise ConfigError(f"{path}: write master in [pipeline], not in [spark]")
    return flat


def _folder(text: str) -> str:
    """An address independent of the JVM's working directory; addresses with a scheme are not changed."""
    return text if "://" in text else str(Path(text).absolute())


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
