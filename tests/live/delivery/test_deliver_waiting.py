"""Waiting costs almost nothing, and the next owner knows the attempts so far and until when to wait."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from parti.cli import main
from parti.clock import SystemClock
from parti.dead_letters import DeadLetter, DeadLetterReader, DeadLetterWriter, dead_letter_stream
from parti.delivery import TaskConsumer
from parti.delivery.pending import Wake
from parti.testing import NatsServer, eventually
from parti.testing.http_server import Answer, ReceivedRequest, Reply
from parti.testing.monitor import ask
from support.delivery import Scene, scene


@pytest.fixture
async def stage(server: NatsServer, name: str) -> AsyncIterator[Scene]:
    async with scene(server, name) as made:
        yield made


async def subjects(stage: Scene, kind: str) -> set[str]:
    """What the park holds of one kind: q the tasks, s and w wake-ups, n notes."""
    found: set[str] = set()
    async for page in stage.js.stream_subjects(f"{stage.stream}_PARK", f"{stage.stream}_PARK.{kind}.>"):
        found.update(page)
    return found


def crash(consumer: TaskConsumer) -> None:
    """As after a SIGKILL: nothing is handed over or saved."""
    assert consumer._shares is not None
    for slot in consumer._shares.slots.values():
        slot.lose()


async def release(stage: Scene, partitions: int = 1) -> None:
    """As after the lease: the partitions are free."""
    for number in range(partitions):
        await stage.js.publish(f"$KV.{stage.stream}_DELIVER.slot.{number}", b"", headers={"KV-Operation": "DEL"})


@pytest.mark.parametrize("rules", ["order=park concurrency=2", "order=skip concurrency=2 rate=400"])
async def test_a_trigger_with_limits_waits_in_line_and_costs_few_messages(stage: Scene, rules: str) -> None:
    running = most = 0

    def reply(request: ReceivedRequest) -> Reply:
        nonlocal running, most
        running += 1
        most = max(most, running)
        asyncio.get_running_loop().call_later(0.005, leave)
        return Answer(200, delay=0.005)

    def leave() -> None:
        nonlocal running
        running -= 1

    stage.endpoint.otherwise(reply)
    await stage.publish_many(200, documents=100)
    before = ask(f"{stage.server.monitor_url}/varz")["in_msgs"]
    async with stage.delivering(stage.config(triggers=(f"t1: {rules}",))):
        await stage.endpoint.wait_for(200)
        sent = ask(f"{stage.server.monitor_url}/varz")["in_msgs"] - before
        await eventually(stage.settled)
    assert len(stage.endpoint.received) == 200
    assert most <= 2
    assert sent < 200 * 4  # 69 for each with `park`, when lanes asked again and again


async def test_what_waits_in_memory_for_longer_than_ack_wait_is_not_redelivered_and_costs_one_heartbeat(
    stage: Scene,
) -> None:
    gate = asyncio.Event()
    stage.endpoint.otherwise(Answer(200, gate=gate))
    await stage.publish_many(30, documents=30)
    async with stage.delivering(stage.config(triggers=("t1: concurrency=1",), ack_wait=1.0)):
        await stage.endpoint.wait_for(1)
        before = ask(f"{stage.server.monitor_url}/varz")["in_msgs"]
        await SystemClock().sleep(3.5)  # three times AckWait, which the server counts
        sent = ask(f"{stage.server.monitor_url}/varz")["in_msgs"] - before
        info = await stage.js.consumer_info(stage.stream, "TriggerDeliveryWorker")
        gate.set()
        await stage.endpoint.wait_for(30)
        await eventually(stage.settled)
    assert (info["num_ack_pending"], info["num_redelivered"]) == (30, 0)
    assert sent < 2 * 30  # "in progress" every two thirds of AckWait were five for each
    assert len(stage.endpoint.received) == 30


@pytest.mark.parametrize("order", ["block", "skip"])
async def test_documents_of_a_dead_host_have_no_wake_ups_and_all_arrive_when_it_is_up(stage: Scene, order: str) -> None:
    config = stage.config(order=order, breaker_calls=2, breaker_open=1.0, schedule=("300ms",) * 40, block_for=0.0)
    url = stage.endpoint.url
    await stage.endpoint.stop()
    async with stage.delivering(config):
        for number in range(150):
            await stage.publish(stage.task(f"d{number}", url=f"{url}/hook"))
        await eventually(stage.settled)
        assert len(await subjects(stage, "q")) + len(await subjects(stage, "s")) >= 150
        # Only what was tried has a time to wait for; the rest waits for the host.
        assert len(await subjects(stage, "s") | await subjects(stage, "w")) <= 40
        await stage.endpoint.start()
        await eventually(lambda: len({r.headers["webhook-id"] for r in stage.endpoint.received}) == 150, 60)
        await eventually(lambda: _empty(stage), 60)


async def _empty(stage: Scene) -> bool:
    return not any([await subjects(stage, kind) for kind in "qswtn"])


async def test_documents_of_a_dead_host_are_found_by_the_next_owner(stage: Scene) -> None:
    config = stage.config(breaker_calls=2, breaker_open=3600.0, order="park")
    url = stage.endpoint.url
    await stage.endpoint.stop()
    async with stage.delivering(config) as consumer:
        for number in range(100):
            await stage.publish(stage.task(f"d{number}", url=f"{url}/hook"))
        await eventually(stage.settled)
        await stage.endpoint.start()
        crash(consumer)
        await eventually(lambda: consumer.partitions == ())
        await release(stage)
    async with stage.delivering(stage.config()):  # it has no idea which host they wait for
        await eventually(lambda: len({r.headers["webhook-id"] for r in stage.endpoint.received}) == 100, 60)
    attempts = [int(request.headers["x-parti-attempt"]) for request in stage.endpoint.received]
    assert set(attempts) <= {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "order", "partitions"),
    [("stop", "block", 1), ("crash", "block", 1), ("crash", "block", 2), ("stop", "park", 2), ("crash", "skip", 1)],
)
async def test_attempts_and_retry_after_outlive_their_process(
    stage: Scene, how: str, order: str, partitions: int
) -> None:
    clock, times = SystemClock(), []

    def reply(request: ReceivedRequest) -> Reply:
        times.append((clock.now(), int(request.headers["x-parti-attempt"])))
        return Answer(200) if len(times) > 2 else Answer(429, {"Retry-After": "1"})

    stage.endpoint.otherwise(reply)
    await stage.publish(stage.task("a"))
    config = stage.config(order=order, partitions=partitions)
    async with stage.delivering(config) as consumer:
        await stage.endpoint.wait_for(1)
        await eventually(lambda: _said(stage))
        if how == "crash":
            crash(consumer)
            await eventually(lambda: consumer.partitions == ())
            await release(stage, partitions)
            await stage.endpoint.wait_for(3)
    if how == "stop":
        async with stage.delivering(config):
            await stage.endpoint.wait_for(3)
    assert [attempt for _, attempt in times] == [1, 2, 3]
    assert times[1][0] - times[0][0] >= 1
    assert times[2][0] - times[1][0] >= 1


async def _said(stage: Scene) -> bool:
    """Whether the server knows of the attempt, be it in the journal or by a schedule."""
    return bool(await subjects(stage, "d") or await subjects(stage, "s"))


async def test_a_wake_up_that_comes_too_early_changes_nothing(stage: Scene) -> None:
    clock, times = SystemClock(), []

    def reply(request: ReceivedRequest) -> Reply:
        times.append(clock.now())
        return Answer(200) if len(times) > 1 else Answer(429, {"Retry-After": "1"})

    stage.endpoint.otherwise(reply)
    await stage.publish(stage.task("a"))
    async with stage.delivering(stage.config(order="park")) as consumer:
        await stage.endpoint.wait_for(1)
        (subject,) = await eventually(lambda: subjects(stage, "q"))
        assert consumer._shares is not None
        lanes = consumer._shares.slots[0].lanes
        assert lanes is not None
        lanes.woken(Wake(subject.rpartition(".")[2], 0, "", 0))
        await stage.endpoint.wait_for(2)
    assert times[1] - times[0] >= 1


async def test_tasks_on_a_subject_that_is_not_their_document_s_are_refused_with_several_partitions(
    stage: Scene,
) -> None:
    whole = hashlib.sha256(f"{stage.stream}.shop.orders.YQ==".encode()).hexdigest()[:32]
    async with stage.delivering(stage.config(partitions=2)):
        await stage.publish(stage.task("a"))
        await stage.publish(stage.task("a"), subject=f"{stage.stream}.shop.orders.elsewhere")
        await stage.publish(stage.task("a", collection="users"), subject=f"{stage.stream}.shop.orders.YQ")
        await stage.publish(stage.task("a", subjectHashed=True), subject=f"{stage.stream}.shop.orders.0abc")
        await stage.publish(stage.task("a", subjectHashed=True), subject=f"{stage.stream}.hashed.{whole}")
        await stage.publish(stage.task("b", subjectHashed=True), subject=f"{stage.stream}.hashed.{whole}")
        await eventually(lambda: _letters(stage, 3))
        await stage.endpoint.wait_for(3)
    assert [letter.reason for letter in await _letters(stage, 3)] == ["misrouted"] * 3


# -- dead letters by hand ----------------------------------------------------------------------------------------------


async def _letters(stage: Scene, count: int) -> list[DeadLetter]:
    found = [letter async for letter in DeadLetterReader(stage.js, stage.stream).walk()]
    return found if len(found) == count else []


async def parti(stage: Scene, *words: str) -> Result:
    where = ["--server", stage.server.url, "--set", f"deliver.stream={stage.stream}"]
    return await asyncio.to_thread(CliRunner().invoke, main, [*words, *where])


async def as_json(stage: Scene, *words: str, code: int = 0) -> Any:
    result = await parti(stage, *words, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", [("dlq", "replay", "{}", "--all"), ("deliver", "dlq", "replay")])
async def test_a_replayed_task_that_fails_again_has_a_new_letter_with_its_story(
    stage: Scene, command: tuple[str, ...]
) -> None:
    stage.endpoint.on("/bad", Answer(422))
    await stage.publish(stage.task("a", "/bad"), headers={"Nats-Msg-Id": "evt-1", "X-Own": "kept"})
    async with stage.delivering():
        for round_ in range(3):
            (letter,) = await eventually(lambda: _letters(stage, 1))
            assert (letter.extension.id, letter.headers["X-Own"], letter.attempts) == ("evt-1", "kept", 1)
            assert [before["reason"] for before in letter.extension.history] == ["rejected"] * round_
            if round_ < 2:
                words = [word.format(stage.stream) for word in command]
                assert await as_json(stage, *words) == {"replayed": 1}
                await stage.endpoint.wait_for(round_ + 2)
    assert {request.headers["webhook-id"] for request in stage.endpoint.received} == {"evt-1"}


async def test_a_letter_that_was_replayed_is_no_reason_to_drop_the_next_one(stage: Scene) -> None:
    """A message id that repeats must not make a letter vanish, whoever published the task again, and how."""
    stage.endpoint.on("/bad", Answer(422))
    await stage.publish(stage.task("a", "/bad"))
    async with stage.delivering():
        (letter,) = await eventually(lambda: _letters(stage, 1))
        name = dead_letter_stream(stage.stream)
        identity = (await stage.js.msg_get(name, seq=letter.sequence)).headers["Nats-Msg-Id"]
        await stage.js.msg_delete(name, letter.sequence)
        for _ in range(2):  # the second is a repetition, and stays one
            await DeadLetterWriter(stage.js, stage.stream).store(letter, identity)
        assert len(await eventually(lambda: _letters(stage, 1))) == 1


async def test_a_replay_goes_on_past_letters_that_cannot_be_replayed(stage: Scene) -> None:
    async with stage.delivering():
        pass
    cut = "Parti-Data-Cut"  # as earlier versions wrote it
    headers = {"Parti-Task-Id": "x", "Parti-Reason": "rejected", "Parti-Subject": f"{stage.stream}.a", cut: "9"}
    subject = f"{stage.stream}_DLQ.shop.orders.rejected"
    await stage.js.publish(subject, b"", headers=headers | {"Parti-Origin": f"{stage.stream}:77"})
    await stage.js.publish(subject, b"{}", headers={**headers, "Parti-Subject": "ELSEWHERE.a"})
    await stage.js.publish(subject, b"{}", headers={k: v for k, v in headers.items() if k != cut})
    answer = await as_json(stage, "deliver", "dlq", "replay", code=1)
    assert (answer["replayed"], sorted(answer["failed"])) == (1, ["1", "2"])
    answer = await as_json(stage, "dlq", "replay", stage.stream, "1", "2", "9", code=1)
    assert (answer["replayed"], sorted(answer["failed"])) == (0, ["1", "2", "9"])
    assert len(await _letters(stage, 2)) == 2


async def test_before_the_first_run_there_is_nothing_and_what_cannot_be_is_refused(stage: Scene) -> None:
    ours = (("dlq", "ls"), ("dlq", "replay"), ("dlq", "purge", "--yes"), ("endpoints", "ls"))
    plain = (("ls",), ("replay", "--all"), ("purge", "--all"))
    all_of_them = [("deliver", *words) for words in ours]
    all_of_them += [("dlq", verb, stage.stream, *rest) for verb, *rest in plain]
    for words in all_of_them:
        result = await parti(stage, *words)
        assert (result.exit_code, "nothing here yet" in result.output) == (0, True), result.output
    assert (await parti(stage, "deliver", "dlq", "show", "3")).exit_code == 2
    missing = await parti(stage, "deliver", "dlq", "replay", "--letter", "99")
    assert (missing.exit_code, "99" in missing.output) == (1, True)
    for pattern in ("shop.orders", "a.b.nonsense", "a.>.b", "a..rejected"):
        assert (await parti(stage, "deliver", "dlq", "ls", "--filter", pattern)).exit_code == 2
    stage.stream = "NONE"
    assert "no stream NONE" in (await parti(stage, "deliver", "dlq", "ls")).output
    result = await parti(stage, "dlq", "ls", "NONE")
    assert (result.exit_code, "no stream NONE" in result.output) == (2, True)


async def test_a_letter_can_be_shown_without_what_may_be_a_credential(stage: Scene) -> None:
    stage.endpoint.on("/secret-path", Answer(422))
    await stage.publish(stage.task("a", "/secret-path", headers={"X-Key": "hush"}))
    async with stage.delivering():
        await eventually(lambda: _letters(stage, 1))
    shown = (await parti(stage, "deliver", "dlq", "show", "1", "--redact")).output
    assert "documentId" in shown
    assert "secret-path" not in shown
    assert "hush" not in shown
    assert "shop/orders/a" in (await parti(stage, "deliver", "dlq", "ls")).output


@pytest.mark.parametrize("pasted", ["sk_live_4eC39HqLyjWDarjtT1zdp7dc", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"])
async def test_a_secret_that_was_pasted_in_place_of_its_name_is_not_shown(stage: Scene, pasted: str) -> None:
    await stage.publish(stage.task("a", "/x", secretsRef=pasted))
    await stage.publish(stage.task("b", "/x", secretsRef="billing"))
    async with stage.delivering():
        await eventually(lambda: _letters(stage, 2))
    shown = [(await parti(stage, "deliver", "dlq", "show", f"{n}", "--redact")).output for n in (1, 2)]
    assert pasted not in "".join(shown)
    assert "billing" in "".join(shown)
