"""A default is written once: a section of the configuration has the default of the value that it becomes."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import parti
from parti.backoff import Backoff
from parti.config import ControlConfig, NatsSection, RetrySection, WorkerConfig
from parti.config.load import LoadedConfig, load_config
from parti.control.handoff import HandoffTerms
from parti.control.lease import LeaseTerms
from parti.control.pacing import PacingTerms
from parti.manager.lease_keeper import terms_of
from parti.outcomes import RetryPolicy
from parti.spark.pipeline.driver.lease import Standby
from parti.wire.configured import configured_backoff
from parti.wire.options import ConnectOptions


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedConfig:
    monkeypatch.chdir(tmp_path)
    return load_config(None, environ={})


def test_connections_are_the_same_with_and_without_a_configuration() -> None:
    section = NatsSection()
    for field in fields(ConnectOptions):
        assert getattr(section, field.name) == getattr(ConnectOptions(), field.name), field.name


def test_waits_leases_moves_and_tries_are_the_same_with_and_without_a_configuration(untouched: LoadedConfig) -> None:
    control, worker = ControlConfig(), WorkerConfig()
    assert configured_backoff(untouched) == Backoff()
    assert untouched.config.retry == RetrySection()
    assert terms_of(control) == LeaseTerms() == Standby().terms
    assert (
        PacingTerms(control.cold_start_window, control.planned_scale_window, control.rebalance_cooldown)
        == PacingTerms()
    )
    tries = (control.prepare_timeout, control.prepare_retries, control.commit_timeout, control.commit_retries)
    assert HandoffTerms(*tries) == HandoffTerms()
    assert RetryPolicy(worker.max_deliver, worker.delays) == RetryPolicy()


def test_nothing_is_imported_for_a_default() -> None:
    tree = ast.parse((Path(parti.__path__[0]) / "defaults.py").read_text())
    assert [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)] == [
        "from typing import Final"
    ]
