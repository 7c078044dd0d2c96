"""`parti deliver`: tasks to HTTP endpoints, in order per document; their dead letters; endpoints that said 410."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parti.cli.deliver_spark import checkpoint_option as spark_checkpoint
from parti.cli.deliver_spark import master_option as spark_master
from parti.cli.deliver_spark import outcomes_option as spark_outcomes
from parti.cli.deliver_spark import replay as replay_tasks
from parti.cli.deliver_spark import run_on_spark
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import log_quietly, with_config
from parti.config import LoadedConfig
from parti.errors import UsageError
from parti.observe.logs import configure_logging

if TYPE_CHECKING:
    from parti.tasks import DeadLetters, Letter
    from parti.wire.api import JetStreamApi

T = TypeVar("T")


@click.group()
def deliver() -> None:
    """Deliver the tasks of a stream to HTTP endpoints, in order per document."""


deliver.add_command(replay_tasks)


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
    from parti.observe.health import HealthCheck, ObservabilityServer
    from parti.observe.prometheus import PrometheusMetrics, process_metrics
    from parti.tasks import TaskConsumer
    from parti.tasks.collector import calm_collector
    from parti.wire.configured import configured_options

    calm_collector()
    metrics = PrometheusMetrics()
    process_metrics(metrics.registry)
    consumer = TaskConsumer(loaded.config.deliver, nats=configured_options(loaded).options, metrics=metrics)
    checks = (HealthCheck("delivering", consumer.health),)
    shown = ObservabilityServer.configured(loaded.config.observe, metrics.registry, checks, metrics)
    loop, ends = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ends.set)

    async def announce() -> None:
        await consumer.wait_ready(0)
        where = {"stream": loaded.config.deliver.stream, "metrics": shown.url if shown is not None else None}
        if as_json:
            print_json({"event": "ready"} | where)
        else:
            click.echo(f"delivering {where['stream']}" + (f", metrics on {where['metrics']}" if shown else ""))

    async def stop() -> None:
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


# -- dead letters ------------------------------------------------------------------------------------------------------


@deliver.group("dlq")
def dlq() -> None:
    """The tasks that could not be delivered (stream <STREAM>_DLQ)."""


_filter = click.option(
    "--filter",
    "pattern",
    default=">",
    show_default=True,
    metavar="PATTERN",
    help="Only letters of <database>.<collection>.<reason>; wildcards allowed.",
)


@dlq.command("ls")
@_filter
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 100_000), help="At most so many.")
@json_option
@with_config
def list_letters(loaded: LoadedConfig, pattern: str, limit: int, as_json: bool) -> None:
    """List letters, oldest first."""

    async def gather(letters: DeadLetters) -> list[Letter]:
        return [letter async for letter in _first(letters.letters(pattern), limit)]

    found = _with_letters(loaded, gather)
    if as_json:
        print_json([_summary(letter) for letter in found])
        return
    columns = ["letter", "buried", "reason", "status", "attempts", "trigger", "host", "id"]
    rows = [[plain(str(_summary(letter)[column])) for column in columns] for letter in found]
    print_table(columns, rows)


@dlq.command("show")
@click.argument("letter", type=click.IntRange(min=1))
@json_option
@with_config
def show(loaded: LoadedConfig, letter: int, as_json: bool) -> None:
    """Show one letter: why, the endpoint's answer, and the task as it was published."""
    found = _with_letters(loaded, lambda letters: letters.get(letter))
    if as_json:
        parts = {"response": found.response, "task": found.data}
        encoded = {f"{name}_base64": base64.b64encode(data).decode() for name, data in parts.items()}
        print_json(_summary(found) | encoded)
        return
    print_table(["", ""], [[name, plain(value)] for name, value in _summary(found).items()])
    for title, data in (("response", found.response), ("task", found.data)):
        click.echo(f"\n{title}:\n{data.decode(errors='replace')}")


@dlq.command("replay")
@_filter
@click.option("--letter", "chosen", type=click.IntRange(min=1), multiple=True, help="This one only; may be repeated.")
@click.option("--rate", default=100.0, show_default=True, type=click.FloatRange(min=0.01), help="Letters a second.")
@json_option
@with_config
def replay(loaded: LoadedConfig, pattern: str, chosen: tuple[int, ...], rate: float, as_json: bool) -> None:
    """Publish letters again, with the id they had, and remove them from the dead letters."""
    from parti.clock import SystemClock

    async def again(letters: DeadLetters) -> int:
        wanted = frozenset(chosen)
        replays = letters.replay(
            pattern, rate=rate, clock=SystemClock(), chosen=lambda letter: not wanted or letter.sequence in wanted
        )
        count = 0
        async for _ in replays:
            count += 1
        return count

    _told("replayed", _with_letters(loaded, again), as_json)


@dlq.command("purge")
@_filter
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@with_config
def purge(loaded: LoadedConfig, pattern: str, yes: bool, as_json: bool) -> None:
    """Remove letters for good."""
    if not yes:
        click.confirm(f"Remove every dead letter that matches {pattern!r} for good?", abort=True, err=True)
    _told("purged", _with_letters(loaded, lambda letters: letters.purge(pattern)), as_json)


# -- endpoints ---------------------------------------------------------------------------------------------------------


@deliver.group("endpoints")
def endpoints() -> None:
    """Endpoints that answered 410 and are not called any more."""


@endpoints.command("ls")
@json_option
@with_config
def list_endpoints(loaded: LoadedConfig, as_json: bool) -> None:
    """List disabled endpoints."""
    from parti.tasks.endpoints import disabled_endpoints

    found = _with_bucket(loaded, disabled_endpoints)
    if as_json:
        print_json(found)
        return
    rows = [
        [n, plain(r.trigger), plain(r.database), plain(r.host), plain(r.why), _time(r.since)] for n, r in found.items()
    ]
    print_table(["endpoint", "trigger", "database", "host", "why", "since"], rows)


@endpoints.command("enable")
@click.argument("endpoint")
@with_config
def enable_endpoint(loaded: LoadedConfig, endpoint: str) -> None:
    """Call ENDPOINT again; `endpoints ls` shows its name."""
    from parti.tasks.endpoints import disabled_endpoints, enable

    async def again(bucket: Any) -> None:
        if endpoint not in await disabled_endpoints(bucket):
            raise UsageError(f"no disabled endpoint {endpoint!r}: `parti deliver endpoints ls` lists them")
        await enable(bucket, endpoint)

    _with_bucket(loaded, again)
    note(f"{endpoint} is called again")


# -- what they share ---------------------------------------------------------------------------------------------------


def _with_api(loaded: LoadedConfig, work: Callable[[JetStreamApi], Awaitable[T]]) -> T:
    from parti.wire.api import JetStreamApi
    from parti.wire.configured import configured_options
    from parti.wire.connect import connect

    log_quietly(loaded)

    async def main() -> T:
        connection = await connect(configured_options(loaded).options)
        try:
            return await work(JetStreamApi(connection))
        finally:
            await connection.close()

    return asyncio.run(main())


def _with_letters(loaded: LoadedConfig, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    from parti.tasks import DeadLetters
    from parti.tasks.names import Names

    names = Names(loaded.config.deliver.stream)
    return _with_api(loaded, lambda js: work(DeadLetters(js, names)))


def _with_bucket(loaded: LoadedConfig, work: Callable[[Any], Awaitable[T]]) -> T:
    from parti.tasks.names import Names
    from parti.wire.kv import KeyValue

    bucket = Names(loaded.config.deliver.stream).bucket

    async def opened(js: JetStreamApi) -> T:
        return await work(await KeyValue.open(js, bucket))

    return _with_api(loaded, opened)


async def _first(letters: AsyncIterator[Letter], limit: int) -> AsyncIterator[Letter]:
    count = 0
    async for letter in letters:
        yield letter
        count += 1
        if count >= limit:
            return


def _summary(letter: Letter) -> dict[str, Any]:
    return {
        "letter": letter.sequence,
        "buried": _time(letter.time),
        "reason": letter.reason,
        "status": letter.status,
        "attempts": letter.attempts,
        "outcome": letter.outcome,
        "error": letter.error,
        "trigger": letter.trigger,
        "host": letter.host,
        "id": letter.id,
        "subject": letter.subject,
        "origin": letter.source,
        "bytes": len(letter.data),
    }


def _told(what: str, count: int, as_json: bool) -> None:
    if as_json:
        print_json({what: count})
    else:
        click.echo(f"{what} {count}")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
