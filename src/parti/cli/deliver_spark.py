"""`parti deliver run --engine spark` and `parti deliver replay`: delivery as a pipeline on Spark."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from parti.cli.output import json_option, note, print_json
from parti.cli.settings import with_config
from parti.cli.watching import on_signal, watch
from parti.config import LoadedConfig
from parti.errors import UsageError
from parti.observe.logs import configure_logging

if TYPE_CHECKING:
    from parti.spark.delivery import Span
    from parti.spark.pipeline import Pipeline

# How often an idle query polls for tasks; Spark's default of 10 ms would use a tenth of a core.
_SETTINGS: dict[str, Any] = {"spark.sql.streaming.pollingDelay": "200ms"}

checkpoint_option = click.option(
    "--checkpoint", metavar="FOLDER", help="With Spark: positions and parked documents; needed, as they must last."
)
master_option = click.option("--master", default="local[*]", show_default=True, metavar="URL", help="Spark master.")
outcomes_option = click.option("--outcomes", metavar="FOLDER", help="With Spark: write the outcome of each task there.")


def run_on_spark(
    loaded: LoadedConfig,
    as_json: bool,
    *,
    checkpoint: str | None,
    master: str,
    outcomes: str | None,
    available_now: bool,
) -> None:
    """Deliver until a signal arrives, or with `available_now` only what the stream holds now."""
    pipeline = _pipeline(loaded, None, checkpoint, master, outcomes, trigger="available-now" if available_now else "0s")
    _drive(pipeline, as_json, again=available_now)


@click.command("replay")
@click.option("--from", "start", required=True, metavar="POSITION", help="First: a sequence, a time, or earliest.")
@click.option("--to", "end", required=True, metavar="POSITION", help="Last: a sequence or a time.")
@click.option("--engine", type=click.Choice(["spark"]), default="spark", show_default=True, help="What runs it.")
@checkpoint_option
@master_option
@outcomes_option
@json_option
@with_config
def replay(
    loaded: LoadedConfig,
    start: str,
    end: str,
    engine: str,  # noqa: ARG001 - one choice today, and named so that it can be said
    checkpoint: str | None,
    master: str,
    outcomes: str | None,
    as_json: bool,
) -> None:
    """Deliver tasks of the stream once more, between two positions, in order per document, with the ids they had.

    Ends when each is delivered or in the dead letters. Started again with the same folder it continues.
    """
    from parti.spark.delivery import Span

    pipeline = _pipeline(loaded, Span(start, end), checkpoint, master, outcomes, trigger="available-now")
    _drive(pipeline, as_json, again=True)


def _pipeline(
    loaded: LoadedConfig, span: Span | None, checkpoint: str | None, master: str, outcomes: str | None, *, trigger: str
) -> Pipeline:
    if checkpoint is None:
        raise UsageError("name a folder with --checkpoint: the position and the parked documents are kept there")
    from parti.spark.delivery import delivery_pipeline
    from parti.wire.configured import configured_options

    configure_logging(loaded.config.observe)
    return delivery_pipeline(
        loaded.config.deliver,
        configured_options(loaded).options,
        checkpoint=checkpoint,
        span=span,
        trigger=trigger,
        outcomes=outcomes,
        master=master,
    )


def _drive(pipeline: Pipeline, as_json: bool, *, again: bool) -> None:
    """Run it to its end; with `again`, run it again whenever parked documents are due, until none is left."""
    from parti.spark.quiet import without_chatter
    from parti.spark.session import session

    ended = on_signal()
    counts = {"delivered": 0, "dead_lettered": 0, "parked": 0}
    if as_json:
        print_json({"event": "starting", "stream": pipeline.stream})
    with without_chatter():
        spark = session(pipeline.name, pipeline.master, **_SETTINGS)
        try:
            while True:
                with pipeline.start(spark) as running:
                    note(f"{pipeline.name}: {running.plan or 'delivers, or stands by until the driver before it ends'}")
                    watch(running, ended)
                    totals, due = running.totals, running.parked_due
                counts["delivered"] += totals.done
                counts["dead_lettered"] += totals.dead_lettered
                if totals.batches:
                    counts["parked"] = totals.parked
                if not again or due is None or ended.is_set() or ended.wait(max(0.0, due - time.time())):
                    break
        finally:
            spark.stop()
    if as_json:
        print_json(counts)
    else:
        note(", ".join(f"{name} {value}" for name, value in counts.items()))
