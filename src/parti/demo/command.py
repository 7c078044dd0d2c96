"""The demonstration: workers and a Spark pipeline over the same stream, a crash, a join and a freeze, then the audit.

It is honest: what it shows is judged from what was published and what took effect, and any promise that does not hold
makes it fail.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from parti.demo.story import Told, tell


@click.command()
@click.option("--partitions", default=2_000, show_default=True, help="Partitions of the stream.")
@click.option("--workers", default=4, show_default=True, help="Worker processes at the start.")
@click.option("--rate", default=2_000, show_default=True, help="Messages published a second.")
@click.option("--seconds", default=45, show_default=True, help="How long load flows; start and audit come on top.")
@click.option("--seed", default=1, show_default=True, help="Who is killed, frozen, and when.")
@click.option("--out", type=click.Path(file_okay=False), help="Keep outcomes and report in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on stdout.")
def main(partitions: int, workers: int, rate: int, seconds: int, seed: int, out: str | None, as_json: bool) -> None:
    """Run workers and a pipeline under load and faults, and audit what they did."""
    console = Console(stderr=True)
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="parti-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    told = asyncio.run(
        tell(folder, console, random.Random(seed), partitions=partitions, workers=workers, rate=rate, seconds=seconds)
    )
    if as_json:
        click.echo(json.dumps({"ok": told.ok, "folder": str(folder), **told.figures()}))
    else:
        Console().print(_table(told))
    console.print(f"outcomes of the pipeline: {folder / 'outcomes'}")
    if told.report is not None:
        console.print(f"report: {told.report}")
    if not told.ok:
        console.print("[red]FAILED[/red]: a promise did not hold, see the table")
        sys.exit(1)
    console.print("[green]Every promise held.[/green]")


def _table(told: Told) -> Table:
    table = Table("promise", "workers", "pipeline on Spark", title="What was published, and what took effect")
    for name, (worker, pipeline) in told.rows().items():
        table.add_row(name, f"{worker:,}", f"{pipeline:,}")
    return table
