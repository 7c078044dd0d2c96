"""A query and a pipeline as members of consumer groups, on the suite's Spark session and a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parti.errors import ConfigError
from parti.groups import errors
from parti.spark.pipeline import Emit, Pipeline, Results, Retries
from parti.spark.pipeline.driver.explain import explain
from parti.wire.stored import StoredMessage
from support.group_rig import Group, Rig

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@pytest.fixture
def group(rig: Rig, stream: Any) -> Group:
    """An elastic group of 8 partitions with the members m1 and m2."""
    return Group.elastic(rig, stream, "m1", "m2")


def pipeline(on: Group, folder: Path, **more: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "name": f"billing-{on.stream.name}",
        "stream": on.stream.name,
        "group": "g",
        "member": "m1",
        "handler": lambda message: Emit(b"%d %s" % (message.sequence, message.subject.encode())),
        "checkpoint": str(folder / f"checkpoint-{more.get('member')}"),
        "trigger": "available-now",
        "nats": on.rig.options,
    }
    return Pipeline(**(settings | more))


@pytest.mark.slow
def test_a_pipeline_handles_the_partitions_of_its_member_and_the_rest_is_for_the_others(
    group: Group, spark: Any, tmp_path: Path
) -> None:
    out = f"{group.stream.name}-out"
    api = group.stream.connection.api
    api(f"STREAM.CREATE.{out}", {"name": out, "subjects": [f"{out}.>"], "allow_direct": True})
    group.publish(120)
    made = pipeline(group, tmp_path, results=Results(subject=f"{out}.{{key}}"), batch_size=50)
    with made.start(spark) as running:
        assert running.wait(300)
    assert 0 < running.totals.done == 120 - group.messages_left()
    stored = [
        StoredMessage.from_json(api(f"STREAM.MSG.GET.{out}", {"seq": sequence})["message"])
        for sequence in range(1, api(f"STREAM.INFO.{out}")["state"]["last_seq"] + 1)
    ]
    group.spark += [(subject, int(number)) for number, subject in (message.data.decode().split() for message in stored)]
    with group.member("m2"):
        group.wait_all_handled()
    group.check()
    assert all(message.headers["Nats-Msg-Id"].startswith(f"g:{group.stream.name}:") for message in stored)


def test_a_pipeline_with_a_wrong_group_is_refused_before_it_starts(group: Group, spark: Any, tmp_path: Path) -> None:
    with pytest.raises(errors.GroupNotFound, match="no group 'x' on stream"):
        pipeline(group, tmp_path, group="x").start(spark)
    with pytest.raises(errors.GroupNotFound, match="no static group 'g' on stream"):
        pipeline(group, tmp_path, group_kind="static").start(spark)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"member": None}, "group and member belong together"),
        ({"subjects": ("a",)}, "subjects does not go with group"),
        ({"commit": "purge"}, "commit does not go with group"),
        ({"key": "payload:id"}, "key payload:id does not go with group"),
        ({"retries": Retries(then="park")}, "parking does not go with group"),
    ],
)
def test_settings_that_the_group_decides_on_are_refused(group: Group, tmp_path: Path, given: Any, told: Any) -> None:
    with pytest.raises(ConfigError, match=told):
        pipeline(group, tmp_path, **given)


def test_the_explanation_names_group_and_member(group: Group, tmp_path: Path) -> None:
    told = dict(explain(pipeline(group, tmp_path), cores=2))
    assert "as member m1 of group g" in told["source"]
    assert "in the group's partitions" in told["order"]
