"""Another client changes our consumer: no message is missed, and the change is logged."""

from __future__ import annotations

import random

import pytest

from parti.testing import eventually
from support.worker import Bench, Effects, parts

# An interest stream itself deletes what no filter asks for, so that nobody could help there.
pytestmark = pytest.mark.parametrize("retention", ["limits", "workqueue"])


async def retained(bench: Bench, retention: str) -> None:
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention=retention)


async def edited(bench: Bench, filters: list[str]) -> None:
    config = (await bench.info())["config"]
    await bench.js.consumer_update(bench.stream, config | {"filter_subjects": filters})


@pytest.mark.slow
async def test_filters_edited_from_outside_are_mended_and_nothing_is_missed(bench: Bench, retention: str) -> None:
    await retained(bench, retention)
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a", "b", "c"))
    await bench.publish("a", 2)
    await effects.count(2)
    await edited(bench, [f"{bench.stream}.a"])
    for _ in range(5):
        await bench.publish("b", 1)
        await bench.publish("a", 1)  # what is delivered of others must not count as received of all
    await eventually(lambda: len(effects.of("b")) == 5, 60, "what the edited filters left out")
    await bench.publish("c", 1)
    await effects.count(13)
    assert effects.of("a") == sorted(effects.of("a"))
    assert effects.of("b") == sorted(effects.of("b"))
    assert len(effects.seen) == 13
    assert bench.metric("parti_worker_consumer_repairs_total") >= 1


@pytest.mark.slow
async def test_a_consumer_made_by_somebody_else_under_our_name_is_set_right(bench: Bench, retention: str) -> None:
    await retained(bench, retention)
    effects = Effects()
    worker = bench.worker(effects)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await bench.publish("a", 2)
    await effects.count(2)
    config = {k: v for k, v in (await bench.info())["config"].items() if k not in ("metadata", "opt_start_seq")}
    await bench.js.consumer_delete(bench.stream, config["name"])
    await bench.js.consumer_create(
        bench.stream, config | {"deliver_policy": "all", "filter_subjects": [f"{bench.stream}.a"]}
    )
    await bench.publish("b", 4)
    await bench.publish("a", 1)
    await effects.count(7)
    assert len(effects.of("b")) == 4
    assert len(effects.seen) == 7


@pytest.mark.parametrize("lanes", ["partition", "key"])
async def test_an_update_of_ours_that_puts_filters_back_reads_what_was_missed(
    bench: Bench, retention: str, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random cuts and updates. What came behind our update moved the position over what nobody had received."""
    monkeypatch.setattr("parti.worker.engine._VERIFY_EVERY", 3600.0)  # only our own updates notice
    rng = random.Random(7)
    await retained(bench, retention)
    effects = Effects()
    worker = bench.worker(effects, lanes=lanes)
    names = [f"p{n}" for n in range(8)]
    published = 0
    for count in range(3, 8):
        await worker.update_worker_consumer("w1", parts(*names[:count]))
        await bench.publish_many(names[:count], 2)
        published += 2 * count
        await effects.count(published)
        config = (await bench.info())["config"]
        kept = rng.sample(config["filter_subjects"], rng.randint(1, count - 1))
        await bench.js.consumer_update(bench.stream, config | {"filter_subjects": kept})
        await bench.publish_many(names[:count], 3)
        published += 3 * count
        await worker.update_worker_consumer("w1", parts(*names[: count + 1]))
        await bench.publish_many(names[:count], 1)
        published += count
        await effects.count(published)
    assert len(set(effects.sequences)) == len(effects.seen) == published, "each once"
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))
