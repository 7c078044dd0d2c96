"""`parti dlq` on letters of every kind and every version: listed, shown, replayed and purged by the same code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from parti.cli import main
from parti.clock import SystemClock
from parti.dead_letters import (
    ChosenLetters,
    DeadLetterReader,
    DeadLetterWriter,
    LetterExtension,
    LetterKind,
    dead_letter_stream,
    ensure_stream,
)
from parti.errors import UsageError
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.wire.stored import StoredMessage
from unit.dead_letters.test_format import LETTER, TASK
from unit.dead_letters.test_old_formats import RECORDED


@pytest.fixture
async def js(own_server: NatsServer) -> AsyncIterator[JetStreamApi]:
    async with await connect(ConnectOptions(servers=(own_server.url,))) as connection:
        yield JetStreamApi(connection)


async def parti(server: NatsServer, *words: str, code: int = 0) -> Any:
    result = await asyncio.to_thread(CliRunner().invoke, main, [*words, "--server", server.url, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])


async def restore(js: JetStreamApi, kind: str) -> tuple[str, list[StoredMessage]]:
    """The recorded letters in a dead-letter stream, and their own stream beside it."""
    record = json.loads((RECORDED / f"{kind}.json").read_text())
    stream, messages = record["stream"], [StoredMessage.from_json(message) for message in record["messages"]]
    subjects = [f"{number}.{stream}.>" for number in (0, 1)] if kind == "static_group" else [f"{stream}.>"]
    await js.stream_create({"name": stream, "subjects": subjects, "storage": "memory"})
    await ensure_stream(js, stream)
    for message in messages:
        await js.publish(message.subject, message.data, headers=dict(message.headers))
    return stream, messages


@pytest.mark.parametrize("kind", ["worker", "static_group", "elastic_group", "pipeline"])
async def test_letters_of_earlier_versions_are_listed_shown_and_replayed(
    own_server: NatsServer, js: JetStreamApi, kind: str
) -> None:
    stream, (message,) = await restore(js, kind)
    listed = await parti(own_server, "dlq", "ls", stream)
    assert (listed["total"], listed["letters"][0]["subject"]) == (1, message.headers["Parti-Subject"])
    shown = await parti(own_server, "dlq", "show", stream, "1")
    assert (shown["reason"], shown["consumer"]) == (message.headers["Parti-Reason"], message.headers["Parti-Consumer"])
    assert await parti(own_server, "dlq", "replay", stream, "--all") == {"replayed": 1}
    again = await js.msg_get(stream, seq=1)
    assert (again.subject, again.data) == (message.headers["Parti-Subject"], message.data)
    theirs = {"worker": {"Kind", "Parti-Reason", "Parti-Task-Id"}, "pipeline": {"trace"}}.get(kind, {"Kind"})
    assert {name for name in again.headers if name != "Nats-Msg-Id"} == theirs
    assert await DeadLetterReader(js, stream).count() == 0


async def test_letters_of_delivery_of_earlier_versions_keep_their_id_and_their_history(
    own_server: NatsServer, js: JetStreamApi
) -> None:
    stream, messages = await restore(js, "delivery")
    for words in (("dlq", "ls", stream), ("deliver", "dlq", "ls", "--set", f"deliver.stream={stream}")):
        listed = await parti(own_server, *words)
        found = listed["letters"] if isinstance(listed, dict) else listed
        assert [letter["id"] for letter in found] == [message.headers["Parti-Task-Id"] for message in messages]
        assert [letter["status"] for letter in found] == [422] * 3
    shown = await parti(own_server, "dlq", "show", stream, "2")
    assert [before["letter"] for before in shown["history"]] == [1]
    answer = await parti(own_server, "dlq", "replay", stream, "--all", code=1)
    assert (answer["replayed"], list(answer["failed"])) == (2, ["3"]), "the task of the third is gone from its stream"
    first, second = [await js.msg_get(stream, seq=n) for n in (1, 2)]
    assert (first.data, first.subject) == (messages[0].data, "OLDD.shop.orders.YQ==")
    assert {first.headers["Parti-Task-Id"], second.headers["Parti-Task-Id"]} == {"evt-1"}
    assert first.headers["X-Own"] == "kept"
    assert [before["letter"] for before in json.loads(second.headers["Parti-History"])] == [1, 2]
    assert "Parti-Status" not in first.headers
    assert await DeadLetterReader(js, stream).count() == 1


async def mixed(js: JetStreamApi, name: str) -> DeadLetterReader:
    """A stream with a letter of each kind, and a driver's epoch marker."""
    await js.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
    await ensure_stream(js, name)
    writer, letter = DeadLetterWriter(js, name), replace(LETTER, stream=name, subject=f"{name}.a")
    task = replace(letter, extension=replace_cut(TASK), place=f"{name}_DLQ.shop.orders.rejected", consumer="")
    await writer.store(letter, "plain")
    await writer.store(replace(letter, extension=LetterExtension(LetterKind.GROUP, "g"), subject=f"{name}.b"), "group")
    await js.publish(f"{name}_DLQ.parti-fence.p", b"{}", headers={"Parti-Reason": "fence"})
    await writer.store(task, "task")
    return DeadLetterReader(js, name)


def replace_cut(extension: LetterExtension) -> LetterExtension:
    return type(extension)(**{name: getattr(extension, name) for name in extension.__struct_fields__} | {"cut": 0})


@pytest.mark.parametrize(
    ("chosen", "sequences"),
    [
        (ChosenLetters(), [1, 2, 4]),
        (ChosenLetters(subject="*.b"), [2]),
        (ChosenLetters(place="shop.*.rejected"), [4]),
        (ChosenLetters(kind=LetterKind.DELIVERY), [4]),
        (ChosenLetters(kind=LetterKind.GROUP), [2]),
        (ChosenLetters(sequences=(1, 4)), [1, 4]),
    ],
)
async def test_letters_are_chosen_by_number_subject_place_and_kind(
    js: JetStreamApi, name: str, chosen: ChosenLetters, sequences: list[int]
) -> None:
    letters = await mixed(js, name)
    assert await letters.count() == 3
    assert [letter.sequence async for letter in letters.walk(chosen)] == sequences
    assert [letter.sequence async for letter in letters.replay_all(chosen, clock=SystemClock())] == sequences
    assert (await js.stream_info(name))["state"]["messages"] == len(sequences)
    assert await letters.count() == 3 - len(sequences)


async def test_a_purge_removes_letters_and_leaves_the_markers_of_drivers(
    own_server: NatsServer, js: JetStreamApi, name: str
) -> None:
    letters = await mixed(js, name)
    assert await parti(own_server, "dlq", "purge", name, "--filter", "shop.>") == {"removed": 1}
    assert await parti(own_server, "dlq", "purge", name, "--all") == {"removed": 2}
    assert await letters.count() == 0
    assert (await js.msg_get(dead_letter_stream(name), seq=3)).headers["Parti-Reason"] == "fence"
    with pytest.raises(UsageError):
        await letters.get(3)


async def test_a_letter_stays_when_its_message_cannot_be_stored_again(js: JetStreamApi, name: str) -> None:
    letters = await mixed(js, name)
    await js.stream_delete(name)
    failed: dict[int, str] = {}
    chosen = ChosenLetters(sequences=(4, 3, 99))
    other = f"{name}-other"
    await js.stream_create({"name": other, "subjects": [f"{name}.>"], "storage": "memory"})
    replays = letters.replay_all(chosen, clock=SystemClock(), failed=lambda n, error: failed.update({n: str(error)}))
    assert [letter async for letter in replays] == []
    assert "taken by the stream" in failed[4]
    assert sorted(failed) == [3, 4, 99]
    assert await letters.count() == 3


async def test_what_a_group_or_a_task_tells_is_shown_and_secrets_can_be_left_out(
    own_server: NatsServer, js: JetStreamApi, name: str
) -> None:
    await mixed(js, name)
    assert (await parti(own_server, "dlq", "show", name, "2"))["group"] == "g"
    shown = await parti(own_server, "dlq", "show", name, "4", "--redact")
    assert (shown["id"], shown["status"], shown["headers"]) == ("evt-1", 422, {"Kind": "***"})
    assert shown["response_base64"]
