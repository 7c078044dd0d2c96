"""The `parti` command. One file per noun; each is imported only when it is called.

Promises: an error is one sentence and an exit code; `--json` prints nothing but JSON on stdout; no secret is shown.

Flow: flags and files -> `settings` -> one command -> `output`.
"""

from __future__ import annotations

import click

from parti.cli.lazy import LazyCommand, RootGroup, installed_commands

_COMMANDS = {
    "run": LazyCommand("parti.cli.run:run", "Run an ordered pipeline on Spark."),
    "server": LazyCommand("parti.cli.server:server", "Run a nats-server with JetStream for local use."),
    "doctor": LazyCommand("parti.cli.doctor:doctor", "Check this machine and the NATS server, and say what to do."),
    "worker": LazyCommand("parti.cli.worker:worker", "Run a worker process from a configuration file."),
    "migrate": LazyCommand("parti.cli.migrate:migrate", "Move from one durable per partition to parti, without loss."),
    "audit": LazyCommand("parti.cli.audit:audit", "Judge what was published against what took effect."),
    "config": LazyCommand("parti.cli.config:config", "Show the configuration and where each value comes from."),
    "group": LazyCommand("parti.cli.group:group", "Work with partitioned consumer groups."),
    "dlq": LazyCommand("parti.cli.dlq:dlq", "List, show, replay and purge dead letters."),
    "deliver": LazyCommand("parti.cli.deliver:deliver", "Deliver tasks to HTTP endpoints, in order per document."),
    "completion": LazyCommand("parti.cli.completion:completion", "Print the completion script for a shell."),
    "version": LazyCommand("parti.cli.version:version", "Show the versions of parti and of what it runs on."),
}


@click.group(
    cls=RootGroup,
    entries=_COMMANDS | installed_commands(),
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:  # noqa: ARG001 - RootGroup reads it
    """Partitioned, ordered, elastic consumption of NATS JetStream."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
