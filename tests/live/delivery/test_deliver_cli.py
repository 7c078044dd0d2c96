"""`parti deliver` as users run it: a real process, real signals, and dead letters managed by commands."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner

from parti.cli.deliver import deliver
from parti.errors import UsageError
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


def flags(stage: Scene) -> list[str]:
    settings = {
        "deliver.stream": stage.stream,
        "deliver.storage": "memory",
        "deliver.allow_addresses": stage.endpoint.allowed,
        "deliver.schedule": "50ms",
    }
    return ["-s", stage.server.url, *(word for k, v in settings.items() for word in ("--set", f"{k}={v}"))]


async def parti(stage: Scene, *words: str) -> tuple[int, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "parti.cli", "deliver", *words, *flags(stage), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, json.loads(out) if out.strip() and "--json" in words else out.decode()


@pytest.mark.slow
async def test_a_process_delivers_until_it_is_asked_to_stop_and_letters_are_handled_by_hand(stage: Scene) -> None:
    stage.endpoint.on("/bad", Answer(422, body=b"no"), Answer(422), Answer(200))
    stage.endpoint.on("/gone", Answer(410))
    await stage.publish(stage.task("a", "/bad"), headers={"Nats-Msg-Id": "evt-1"})
    await stage.publish(stage.task("b", "/bad"))
    await stage.publish(stage.task("c", "/gone"))
    await stage.publish_many(5)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "parti.cli", "deliver", "run", "--json", *flags(stage),
        "--set", "observe.listen=127.0.0.1:0", stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert (ready["event"], ready["stream"]) == ("ready", stage.stream)
        await stage.endpoint.wait_for(8, timeout=60)
        await eventually(stage.settled)

        code, listed = await parti(stage, "dlq", "ls", "--json")
        assert (code, sorted(letter["reason"] for letter in listed)) == (0, ["gone", "rejected", "rejected"])
        first = next(letter["letter"] for letter in listed if letter["id"] == "evt-1")
        code, shown = await parti(stage, "dlq", "show", str(first))
        assert code == 0
        assert "rejected" in shown
        assert '"documentId": "a"' in shown
        code, answer = await parti(stage, "dlq", "replay", "--letter", str(first), "--json")
        assert (code, answer) == (0, {"replayed": 1})
        await eventually(lambda: len([r for r in stage.endpoint.received if r.headers["webhook-id"] == "evt-1"]) == 2)
        code, answer = await parti(stage, "dlq", "purge", "--filter", "shop.orders.rejected", "--yes", "--json")
        assert (code, answer) == (0, {"purged": 1})

        code, disabled = await parti(stage, "endpoints", "ls", "--json")
        assert [record["trigger"] for record in disabled.values()] == ["t1"]
        code, _ = await parti(stage, "endpoints", "enable", next(iter(disabled)))
        assert code == 0
        assert (await parti(stage, "endpoints", "enable", "nothing"))[0] == 2
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--available-now"], "are for --engine spark"),
        (["run", "--engine", "spark"], "--checkpoint"),
        (["replay", "--from", "1", "--to", "9"], "--checkpoint"),
    ],
)
def test_what_only_one_engine_can_do_or_needs_is_said_at_once(words: list[str], said: str) -> None:
    result = CliRunner().invoke(deliver, words)
    assert isinstance(result.exception, UsageError)
    assert said in str(result.exception)
