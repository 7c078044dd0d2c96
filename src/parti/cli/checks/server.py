"""The facts about a NATS server that an ordinary user can see, and its fsync interval from the monitoring port."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from datetime import datetime

import aiohttp
import msgspec

from parti.cli.checks.judge import CheckedStream, ServerFacts
from parti.clock import Clock, SystemClock
from parti.errors import ConnectionFailed, NoResponders, RequestTimeout
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.wire.requests import Requests

_USER_INFO = "$SYS.REQ.USER.INFO"  # every user may request it, and the answer contains the server's time
_CLOCK_SAMPLES = 3  # the sample with the shortest round trip counts; the first one includes setup cost
_MONITOR_LIMIT = 4 * 2**20  # bytes of /varz; it has about 10 KB


class _Server(msgspec.Struct):
    name: str = ""
    ver: str = ""
    time: str = ""
    cluster: str = ""


class _UserInfo(msgspec.Struct):
    server: _Server


class _Error(msgspec.Struct):
    code: int = 0
    description: str = ""


class _Api(msgspec.Struct):
    level: int = 0


class _Account(msgspec.Struct):
    error: _Error | None = None
    api: _Api = msgspec.field(default_factory=_Api)


class _StreamConfig(msgspec.Struct):
    name: str
    storage: str = "file"
    num_replicas: int = 1


class _StreamState(msgspec.Struct):
    num_subjects: int = 0


class _Stream(msgspec.Struct):
    config: _StreamConfig | None = None
    state: _StreamState = msgspec.field(default_factory=_StreamState)
    error: _Error | None = None


class _Streams(msgspec.Struct):
    total: int = 0
    streams: list[_Stream] | None = None


class _JetStreamConfig(msgspec.Struct):
    sync_interval: int = 0
    sync_always: bool = False


class _JetStream(msgspec.Struct):
    config: _JetStreamConfig | None = None


class _Varz(msgspec.Struct):
    jetstream: _JetStream = msgspec.field(default_factory=_JetStream)


async def gather(
    options: ConnectOptions,
    *,
    streams: Sequence[str] = (),
    monitor: str | None = None,
    clock: Clock | None = None,
) -> ServerFacts:
    """Connect, read the facts, disconnect. Reads the named streams, or the first 256 when none is named."""
    connection = await connect(options, name="parti doctor")
    try:
        requests = Requests(connection)
        prefix, timeout = options.js_prefix, options.request_timeout
        server, offset, error = await _clock(requests, clock or SystemClock(), timeout)
        facts = ServerFacts(
            name=server.name or connection.server_address,
            version=connection.server_version,
            jetstream=False,
            clustered=bool(server.cluster),
            clock_offset=offset,
            clock_error=error,
        )
        try:
            reply = await requests.call(f"{prefix}.INFO", timeout=timeout)
        except (NoResponders, RequestTimeout) as failure:
            return dataclasses.replace(facts, jetstream_error=str(failure))
        account = msgspec.json.decode(reply.data, type=_Account)
        if account.error is not None:
            return dataclasses.replace(facts, jetstream_error=account.error.description)
        found, total, missing = await _streams(requests, prefix, timeout, streams)
    finally:
        await connection.close()
    if monitor:
        try:
            facts = dataclasses.replace(facts, sync_interval=await sync_interval(monitor))
        except ConnectionFailed as failure:
            facts = dataclasses.replace(facts, sync_unknown=str(failure))
    return dataclasses.replace(
        facts,
        jetstream=True,
        api_level=account.api.level,
        streams=found,
        streams_in_all=total,
        missing_streams=missing,
    )


async def _clock(requests: Requests, clock: Clock, timeout: float) -> tuple[_Server, float | None, float]:
    """The server's own facts, its time minus local time, and the uncertainty of that."""
    best: tuple[_Server, float | None, float] = (_Server(), None, 0.0)
    for _ in range(_CLOCK_SAMPLES):
        started, wall = clock.now(), clock.wall()
        try:
            reply = await requests.call(_USER_INFO, timeout=timeout)
        except (NoResponders, RequestTimeout):
            return best
        half = (clock.now() - started) / 2
        server = msgspec.json.decode(reply.data, type=_UserInfo).server
        if server.time and (best[1] is None or half < best[2]):
            best = (server, _unix(server.time) - (wall + half), half)
    return best


async def _streams(
    requests: Requests, prefix: str, timeout: float, names: Sequence[str]
) -> tuple[tuple[CheckedStream, ...], int, tuple[str, ...]]:
    if not names:
        reply = await requests.call(f"{prefix}.STREAM.LIST", timeout=timeout)
        page = msgspec.json.decode(reply.data, type=_Streams)
        found = tuple(_facts(stream) for stream in page.streams or [] if stream.config is not None)
        return found, page.total, ()
    looked_at: list[CheckedStream] = []
    missing: list[str] = []
    for name in names:
        reply = await requests.call(f"{prefix}.STREAM.INFO.{name}", timeout=timeout)
        stream = msgspec.json.decode(reply.data, type=_Stream)
        if stream.config is None:
            missing.append(name)
        else:
            looked_at.append(_facts(stream))
    return tuple(looked_at), len(looked_at), tuple(missing)


def _facts(stream: _Stream) -> CheckedStream:
    assert stream.config is not None
    config = stream.config
    return CheckedStream(config.name, config.storage, max(1, config.num_replicas), stream.state.num_subjects)


async def sync_interval(monitor: str) -> float:
    """Seconds between fsyncs from the monitoring port; 0: after every write. Ordinary users cannot see it elsewhere."""
    url = f"{monitor.rstrip('/')}/varz"
    try:
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, allow_redirects=False) as answer:
            body = await answer.content.read(_MONITOR_LIMIT)
            status = answer.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConnectionFailed(f"cannot read {url}: {error or type(error).__name__}") from error
    try:
        varz = msgspec.json.decode(body, type=_Varz)
    except msgspec.MsgspecError:
        raise ConnectionFailed(f"{url} answered {status} with no JSON: is it the server's monitoring port?") from None
    config = varz.jetstream.config
    if config is None:
        raise ConnectionFailed(f"{url} shows no JetStream configuration: is it this server's monitoring port?")
    # `always` leaves the interval at its default and sets a separate flag.
    return 0.0 if config.sync_always else config.sync_interval / 1e9


def _unix(timestamp: str) -> float:
    """Unix seconds of an RFC 3339 time; Go writes nanoseconds, which `fromisoformat` cannot parse."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", timestamp.replace("Z", "+00:00"))).timestamp()
