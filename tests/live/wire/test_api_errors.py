"""The error table on a real server: each refusal is provoked and must be raised as its class."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from parti.errors import NoResponders, PartiError
from parti.testing import NatsServer, eventually
from parti.wire import errors
from parti.wire.api import JetStreamApi, Outgoing, expectations
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

Provocation = Callable[[JetStreamApi, str], Awaitable[Any]]


@pytest.fixture
async def api(server: NatsServer, name: str) -> AsyncIterator[JetStreamApi]:
    """A limits stream `<name>`, a work queue `<name>q`, and a durable `c` on each, all filled with one message."""
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        api = JetStreamApi(connection)
        for suffix, retention in (("", "limits"), ("q", "workqueue")):
            stream = f"{name}{suffix}"
            await api.stream_create(
                {
                    "name": stream,
                    "subjects": [f"{stream}.>"],
                    "storage": "memory",
                    "retention": retention,
                    "max_msgs": 5,
                }
            )
            await api.consumer_create(stream, durable("c", filter_subjects=[f"{stream}.a"]))
            await api.publish(f"{stream}.a", b"x")
        yield api


def durable(consumer: str, **config: Any) -> dict[str, Any]:
    return {"name": consumer, "durable_name": consumer, "ack_policy": "explicit", **config}


PROVOKED: dict[str, tuple[type[PartiError], Provocation]] = {
    "10003 or 10025": (errors.ApiRefused, lambda a, n: a.request(f"STREAM.CREATE.{n}", {"name": 7})),
    "10012": (
        errors.ConsumerCreateFailed,
        lambda a, n: a.consumer_create(n, durable("c", filter_subjects=[f"{n}.a"], deliver_policy="new")),
    ),
    "10014": (errors.ConsumerNotFound, lambda a, n: a.consumer_info(n, "gone")),
    "10014 on delete": (errors.ConsumerNotFound, lambda a, n: a.consumer_delete(n, "gone")),
    "10037": (errors.MessageNotFound, lambda a, n: a.msg_get(n, last_by_subj=f"{n}.gone")),
    "10043 or 10057": (PartiError, lambda a, n: a.msg_delete(n, 99)),
    "10052": (errors.StreamInvalidConfig, lambda a, n: a.stream_update({"name": n, "storage": "file"})),
    "10058": (errors.StreamNameExists, lambda a, n: a.stream_create({"name": n, "subjects": [f"{n}.other"]})),
    "10059": (errors.StreamNotFound, lambda a, n: a.stream_info(f"{n}gone")),
    "10060": (errors.StreamMismatch, lambda a, n: a.publish(f"{n}.a", headers=expectations(stream="x"))),
    "10065": (errors.StreamSubjectOverlap, lambda a, n: a.stream_create({"name": f"{n}2", "subjects": [f"{n}.a"]})),
    "10070": (errors.WrongLastMsgId, lambda a, n: a.publish(f"{n}.a", headers=expectations(last_msg_id="x"))),
    "10071": (errors.WrongLastSequence, lambda a, n: a.publish(f"{n}.a", headers=expectations(last_seq=99))),
    "10074": (errors.ReplicasNotSupported, lambda a, n: a.stream_create({"name": f"{n}3", "num_replicas": 3})),
    "10084": (
        errors.ConsumerPullRequiresAck,
        lambda a, n: a.consumer_create(f"{n}q", {"name": "x", "ack_policy": "none", "filter_subject": f"{n}q.b"}),
    ),
    "10100": (
        errors.WorkQueueFilterNotUnique,
        lambda a, n: a.consumer_create(f"{n}q", durable("x", filter_subjects=[f"{n}q.a"])),
    ),
    "10101": (
        errors.WorkQueueRequiresDeliverAll,
        lambda a, n: a.consumer_create(f"{n}q", durable("x", filter_subjects=[f"{n}q.b"], deliver_policy="new")),
    ),
    "10136": (
        errors.ConsumerDuplicateFilters,
        lambda a, n: a.consumer_create(n, durable("x", filter_subject=f"{n}.a", filter_subjects=[f"{n}.b"])),
    ),
    "10138": (
        errors.ConsumerFiltersOverlap,
        lambda a, n: a.consumer_create(n, durable("x", filter_subjects=[f"{n}.*", f"{n}.b"])),
    ),
    "10139": (
        errors.ConsumerEmptyFilter,
        lambda a, n: a.consumer_create(n, durable("x", filter_subjects=["", f"{n}.b"])),
    ),
    "10148": (errors.ConsumerAlreadyExists, lambda a, n: a.consumer_create(n, durable("c"), action="create")),
    "10149": (errors.ConsumerDoesNotExist, lambda a, n: a.consumer_create(n, durable("x"), action="update")),
    "10159": (
        errors.PriorityPolicyWithoutGroup,
        lambda a, n: a.consumer_create(n, durable("x", priority_policy="pinned_client")),
    ),
    "10160": (errors.InvalidPriorityGroup, lambda a, n: a.consumer_unpin(n, "c", "g")),
    "10166": (errors.MessageTtlDisabled, lambda a, n: a.publish(f"{n}.a", headers=expectations(ttl=5))),
    "10111": (errors.StreamRollupFailed, lambda a, n: a.publish(f"{n}.a", headers={"Nats-Rollup": "sub"})),
    "10174": (errors.AtomicPublishDisabled, lambda a, n: a.publish_atomic([Outgoing(f"{n}.a")])),
}


@pytest.mark.parametrize("code", PROVOKED)
async def test_a_refusal_of_the_server_arrives_as_its_class(api: JetStreamApi, name: str, code: str) -> None:
    kind, provoke = PROVOKED[code]
    with pytest.raises(kind) as raised:
        await provoke(api, name)
    if isinstance(raised.value, errors.ApiError):
        assert str(raised.value.server_code) in code


async def test_a_full_stream_that_discards_new_messages_says_so(api: JetStreamApi, name: str) -> None:
    await api.stream_create(
        {"name": f"{name}f", "subjects": [f"{name}f.>"], "storage": "memory", "max_msgs": 1, "discard": "new"}
    )
    await api.publish(f"{name}f.a")
    with pytest.raises(errors.StreamStoreFailed) as raised:
        await api.publish(f"{name}f.a")
    assert raised.value.retriable


async def test_a_message_above_the_limit_of_the_stream_is_refused(api: JetStreamApi, name: str) -> None:
    await api.stream_create({"name": f"{name}m", "subjects": [f"{name}m.>"], "storage": "memory", "max_msg_size": 10})
    with pytest.raises(errors.MessageTooLarge):
        await api.publish(f"{name}m.a", b"x" * 100)


async def test_the_limit_of_consumers_is_told(api: JetStreamApi, name: str) -> None:
    await api.stream_create({"name": f"{name}l", "subjects": [f"{name}l.>"], "storage": "memory", "max_consumers": 1})
    await api.consumer_create(f"{name}l", durable("a"))
    with pytest.raises(errors.MaximumConsumersReached):
        await api.consumer_create(f"{name}l", durable("b"))


async def pull_status(api: JetStreamApi, target: str, **pull: Any) -> errors.StatusError:
    """The status that ends a pull."""
    inbox = api.connection.new_inbox()
    subscription = await api.connection.subscribe(inbox)
    await api.connection.publish(f"{api.prefix}.CONSUMER.MSG.NEXT.{target}", json.dumps(pull).encode(), reply=inbox)
    while True:
        message = await subscription.next_msg(timeout=60)
        if message.headers and "Status" in message.headers:
            await subscription.unsubscribe()
            return errors.status_error(
                int(message.headers["Status"]), message.headers.get("Description", ""), request="pull"
            )
        await message.ack()


async def test_the_status_lines_of_a_pull_arrive_as_their_classes(api: JetStreamApi, name: str) -> None:
    target = f"{name}.c"
    assert isinstance(await pull_status(api, target, batch=5, expires=1_000_000), errors.PullExpired)
    assert isinstance(await pull_status(api, target, batch=5, no_wait=True), errors.NoMessages)
    beat = {"expires": 1_000_000_000, "idle_heartbeat": 5_000_000_000}
    assert isinstance(await pull_status(api, target, batch=5, **beat), errors.RequestRefused)
    assert isinstance(await pull_status(api, f"{name}.gone", batch=1), errors.NoResponder)
    await api.consumer_create(name, durable("small", max_batch=2))
    assert isinstance(await pull_status(api, f"{name}.small", batch=9), errors.PullTooLarge)
    await api.publish(f"{name}.a", b"x" * 100)
    await api.consumer_create(name, durable("bytes"))
    assert isinstance(await pull_status(api, f"{name}.bytes", batch=9, max_bytes=1), errors.MessageExceedsMaxBytes)


async def test_a_pull_is_told_when_its_consumer_is_deleted(api: JetStreamApi, name: str) -> None:
    await api.consumer_create(name, durable("d", filter_subjects=[f"{name}.none"]))
    inbox = api.connection.new_inbox()
    subscription = await api.connection.subscribe(inbox)
    await api.connection.publish(
        f"{api.prefix}.CONSUMER.MSG.NEXT.{name}.d", b'{"batch":1,"expires":30000000000}', reply=inbox
    )

    async def waiting() -> bool:  # the server queues pulls: one that the delete overtakes is never answered
        return bool((await api.consumer_info(name, "d"))["num_waiting"] == 1)

    await eventually(waiting, 60, "the pull waits")
    await api.consumer_delete(name, "d")
    message = await subscription.next_msg(timeout=60)
    error = errors.status_error(int(message.headers["Status"]), message.headers["Description"], request="pull")
    assert isinstance(error, errors.ConsumerDeleted)


async def test_a_server_without_jetstream_is_told_apart() -> None:
    with NatsServer(jetstream=False) as server:
        async with await connect(ConnectOptions(servers=(server.url,))) as connection:
            with pytest.raises((NoResponders, errors.JetStreamNotEnabled)):
                await JetStreamApi(connection).account_info()


async def test_an_account_without_jetstream_is_a_policy_error() -> None:
    accounts = "accounts { a { users: [ { user: a, password: x } ] }, js { jetstream: enabled } }"
    with NatsServer(config=accounts) as server:
        options = ConnectOptions(servers=(server.url,), user="a", password="x")
        async with await connect(options) as connection:
            with pytest.raises((NoResponders, errors.JetStreamNotEnabledForAccount)) as raised:
                await JetStreamApi(connection).account_info()
            assert isinstance(raised.value, errors.JetStreamNotEnabledForAccount)
