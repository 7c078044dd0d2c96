import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from parti.errors import ConnectionFailed, ConnectionLost, NoResponders, RequestTimeout, ServerTooOld, UsageError
from parti.testing import NatsServer, insist
from parti.wire import errors
from parti.wire.api import JetStreamApi, Outgoing, expectations
from parti.wire.api_call import check_version
from parti.wire.api_consumers import filters_of
from parti.wire.connect import Connection, connect
from parti.wire.events import ConnectionEvent, ConnectionEventKind
from parti.wire.options import ConnectOptions
from parti.wire.stored import parse_time


@pytest.fixture
async def api(server: NatsServer) -> AsyncIterator[JetStreamApi]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        yield JetStreamApi(connection)


async def make(api: JetStreamApi, name: str, **config: object) -> None:
    await api.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory", **config})


async def fill(api: JetStreamApi, name: str, count: int, subjects: int = 1) -> None:
    for number in range(count):
        await api.publish(f"{name}.{number % subjects}", f"m{number}".encode())


async def next_message(connection: Connection, api: JetStreamApi, target: str, **pull: object) -> object:
    """One message or status from a pull consumer."""
    inbox = connection.new_inbox()
    subscription = await connection.subscribe(inbox)
    body = json.dumps({"batch": 1, "expires": 2_000_000_000, **pull}).encode()
    await connection.publish(f"{api.prefix}.CONSUMER.MSG.NEXT.{target}", body, reply=inbox)
    try:
        return await subscription.next_msg(timeout=60)
    finally:
        await subscription.unsubscribe()


async def test_streams_can_be_created_updated_listed_and_deleted(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    info = await api.stream_info(name)
    changed = await api.stream_update({**info["config"], "max_msgs": 7})
    assert changed["config"]["max_msgs"] == 7
    assert name in await api.stream_names()
    assert await api.stream_names(f"{name}.x") == [name]
    await api.stream_delete(name)
    with pytest.raises(errors.StreamNotFound):
        await api.stream_info(name)


async def test_fields_unknown_to_parti_survive_a_round_trip(api: JetStreamApi, name: str) -> None:
    await make(api, name, metadata={"owner": "me"}, subject_transform={"src": ">", "dest": ">"})
    info = await api.stream_info(name)
    again = await api.stream_update(info["config"])
    assert again["config"] == info["config"]


async def test_account_info_tells_that_jetstream_is_on(api: JetStreamApi) -> None:
    assert "limits" in await api.account_info()


async def test_subjects_are_counted_by_filter_over_pages(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    await fill(api, name, 12, subjects=4)
    pages = [page async for page in api.stream_subjects(name, f"{name}.*")]
    assert {subject: count for page in pages for subject, count in page.items()} == {f"{name}.{n}": 3 for n in range(4)}
    assert [page async for page in api.stream_subjects(name, f"{name}.none")] == []


async def test_a_purge_takes_a_filter_a_sequence_or_what_to_keep(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    await fill(api, name, 10, subjects=2)
    assert await api.stream_purge(name, filter=f"{name}.0", keep=1) == 4
    assert await api.stream_purge(name, filter=f"{name}.1", seq=5) == 2
    assert await api.stream_purge(name, seq=9) == 2
    assert (await api.stream_info(name))["state"]["messages"] == 2
    assert await api.stream_purge(name) == 2
    with pytest.raises(UsageError):
        await api.stream_purge(name, seq=1, keep=1)


async def test_messages_are_read_from_the_leader_by_sequence_and_subject(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    before = datetime.now(UTC)
    await api.publish(f"{name}.a", b"one", headers={"Kind": "test"})
    await api.publish(f"{name}.b", b"two")
    await api.publish(f"{name}.a", b"three")
    first = await api.msg_get(name, seq=1)
    assert (first.subject, first.seq, first.data, first.headers) == (f"{name}.a", 1, b"one", {"Kind": "test"})
    assert abs(first.time_ns / 1e9 - before.timestamp()) < 60
    assert (await api.msg_get(name, last_by_subj=f"{name}.a")).seq == 3
    assert (await api.msg_get(name, next_by_subj=f"{name}.b")).seq == 2
    assert (await api.msg_get(name, seq=2, next_by_subj=f"{name}.*")).seq == 2
    with pytest.raises(errors.MessageNotFound):
        await api.msg_get(name, seq=99)
    with pytest.raises(UsageError):
        await api.msg_get(name)


async def test_a_deleted_message_is_gone(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    await fill(api, name, 2)
    await api.msg_delete(name, 1)
    with pytest.raises(errors.MessageNotFound):
        await api.msg_get(name, seq=1)


async def test_direct_get_without_allow_direct_says_what_is_missing(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    with pytest.raises(NoResponders, match="allow_direct"):
        await api.direct_get_batch(name, batch=3)


async def test_a_batch_of_direct_get_is_ordered_and_says_how_much_is_left(api: JetStreamApi, name: str) -> None:
    await make(api, name, allow_direct=True)
    await fill(api, name, 10, subjects=2)
    batch = await api.direct_get_batch(name, seq=2, batch=4)
    assert [message.seq for message in batch.messages] == [2, 3, 4, 5]
    assert batch.pending == 5
    odd = await api.direct_get_batch(name, seq=1, batch=99, next_by_subj=f"{name}.1")
    assert [message.seq for message in odd.messages] == [2, 4, 6, 8, 10]
    assert odd.pending == 0
    later = await api.direct_get_batch(name, batch=3, start_time=datetime.now(UTC) - timedelta(hours=1))
    assert [message.seq for message in later.messages] == [1, 2, 3]
    small = await api.direct_get_batch(name, seq=1, batch=9, max_bytes=1)
    assert len(small.messages) == 1
    assert (await api.direct_get_batch(name, seq=99, batch=9)).messages == ()
    assert api.connection.requests.in_flight == 0


async def test_a_publish_is_answered_with_its_sequence_and_deduplicated_by_id(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    first = await api.publish(f"{name}.a", b"x", headers=expectations(msg_id="m1"))
    again = await api.publish(f"{name}.a", b"x", headers=expectations(msg_id="m1"))
    assert (first.stream, first.seq, first.duplicate) == (name, 1, False)
    assert (again.seq, again.duplicate) == (1, True)


async def test_a_publish_that_expects_another_state_is_refused(api: JetStreamApi, name: str) -> None:
    await make(api, name, allow_msg_ttl=True)
    await api.publish(f"{name}.a", b"x", headers=expectations(msg_id="m1", last_subject_seq=0, stream=name))
    with pytest.raises(errors.WrongLastSequence) as raised:
        await api.publish(f"{name}.a", b"y", headers=expectations(last_subject_seq=0))
    assert (raised.value.server_code, raised.value.retriable) == (10071, False)
    with pytest.raises(errors.WrongLastSequence):
        await api.publish(f"{name}.b", b"y", headers=expectations(last_seq=0))
    with pytest.raises(errors.WrongLastMsgId):
        await api.publish(f"{name}.b", b"y", headers=expectations(last_msg_id="other"))
    with pytest.raises(errors.StreamMismatch):
        await api.publish(f"{name}.b", b"y", headers=expectations(stream="other"))
    await api.publish(f"{name}.b", b"y", headers=expectations(last_seq=1, last_msg_id="m1", ttl=1))


@pytest.mark.parametrize("ttl", [0, -1, 1.9])
def test_a_ttl_that_the_server_would_cut_is_refused(ttl: int) -> None:
    with pytest.raises(UsageError):
        expectations(ttl=ttl)


async def test_an_atomic_batch_is_stored_as_a_whole(api: JetStreamApi, name: str) -> None:
    await make(api, name, allow_atomic=True)
    ack = await api.publish_atomic([Outgoing(f"{name}.{n}", b"x") for n in range(50)])
    assert (ack.seq, ack.count) == (50, 50)
    single = await api.publish_atomic([Outgoing(f"{name}.single", b"x")])
    assert (single.seq, single.count) == (51, 1)


async def test_an_atomic_batch_whose_expectation_fails_stores_nothing(api: JetStreamApi, name: str) -> None:
    await make(api, name, allow_atomic=True)
    await api.publish(f"{name}.taken", b"x")
    batch = [
        Outgoing(f"{name}.free", b"x", expectations(last_subject_seq=0)),
        Outgoing(f"{name}.taken", b"x", expectations(last_subject_seq=0)),
        Outgoing(f"{name}.other", b"x"),
    ]
    with pytest.raises(errors.WrongLastSequence):
        await api.publish_atomic(batch)
    assert (await api.stream_info(name))["state"]["messages"] == 1


async def test_an_atomic_batch_needs_a_stream_that_takes_it(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    for count in (1, 3):
        with pytest.raises(errors.AtomicPublishDisabled):
            await api.publish_atomic([Outgoing(f"{name}.a")] * count)
    for size in (0, 1001):
        with pytest.raises(UsageError):
            await api.publish_atomic([Outgoing(f"{name}.a")] * size)


async def test_consumers_tell_create_from_update(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    config = {"name": "c", "durable_name": "c", "ack_policy": "explicit", "filter_subjects": [f"{name}.a", f"{name}.b"]}
    with pytest.raises(errors.ConsumerDoesNotExist):
        await api.consumer_create(name, config, action="update")
    await api.consumer_create(name, config, action="create")
    wider = {**config, "filter_subjects": [f"{name}.a", f"{name}.c"]}
    with pytest.raises(errors.ConsumerAlreadyExists):
        await api.consumer_create(name, wider, action="create")
    info = await api.consumer_create(name, wider, action="update")
    assert info["config"]["filter_subjects"] == wider["filter_subjects"]
    assert await api.consumer_names(name) == ["c"]
    assert [entry["name"] for entry in await api.consumer_list(name)] == ["c"]
    await api.consumer_delete(name, "c")
    with pytest.raises(errors.ConsumerNotFound):
        await api.consumer_info(name, "c")


async def test_an_update_to_no_filter_at_all_is_refused_before_it_matches_everything(
    api: JetStreamApi, name: str
) -> None:
    await make(api, name)
    with pytest.raises(UsageError, match="whole stream"):
        await api.consumer_create(name, {"name": "c", "filter_subjects": []})
    with pytest.raises(UsageError, match="needs a name"):
        await api.consumer_create(name, {})


async def test_a_pinned_group_keeps_its_config_and_can_be_unpinned(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    await fill(api, name, 3)
    pinned = {
        "name": "p",
        "durable_name": "p",
        "ack_policy": "explicit",
        "priority_policy": "pinned_client",
        "priority_groups": ["g"],
        "priority_timeout": 30_000_000_000,
    }
    created = await api.consumer_create(name, pinned, action="create")
    # An edit of the returned configuration keeps the pinning, which nats-py's dataclasses lose.
    updated = await api.consumer_create(name, {**created["config"], "description": "x"}, action="update")
    assert updated["config"]["priority_policy"] == "pinned_client"
    connection, target = api.connection, f"{name}.p"
    first = await next_message(connection, api, target, group="g")
    pin = first.headers["Nats-Pin-Id"]  # type: ignore[attr-defined]
    assert pin
    second = await next_message(connection, api, target, group="g", id=pin)
    assert second.data == b"m1"  # type: ignore[attr-defined]
    await api.consumer_unpin(name, "p", "g")
    stale = await next_message(connection, api, target, group="g", id=pin)
    assert stale.headers["Status"] == "423"  # type: ignore[attr-defined]
    with pytest.raises(errors.InvalidPriorityGroup):
        await api.consumer_unpin(name, "p", "other")
    missing: Any = await next_message(connection, api, target)
    status, text = int(missing.headers["Status"]), missing.headers["Description"]
    assert isinstance(errors.status_error(status, text, request="pull"), errors.RequestRefused)


async def test_a_reset_consumer_delivers_again_from_its_floor_or_from_a_sequence(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    await fill(api, name, 5)
    await api.consumer_create(name, {"name": "c", "durable_name": "c", "ack_policy": "explicit"})
    target = f"{name}.c"
    for _ in range(3):
        message = await next_message(api.connection, api, target)
    await api.consumer_reset(name, "c")
    message = await next_message(api.connection, api, target)
    assert message.data == b"m0"  # type: ignore[attr-defined]
    await api.consumer_reset(name, "c", 4)
    message = await next_message(api.connection, api, target)
    assert message.data == b"m3"  # type: ignore[attr-defined]


async def test_an_update_right_after_a_restart_is_answered_as_it_was_made(own_server: NatsServer, name: str) -> None:
    """The server's own first answer after a restart is the configuration from before the update (2.15.1)."""
    async with await connect(ConnectOptions(servers=(own_server.url,), reconnect_wait=0.05)) as connection:
        api = JetStreamApi(connection)
        await api.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "file"})
        config = {"durable_name": "c", "ack_policy": "explicit", "filter_subjects": [f"{name}.a"]}
        before = (await api.consumer_create(name, config, action="create"))["config"]
        await asyncio.to_thread(own_server.terminate)
        await asyncio.to_thread(own_server.restart)
        wanted = [f"{name}.b", f"{name}.c"]
        update = before | {"filter_subjects": wanted, "metadata": {"ours": "1"}}
        info = await insist(lambda: api.consumer_update(name, update))
        assert (list(filters_of(info["config"])), info["config"]["metadata"]["ours"]) == (wanted, "1")
        assert list(filters_of((await api.consumer_info(name, "c"))["config"])) == wanted


@pytest.mark.parametrize("interrupted_after", ["CONSUMER.CREATE", "CONSUMER.DELETE"])
async def test_a_remake_on_an_interest_stream_keeps_every_message_also_when_it_is_interrupted(
    api: JetStreamApi, name: str, interrupted_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory", "retention": "interest"})
    config = {"durable_name": "c", "ack_policy": "explicit", "filter_subjects": [f"{name}.>"]}
    await api.consumer_create(name, config, action="create")
    await api.publish(f"{name}.a", b"1")
    carried_out, request = 0, api.request

    async def broken(call: str, *rest: Any, **more: Any) -> Any:
        nonlocal carried_out
        answer = await request(call, *rest, **more)
        if call.startswith(interrupted_after) and not call.endswith("-guard"):
            carried_out += 1
            if carried_out == 1:
                raise RequestTimeout("its answer got lost")
        return answer

    monkeypatch.setattr(api, "request", broken)
    await insist(lambda: api.consumer_remake(name, config, guarded=True))
    assert await api.consumer_names(name) == ["c"]
    assert (await api.stream_info(name))["state"]["messages"] == 1
    assert (await api.consumer_info(name, "c"))["num_pending"] == 1
    await api.consumer_delete(name, "c")


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "a>", "*", "a/b", "x\r\nPUB y 0\r\n"])
async def test_a_name_that_would_change_the_api_subject_is_refused(api: JetStreamApi, bad: str) -> None:
    with pytest.raises(UsageError):
        await api.stream_info(bad)
    with pytest.raises(UsageError):
        await api.consumer_info("s", bad)


def test_a_call_that_needs_a_newer_server_says_which() -> None:
    with pytest.raises(ServerTooOld, match=r"needs nats-server 2\.14\.0 or newer, and 2\.11\.4 is connected"):
        check_version((2, 11, 4), (2, 14, 0), "resetting a consumer")
    check_version((2, 14, 0), (2, 14, 0), "resetting a consumer")
    check_version((0, 0, 0), (2, 14, 0), "a server of unknown version")


async def test_a_request_to_nobody_fails_at_once(api: JetStreamApi, name: str) -> None:
    with pytest.raises(NoResponders):
        await api.publish(f"nobody.{name}", b"x")


async def test_a_request_without_an_answer_times_out_and_leaves_nothing_behind(api: JetStreamApi, name: str) -> None:
    await api.connection.subscribe(f"silent.{name}")
    with pytest.raises(RequestTimeout):
        await api.connection.requests.call(f"silent.{name}", timeout=0.05)
    assert api.connection.requests.in_flight == 0


async def test_a_payload_above_the_limit_is_refused_before_it_is_sent(api: JetStreamApi, name: str) -> None:
    await make(api, name)
    with pytest.raises(UsageError, match="max_payload"):
        await api.publish(f"{name}.a", b"x" * (api.connection.max_payload + 1))


async def test_requests_in_flight_fail_when_the_server_dies_and_later_ones_are_not_queued(
    own_server: NatsServer, name: str
) -> None:
    seen: list[ConnectionEventKind] = []
    back = asyncio.Event()

    def note(event: ConnectionEvent) -> None:
        seen.append(event.kind)
        if event.kind is ConnectionEventKind.RECONNECTED:
            back.set()

    options = ConnectOptions(servers=(own_server.url,), reconnect_wait=0.05)
    async with await connect(options, on_event=note) as connection:
        api = JetStreamApi(connection)
        await connection.subscribe(f"silent.{name}")
        waiting = asyncio.create_task(connection.requests.call(f"silent.{name}", timeout=60))
        await connection.flush()
        await asyncio.to_thread(own_server.kill)
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionFailed):
            await api.stream_names()
        await asyncio.to_thread(own_server.restart)
        await asyncio.wait_for(back.wait(), 60)
        assert await api.stream_names() == []
    assert seen[-1] is ConnectionEventKind.CLOSED
    assert ConnectionEventKind.DISCONNECTED in seen


async def test_a_listener_that_raises_does_not_hurt_the_connection(own_server: NatsServer) -> None:
    back = asyncio.Event()

    def broken(event: ConnectionEvent) -> None:
        raise RuntimeError("a bug in a listener")

    options = ConnectOptions(servers=(own_server.url,), reconnect_wait=0.05)
    async with await connect(options, on_event=broken) as connection:

        def note(event: ConnectionEvent) -> None:
            if event.kind is ConnectionEventKind.RECONNECTED:
                back.set()

        remove = connection.add_listener(note)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.restart)
        await asyncio.wait_for(back.wait(), 60)
        assert await JetStreamApi(connection).stream_names() == []
        remove()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-02T03:04:05.123456789Z", 1_767_323_045_123_456_789),
        ("2026-01-02T03:04:05Z", 1_767_323_045_000_000_000),
        ("2026-01-02T04:04:05.5+01:00", 1_767_323_045_500_000_000),
    ],
)
def test_times_keep_their_nanoseconds(text: str, expected: int) -> None:
    assert parse_time(text) == expected
