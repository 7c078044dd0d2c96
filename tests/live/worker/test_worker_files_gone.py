"""A consumer whose files are gone at the server still delivers, but refuses every change: parti recreates it, no gap.

The server leaves such a consumer if it is deleted while it is being created (`ConsumerFilesGone`).
"""

from __future__ import annotations

import random

import pytest

from parti.testing import NatsServer
from parti.wire.errors import ConsumerFilesGone
from support.worker import Bench, Effects, parts


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
@pytest.mark.parametrize("lanes", ["partition", "key"])
async def test_partitions_come_and_go_although_the_files_of_the_consumer_are_gone(
    server: NatsServer, bench: Bench, retention: str, lanes: str
) -> None:
    rng = random.Random(7)
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention=retention, storage="file")
    effects = Effects()
    worker = bench.worker(effects, lanes=lanes)
    names = [f"p{n}" for n in range(8)]
    published = 0
    for count in (3, 5, 4, 8, 6):
        await worker.update_worker_consumer("w1", parts(*names[:count]))
        await bench.publish_many(names[:count], rng.randint(1, 4))
        published = (await bench.js.stream_info(bench.stream))["state"]["last_seq"]
        if rng.random() < 0.5:
            await effects.count(published)
        config = (await bench.info())["config"]
        server.lose_consumer_files(bench.stream, config["name"])
        with pytest.raises(ConsumerFilesGone):
            await bench.js.consumer_update(bench.stream, config | {"description": "a change"})
    await worker.update_worker_consumer("w1", parts(*names))
    await effects.count(published)
    assert len(set(effects.sequences)) == len(effects.seen) == published, "each once"
    for name in names:
        assert effects.of(name) == sorted(effects.of(name))
    config = (await bench.info())["config"]
    assert sorted(config["filter_subjects"]) == sorted(f"{bench.stream}.{name}" for name in names)
    await bench.js.consumer_update(bench.stream, config | {"description": "it can be changed again"})
