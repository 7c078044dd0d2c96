"""Generated cases of `parti prove spark`: a number gives one case, all pass, and the verdict finds planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from parti.errors import DataLoss
from parti.testing import NatsServer
from parti_lab.bench.report import RunContext
from parti_lab.prove.plain_reader import Plain
from parti_lab.prove.spark_case import FAULTS, FEATURES, WRONG, draw
from parti_lab.prove.spark_generated import run_cases
from parti_lab.prove.spark_play import Play, PlayOutcome, Task
from parti_lab.prove.spark_verdict import judge
from parti_lab.prove.spark_world import SparkWorld


def test_a_number_is_a_case_and_everything_comes_up() -> None:
    cases = [draw(7, number) for number in range(300)]
    assert [str(case) for case in cases] == [str(draw(7, number)) for number in range(300)]
    assert {case.stream.kind for case in cases} == {"plain", "mirror", "filtered", "sourced"}
    assert {case.stream.retention for case in cases} == {"limits", "interest", "workqueue"}
    assert {feature for case in cases for feature in case.stream.features} == {*FEATURES}
    assert {case.reader.fault for case in cases} == {*FAULTS}
    assert {case.reader.start for case in cases} == {"earliest", "sequence", "timestamp"}
    acts = Counter(act.name for case in cases for _, act in case.reader.acts)
    single = {"delete", "run", "tail", "purge_subject"}
    assert acts.keys() == single | {"publish", "front", "limit", "bytes", "storm", "flood", "aging", "age", "remake"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_handful_of_generated_cases_pass() -> None:
    figures = run_cases(RunContext(seed=3), cases=10)
    assert figures["cases"] == 10
    assert figures["rows"] > 1_000
    assert not any(figures[f"cases_{kind}"] for kind in WRONG), figures


@pytest.fixture
def world(server: NatsServer) -> Iterator[Any]:
    """A plain stream of fifty messages."""
    case = draw(3, 0)
    plan = replace(
        case.stream, kind="plain", retention="limits", messages=50, features=frozenset(), mirrors=(), acts=()
    )
    reader = replace(case.reader, streaming=False, filtered=False, start="sequence", acts=(), crashes=())
    made = SparkWorld((server.url,), replace(case, number=900, stream=plan, reader=reader), 3)
    made.build()
    yield made
    made.close()


def complete(world: Any, *, gone: Collection[int] = ()) -> PlayOutcome:
    rows = [world.ledger[n] for n in sorted(world.present) if n not in gone]
    return PlayOutcome(rows=rows, tasks=[Task(0, 50, 0, False, 1)], begin=0, end=50)


def test_what_is_planted_is_found(world: Any) -> None:
    assert not judge(complete(world), world, ()).wrong
    assert judge(complete(world, gone={7}), world, ()).wrong == {"missing": 1}
    twice = complete(world)
    twice.rows.append(twice.rows[3])
    assert judge(twice, world, ()).wrong == {"doubled": 1}
    other = complete(world)
    other.rows[4] = replace(other.rows[4], data=b"other")
    assert judge(other, world, ()).wrong == {"altered": 1}
    strange = complete(world)
    strange.rows.append(Plain(77, "x", 0, (), b""))
    assert judge(strange, world, ()).wrong == {"alien": 1}
    wrongly = complete(world)
    wrongly.said = [(9, 9)]
    assert judge(wrongly, world, ()).wrong == {"inexact": 1}
    alarmed = complete(world)
    alarmed.failures = [DataLoss("none", stream="S", first_missing=1, first_available=2)]
    assert judge(alarmed, world, ()).wrong == {"false_alarms": 1}
    differing = complete(world)
    differing.differing = 1
    assert judge(differing, world, ()).wrong == {"replays_that_differ": 1}


def test_a_loss_that_nobody_told_is_found_and_one_that_was_told_is_none(world: Any) -> None:
    world.api(f"STREAM.PURGE.{world.name}", {"seq": 11})
    world.step += 1
    world._note("front")
    assert judge(complete(world), world, ()).wrong == {"silent": 10}
    told = complete(world)
    told.said = [(1, 10)]
    assert not judge(told, world, ()).wrong
    late = complete(world)
    late.tasks = [Task(0, 50, world.step, True, 11)]  # it began when they were gone, and was to begin anywhere
    assert not judge(late, world, ()).wrong


def test_a_reader_that_leaves_out_a_message_is_found(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(replace(world.case, number=900), world, ",".join(world._urls), 3)
    play.given["startingOffsets"] = "earliest"
    whole = Play._read
    monkeypatch.setattr(Play, "_read", lambda self, reader, part: whole(self, reader, part)[1:])
    assert judge(play.run(), world, ()).wrong["missing"] >= 1
