"""A command group that imports a command only when it is called, so that `parti --help` answers at once."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from parti.errors import ConfigError, PartiError, UsageError

_ABOUT = {
    "bench": "Measure how fast parti is on this machine.",
    "prove": "Prove a promise of parti under real faults.",
    "demo": "Show a fleet and a pipeline under faults, and judge them.",
}
_INTERRUPTED = 130  # what a shell reports for SIGINT: 128 + 2


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is defined ("package.module:attribute"), and its line in --help."""

    target: str
    help: str


def installed_commands() -> dict[str, LazyCommand]:
    """Commands of other packages, such as the lab's: entry points of the group `parti.commands`. None is imported."""
    found = sorted(importlib.metadata.entry_points(group="parti.commands"), key=lambda each: each.name)
    return {each.name: LazyCommand(each.value, _ABOUT.get(each.name, f"From {each.module}.")) for each in found}


def load_command(entry: LazyCommand) -> click.Command:
    """The command itself."""
    module, _, attribute = entry.target.partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    return command


class LazyGroup(click.Group):
    """A group over a table of entries; listing them imports nothing."""

    def __init__(self, *args: Any, entries: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._entries = dict(entries)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = self._entries.get(cmd_name)
        if entry is None:
            return None
        return load_command(entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self._entries:
            near = difflib.get_close_matches(args[0], self._entries, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(self._entries)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self._entries.items()])


class RootGroup(LazyGroup):
    """The program itself: every failure is one line "Error: ..." on stderr, and the exit code gives its kind.

    2: the command line or the configuration is wrong. 1: the work failed. 130: interrupted. A traceback appears only
    for a bug, or with --debug.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name or "parti", complete_var, standalone_mode=False, **extra)
        except click.Abort:
            click.echo("Interrupted.", err=True)
            code = _INTERRUPTED
        except click.ClickException as error:
            click.echo(f"Error: {_one_line(error.format_message())}", err=True)
            code = error.exit_code
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PartiError as error:
            if ctx.params.get("debug"):
                raise
            kind = Refusal if isinstance(error, ConfigError | UsageError) else Failure
            raise kind(str(error) or type(error).__name__) from error


class Failure(click.ClickException):
    """The work failed: exit 1."""


class Refusal(click.ClickException):
    """The command line or the configuration is wrong: exit 2."""

    exit_code = 2


def _one_line(message: str) -> str:
    return " ".join(message.split())
