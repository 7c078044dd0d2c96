"""`parti worker run`: a real process, configured by a file, stopped by SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from parti.cli import main
from parti.testing import NatsServer, eventually
from parti.testing.child import spawn
from support.fleet import fleet_on

HANDLER = """
from pathlib import Path

async def handle(message):
    with Path("seen").open("a") as file:
        file.write(f"{message.sequence} {message.partition.id} {message.lease.epoch}\\n")
"""


@pytest.mark.slow
async def test_a_worker_process_handles_messages_and_exits_0_on_sigterm(
    server: NatsServer, name: str, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(HANDLER)
    (tmp_path / "parti.toml").write_text(
        f"""
[nats]
servers = ["{server.url}"]
[worker]
stream = "{name}"
subject_template = "{name}.{{partition}}"
[control]
namespace = "{name}"
partitions = ["p{{0..3}}"]
[observe]
listen = "127.0.0.1:0"
"""
    )
    async with fleet_on(server, name, count=4) as fleet:
        sequences = await fleet.publish(20)
        script = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = ['parti', 'worker', 'run', 'app:handle']"
        process = await asyncio.to_thread(
            spawn, [sys.executable, "-c", f"{script}; from parti.cli import main; main()"]
        )
        try:
            seen = tmp_path / "seen"

            def handled() -> list[int]:
                return [int(line.split()[0]) for line in seen.read_text().splitlines()] if seen.exists() else []

            await eventually(lambda: sorted(handled()) == sequences, 60, "all messages are handled")
            os.kill(process.pid, signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, 30)
            output = process.stdout.read().decode() if process.stdout else ""
            assert code == 0, output
            assert "handed over and left" in output
        finally:
            if process.poll() is None:
                process.kill()
                await asyncio.to_thread(process.wait)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        ("app", "MODULE:FUNCTION"),
        ("no_such_module_at_all:handle", "cannot import"),
        ("json:nothing", "has no 'nothing'"),
        ("json:__name__", "not a function"),
    ],
)
def test_a_handler_that_cannot_be_found_is_named(handler: str, says: str) -> None:
    done = CliRunner().invoke(main, ["worker", "run", handler])
    assert done.exit_code != 0
    assert says in done.stderr
