"""`parti deliver endpoints`: who is not called any more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from parti.cli.connected import run_connected
from parti.cli.dlq import require_stream, shown_time
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.errors import UsageError

if TYPE_CHECKING:
    from parti.delivery.endpoints import Disabled
    from parti.wire.connect import Connection

T = TypeVar("T")


@click.group("endpoints")
def endpoints() -> None:
    """Endpoints that answered 410 and are not called any more."""


@endpoints.command("ls")
@json_option
@with_config
def list_endpoints(loaded: LoadedConfig, as_json: bool) -> None:
    """List disabled endpoints."""
    from parti.delivery.endpoints import disabled_endpoints

    nothing: dict[str, Disabled] = {}
    found = _with_bucket(loaded, disabled_endpoints, nothing)
    if as_json:
        print_json(found)
        return
    rows = [
        [n, plain(r.trigger), plain(r.database), plain(r.host), plain(r.why), shown_time(r.since)]
        for n, r in found.items()
    ]
    print_table(["endpoint", "trigger", "database", "host", "why", "since"], rows)


@endpoints.command("enable")
@click.argument("endpoint")
@with_config
def enable_endpoint(loaded: LoadedConfig, endpoint: str) -> None:
    """Call ENDPOINT again; `endpoints ls` shows its name."""
    from parti.delivery.endpoints import disabled_endpoints, enable

    async def again(bucket: Any) -> None:
        if endpoint not in await disabled_endpoints(bucket):
            raise UsageError(f"no disabled endpoint {endpoint!r}: `parti deliver endpoints ls` lists them")
        await enable(bucket, endpoint)

    _with_bucket(loaded, again, None)
    note(f"{endpoint} is called again")


def _with_bucket(loaded: LoadedConfig, work: Callable[[Any], Awaitable[T]], nothing: T) -> T:
    """What `work` makes of the bucket; `nothing`, and a word, while delivery has not run."""
    from parti.delivery.names import DeliveryNames
    from parti.wire.api import JetStreamApi
    from parti.wire.errors import StreamNotFound
    from parti.wire.kv import KeyValue

    names = DeliveryNames(loaded.config.deliver.stream)

    async def opened(connection: Connection) -> T:
        js = JetStreamApi(connection)
        try:
            return await work(await KeyValue.open(js, names.bucket))
        except StreamNotFound:
            await require_stream(js, names.stream)
            note(f"nothing here yet: `parti deliver run` has not run on {names.stream}")
            return nothing

    return run_connected(loaded, opened)
