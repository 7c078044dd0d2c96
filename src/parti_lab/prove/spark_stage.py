"""A generated case on a real Spark: its own driver process, real kills, and the result in files."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from parti.errors import DataLoss
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader
from parti_lab.prove.spark_case import Case
from parti_lab.prove.spark_play import PlayOutcome, plain_rows, starting
from parti_lab.prove.spark_process import WITHIN, Driver, ProofBroken
from parti_lab.prove.spark_world import SparkWorld

_TRIES = 6
_LOST = re.compile(r"DataLoss")
_NUMBERS = re.compile(r"sequences? (\d+)(?: to (\d+))?")


class SparkServers(Protocol):
    """The operations on servers that the faults of a case need."""

    def restart(self, stream: str) -> None: ...

    def step_down(self, stream: str) -> None: ...


class CaseDriver(Driver):
    """The process with the Spark session; one job at a time."""

    module = "parti_lab.prove.spark_case_driver"

    def __init__(self, folder: Path) -> None:
        super().__init__({"folder": str(folder)})
        self._said: list[dict[str, Any]] = []
        self._news = threading.Condition()

    def _heard(self, message: dict[str, Any]) -> None:
        with self._news:
            self._said.append(message)
            self._news.notify_all()

    def submit(self, job: dict[str, Any]) -> None:
        self.ensure()
        self._said.clear()
        super().submit(job)

    def wait(self, word: str, number: int, folder: Path) -> dict[str, Any] | None:
        """The message of this kind about the job, or its answer; None if the process ended before.

        Only a stall is an error: a query of a thousand small batches takes long on a busy machine.
        """
        seen, deadline = -1, 0.0
        while (done := sum(1 for _ in folder.glob("checkpoint/commits/*"))) > seen or time.monotonic() < deadline:
            if done > seen:
                seen, deadline = done, time.monotonic() + WITHIN
            with self._news:
                for message in self._said:
                    if number in (message.get(word), message.get("answer")):
                        return message
                if self._process is None or self._process.poll() is not None:
                    return None
                self._news.wait(0.2)
        raise ProofBroken(f"the Spark driver stood still for {WITHIN:g} s before it said {word}; see its log")


class SparkStage:
    """Plays one case on the driver; `faults` counts the faults by kind."""

    def __init__(
        self, case: Case, world: SparkWorld, url: str, seed: int, driver: CaseDriver, servers: SparkServers
    ) -> None:
        self.case = case
        self.world = world
        self.rng = random.Random(f"{seed}:{case.number}:play")
        self.driver = driver
        self.servers = servers
        self.faults = 0
        self.given = starting(case, world, url, self.rng)
        self._folder = Path(driver._config["folder"]) / f"case-{case.number}"

    def run(self) -> PlayOutcome:
        outcome = PlayOutcome()
        state = _state(self.given)
        outcome.begin = _begin(self.given, state.first_seq, self.world)
        outcome.open_start = self.case.reader.start != "sequence"
        acts, fault = [act for _, act in self.case.reader.acts], self.case.reader.fault
        self.driver.ensure()
        for attempt in range(_TRIES):
            self.driver.submit(
                {
                    "id": attempt,
                    "streaming": self.case.reader.streaming,
                    "trigger": self.case.reader.trigger,
                    "given": self.given,
                    "folder": str(self._folder),
                }
            )
            if self.driver.wait("started", attempt, self._folder) is not None:
                threading.Event().wait(self.rng.uniform(0.0, 1.5))  # anywhere in planning or reading
                fault = self._break(fault)
                while acts:
                    self.world.act(acts.pop(0))
            answer = self.driver.wait("answer", attempt, self._folder)
            if answer is not None and not answer["error"]:
                break
            if answer is None:
                continue  # killed: run the same job again, on the same checkpoint
            if not _LOST.search(answer["error"]):
                if self.faults and self.case.reader.fault == "workers":
                    continue  # Spark also plans in a Python worker: without it the query fails, and is run again
                raise ProofBroken(f"the query failed: {answer['error'][:1500]}")
            outcome.failures.append(_loss(self.world.name, answer["error"]))
            if not self.case.reader.streaming:
                outcome.tasks_follow = False
                return outcome
            self.given = self.given | {"failOnDataLoss": "false"}
        else:
            raise ProofBroken(f"came to no end in {_TRIES} tries")
        self.world.settle()
        for path in sorted(self._folder.glob("out/*/*.parquet")):
            outcome.rows += plain_rows(pq.ParquetFile(path).read())
        outcome.end = self._end(state.last_seq)
        outcome.tolerant = self.given["failOnDataLoss"] == "false"
        return outcome

    def _break(self, fault: str) -> str:
        match fault:
            case "none":
                return fault
            case "workers":
                self.faults += self.driver.kill_workers(self.rng)
            case "driver":
                self.faults += bool(self.driver.kill())
            case "server":
                self.servers.restart(self.world.name)
                self.world.remember()
                self.faults += 1
            case "leader":
                self.servers.step_down(self.world.name)
                self.world.remember()
                self.faults += 1
        return "none"

    def _end(self, last: int) -> int:
        """The last sequence that the query must have read: from its checkpoint, or the last one stored."""
        logs = sorted((self._folder / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        if not logs:
            return 0 if self.case.reader.streaming else last
        return int(json.loads(logs[-1].read_text().splitlines()[-1])["sequence"])


def _state(given: dict[str, str]) -> Any:
    reader = RangeReader(ConnectOptions(servers=tuple(given["servers"].split(","))))
    try:
        return reader.state(given["stream"])
    finally:
        reader.close()


def _begin(given: dict[str, str], first: int, world: SparkWorld) -> int:
    """The sequence after which the query must begin."""
    start = given.get("startingOffsets", "earliest")
    if (moment := given.get("startingTimestamp")) is not None:
        since = int(moment) * 1_000
        return min(each for each in world.present if world.ledger[each].microseconds >= since) - 1
    return int(start) - 1 if start.isdecimal() else first - 1


def _loss(stream: str, text: str) -> DataLoss:
    found = _NUMBERS.search(text)
    first = int(found[1]) if found else 0
    last = int(found[2] or found[1]) if found else 0
    return DataLoss(text[-500:], stream=stream, first_missing=first, first_available=last + 1)
