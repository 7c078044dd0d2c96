"""`parti run`: the ordered pipeline on Spark."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.cli.watching import on_signal, watch
from parti.config import LoadedConfig
from parti.errors import UsageError
from parti.observe.logs import configure_logging

if TYPE_CHECKING:
    from parti.spark.pipeline import Pipeline


@click.command()
@click.argument("pipeline", required=False)
@click.option("--explain", is_flag=True, help="Say which plan would run and why, and run nothing.")
@click.option("--demo", is_flag=True, help="Run the demonstration: a server, workers and a pipeline of its own.")
@click.option("--master", metavar="URL", help="Spark master, over that of the pipeline.")
@click.option("--available-now", is_flag=True, help="Handle what the stream holds, then end.")
@json_option
@with_config
def run(
    loaded: LoadedConfig,
    pipeline: str | None,
    explain: bool,
    demo: bool,
    master: str | None,
    available_now: bool,
    as_json: bool,
) -> None:
    """Run PIPELINE, a pipeline.toml or module:attribute, until SIGINT or SIGTERM.

    A stop lets the batch under way end; one that takes longer than `grace` is replayed later. Exit code 1 on failure.
    """
    if demo:
        _demo(as_json)
        return
    if pipeline is None:
        raise UsageError("name a pipeline (pipeline.toml or module:attribute), or --demo for a demonstration")
    from dataclasses import replace

    from parti.spark.pipeline.load import load
    from parti.wire.configured import configured_options

    configure_logging(loaded.config.observe)
    made = load(pipeline, configured_options(loaded).options)
    if master is not None:
        made = replace(made, master=master)
    if available_now:
        made = replace(made, trigger="available-now")
    if explain:
        _explain(made, as_json)
    else:
        _run(made, as_json)


def _demo(as_json: bool) -> None:
    from parti.cli.lazy import installed_commands, load_command

    entry = installed_commands().get("demo")
    if entry is None:
        raise UsageError("the demonstration is part of the lab: pip install 'parti[lab]'")
    load_command(entry).main(args=["--json"] if as_json else [], standalone_mode=False)


def _explain(pipeline: Pipeline, as_json: bool) -> None:
    from parti.spark.pipeline.explain import explain

    explained = explain(pipeline, _cores(pipeline.master))
    if as_json:
        print_json(dict(explained))
    else:
        print_table(["", ""], [[f"[bold]{word}[/bold]", plain(text)] for word, text in explained])


def _cores(master: str) -> int:
    """Cores of a local master; otherwise those of this machine, because a cluster is not asked here."""
    inside = master.partition("[")[2].rstrip("]").split(",")[0]
    return int(inside) if inside.isdecimal() else 1 if master == "local" else os.cpu_count() or 1


def _run(pipeline: Pipeline, as_json: bool) -> None:
    from parti.spark.quiet import without_chatter

    ended = on_signal()
    with without_chatter(), pipeline.start() as running:
        if running.plan is not None:
            note(f"pipeline {pipeline.name}: {running.plan}")
        watch(running, ended)
        totals = running.totals
    done = {
        "pipeline": pipeline.name,
        "batches": totals.batches,
        "messages": totals.messages,
        "done": totals.done,
        "dead_lettered": totals.dead_lettered,
        "parked": totals.parked,
    }
    if as_json:
        print_json(done)
    else:
        note(", ".join(f"{name} {value}" for name, value in done.items()))
