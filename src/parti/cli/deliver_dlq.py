"""`parti deliver dlq`: `parti dlq` for the tasks of deliver.stream only, with a filter that is checked."""

from __future__ import annotations

import click

from parti.cli.dlq import (
    chosen_letters,
    gather_letters,
    limit_option,
    print_letters,
    redact_option,
    replay_letters,
    show_letter,
    summary,
    with_letters,
)
from parti.cli.output import json_option, print_json
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import UsageError

_COLUMNS = ("letter", "buried", "reason", "status", "attempts", "document", "trigger", "host", "id")


@click.group("dlq")
def dlq() -> None:
    """The tasks that could not be delivered (stream <STREAM>_DLQ): `parti dlq` for deliver.stream."""


def _checked(_: click.Context, __: click.Parameter, pattern: str) -> str:
    """Refuse a filter that no letter can match: an empty answer would look like good news."""
    from parti.delivery.errors import Reason

    tokens, reasons = pattern.split("."), [reason.value for reason in Reason]
    fits = len(tokens) == 3 or (tokens[-1] == ">" and len(tokens) <= 3)
    if not fits or not all(tokens) or ">" in tokens[:-1]:
        raise UsageError(
            f"--filter {pattern!r}: write <database>.<collection>.<reason>, with * for any, or > at the end"
        )
    if len(tokens) == 3 and tokens[2] not in ("*", ">", *reasons):
        raise UsageError(f"--filter {pattern!r}: {tokens[2]!r} is no reason; there are {', '.join(reasons)}")
    return pattern


_filter = click.option(
    "--filter",
    "pattern",
    default=">",
    show_default=True,
    metavar="PATTERN",
    callback=_checked,
    help="Only letters of <database>.<collection>.<reason>; wildcards allowed.",
)


@dlq.command("ls")
@_filter
@limit_option
@json_option
@with_config
def list_letters(loaded: LoadedConfig, pattern: str, limit: int, as_json: bool) -> None:
    """List letters, oldest first."""
    chosen = chosen_letters(place=pattern, tasks=True)
    found, total = gather_letters(loaded, loaded.config.deliver.stream, chosen, limit)
    if as_json:
        print_json([summary(letter) for letter in found])
    else:
        print_letters(_COLUMNS, found, total)


@dlq.command("show")
@click.argument("letter", type=click.IntRange(min=1))
@redact_option
@json_option
@with_config
def show(loaded: LoadedConfig, letter: int, redact: bool, as_json: bool) -> None:
    """Show one letter: why, the endpoint's answer, the task as it was published, and its letters before."""
    show_letter(loaded, loaded.config.deliver.stream, letter, redact, as_json)


@dlq.command("replay")
@_filter
@click.option("--letter", "letters", type=click.IntRange(min=1), multiple=True, help="This one only; may be repeated.")
@click.option("--rate", default=100.0, show_default=True, type=click.FloatRange(min=0.01), help="Letters a second.")
@json_option
@with_config
def replay(loaded: LoadedConfig, pattern: str, letters: tuple[int, ...], rate: float, as_json: bool) -> None:
    """Publish letters again, with the id they had, and remove them from the dead letters."""
    chosen = chosen_letters(letters, place=pattern, tasks=True)
    replay_letters(loaded, loaded.config.deliver.stream, chosen, rate, as_json)


@dlq.command("purge")
@_filter
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@with_config
def purge(loaded: LoadedConfig, pattern: str, yes: bool, as_json: bool) -> None:
    """Remove letters for good."""
    if not yes:
        click.confirm(f"Remove every dead letter that matches {pattern!r} for good?", abort=True, err=True)
    chosen = chosen_letters(place=pattern, tasks=True)
    count = with_letters(loaded, loaded.config.deliver.stream, lambda letters: letters.purge(chosen))
    if as_json:
        print_json({"purged": count})
    else:
        click.echo(f"purged {count}")
