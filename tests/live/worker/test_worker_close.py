"""Closing: nothing starts afterwards, running handlers finish or are released, no leaks, and no repeats."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from parti.testing import eventually
from parti.worker import Message, Retry
from support.worker import Bench, Effects, parts


async def test_close_finishes_what_was_received_and_starts_nothing_afterwards(bench: Bench) -> None:
    """docs/evidence/go-library.md#l5: there the loop was alive 12 s after Close, and processed the next message."""

    async def handle(message: Message) -> None:
        await asyncio.sleep(0.01)
        effects.seen.append(message)

    effects = Effects()
    worker = bench.worker(handle)
    await bench.publish("a", 20)
    await worker.update_worker_consumer("w1", parts("a"))
    await effects.count(3)
    await worker.close()
    done = len(effects.seen)

    async def acked() -> bool:
        return bool((await bench.info())["ack_floor"]["stream_seq"] == done)

    await eventually(acked, what="every ack has reached the server")
    await bench.publish("a", 5)
    await asyncio.sleep(0.3)
    assert len(effects.seen) == done


async def test_a_handler_that_does_not_end_is_released_and_its_message_comes_again_to_the_successor(
    bench: Bench,
) -> None:
    async def hang(message: Message) -> None:
        started.append(message.sequence)
        if message.partition.id == "slow":
            await asyncio.Event().wait()

    started: list[int] = []
    worker = bench.worker(hang, drain_timeout=0.2)
    await bench.publish("slow", 3)
    await bench.publish("fast", 3)
    await worker.update_worker_consumer("w1", parts("slow", "fast"))
    await eventually(lambda: len(started) == 4)
    await worker.close()
    effects = Effects()
    await bench.worker(effects).update_worker_consumer("w1", parts("slow", "fast"))
    await effects.count(3)
    await bench.publish("fast", 1)
    await effects.count(4)
    await bench.settled()
    assert effects.sequences == [1, 2, 3, 7], "the slow ones in order, and nothing of what was done"


async def test_messages_that_wait_for_a_retry_are_left_to_the_successor_without_repeating_others(bench: Bench) -> None:
    effects = Effects(answer=lambda m: Retry(after=60) if m.sequence == 2 else None)
    worker = bench.worker(effects)
    await bench.publish("a", 4)
    await bench.publish("b", 4)
    await worker.update_worker_consumer("w1", parts("a", "b"))
    await effects.count(5)
    await worker.close()
    assert sorted(effects.sequences) == [1, 5, 6, 7, 8]
    again = Effects()
    await bench.worker(again).update_worker_consumer("w1", parts("a", "b"))
    await again.count(3)
    await bench.settled()
    assert again.sequences == [2, 3, 4]


async def test_a_crash_repeats_at_most_what_was_in_hand_and_keeps_the_order(bench: Bench) -> None:
    """The process is gone without a word: its connection is aborted, and nothing of it runs on."""
    gate = asyncio.Event()

    async def handle(message: Message) -> None:
        if message.partition.id == "slow":
            await gate.wait()
        effects.seen.append(message)

    effects = Effects()
    first = bench.worker(handle)
    await bench.publish("fast", 10)
    await bench.publish("slow", 10)
    await first.update_worker_consumer("w1", parts("fast", "slow"))
    await effects.count(10)
    await bench.js.connection.flush()
    engine = first._engine
    assert engine is not None
    engine.channel.abort()
    first._main.cancel()
    await engine.attempts.halt()
    bench.workers.remove(first)
    again = Effects()
    await bench.worker(again).update_worker_consumer("w1", parts("fast", "slow"))
    await again.count(10)
    assert again.of("slow") == list(range(11, 21)), "at once and in order, not after ack_wait"


async def test_nothing_is_left_after_close(bench: Bench) -> None:
    effects = Effects()

    async def once() -> None:
        worker = bench.worker(effects)
        wanted = len(effects.seen) + 3
        await bench.publish("a", 3)
        await worker.update_worker_consumer("w1", parts("a", "b"), positions={})
        await effects.count(wanted)
        await worker.update_worker_consumer("w1", parts("a"))
        await worker.close()

    await once()
    tasks, descriptors = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(5):
        await once()
    await eventually(lambda: len(asyncio.all_tasks()) == tasks, what="no task is left")
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, what="no descriptor is left")
    await eventually(lambda: threading.active_count() <= threads, what="no thread is left")


async def test_a_plain_handler_that_runs_on_does_not_hold_up_the_close(bench: Bench) -> None:
    release, started = threading.Event(), threading.Event()

    def handle(message: Message) -> None:
        started.set()
        release.wait(60)

    worker = bench.worker(handle, drain_timeout=0.1)
    await bench.publish("a", 2)
    await worker.update_worker_consumer("w1", parts("a"))
    await asyncio.to_thread(started.wait, 60)
    async with asyncio.timeout(60):
        await worker.close()
    info = await bench.info()
    assert info["ack_floor"]["stream_seq"] == 0, "it was not acknowledged"
    release.set()


@pytest.mark.slow
async def test_sigterm_drains_and_exits_with_zero(bench: Bench, tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from parti.model import Partition
        from parti.wire.api import JetStreamApi
        from parti.wire.connect import connect
        from parti.wire.options import ConnectOptions
        from parti.worker import WorkerConfig, WorkerConsumer

        async def handle(message):
            await asyncio.sleep(0.005)
            print(message.sequence, flush=True)

        async def main(url, stream):
            async with await connect(ConnectOptions(servers=(url,))) as connection:
                config = WorkerConfig(stream=stream, subject_template=stream + ".{partition}")
                worker = WorkerConsumer(JetStreamApi(connection), config, handle)
                await worker.update_worker_consumer("w1", [Partition((str(n),)) for n in range(4)])
                await worker.run_until_signal()

        asyncio.run(main(*sys.argv[1:]))
        """
    )
    script = tmp_path / "worker.py"
    script.write_text(program)
    log = tmp_path / "out.txt"
    await bench.publish_many(["0", "1", "2", "3"], 400)
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), bench.server.url, bench.stream, stdout=out, stderr=asyncio.subprocess.PIPE
        )
        await eventually(lambda: log.stat().st_size > 500, 60, "the worker works")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        errors = await asyncio.wait_for(process.stderr.read(), 60)
        assert await process.wait() == 0, errors.decode()
    first = [int(line) for line in log.read_text().split() if line.isdigit()]
    effects = Effects()
    await bench.worker(effects).update_worker_consumer("w1", parts("0", "1", "2", "3"))
    await effects.count(1600 - len(first))
    await bench.settled()
    assert sorted(first + effects.sequences) == list(range(1, 1601)), "each exactly once over both processes"
