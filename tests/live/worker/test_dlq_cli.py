"""`parti dlq` on a real server: a worker's dead letters can be listed, replayed and removed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from click.testing import CliRunner, Result

from parti.cli import main
from parti.worker import Message, Outcome, Reject
from support.worker import Bench, Effects, parts


async def parti(bench: Bench, *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["dlq", *arguments, "--server", bench.server.url])


async def as_json(bench: Bench, *arguments: str) -> Any:
    result = await parti(bench, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


async def bury(bench: Bench, *names: str) -> Effects:
    broken = True

    async def handle(message: Message) -> Outcome:
        if broken:
            return Reject(f"cannot take {message.data.decode()}")
        effects.seen.append(message)
        return None

    effects = Effects()
    worker = bench.worker(handle)
    await worker.update_worker_consumer("w1", parts(*names))
    for name in names:
        await bench.publish(name, 1, name.encode(), Kind="order")
    await bench.settled()
    broken = False
    return effects


async def test_letters_are_listed_shown_replayed_and_purged(bench: Bench) -> None:
    effects = await bury(bench, "a", "b", "c")
    listed = await as_json(bench, "ls", bench.stream)
    assert listed["total"] == 3
    first = listed["letters"][0]
    assert first["error"].startswith("cannot take")
    assert (first["reason"], first["attempts"], first["worker"]) == ("rejected", 1, "w1")
    only = await as_json(bench, "ls", bench.stream, "--subject", "*.b")
    assert [letter["subject"] for letter in only["letters"]] == [f"{bench.stream}.b"]

    shown = await as_json(bench, "show", bench.stream, str(only["letters"][0]["letter"]))
    assert shown["headers"] == {"Kind": "order"}
    assert shown["data_base64"] == "Yg=="
    text = await parti(bench, "show", bench.stream, "1")
    assert "header Kind: order" in text.output

    assert await as_json(bench, "replay", bench.stream, "--subject", "*.b") == {"replayed": 1}
    await effects.count(1)
    assert (effects.seen[0].data, dict(effects.seen[0].headers)["Kind"]) == (b"b", "order")
    assert (await as_json(bench, "ls", bench.stream))["total"] == 2
    left = [letter["letter"] for letter in (await as_json(bench, "ls", bench.stream))["letters"]]
    assert await as_json(bench, "purge", bench.stream, str(left[0])) == {"removed": 1}
    assert await as_json(bench, "replay", bench.stream, "--all") == {"replayed": 1}
    await effects.count(2)
    assert (await as_json(bench, "ls", bench.stream))["total"] == 0


async def test_a_stream_without_letters_lists_none(bench: Bench) -> None:
    assert (await as_json(bench, "ls", bench.stream)) == {"stream": bench.stream, "total": 0, "letters": []}
    assert await as_json(bench, "purge", bench.stream, "--all") == {"removed": 0}


async def test_what_cannot_be_meant_is_refused_with_a_reason(bench: Bench) -> None:
    result = await parti(bench, "replay", bench.stream)
    assert result.exit_code == 2
    assert "--all" in result.output
    missing = await parti(bench, "show", bench.stream, "77")
    assert missing.exit_code == 2
    assert "no letter 77" in missing.output
