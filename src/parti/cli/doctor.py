"""`parti doctor`: are this machine and the NATS server fit for parti? Each result says what to do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import click

from parti.cli.checks import Check, CheckVerdict, fail, ok, warn
from parti.cli.output import json_option, plain, print_json, print_table
from parti.cli.settings import log_quietly, with_config
from parti.config import LoadedConfig
from parti.errors import ConnectionFailed, PartiError

_COLOURS = {CheckVerdict.OK: "green", CheckVerdict.WARN: "yellow", CheckVerdict.FAIL: "red"}


@click.command()
@click.option("--require-server", is_flag=True, help="No reachable server is a failure, not a warning.")
@click.option("--stream", "streams", multiple=True, metavar="NAME", help="Look at this stream only; may be repeated.")
@click.option("--monitor", metavar="URL", help="The server's monitoring address, such as http://127.0.0.1:8222.")
@json_option
@with_config
def doctor(
    loaded: LoadedConfig, require_server: bool, streams: tuple[str, ...], monitor: str | None, as_json: bool
) -> None:
    """Check Java, Spark and the nats-server program here, and the NATS server that the configuration names.

    Exit code 1 when a check failed; warnings alone are exit code 0.
    """
    from parti.cli.checks.judge import worst
    from parti.cli.checks.local import local_checks

    log_quietly(loaded)
    checks = [*local_checks(), *_server_checks(loaded, require_server, streams, monitor)]
    verdict = worst(checks)
    if as_json:
        print_json({"ok": verdict is not CheckVerdict.FAIL, "verdict": verdict, "checks": checks})
    else:
        _print(checks)
    if verdict is CheckVerdict.FAIL:
        raise click.exceptions.Exit(1)


def _server_checks(
    loaded: LoadedConfig, required: bool, streams: tuple[str, ...], monitor: str | None
) -> Iterator[Check]:
    from parti.cli.checks.judge import judge_server
    from parti.cli.checks.server import gather
    from parti.wire.configured import configured_options

    options = configured_options(loaded).options
    servers = ", ".join(options.servers)
    try:
        facts = asyncio.run(gather(options, streams=streams, monitor=monitor))
    except ConnectionFailed as error:
        answer = fail if required else warn
        yield answer("server", str(error), "start one (`parti server`), or name one with --server or --context")
        return
    except PartiError as error:
        # The server exists and refused the connection or broke it off: never the intended state.
        yield fail("server", str(error), f"correct the [nats] settings for {servers}: `parti config show` lists them")
        return
    yield ok("server", f"connected to {servers}")
    yield from judge_server(facts)


def _print(checks: list[Check]) -> None:
    rows = []
    for check in checks:
        colour = _COLOURS[check.verdict]
        rows.append([f"[{colour}]{check.verdict.value}[/{colour}]", plain(check.name), plain(check.found)])
        if check.advice:
            rows.append(["", "", f"[dim]→ {plain(check.advice)}[/dim]"])
    print_table(["", "check", "found"], rows)
