"""`parti migrate plan | shadow | verify | switch`: from one durable per partition to parti."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from parti.cli.connected import run_connected
from parti.cli.output import json_option, note, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig

if TYPE_CHECKING:
    from parti.manager.migrate import MigrationPlan
    from parti.wire.connect import Connection


@click.group()
def migrate() -> None:
    """Move from one durable per partition to parti, without loss or repeat. Nothing is deleted without --execute."""


@migrate.command()
@json_option
@with_config
def plan(loaded: LoadedConfig, as_json: bool) -> None:
    """Show the legacy durable and the position of each partition."""
    _show(_run(loaded, "plan"), as_json)


@migrate.command()
@json_option
@with_config
def shadow(loaded: LoadedConfig, as_json: bool) -> None:
    """Count what parti would have to do, beside what the legacy durables have left. Reads only."""
    _show(_run(loaded, "shadow"), as_json)


@migrate.command()
@json_option
@with_config
def verify(loaded: LoadedConfig, as_json: bool) -> None:
    """Fail unless both sides have the same work left in every partition."""
    _show(_run(loaded, "verify"), as_json)


@migrate.command()
@click.option("--execute", is_flag=True, help="Delete the legacy durables when parti has their positions.")
@click.option("--allow-repeat", is_flag=True, help="Accept that messages acked ahead of others are done again.")
@json_option
@with_config
def switch(loaded: LoadedConfig, as_json: bool, execute: bool, allow_repeat: bool) -> None:
    """Give parti the positions of the legacy durables; they are deleted only with --execute."""
    done = _run(loaded, "switch", execute=execute, allow_repeat=allow_repeat)
    _show(done, as_json)
    note("the legacy durables are deleted" if execute else "the legacy durables are kept; --execute deletes them")


def _run(loaded: LoadedConfig, step: str, **options: Any) -> MigrationPlan:
    from parti.manager.configured import source_of
    from parti.manager.kv_store import Store
    from parti.manager.migrate import Migration
    from parti.wire.api import JetStreamApi

    control, worker = loaded.config.control, loaded.config.worker

    async def work(connection: Connection) -> MigrationPlan:
        js = JetStreamApi(connection)
        store = await Store.open(
            js, control.namespace, replicas=control.bucket_replicas, storage=control.bucket_storage
        )
        partitions = await source_of(control, worker, js).partitions()
        migration = Migration(js, store, worker, partitions)
        result: MigrationPlan = await getattr(migration, step)(**options)
        return result

    return run_connected(loaded, work)


def _show(plan: MigrationPlan, as_json: bool) -> None:
    rows = [
        {
            "partition": row.partition,
            "consumer": row.legacy.consumer if row.legacy else None,
            "floor": row.legacy.floor if row.legacy else None,
            "left": row.legacy.remaining if row.legacy else None,
            "ours": row.ours,
            "repeats": row.repeats,
            "problem": row.problem,
        }
        for row in plan.rows
    ]
    if as_json:
        click.echo(json.dumps({"partitions": rows, "strangers": plan.strangers}))
        return
    headers = ("partition", "consumer", "floor", "left", "ours", "repeats", "problem")
    print_table(headers, [["" if row[name] is None else str(row[name]) for name in headers] for row in rows])
    if plan.strangers:
        note(f"left alone, no partition's durable: {', '.join(plan.strangers)}")
