"""`parti deliver`: tasks to HTTP endpoints, in order per document; their dead letters; endpoints that answered 410."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import click

from parti.cli.deliver_dlq import dlq
from parti.cli.deliver_endpoints import endpoints
from parti.cli.deliver_spark import checkpoint_option as spark_checkpoint
from parti.cli.deliver_spark import master_option as spark_master
from parti.cli.deliver_spark import outcomes_option as spark_outcomes
from parti.cli.deliver_spark import replay as replay_tasks
from parti.cli.deliver_spark import run_on_spark
from parti.cli.output import json_option, print_json
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import UsageError
from parti.observe.logs import configure_logging


@click.group()
def deliver() -> None:
    """Deliver the tasks of a stream to HTTP endpoints, in order per document."""


deliver.add_command(replay_tasks)
deliver.add_command(dlq)
deliver.add_command(endpoints)


@deliver.command("run")
@click.option("--engine", type=click.Choice(["async", "spark"]), default="async", show_default=True)
@spark_checkpoint
@spark_master
@spark_outcomes
@click.option("--available-now", is_flag=True, help="With Spark: deliver what the stream holds, then end.")
@json_option
@with_config
def run(
    loaded: LoadedConfig,
    engine: str,
    checkpoint: str | None,
    master: str,
    outcomes: str | None,
    available_now: bool,
    as_json: bool,
) -> None:
    """Deliver until Ctrl-C or SIGTERM: then finish what is in flight, hand back the rest, and end.

    Settings are in the section [deliver] of the configuration. Several processes of the engine async may run at once.
    The engine spark delivers in batches, for fan-out and backlogs; not beside the other. Of several drivers one
    delivers and the others stand by: give them the same checkpoint folder.
    """
    if engine == "spark":
        run_on_spark(
            loaded, as_json, checkpoint=checkpoint, master=master, outcomes=outcomes, available_now=available_now
        )
        return
    if checkpoint or outcomes or available_now:
        raise UsageError("--checkpoint, --outcomes and --available-now are for --engine spark")
    configure_logging(loaded.config.observe)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_deliver(loaded, as_json))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return, unused-ignore]


async def _deliver(loaded: LoadedConfig, as_json: bool) -> None:
    from parti.cli.tune_gc import tune_gc
    from parti.delivery import TaskConsumer
    from parti.observe.health import HealthCheck, ObservabilityServer
    from parti.observe.prometheus import PrometheusMetrics, process_metrics
    from parti.waiting import stop_signals
    from parti.wire.configured import configured_options

    tune_gc()
    metrics = PrometheusMetrics()
    process_metrics(metrics.registry)
    consumer = TaskConsumer(loaded.config.deliver, nats=configured_options(loaded).options, metrics=metrics)
    checks = (HealthCheck("delivering", consumer.health),)
    shown = ObservabilityServer.configured(loaded.config.observe, metrics.registry, checks, metrics)

    async def announce() -> None:
        await consumer.wait_ready(0)
        where = {"stream": loaded.config.deliver.stream, "metrics": shown.url if shown is not None else None}
        if as_json:
            print_json({"event": "ready"} | where)
        else:
            click.echo(f"delivering {where['stream']}" + (f", metrics on {where['metrics']}" if shown else ""))

    async def stop() -> None:
        with stop_signals() as ends:
            await ends.wait()
        await consumer.stop()

    async with contextlib.AsyncExitStack() as stack:
        if shown is not None:
            await stack.enter_async_context(shown)
        beside = [asyncio.create_task(announce()), asyncio.create_task(stop())]
        try:
            await consumer.start()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
