"""`parti audit`: compares what was published with what took effect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from parti.cli.output import json_option, note, print_json
from parti.cli.settings import log_quietly, with_config
from parti.config import LoadedConfig
from parti.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from parti.audit import Report


@click.command()
@click.option("--stream", required=True, metavar="NAME", help="The stream whose messages are audited.")
@click.option("--published", metavar="PATH", help="A Parquet copy of the stream, instead of the stream itself.")
@click.option("--effects", required=True, metavar="WHERE", help="stream:NAME, or the path of Parquet or JSON lines.")
@click.option("--compare", metavar="WHERE", help="Effects of another consumer or run, for parity.")
@click.option("--subjects", metavar="FILTERS", default="", help="Audit only these subjects, separated by commas.")
@click.option("--first", type=click.IntRange(min=1), help="First sequence to audit.")
@click.option("--last", type=click.IntRange(min=1), help="Last sequence to audit.")
@click.option("--key", default="subject", show_default=True, help="Tokens that are the key, when effects tell none.")
@click.option("--order", default="key", show_default=True, help="What is promised to be in order: key or partition.")
@click.option("--duplicates", default=0, show_default=True, help="Repeats that are allowed, as after a crash.")
@click.option("--metrics", multiple=True, metavar="FILE", help="A saved /metrics page of a worker, for its SLO.")
@click.option("--slo", "fail_on_slo", is_flag=True, help="Exit 1 also when an objective is missed.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write the report with charts to FILE.")
@click.option("--master", default="local[*]", show_default=True, metavar="URL", help="Spark master.")
@json_option
@with_config
def audit(
    loaded: LoadedConfig,
    stream: str,
    published: str | None,
    effects: str,
    compare: str | None,
    subjects: str,
    first: int | None,
    last: int | None,
    key: str,
    order: str,
    duplicates: int,
    metrics: tuple[str, ...],
    fail_on_slo: bool,
    html: str | None,
    master: str,
    as_json: bool,
) -> None:
    """Find what was lost, duplicated, out of order or done by the wrong owner, from the data alone.

    Exit code 0: every promise held. 1: one is broken. 2: the command line is wrong.
    """
    from parti.audit import AuditRules, Effects, Published
    from parti.audit import audit as run
    from parti.audit.session import audit_session
    from parti.audit.slo import update_counts
    from parti.spark.quiet import without_chatter
    from parti.wire.configured import configured_options

    log_quietly(loaded)
    if published is not None and subjects:
        raise UsageError("--subjects filters a stream: cut the copy of --published instead")
    rules = AuditRules(order=order, duplicates=duplicates)
    updates = update_counts(metrics)
    connect = configured_options(loaded).options
    filters = tuple(one.strip() for one in subjects.split(",") if one.strip())
    what = Published(stream=stream, path=published, connect=connect, subjects=filters, key=key, first=first, last=last)
    given = Effects.parse(effects, connect)
    other = None if compare is None else Effects.parse(compare, connect)
    with without_chatter(), audit_session(master) as spark:
        report = run(spark, what, given, compare=other, rules=rules, updates=updates)
    if html is not None:
        write_report(html, report)
    if as_json:
        print_json(report.figures())
    else:
        print_report(report)
    if html is not None:
        note(f"report: {html}")
    if not report.ok:
        note("not ok: a promise is broken, see the findings")
    elif fail_on_slo and not report.slos_met:
        note("not ok: an objective is missed")
    if not report.ok or (fail_on_slo and not report.slos_met):
        raise click.exceptions.Exit(1)


def write_report(path: str, report: Report) -> None:
    """Write the HTML page into this file."""
    from parti.audit.html import render_html

    try:
        Path(path).write_text(render_html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def print_report(report: Report) -> None:
    """Print tables on stdout."""
    import sys

    from rich.console import Console

    from parti.audit.table import tables

    width = None if sys.stdout.isatty() else 160
    console = Console(file=sys.stdout, width=width)
    for table in tables(report):
        console.print(table)
