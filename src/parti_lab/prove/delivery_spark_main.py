"""The process with the one Spark session of generated cases: `python -m parti_lab.prove.delivery_spark_main '{...}'`.

It reads jobs from standard input, one JSON line each: {"run": [the words of `parti deliver run`]} starts a delivery
pipeline, {"stop": 1} stops it cleanly. A pipeline that fails is restarted, as a supervisor would do.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from parti.config import load_config
from parti.errors import PartiError
from parti.observe.logs import configure_logging
from parti_lab.prove.delivery_spark import SPARK_TASKS

_MASTER = f"local[{SPARK_TASKS}]"
_AGAIN = 0.5  # seconds until a failed pipeline is restarted


class MainDelivery:
    """One pipeline, from its job to its end."""

    def __init__(self, spark: Any, words: list[str]) -> None:
        self._spark = spark
        self._words = words
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="parti-prove-delivery", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<MainDelivery {'ended' if self._ended.is_set() else 'running'}>"

    def end(self) -> None:
        """After this returns, the pipeline has stopped cleanly."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._once()
            except Exception as error:  # also Spark's: the next pipeline continues from the checkpoint
                _say({"failed": f"{type(error).__name__}: {error}"[:2000]})
                self._ended.wait(_AGAIN)

    def _once(self) -> None:
        from parti.spark.delivery.job import delivery_pipeline
        from parti.wire.configured import configured_options

        given = dict(zip(self._words[::2], self._words[1::2], strict=True))
        loaded = load_config(flags={name: value for name, value in given.items() if "." in name})
        configure_logging(loaded.config.observe, stream=sys.stdout)  # the proof reads lost leases from this log
        options = configured_options(loaded).options
        pipeline = delivery_pipeline(
            loaded.config.deliver, options, checkpoint=given["checkpoint"], master=f"local[{SPARK_TASKS}]"
        )
        with pipeline.start(self._spark) as running:
            while not self._ended.wait(0.05):
                if running.wait(0):
                    raise PartiError("the pipeline has ended by itself")


def main(config: dict[str, Any]) -> None:
    from parti.spark.session import session  # Spark is an extra

    conf: dict[str, Any] = {
        "spark.python.daemon.module": "parti_lab.prove.delivery_daemon",
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.streaming.pollingDelay": "100ms",
        "spark.sql.warehouse.dir": f"{config['folder']}/warehouse",
        "spark.ui.enabled": "false",
    }
    spark = session("parti-prove-delivery", _MASTER, **conf)
    spark.sparkContext.setLogLevel("ERROR")
    _say({"ready": True})
    delivery: MainDelivery | None = None
    for line in sys.stdin:
        job = json.loads(line)
        if "run" in job and delivery is None:
            delivery = MainDelivery(spark, job["run"])
        elif "stop" in job and delivery is not None:
            delivery.end()
            delivery = None
            _say({"stopped": True})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
