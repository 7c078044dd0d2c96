"""Judges the facts about a NATS server. Pure: facts in, checks out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from parti.cli.checks import Check, CheckVerdict, fail, ok, warn
from parti.config.units import format_duration

OLDEST_SERVER: Final = (2, 11, 0)  # the first with per-message TTL and priority groups
# Measured on nats-server 2.15.1, file storage, 25 consumers with many filters and a backlog: 100 subjects 47k msg/s,
# 250 22k, 500 10k, 2,000 3k, 87,000 1.5k, 190,000 47k again. Inside this range a consumer with a backlog stays behind.
CLIFF: Final = range(300, 100_000)
CLOCK_WARN: Final = 0.5  # seconds; positions by timestamp and log lines of two machines no longer agree
CLOCK_FAIL: Final = 30.0  # seconds; credentials and TLS certificates count as expired or not yet valid


@dataclass(frozen=True, slots=True)
class CheckedStream:
    """The facts about one stream."""

    name: str
    storage: str
    replicas: int
    subjects: int


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts about one server that an ordinary user may see."""

    name: str
    version: tuple[int, int, int]
    jetstream: bool
    jetstream_error: str = ""
    api_level: int = 0
    clustered: bool = False
    clock_offset: float | None = None
    """Server time minus local time, in seconds."""
    clock_error: float = 0.0
    """Half a round trip: the uncertainty of the offset."""
    sync_interval: float | None = None
    """Seconds between fsyncs; 0: after every write, None: unknown."""
    sync_unknown: str = "the server shows it only to its monitoring port"
    """Why it is unknown."""
    streams: tuple[CheckedStream, ...] = ()
    streams_in_all: int = 0
    missing_streams: tuple[str, ...] = ()
    """Named by the user, but missing on the server."""


def judge_server(facts: ServerFacts) -> Iterator[Check]:
    """All checks of one server."""
    yield _version(facts)
    yield _clock(facts)
    if not facts.jetstream:
        advice = "start nats-server with -js, or enable JetStream for this account"
        yield fail("jetstream", facts.jetstream_error or "off", advice)
        return
    yield ok("jetstream", f"on, API level {facts.api_level}")
    yield _fsync(facts)
    for stream in facts.streams:
        yield judge_stream(stream, clustered=facts.clustered)
    for name in facts.missing_streams:
        yield fail(f"stream {name}", "does not exist, or may not be seen", "check the name, the account and the domain")
    left = facts.streams_in_all - len(facts.streams)
    if left > 0:
        yield warn("streams", f"{left} more were not looked at", "name the ones that matter: --stream NAME")


def judge_stream(stream: CheckedStream, *, clustered: bool) -> Check:
    """Checks storage, replicas and the number of subjects of one stream; the worst result is the verdict."""
    found = (
        f"{stream.storage} storage, {stream.replicas} replica{'s' * (stream.replicas > 1)}, {stream.subjects} subjects"
    )
    name = f"stream {stream.name}"
    advice = []
    if stream.storage == "file" and stream.subjects in CLIFF:
        advice.append(
            f"with {stream.subjects} subjects in a file stream, a consumer with many filters that falls behind reads "
            "a few thousand msg/s and may never catch up: use one consumer per partition, or memory storage"
        )
    if stream.storage == "memory" and stream.replicas == 1:
        advice.append("a restart of the server empties it: use file storage or 3 replicas if that matters")
    if clustered and stream.replicas == 1:
        advice.append("one server down stops it: use 3 replicas")
    if stream.replicas == 2:
        advice.append("2 replicas stop when one of them is down: use 3")
    return warn(name, found, "; ".join(advice)) if advice else ok(name, found)


def _version(facts: ServerFacts) -> Check:
    found = f"{'.'.join(map(str, facts.version))} ({facts.name})"
    if facts.version < OLDEST_SERVER:
        return fail("server version", found, f"upgrade to {'.'.join(map(str, OLDEST_SERVER))} or newer")
    return ok("server version", found)


def _clock(facts: ServerFacts) -> Check:
    if facts.clock_offset is None:
        return warn("clock", "unknown: the server did not tell its time", "compare the clocks by hand")
    found = f"server {facts.clock_offset * 1000:+.1f} ms from here, known to {facts.clock_error * 1000:.1f} ms"
    surely_off = abs(facts.clock_offset) - facts.clock_error
    if surely_off > CLOCK_FAIL:
        return fail("clock", found, "set the clocks right (NTP): credentials and certificates are judged by them")
    if surely_off > CLOCK_WARN:
        return warn("clock", found, "run NTP on both machines: positions by timestamp and logs will not agree")
    return ok("clock", found)


def _fsync(facts: ServerFacts) -> Check:
    if facts.sync_interval is None:
        return warn(
            "fsync",
            f"unknown: {facts.sync_unknown}; the default is 2 minutes",
            "a power failure may lose what was acknowledged since the last fsync: give --monitor URL to check, use "
            "3 replicas, and sync_interval: always where that loss counts",
        )
    if facts.sync_interval == 0:
        return ok("fsync", "always: what is acknowledged is on disk")
    every = format_duration(facts.sync_interval)
    return warn(
        "fsync",
        f"every {every}",
        f"a power failure may lose up to {every} of acknowledged messages: use 3 replicas in different places, and "
        "sync_interval: always where that loss counts",
    )


def worst(checks: list[Check]) -> CheckVerdict:
    """The worst verdict of all."""
    order = [CheckVerdict.OK, CheckVerdict.WARN, CheckVerdict.FAIL]
    return max((check.verdict for check in checks), key=order.index, default=CheckVerdict.OK)
