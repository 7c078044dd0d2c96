"""Output of the commands: results on stdout (a table, or JSON with --json), progress and notes on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec

from parti.progress import Advance, no_progress

_PIPE_WIDTH = 10_000

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")(command)


def print_json(value: object) -> None:
    """One line of JSON on stdout."""
    click.echo(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """A table on stdout. Cells may hold rich markup; use `plain` for text that comes from outside."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A pipe has no width, and other programs read it line by line: cells must not be folded.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def plain(text: object) -> str:
    """Text without rich markup."""
    from rich.markup import escape

    return escape(str(text))


def note(message: str) -> None:
    """One line on stderr."""
    click.echo(message, err=True)


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Advance]:
    """A progress bar on stderr if it is a terminal; nothing if it is a file or a pipe."""
    if not sys.stderr.isatty():
        with no_progress(description, total) as silent:
            yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
