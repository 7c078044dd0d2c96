"""The demonstration: workers and a Spark pipeline over the same stream, a crash, a join and a freeze, then the audit.

The verdict compares what was published with what took effect; any broken promise makes the demonstration fail.
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

from parti.audit.html import render_html
from parti.audit.table import tables
from parti.config import LogLevel, ObserveSection
from parti.errors import PartiError
from parti.observe.logs import configure_logging
from parti_lab.demo.quiet import quietly
from parti_lab.demo.story import Told, tell

_PIPE_WIDTH = 160


@click.command()
@click.option("--partitions", default=2_000, show_default=True, help="Partitions of the stream.")
@click.option("--workers", default=4, show_default=True, help="Worker processes at the start.")
@click.option("--rate", default=2_000, show_default=True, help="Messages published a second.")
@click.option("--seconds", default=45, show_default=True, help="How long load flows; start and audit come on top.")
@click.option("--seed", default=1, show_default=True, help="Who is killed, frozen, and when.")
@click.option("--out", type=click.Path(file_okay=False), help="Keep effects, report and log in this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on stdout.")
def main(partitions: int, workers: int, rate: int, seconds: int, seed: int, out: str | None, as_json: bool) -> None:
    """Run workers and a pipeline under load and faults, and audit what they did."""
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="parti-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    size = {"partitions": partitions, "workers": workers, "rate": rate, "seconds": seconds}
    log = folder / "demo.log"
    try:
        with quietly(log) as terminal:
            configure_logging(ObserveSection(log_level=LogLevel.WARNING))
            outcome = asyncio.run(tell(folder, Console(file=terminal), random.Random(seed), **size))
    except PartiError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        click.echo(f"FAILED before the audit: {reason}\nThe log, Spark's words included, is {log}", err=True)
        sys.exit(1)
    report = folder / "report.html"
    report.write_text(render_html(outcome.report), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"ok": outcome.ok, "folder": str(folder), **outcome.figures()}))
    else:
        _print(outcome)
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"report: {report}")
    if not outcome.ok:
        console.print(f"[red]FAILED[/red]: a promise did not hold, see the table; the log is {log}")
        sys.exit(1)
    console.print("[green]Every promise held.[/green]")


def _print(outcome: Told) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for part in tables(outcome.report):
        console.print(part)
    console.print(f"\nstale effects that the workers' sink refused: {outcome.refused:,}")
