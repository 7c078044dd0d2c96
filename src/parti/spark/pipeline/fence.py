"""Epoch markers: after `raise_fence` returns, the server refuses every publish of a lower epoch, whenever it comes.

The marker is a message on a subject of its own in the stream that is written to. A publish names the sequence of the
marker it knows (`Nats-Expected-Last-Subject-Sequence`); the server compares and stores in one step, so that there is no
gap between a check and an act (docs/evidence/pipeline.md#p9).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from parti.backoff import Backoff, retry
from parti.clock import SystemClock
from parti.errors import ConfigError, FatalError, PartiError, UnknownOutcome
from parti.wire.api import JetStreamApi, expectations
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound, WrongLastSequence
from parti.wire.options import ConnectOptions
from parti.wire.stored import StoredMessage

_ROUNDS = 8  # of compare-and-set; each further one means that another owner was faster


class StaleEpoch(FatalError):
    """A later epoch has set its marker: this driver must not write any more."""


def fence_subject(stream: str, subjects: Iterable[str], pipeline: str) -> str:
    """A subject of the stream for the marker of a pipeline: behind the fixed part of one of the stream's wildcards."""
    for subject in subjects:
        if subject.endswith(">"):
            return f"{subject[:-1]}parti-fence.{pipeline}"
    raise ConfigError(
        f"stream {stream!r} has no subject that ends in '>', so that no epoch marker can be stored in it: add one such "
        f"as '{stream}.>', or run the pipeline without standby"
    )


def raise_fence(options: ConnectOptions, stream: str, subject: str, *, epoch: int, owner: str) -> int:
    """Set the marker of this epoch and return its sequence; StaleEpoch when a later one is there."""
    return asyncio.run(_raise(options, stream, subject, epoch, owner))


async def _raise(options: ConnectOptions, stream: str, subject: str, epoch: int, owner: str) -> int:
    connection = await connect(options, name="parti-pipeline-fence")
    try:
        api = JetStreamApi(connection)
        return await retry(
            lambda: _mark(api, stream, subject, epoch, owner), backoff=Backoff(), clock=SystemClock(), classify=_again
        )
    finally:
        await connection.close()


def _again(error: PartiError) -> bool:
    return error.retriable or isinstance(error, UnknownOutcome)  # the marker that is there tells what happened


async def _mark(api: JetStreamApi, stream: str, subject: str, epoch: int, owner: str) -> int:
    for _ in range(_ROUNDS):
        found = await _marker(api, stream, subject)
        if found is not None:
            there = json.loads(found.data)
            if (there["epoch"], there["owner"]) == (epoch, owner):
                return found.seq
            if there["epoch"] >= epoch:
                raise StaleEpoch(f"{there['owner']} has set epoch {there['epoch']} on {stream}; ours is {epoch}")
        headers = expectations(stream=stream, last_subject_seq=found.seq if found is not None else 0)
        body = json.dumps({"epoch": epoch, "owner": owner, "pipeline": subject.rpartition(".")[2]}).encode()
        try:
            ack = await api.publish(subject, body, headers=headers | {"Parti-Reason": "fence"})
        except WrongLastSequence:
            continue
        return ack.seq
    raise StaleEpoch(f"others set markers on {stream} faster than epoch {epoch} could")


async def _marker(api: JetStreamApi, stream: str, subject: str) -> StoredMessage | None:
    try:
        return await api.msg_get(stream, last_by_subj=subject)
    except MessageNotFound:
        return None
