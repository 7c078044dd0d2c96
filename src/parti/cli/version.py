"""`parti version`: the versions that a bug report needs."""

from __future__ import annotations

import platform

import click

import parti
from parti.cli.output import json_option, print_json, print_table


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Show the versions of parti and of what it runs on."""
    versions = collect()
    if as_json:
        print_json(versions)
        return
    print_table(["part", "version"], [[name, found or "not found"] for name, found in versions.items()])


def collect() -> dict[str, str | None]:
    """The version of each part; None if it is not installed."""
    from parti.cli.checks.local import find_nats_server, installed
    from parti.java import find_java

    java = find_java()
    server, _ = find_nats_server()
    return {
        "parti": parti.__version__,
        "python": platform.python_version(),
        "nats-py": installed("nats-py"),
        "pyspark": installed("pyspark"),
        "pyarrow": installed("pyarrow"),
        "java": java.version if java else None,
        "nats-server": server,
    }
