"""`parti config show`: every value, its origin, and the reason for its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click

from parti.cli.output import json_option, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig, env_name
from parti.config.origin import Origin, Source
from parti.config.redact import MASK


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    value: str
    origin: Origin
    default: str
    env: str
    help: str


@click.group()
def config() -> None:
    """Show the configuration."""


@config.command()
@click.option("--help-text", "explain", is_flag=True, help="Add what each key is for.")
@json_option
@with_config
def show(loaded: LoadedConfig, explain: bool, as_json: bool) -> None:
    """Show every value with its origin; secrets are masked.

    A flag wins over the environment, the environment over the file, the file over the default.
    """
    rows = list(_rows(loaded))
    if as_json:
        print_json(
            {
                row.name: {
                    "value": row.value,
                    "origin": str(row.origin),
                    "default": row.default,
                    "env": row.env,
                    "help": row.help,
                }
                for row in rows
            }
        )
        return
    columns = ["key", "value", "origin", *(["what for"] if explain else [])]
    print_table(
        columns,
        [
            [
                row.name,
                plain(row.value),
                plain(row.origin) if row.origin.source is Source.DEFAULT else f"[bold]{plain(row.origin)}[/bold]",
                *([plain(row.help)] if explain else []),
            ]
            for row in rows
        ],
    )


def _rows(loaded: LoadedConfig) -> Iterator[_Row]:
    from parti.wire.configured import configured_options

    nats = configured_options(loaded)
    for name, key, value, origin in loaded.rows():
        section, _, field = name.partition(".")
        if section == "nats" and field != "context":
            # The value that a connection would use, with the environment and contexts of the `nats` CLI applied.
            value, origin = getattr(nats.options, field), nats.origins[field]
        elif name == "nats.context" and nats.context and not value:
            value, origin = nats.context, Origin(Source.CONTEXT, nats.context)
        shown = MASK if key.setting.secret and value else key.show(value)
        yield _Row(name, shown, origin, key.show(key.default), env_name(name), key.setting.reason)
