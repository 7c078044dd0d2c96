"""Epoch markers on a real server: markers of earlier versions are read, publishes under an older marker refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from parti.errors import UsageError
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.epoch_marker import EpochMarker, StaleEpoch, put_marker, raise_marker, read_marker
from parti.wire.errors import WrongLastSequence
from parti.wire.options import ConnectOptions

RECORDED = {  # byte for byte as 0.1 stored them: the park of a delivery partition, and the fence of a pipeline
    b"41": (41, ""),
    b'{"epoch": 7, "owner": "host-1:99", "pipeline": "orders"}': (7, "host-1:99"),
}


@pytest.fixture
async def api(server: NatsServer, name: str) -> AsyncIterator[JetStreamApi]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        made = JetStreamApi(connection)
        await made.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
        yield made


@pytest.mark.parametrize("recorded", RECORDED)
async def test_a_marker_of_an_earlier_version_is_read_and_raised(api: JetStreamApi, name: str, recorded: bytes) -> None:
    subject, (epoch, owner) = f"{name}.e.0", RECORDED[recorded]
    stored = await api.publish(subject, recorded)
    assert await read_marker(api, name, subject) == EpochMarker(subject, stored.seq, epoch, owner)
    with pytest.raises(StaleEpoch):
        await raise_marker(api, name, subject, epoch=epoch - 1, owner="late")
    raised = await raise_marker(api, name, subject, epoch=epoch + 1, owner="next")
    assert await read_marker(api, name, subject) == raised


async def test_what_is_stored_now_is_read_by_an_earlier_version(api: JetStreamApi, name: str) -> None:
    """Drivers are upgraded one by one: theirs asks for the keys `epoch` and `owner`."""
    raised = await raise_marker(api, name, f"{name}.e.0", epoch=3, owner="me")
    found = json.loads((await api.msg_get(name, seq=raised.sequence)).data)
    assert (found["epoch"], found["owner"]) == (3, "me")


async def test_publishes_under_an_older_marker_are_refused_also_where_epochs_begin_anew(
    api: JetStreamApi, name: str
) -> None:
    first = await put_marker(api, f"{name}.e.0", 9)
    await api.publish(f"{name}.a", b"1", headers=first.expected)
    second = await put_marker(api, f"{name}.e.0", 1)  # the bucket that counts them was lost
    with pytest.raises(WrongLastSequence):
        await api.publish(f"{name}.a", b"2", headers=first.expected)
    await api.publish(f"{name}.a", b"3", headers=second.expected)


async def test_what_is_no_marker_is_told(api: JetStreamApi, name: str) -> None:
    assert await read_marker(api, name, f"{name}.e.0") is None
    await api.publish(f"{name}.e.0", b'{"who": "me"}')
    with pytest.raises(UsageError, match="is no epoch marker"):
        await read_marker(api, name, f"{name}.e.0")
