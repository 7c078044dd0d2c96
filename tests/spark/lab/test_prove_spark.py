"""`parti prove spark` passes, and its checker finds each kind of planted fault."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parti.testing import NatsServer
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti_lab.bench.load import create_stream, delete_stream
from parti_lab.bench.report import RunContext, execute
from parti_lab.prove.spark import PROOF, SINK, SOURCE, SparkExperiment


@pytest.fixture
def experiment(server: NatsServer, tmp_path: Path) -> Iterator[Any]:
    options = ConnectOptions(servers=(server.url,))
    create_stream(options, SOURCE, "memory")
    create_stream(options, SINK, "memory")
    made = SparkExperiment(options, tmp_path, random.Random(1))
    yield made
    made.close()
    delete_stream(options, SOURCE)
    delete_stream(options, SINK)


def commit(folder: Path, number: str, files: dict[str, list[tuple[int, str, bytes]]]) -> None:
    """Add files to the table and to its commit log, as Spark does."""
    log = folder / "parquet" / "_spark_metadata"
    log.mkdir(parents=True, exist_ok=True)
    lines = ["v1"]
    for name, rows in files.items():
        columns = dict(zip(("sequence", "subject", "value"), map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(columns), folder / "parquet" / name)
        lines.append(json.dumps({"path": (folder / "parquet" / name).as_uri(), "action": "add"}))
    (log / number).write_text("\n".join(lines))


def copy(experiment: SparkExperiment, numbers: list[int]) -> None:
    with BlockingConnection.open(experiment.options) as connection:
        for number in numbers:
            subject, value = experiment.expected[number]
            connection.request(subject.replace(SOURCE, SINK), value)


def rows(experiment: SparkExperiment, numbers: list[int]) -> list[tuple[int, str, bytes]]:
    return [(number, *experiment.expected[number]) for number in numbers]


def test_outputs_that_equal_the_input_pass(experiment: Any) -> None:
    experiment.publish(50)
    commit(experiment.folder, "0", {"a": rows(experiment, list(range(1, 31)))})
    commit(experiment.folder, "1", {"b": rows(experiment, list(range(31, 51)))})
    copy(experiment, list(range(1, 51)))
    assert not any(experiment.check().values())


def test_a_file_that_no_commit_names_is_no_part_of_the_table(experiment: Any) -> None:
    experiment.publish(10)
    commit(experiment.folder, "0", {"left-by-a-dead-task": rows(experiment, [3])})
    commit(experiment.folder, "0", {"a": rows(experiment, list(range(1, 11)))})
    copy(experiment, list(range(1, 11)))
    assert not any(experiment.check().values())


def test_a_compacted_log_replaces_the_commits_before_it(experiment: Any) -> None:
    experiment.publish(10)
    commit(experiment.folder, "0", {"a": rows(experiment, [1, 2])})
    commit(experiment.folder, "1.compact", {"a": rows(experiment, [1, 2]), "b": rows(experiment, [3, 4, 5])})
    commit(experiment.folder, "2", {"c": rows(experiment, list(range(6, 11)))})
    copy(experiment, list(range(1, 11)))
    assert not any(experiment.check().values())


def test_each_kind_of_planted_fault_is_counted(experiment: Any) -> None:
    experiment.publish(200)
    numbers = list(range(1, 201))
    wrong = [(4, "other.subject", experiment.expected[4][1])]
    table = rows(experiment, [n for n in numbers if n not in (4, 7)]) + rows(experiment, [9, 9]) + wrong
    commit(experiment.folder, "0", {"a": table})
    subjects = {number: experiment.expected[number][0] for number in numbers}
    late = next(n for n in numbers if any(subjects[later] == subjects[n] for later in range(n + 1, 201)))
    copy(experiment, [n for n in numbers if n not in (late, 199)] + [late, 50])
    found = experiment.check()
    assert (found["parquet_lost"], found["parquet_duplicated"], found["parquet_wrong"]) == (1, 2, 1)
    assert (found["stream_lost"], found["stream_duplicated"]) == (1, 1)
    assert found["stream_out_of_order"] >= 1


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_proof_holds_for_a_killed_worker_and_a_killed_driver() -> None:
    result = execute(PROOF, RunContext(quick=True, seed=7, options={"trials": 2, "messages": 600, "cases": 0}))
    assert result.ok, result.figures
    assert result.figures["cases"] == 1  # on a Spark of its own
    kills = [result.figures["driver_kills"], result.figures["worker_kills"]]
    assert all(isinstance(count, int) and count >= 1 for count in kills), kills
