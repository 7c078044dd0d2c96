"""A command group whose commands have aliases, shown in its help."""

from __future__ import annotations

import difflib
from typing import Any

import click

_EARLY = {"--config": 1, "--set": 1, "--server": 1, "-s": 1, "--context": 1, "--sleep": 1, "--json": 0}
"""Flags that may also come before their verb, as in `cg --context c elastic --sleep 1s consume`, each with the number
of its values."""


class AliasGroup(click.Group):
    """`add(command, "rm")` makes `rm` an alias; help lists `delete, rm`. Flags may come before the verb."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aliases: dict[str, str] = {}

    def add(self, command: click.Command, *aliases: str) -> None:
        self.add_command(command)
        assert command.name is not None
        self.aliases |= dict.fromkeys(aliases, command.name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, behind_the_verb(args))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.aliases.get(cmd_name, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = [*self.commands, *self.aliases]
        if args and not args[0].startswith("-") and args[0] not in known:
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(sorted(self.commands))}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        _, command, rest = super().resolve_command(ctx, args)
        return command.name if command is not None else None, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.commands[name]
            names = [name, *(alias for alias, target in self.aliases.items() if target == name)]
            rows.append((", ".join(names), command.get_short_help_str(80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def behind_the_verb(words: list[str]) -> list[str]:
    """The words, with flags before the verb moved behind it; other words stay where they are."""
    flags: list[str] = []
    rest = list(words)
    while rest and (name := rest[0].partition("=")[0]) in _EARLY:
        count = 1 if "=" in rest[0] else 1 + _EARLY[name]
        flags += rest[:count]
        del rest[:count]
    return rest if not flags else [*rest[:1], *flags, *rest[1:]]
