"""Assignment updates: diffed, coalesced, spaced, exact; the pull loop keeps running."""

from __future__ import annotations

import asyncio

import pytest

from parti.errors import ConfigError, PartiError
from parti.testing import eventually
from parti.worker import Message
from parti.worker.routing import Routes, SubjectTemplate
from parti.worker.updates import Diff
from support.worker import Bench, Effects, parts


async def test_100_updates_within_2_seconds_collapse_by_80_percent_and_end_in_the_last_state(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects, update_coalescing_window=0.075, min_update_interval=0.1)
    await worker.update_worker_consumer("w1", parts("base"))
    before = bench.metric("parti_worker_consumer_updates_total", result="success")

    async def change(number: int) -> None:
        await asyncio.sleep(number * 0.018)
        await worker.update_worker_consumer("w1", parts("base", f"p{number}"))

    async with asyncio.TaskGroup() as group:
        for number in range(100):
            group.create_task(change(number))
    assert bench.metric("parti_worker_consumer_updates_total", result="success") - before <= 20
    assert bench.metric("parti_assignment_coalesced_updates_total") == 101
    assert bench.metric("parti_assignment_coalesced_batches_total") <= 21
    wanted = sorted([f"{bench.stream}.base", f"{bench.stream}.p99"])
    assert (await bench.info())["config"]["filter_subjects"] == wanted
    assert list(worker.subjects) == wanted
    await bench.publish("p99", 1)
    await bench.publish("p98", 1)
    await effects.count(1)
    assert [message.partition.id for message in effects.seen] == ["p99"]


async def test_an_update_that_changes_nothing_is_not_sent(bench: Bench) -> None:
    worker = bench.worker(Effects())
    await worker.update_worker_consumer("w1", parts("a", "b"))
    created = (await bench.info())["ts"]
    await worker.update_worker_consumer("w1", parts("b", "a", "b"))
    assert bench.metric("parti_worker_consumer_updates_total", result="noop") == 1
    assert bench.metric("parti_consumer_update_skipped_total") == 1
    assert created


async def test_only_the_filters_change_on_an_update(bench: Bench) -> None:
    await bench.publish("a", 1)
    worker = bench.worker(Effects(), start="new")
    await worker.update_worker_consumer("w1", parts("a"))
    before = (await bench.info())["config"]
    await worker.update_worker_consumer("w1", parts("a", "b"))
    after = (await bench.info())["config"]
    for config in (before, after):
        config.pop("filter_subjects")
        config.pop("metadata")
    assert before == after
    assert before["deliver_policy"] == "by_start_sequence"


async def test_the_pull_loop_is_not_restarted_for_an_update(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 1)
    await effects.count(1)
    pull = worker._engine.channel.pull
    for number in range(5):
        await worker.update_worker_consumer("w1", parts("a", f"p{number}"))
    assert worker._engine.channel.pull is pull
    await bench.publish("p4", 1)
    await effects.count(2)


async def test_updates_while_messages_flow_miss_nothing_and_repeat_nothing(bench: Bench) -> None:
    names = [f"p{i}" for i in range(12)]
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts(*names[:6]))
    done = asyncio.Event()

    async def load() -> None:
        await bench.publish_many(names, 60)
        done.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(load())
        number = 0
        while not done.is_set():
            chosen = names if number % 2 else names[:6]
            await worker.update_worker_consumer("w1", parts(*chosen))
            number += 1
    await worker.update_worker_consumer("w1", parts(*names))
    await effects.count(12 * 60)
    assert number > 3
    assert sorted(effects.sequences) == list(range(1, 12 * 60 + 1)), "each exactly once"
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))


@pytest.mark.parametrize("mode", ["apply-empty-filter", "pause-pull-loop"])
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_no_partition_means_no_message_and_never_the_whole_stream(
    bench: Bench, mode: str, retention: str
) -> None:
    """docs/evidence/go-library.md#w2: there an empty assignment reads everything."""
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention=retention)
    effects = Effects()
    worker = bench.worker(effects, on_empty_assignment=mode)
    await worker.update_worker_consumer("w1", parts("a"))
    await bench.publish("a", 1)
    await effects.count(1)
    await worker.update_worker_consumer("w1", [])
    assert worker.subjects == ()
    await bench.publish("a", 2)
    await bench.publish("foreign", 2)
    if mode == "pause-pull-loop":
        assert not worker.info().pulling
    else:
        (nothing,) = (await bench.info())["config"]["filter_subjects"]
        assert "no_partition" in nothing
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(3)
    assert {message.partition.id for message in effects.seen} == {"a"}
    assert effects.sequences == [1, 2, 3]


async def test_a_worker_may_begin_without_partitions(bench: Bench) -> None:
    effects = Effects()
    worker = bench.worker(effects)
    await bench.publish("a", 2)
    await worker.update_worker_consumer("w1", [])
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(2)
    assert effects.sequences == [1, 2]


async def test_a_removed_partition_ends_before_the_update_returns_and_goes_on_where_it_was(bench: Bench) -> None:
    gate = asyncio.Event()
    running: list[int] = []

    async def handle(message: Message) -> None:
        running.append(message.sequence)
        if message.sequence == 1:
            await gate.wait()
        effects.seen.append(message)

    effects = Effects()
    worker = bench.worker(handle)
    await bench.publish("a", 3)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await eventually(lambda: running == [1])
    update = asyncio.create_task(worker.update_worker_consumer("w1", parts("b")))
    await asyncio.sleep(0.05)
    assert not update.done(), "its handler still runs"
    gate.set()
    await update
    assert effects.sequences == [1], "nothing of it was started after the removal"
    await bench.publish("a", 1)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await effects.count(4)
    assert effects.sequences == [1, 2, 3, 4]


async def test_while_an_update_fails_the_last_good_assignment_works_and_the_update_is_tried_again(bench: Bench) -> None:
    """A work queue refuses a subject that another consumer has (10100), until that one is gone."""
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention="workqueue")
    other = {
        "name": "other",
        "durable_name": "other",
        "ack_policy": "explicit",
        "filter_subjects": [f"{bench.stream}.b"],
    }
    await bench.js.consumer_create(bench.stream, other)
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a"))
    with pytest.raises(PartiError, match="10100"):
        await worker.update_worker_consumer("w1", parts("a", "b"))
    assert bench.metric("parti_worker_consumer_updates_total", result="failure") >= 1
    assert bench.metric("parti_consumer_update_failures_total") >= 1
    await bench.publish("a", 1)
    await effects.count(1)
    await eventually(lambda: not worker.is_healthy, what="three failed updates in a minute")
    await bench.publish("b", 1)
    await bench.js.consumer_delete(bench.stream, "other")
    await effects.count(2)
    await eventually(lambda: worker.is_healthy)
    assert worker.subjects == (f"{bench.stream}.a", f"{bench.stream}.b")


async def test_of_concurrent_updates_the_last_one_called_wins(bench: Bench) -> None:
    """There updates run in unordered goroutines, and an older one can be applied last.

    See docs/evidence/go-library.md#w17.
    """
    worker = bench.worker(Effects())
    calls = [worker.update_worker_consumer("w1", parts(f"p{i}")) for i in range(30)]
    await asyncio.gather(*calls)
    assert worker.subjects == (f"{bench.stream}.p29",)
    assert (await bench.info())["config"]["filter_subjects"] == [f"{bench.stream}.p29"]


async def test_a_flush_does_not_wait_for_the_window(bench: Bench) -> None:
    worker = bench.worker(Effects(), update_coalescing_window=30.0, min_update_interval=30.0)
    async with asyncio.timeout(60):
        await worker.update_worker_consumer("w1", parts("a"), flush=True)
        await worker.update_worker_consumer("w1", parts("a", "b"), flush=True)
    assert len(worker.subjects) == 2


def test_the_diff_names_what_comes_and_what_goes() -> None:
    diff = Diff.between(["a", "b"], ["b", "c"])
    assert (diff.added, diff.removed) == (("c",), ("a",))
    assert not Diff.between(["a", "b"], ["b", "a"])


def test_subjects_are_built_from_the_template_deduplicated_and_sorted() -> None:
    template = SubjectTemplate("dc.{partition}.complete")
    from parti.model import Partition

    assert template.subject(Partition(("tool_001", "region", "us"))) == "dc.tool_001.region.us.complete"
    assert Routes(template, parts("a", "c", "b", "a")).subjects == ("dc.a.complete", "dc.b.complete", "dc.c.complete")
    for key in ("a*", "*", ">", "a b", "", "a\tb"):
        if key in ("a*",):
            continue
        with pytest.raises(ConfigError):
            Partition((key,))


def test_partitions_that_share_subjects_are_refused() -> None:
    template = SubjectTemplate("{partition}.>")
    from parti.model import Partition

    with pytest.raises(ConfigError, match="share subjects"):
        Routes(template, [Partition(("a",)), Partition(("a", "b"))])


def test_a_wildcard_route_gives_the_key_that_the_wildcards_matched() -> None:
    routes = Routes(SubjectTemplate("o.{partition}.*.x.>"), parts("p"))
    route = routes.find(b"o.p.k1.x.k2.k3")
    assert route is not None
    assert (route.partition, route.key) == ("p", "k1.k2.k3")
    assert routes.find(b"o.q.k1.x.k2") is None


@pytest.mark.parametrize("busy", [False, True], ids=["free", "durable-busy"])
async def test_a_worker_fenced_at_any_moment_of_an_update_goes_on_with_the_next_one(bench: Bench, busy: bool) -> None:
    """Cancelled while it waited for its durable, an update took back what it had not placed yet: a KeyError."""
    effects = Effects()
    worker = bench.worker(effects)
    for turns in range(30):
        await worker.update_worker_consumer("w1", parts("a", "b"))
        durable = worker._engine.durable
        if busy:
            await durable.changing.acquire()
        update = asyncio.create_task(worker.update_worker_consumer("w1", parts("a", "c"), flush=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        await worker.abandon()
        if busy:
            durable.changing.release()
        await asyncio.gather(update, return_exceptions=True)
        assert worker.hopeless() == "", f"fenced after {turns} turns of the loop"
    await worker.update_worker_consumer("w1", parts("a", "c"))
    await bench.publish("c", 1)
    await effects.count(1)
