"""The owner of a durable: decided for any configuration that a server may return."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import ConfigError
from parti.manager.layouts.per_partition.durable import slot_name
from parti.model import PartitionId
from parti.worker.routing import consumer_name
from parti.worker.seal import Seal, foreign, is_unsealed

names = st.text("ab-_", min_size=1, max_size=8)
seals = st.builds(Seal, st.just("") | names, st.text(), names, st.text(min_size=1))
configs = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.none() | st.dictionaries(st.sampled_from(["parti.catching", "x"]), st.text()),
        "deliver_subject": st.text(),
        "ack_policy": st.sampled_from(["explicit", "none", "all"]),
    },
)


@given(seals)
def test_a_seal_is_read_as_it_was_written(seal: Seal) -> None:
    assert Seal.read({"metadata": seal.metadata()}) == seal
    assert Seal.read({"metadata": {"_nats.ver": "2.15.1"} | seal.metadata() | {"parti.left": "[0, []]"}}) == seal


@given(configs, st.none() | seals, st.just("") | names)
def test_what_is_sealed_for_another_or_was_never_made_by_us_is_foreign(
    config: dict[str, Any], seal: Seal | None, namespace: str
) -> None:
    if seal is not None:
        config = config | {"metadata": (config.get("metadata") or {}) | seal.metadata()}
    ours = not foreign(config, namespace)
    if seal is not None:
        assert ours == (seal.namespace == namespace)
        assert not is_unsealed(config)
    else:
        made_by_us = config.get("ack_policy") == "explicit" and not config.get("deliver_subject")
        assert is_unsealed(config) == made_by_us
        assert ours == (made_by_us and not namespace), "what has a namespace in its name carries a seal"


@given(st.lists(st.tuples(names, names), min_size=2, max_size=2, unique=True))
def test_where_two_workers_get_one_name_their_seals_differ(pairs: list[tuple[str, str]]) -> None:
    (one_space, one_worker), (two_space, two_worker) = pairs
    if consumer_name("parti", one_worker, one_space) == consumer_name("parti", two_worker, two_space):
        assert foreign({"metadata": Seal(one_space, "", one_worker).metadata()}, two_space)


def test_a_worker_without_a_manager_keeps_the_name_of_the_seeds() -> None:
    assert consumer_name("processor", "instance-123") == "processor-instance-123"
    assert consumer_name("processor", "worker-1", "orders") == "processor-orders-worker-1"
    with pytest.raises(ConfigError, match="consumer name"):
        consumer_name("processor", "worker-1", "or.ders")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300), st.text("ab-", min_size=1))
def test_a_slot_of_a_long_name_still_has_one(partition: str, namespace: str) -> None:
    name = slot_name("parti", PartitionId(partition), namespace)
    assert len(name) <= 255 or len(namespace) > 150
    assert name != slot_name("parti", PartitionId(partition + "x"), namespace)
    assert all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
