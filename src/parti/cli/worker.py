"""`parti worker run app:handler`: one worker process from a configuration file, until SIGTERM."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from contextlib import AsyncExitStack
from typing import Any

import click

from parti.cli.output import note
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import ConfigError
from parti.waiting import first_of, stop_signals

GAVE_UP = 3
"""Exit code: the worker could not work any more; other workers have its partitions."""
BLOCKED = 4
"""Exit code: a handler blocked the event loop for too long; other workers take the partitions when the lease ends."""


@click.group()
def worker() -> None:
    """Run workers."""


@worker.command()
@click.argument("handler", metavar="MODULE:FUNCTION")
@click.option("--returning", is_flag=True, help="On SIGTERM keep the partitions for a restart within one TTL.")
@with_config
def run(handler: str, returning: bool, loaded: LoadedConfig) -> None:
    """Join the namespace of [control] and give messages of [worker] to MODULE:FUNCTION, until SIGTERM or Ctrl-C.

    On SIGTERM the partitions are handed to the other workers first; the exit code is then 0. It is 3 when the worker
    could do no work any more and gave its partitions to others, and 4 when a handler blocked the event loop for longer
    than worker.unhealthy_limit: start it again then.
    """
    from parti.observe.logs import configure_logging

    configure_logging(loaded.config.observe)
    function = load_handler(handler)
    code = asyncio.run(serve(function, loaded, returning=returning))
    if code:
        sys.exit(code)


def load_handler(text: str) -> Any:
    """The function named by MODULE:FUNCTION; the working directory is importable, as with `python -m`."""
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{text!r} names no handler: write MODULE:FUNCTION, such as app:handle")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name!r}: {error}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{text!r} is {type(found).__name__}, not a function that takes a message")
    return found


async def serve(handler: Any, loaded: LoadedConfig, *, returning: bool = False) -> int:
    """Run one worker until SIGTERM or SIGINT, or until it cannot work any more; returns the exit code."""
    from parti.manager import Manager
    from parti.manager.configured import source_of
    from parti.observe.metrics import NO_METRICS
    from parti.wire.api import JetStreamApi
    from parti.wire.configured import configured_backoff, configured_options
    from parti.wire.connect import connect
    from parti.worker import WorkerConsumer, WorkerFailed

    config = loaded.config
    options = configured_options(loaded).options
    async with AsyncExitStack() as stack:
        metrics: Any = NO_METRICS
        if config.observe.listen != "off":
            from parti.observe.prometheus import PrometheusMetrics, process_metrics

            metrics = PrometheusMetrics()
            process_metrics(metrics.registry)
        connection = await connect(options, name=f"{options.name}-{config.control.namespace}")
        stack.push_async_callback(connection.close)
        js = JetStreamApi(connection)
        consumer = WorkerConsumer(js, config.worker, handler, metrics=metrics, backoff=configured_backoff(loaded))
        consumer.on_blocked = _blocked
        manager = Manager(
            config.control, connection, source_of(config.control, config.worker, js), consumer=consumer, metrics=metrics
        )
        asked = stack.enter_context(stop_signals())
        if config.observe.listen != "off":
            from parti.observe.health import ObservabilityServer

            host, port = config.observe.address()
            checks = [
                manager.health_check(),
                consumer.health_check(),
                manager.liveness_check(),
                consumer.liveness_check(),
            ]
            web = ObservabilityServer(metrics.registry, checks, host=host, port=port, metrics=metrics)
            await stack.enter_async_context(web)
            note(f"listening on {web.url}")
        await manager.start(None)
        note(f"{manager.worker_id} joined {config.control.namespace}")
        await first_of(asked.wait(), manager.ended())
        code = 0
        try:
            await manager.stop(returning=returning)
            note("handed over and left")
        except WorkerFailed as failed:
            note(f"gave up: {failed}")
            code = GAVE_UP
        if any(task.get_name() == "parti-lane" and not task.done() for task in asyncio.all_tasks()):
            note("a handler ignores its cancellation: the process ends without it")
            _end(code)
        return code


def _end(code: int) -> None:
    """End the process immediately: some part of it does not end by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _blocked(reason: str) -> None:
    note(f"gave up: {reason}")
    _end(BLOCKED)
