"""What is done leaves a work queue, also when its ack got lost on its way."""

from __future__ import annotations

import pytest
from worker_bench import Bench, Effects, parts

from parti.testing import eventually


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_messages_whose_acks_got_lost_are_acknowledged_again_and_not_handled_again(
    bench: Bench, retention: str
) -> None:
    await bench.js.stream_delete(bench.stream)
    await bench.create(retention=retention)
    effects = Effects()
    worker = bench.worker(effects, ack_wait=600.0)  # the server would not ask again for ten minutes
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await bench.publish("a", 1)
    await effects.count(1)
    connection = worker._engine.desk.connection
    through, connection.write = connection.write, lambda data: None if b"+ACK" in data else through(data)
    await bench.publish("a", 5)
    await bench.publish("b", 5)
    await effects.count(11)
    connection.write = through

    async def empty() -> bool:
        return (await bench.js.stream_info(bench.stream))["state"]["messages"] == 0

    await eventually(empty, 60, "the stream is empty")
    assert len(effects.seen) == 11
