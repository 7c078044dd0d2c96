"""`parti completion`: the script that makes a shell complete commands, streams, groups and members."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash: eval "$(parti completion bash)"
    zsh:  eval "$(parti completion zsh)"
    fish: parti completion fish > ~/.config/fish/completions/parti.fish
    """
    from parti.cli import main

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(main, {}, "parti", "_PARTI_COMPLETE").source())
