"""Checks of this machine: Python, Java, Spark, the nats-server program. None of them opens a connection."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator

from parti.cli.checks import Check, fail, ok, warn
from parti.errors import PartiError
from parti.java import OLDEST, Java, find_java

_OLDEST_PYTHON = (3, 11)
_OLDEST_SPARK = (4, 2)


def local_checks() -> Iterator[Check]:
    """All checks of this machine, in the order a newcomer needs them."""
    yield judge_python(sys.version_info[:2])
    yield judge_java(find_java())
    yield judge_spark(installed("pyspark"))
    yield judge_nats_server(*find_nats_server())


def judge_python(version: tuple[int, ...]) -> Check:
    if version >= _OLDEST_PYTHON:
        return ok("python", platform.python_version())
    return fail("python", ".".join(map(str, version)), "use Python 3.11 or newer")


def judge_java(java: Java | None) -> Check:
    advice = f"install Java {OLDEST} or newer (Debian: apt-get install openjdk-17-jre-headless) and set JAVA_HOME"
    if java is None:
        return warn("java", "not found", f"only Spark needs it: {advice}")
    found = f"{java.version} ({java.origin})"
    if java.major < OLDEST:
        return warn("java", found, f"too old for Spark: {advice}")
    if java.origin not in ("JAVA_HOME", "PATH"):
        return warn("java", found, f"Spark will not find it by itself: export JAVA_HOME={java.home}")
    return ok("java", found)


def judge_spark(version: str | None) -> Check:
    if version is None:
        return warn("spark", "not installed", "only the data pipeline needs it: pip install 'parti[spark]'")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_SPARK:
        return warn("spark", version, "the jetstream source needs pyspark 4.2 or newer: pip install 'parti[spark]'")
    return ok("spark", version)


def judge_nats_server(version: str | None, note: str) -> Check:
    if version is None:
        return warn("nats-server", "no usable program", note)
    return ok("nats-server", f"{version} ({note})")


def find_nats_server() -> tuple[str | None, str]:
    """The version and origin of the nats-server that parti would start; else None and what to do."""
    from parti.testing.binary import find_binary

    try:
        binary = find_binary()
    except PartiError as error:
        return None, str(error)
    return ".".join(map(str, binary.version)), binary.origin


def installed(package: str) -> str | None:
    """The version of an installed package, read without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
