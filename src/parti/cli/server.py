"""`parti server`: a nats-server with JetStream for local use, in the foreground."""

from __future__ import annotations

import contextlib
import queue
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from parti.cli.output import json_option, plain, print_json
from parti.errors import FatalError
from parti.testing import NatsServer

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}  # binary, as nats-server counts


class ServerEnded(FatalError):
    """The server ended although no stop was requested: its log says why."""


def size(text: str) -> int:
    """Bytes, from a number with an optional unit: 512MB, 10GB."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)i?b?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; write a number and a unit, such as 512MB or 10GB")
    return int(match[1]) * _UNITS[match[2]]


@click.command("server", short_help="Run a local nats-server with JetStream.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=4222, show_default=True, type=click.IntRange(0, 65535), help="Client port; 0 picks a free one."
)
@click.option(
    "--store-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep JetStream's files here. Without it they are deleted at the end.",
)
@click.option("--max-memory", default="1GB", show_default=True, type=size, help="JetStream's limit in memory.")
@click.option("--max-storage", default="10GB", show_default=True, type=size, help="JetStream's limit on disk.")
@click.option(
    "--sync-interval", help="How often files are synced to disk: always, 10s, 2m. Default: the server's own, 2m."
)
@json_option
def server(
    host: str,
    port: int,
    store_dir: Path | None,
    max_memory: int,
    max_storage: int,
    sync_interval: str | None,
    as_json: bool,
) -> None:
    """Run a nats-server with JetStream until Ctrl-C or SIGTERM; afterwards it is gone.

    For local use: it has no users and no TLS. Uses the nats-server named by PARTI_NATS_SERVER, else the one on PATH,
    else the packaged one.
    """
    # The reason to end the wait: None for a request to stop, or the server's exit code. A SimpleQueue, because a signal
    # handler may call its put(); an Event's set() can deadlock there with the wait() it interrupts.
    ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    with _on_signals(lambda: ends.put(None)):
        running = NatsServer(
            host=host,
            port=port,
            store_dir=store_dir,
            max_memory=max_memory,
            max_storage=max_storage,
            sync_interval=sync_interval,
        )
        with running:
            _announce(running, store_dir, as_json)
            threading.Thread(target=lambda: ends.put(running.wait()), name="parti-server-watch", daemon=True).start()
            code = ends.get()
    if code is not None:
        raise ServerEnded(f"nats-server ended by itself (exit code {code}); its log ends: {running.log_tail(5)}")


@contextlib.contextmanager
def _on_signals(act: Callable[[], None]) -> Iterator[None]:
    """While open, SIGINT and SIGTERM call `act` instead of ending the process."""
    before = {each: signal.signal(each, lambda *_: act()) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _announce(running: NatsServer, store_dir: Path | None, as_json: bool) -> None:
    version = ".".join(map(str, running.version))
    if as_json:
        print_json(
            {
                "url": running.url,
                "monitor_url": running.monitor_url,
                "pid": running.pid,
                "version": version,
                "store_dir": str(running.store_dir),
                "temporary": store_dir is None,
                "log": str(running.log_path),
            }
        )
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    kept = "" if store_dir is not None else " [yellow](deleted at the end; keep it with --store-dir)[/]"
    console.print(f"[bold green]nats-server {version}[/] with JetStream on [bold]{running.url}[/]")
    console.print(f"  store    {plain(running.store_dir)}{kept}")
    console.print(f"  monitor  {running.monitor_url}")
    console.print(f"  log      {plain(running.log_path)}")
    console.print("Ctrl-C stops it.")
