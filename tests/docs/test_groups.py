"""docs/groups.md names commands, flags and fields that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click

from parti.cli import main
from parti.groups import GroupMessage

PAGE = (Path(__file__).parents[2] / "docs" / "groups.md").read_text(encoding="utf-8")


def resolve(words: list[str]) -> click.Command:
    """The command that the words name; flags and arguments behind it are left over."""
    command: click.Command = main
    context = click.Context(main)
    for word in words:
        if not isinstance(command, click.Group):
            break
        found = command.get_command(context, word)
        assert found is not None, words
        command = found
    return command


def test_every_command_and_flag_on_the_page_exists() -> None:
    lines = [line[2:].split("#")[0] for line in PAGE.splitlines() if line.startswith("$ parti ")]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line)[1:]
        command = resolve(words)
        known = {option for param in command.params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_every_alias_that_the_page_names_exists() -> None:
    for alias in ("ls", "rm", "cm", "dm", "sd", "minfo", "join"):
        assert f"`{alias}`" in PAGE
        assert resolve(["group", "elastic", alias]).name not in ("elastic", None)


def test_every_field_of_a_message_that_the_page_names_exists() -> None:
    rows = PAGE.split("| of the message | |")[1].split("\n\n")[0]
    for name in re.findall(r"^\| `(?:await )?([a-z_]+)", rows, flags=re.MULTILINE):
        assert hasattr(GroupMessage, name), name
