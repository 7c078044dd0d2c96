"""The public API: the names in `parti`, and partitions with several subjects."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import parti
from parti.control.subject_buckets import slot_of
from parti.errors import ConfigError
from parti.manager import ControlConfig, Manager, SlotSource
from parti.model import Partition, PartitionId, WorkerId
from parti.testing import NatsServer, eventually
from parti.worker import WorkerConfig, WorkerConsumer
from support.fleet import PATIENT, Fleet, fleet_on


def test_every_public_name_is_there_and_the_stub_names_the_same() -> None:
    stub = ast.parse(Path(parti.__file__).with_suffix(".pyi").read_text())
    imported = {
        alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {"__version__", *imported} == set(parti.__all__)
    for name, module in imported.items():
        assert module is not None
        assert getattr(parti, name) is getattr(importlib.import_module(module), name)
    assert set(parti.__all__) <= set(dir(parti))
    with pytest.raises(AttributeError, match="Mangaer"):
        parti.Mangaer  # type: ignore[attr-defined]  # noqa: B018


def test_importing_parti_loads_nothing_else() -> None:
    code = "import parti, sys; print(sorted({'nats', 'numpy', 'pyarrow', 'parti.manager'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_many_subjects_become_few_slots_that_agree_with_the_servers_hash() -> None:
    subjects = [f"dc.tool_{n:03d}.complete" for n in range(300)]
    source = SlotSource(subjects, 97)
    for subject in subjects:
        partition = PartitionId(f"slot-{slot_of(Partition(tuple(subject.split('.'))), 97)}")
        assert subject in source.subjects_of(partition)
    with pytest.raises(ConfigError, match="use 54 slots"):
        SlotSource(subjects, 40)
    with pytest.raises(ConfigError, match="subject mapping"):
        SlotSource([f"s.{n}" for n in range(20_000)], 10)
    with pytest.raises(ConfigError, match="wildcard"):
        SlotSource(["dc.*.complete"], 4)
    with pytest.raises(ConfigError, match="at least one"):
        SlotSource([], 4)
    with pytest.raises(ConfigError, match="same subjects"):
        source.subjects_of(PartitionId("slot-98"))


def slots(name: str) -> SlotSource:
    return SlotSource([f"{name}.tool{n}.done" for n in range(12)], 4)


async def test_a_slot_of_explicit_subjects_moves_as_one_and_keeps_its_order(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=4) as fleet:
        one = await fleet.worker(layout="per-partition", source=slots(name))
        await one.wait_for("converged", 60)
        fleet.partitions = sorted(one.owned())
        subjects = [f"tool{n}.done" for n in range(12)]
        first = await fleet.publish(60, subjects)
        two = await fleet.worker(layout="per-partition", source=slots(name))
        await fleet.spread(one, two)
        second = await fleet.publish(60, subjects)
        await fleet.handled(120)
        assert sorted(fleet.sequences()) == first + second
        for slot in fleet.partitions:
            of_one = [m for _, m in fleet.seen if m.partition.id == slot]
            assert [m.sequence for m in of_one] == sorted(m.sequence for m in of_one)
            assert {m.subject for m in of_one} == set(slots(name).subjects_of(PartitionId(slot)))


async def test_a_subject_that_joins_a_slot_is_filtered_from_then_on(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=1) as fleet:
        one = await fleet.worker(layout="per-partition", source=SlotSource([f"{name}.a"], 1))
        await one.wait_for("converged", 60)
        two = await fleet.worker(layout="per-partition", source=SlotSource([f"{name}.a", f"{name}.b"], 1))
        await one.stop()
        await eventually(lambda: two.owned() == {"slot-0"}, 60, "handed over")
        await fleet.publish(4, ["a", "b"])
        await fleet.handled(4)
        assert fleet.sequences() == [1, 2, 3, 4]


async def test_a_template_may_name_several_subjects_of_a_partition(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name, count=2) as fleet:
        template = f"{name}.orders.{{partition}},{name}.returns.{{partition}}"
        one = await fleet.worker(layout="per-partition", worker={"subject_template": template})
        await one.wait_for("converged", 60)
        await fleet.publish(12, ["orders.p0", "returns.p0", "orders.p1", "returns.p1", "orders.p9"])
        await fleet.handled(10)
        assert sorted({m.subject.removeprefix(f"{name}.") for _, m in fleet.seen}) == [
            "orders.p0",
            "orders.p1",
            "returns.p0",
            "returns.p1",
        ]
        for each in fleet.partitions:
            of_one = [m.sequence for _, m in fleet.seen if m.partition.id == each]
            assert of_one == sorted(of_one)


class Backwards:
    """Everything to the last worker."""

    name = "backwards"

    def assign(
        self, workers: Sequence[WorkerId], partitions: Sequence[Partition], previous: Mapping[PartitionId, WorkerId]
    ) -> dict[WorkerId, tuple[Partition, ...]]:
        return dict.fromkeys(workers[:-1], ()) | {workers[-1]: tuple(partitions)}


async def test_a_strategy_and_the_bucket_are_the_users_choice(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        for _ in range(2):
            consumer = WorkerConsumer(
                fleet.js, WorkerConfig(stream=name, subject_template=f"{name}.{{partition}}"), lambda m: None
            )
            config = ControlConfig(**PATIENT | {"namespace": name, "bucket_storage": "memory"})
            manager = Manager(config, await fleet.connection(), ["a", "b"], Backwards(), consumer=consumer)
            fleet.managers.append(manager)
            await manager.start(60)
        one, two = fleet.managers
        await eventually(lambda: two.owned() == {"a", "b"}, 60, "all of it is with the last one")
        info = await fleet.js.stream_info(f"KV_parti-{name}")
        assert info["config"]["storage"] == "memory"
        await two.stop()
        await eventually(lambda: one.owned() == {"a", "b"}, 60, "and with the first one when it left")


async def _manager(fleet: Fleet, template: str, layout: str, source: object = ("p0",)) -> Manager:
    consumer = WorkerConsumer(fleet.js, WorkerConfig(stream=fleet.stream, subject_template=template), lambda m: None)
    return Manager(ControlConfig(layout=layout), await fleet.connection(), source, consumer=consumer)  # type: ignore[arg-type]


async def test_a_layout_that_cannot_serve_the_subjects_is_refused_at_once(server: NatsServer, name: str) -> None:
    async with fleet_on(server, name) as fleet:
        eleven = ",".join(f"{name}.{n}.{{partition}}" for n in range(11))
        with pytest.raises(ConfigError, match="at most 10"):
            await _manager(fleet, eleven, "per-partition")
        with pytest.raises(ConfigError, match="the only subject"):
            await _manager(fleet, f"{name}.{{partition}}.>,{name}.x.{{partition}}", "per-partition")
        with pytest.raises(ConfigError, match="per-partition"):
            await _manager(fleet, f"{name}.a.{{partition}},{name}.b.{{partition}}", "per-worker")
        with pytest.raises(ConfigError, match="per-partition"):
            await _manager(fleet, f"{name}.{{partition}}", "per-worker", slots(name))
