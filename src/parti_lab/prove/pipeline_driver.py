"""The process that `parti prove pipeline` kills, freezes and resumes: a Spark driver with one pipeline.

    python -m parti_lab.prove.pipeline_driver '{"url": ..., "folder": ..., "plan": "fused", "handler": "async", ...}'

It runs until its standard input ends, or its pipeline fails (exit code 1). Every result names its message, its owner
and the owner's epoch. The plan `ranges` is the control: tasks handle the ranges that they read, without a shuffle,
which is fast and wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pyspark.sql.functions import spark_partition_id

from parti.spark.pipeline import Emit, Outcomes, Pipeline, Results, Standby
from parti.spark.pipeline.executor.publishing import ResultSink
from parti.spark.pipeline.executor.stage import HandlerStage
from parti.spark.session import session
from parti.wire.options import ConnectOptions
from parti.worker.message import Message

NAME = "proof"
PAUSE = "pause"
"""A file in the proof's folder: the driver of the next batch stops itself after its sinks and before its commit."""
_RANGES = 2  # tasks of the control


def result_of(message: Message) -> Emit:
    """The number of the message, its partition, and the owner and epoch that handled it."""
    lease = message.lease
    return Emit(b"%s %s %d %s" % (message.data, lease.partition.encode(), lease.epoch, message.worker_id.encode()))


def plain(message: Message) -> Emit:
    """A handler that does not wait."""
    return result_of(message)


async def waiting(message: Message) -> Emit:
    """A handler that waits, for a different time per message."""
    await asyncio.sleep(random.random() * 0.004)
    return result_of(message)


_HANDLERS = {"plain": plain, "async": waiting}


def main(config: dict[str, Any]) -> int:
    conf: dict[str, Any] = {"spark.ui.enabled": "false", "spark.sql.warehouse.dir": f"{config['folder']}/warehouse"}
    if config["master"].startswith("spark://"):
        conf |= {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.cores.max": "2"}
        conf |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    spark = session("parti-prove-pipeline", master=config["master"], fast_checkpoints=True, **conf)
    spark.sparkContext.setLogLevel("OFF")
    threading.Thread(target=_end_with_input, daemon=True).start()
    handler = _HANDLERS[config["handler"]]
    _say({"ready": True})
    try:
        if config["plan"] == "ranges":
            _ranges(spark, config, handler)
        else:
            _pipeline(config, handler).run(spark)
    except Exception as error:  # Spark raises many kinds; after any of them the proof starts a new driver
        _say({"failed": str(error)[-2000:]})
    return 1


def _pipeline(config: dict[str, Any], handler: Any) -> Pipeline:
    return Pipeline(
        name=NAME,
        stream=config["source"],
        handler=handler,
        plan=config["plan"],
        key="2",
        partitions=16,
        checkpoint=str(Path(config["folder"]) / "checkpoint"),
        batch_size=config["per_trigger"],
        results=Results(subject=f"{config['sink']}.{{key}}"),
        outcomes=Outcomes(write=_pausing(Path(config["folder"]) / PAUSE)) if config["pauses"] else Outcomes(),
        standby=Standby(ttl=config["ttl"], renew_every=config["ttl"] / 4, margin=0.3),
        nats=ConnectOptions(servers=(config["url"],)),
    )


def _pausing(flag: Path) -> Any:
    """A sink of outcomes that stops this process if the flag exists: all is stored, nothing is committed."""

    def write(frame: Any, number: int) -> None:
        frame.write.format("noop").mode("append").save()
        try:
            flag.unlink()
        except FileNotFoundError:
            return
        _say({"paused": number})
        os.kill(os.getpid(), signal.SIGSTOP)

    return write


def _ranges(spark: Any, config: dict[str, Any], handler: Any) -> None:
    """The control: each range goes from its reading task into the handler.

    Spark promises no order of the tasks of a stage. "The later range first" is one of the possible orders, and the only
    one here: left to the scheduler, a busy machine may run them one after the other, and the result looks right.
    """
    nats = ConnectOptions(servers=(config["url"],))
    sink = ResultSink(nats, config["sink"], f"{config['sink']}.{{key}}")
    stage = HandlerStage(handler, NAME, config["source"], results=sink, owner="control")
    options = {"servers": config["url"], "stream": config["source"], "startingOffsets": "earliest", "keyTokens": "2"}
    options |= {"minPartitions": str(_RANGES), "minRecordsPerPartition": "100", "numPartitions": "16"}
    frame = spark.readStream.format("jetstream").options(**options).load()

    def handle(batch: Any, _number: int) -> None:
        for task in reversed(range(_RANGES)):
            one = batch.filter(spark_partition_id() == task)
            one.mapInArrow(stage.run, stage.shape.ddl).write.format("noop").mode("append").save()

    checkpoint = str(Path(config["folder"]) / "checkpoint")
    query = frame.writeStream.foreachBatch(handle).option("checkpointLocation", checkpoint).start()
    query.awaitTermination()


def _end_with_input() -> None:
    for _ in sys.stdin:
        pass
    os._exit(0)  # the proof has ended or crashed: Spark's threads must not keep this process alive


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
