"""Epoch markers: once a marker is stored, the server refuses every publish that names an older one, whenever it comes.

The marker is a message on a subject of its own in the stream that is written to. A publish names the sequence of the
marker it knows (`Nats-Expected-Last-Subject-Sequence`); the server compares and stores in one step, so that there is no
gap between a check and an act (docs/evidence/pipeline.md#p9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from parti.backoff import Backoff, retry
from parti.clock import SystemClock
from parti.errors import ConfigError, FatalError, PartiError, UnknownOutcome, UsageError
from parti.wire.api import JetStreamApi, expectations
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound, WrongLastSequence
from parti.wire.options import ConnectOptions

_ROUNDS = 8  # of compare-and-set; each further one means that another owner was faster
_HEADERS = {"Parti-Reason": "fence"}  # in a stream of dead letters: this is none


class StaleEpoch(FatalError):
    """A later epoch has set its marker: whoever acts in an earlier one must not write any more."""


class _Body(msgspec.Struct, frozen=True):
    epoch: int
    owner: str = ""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(int | _Body)

MARKER_TOKEN = "parti-fence"
"""Subjects with this token hold the markers of drivers on Spark: they are no messages of the stream's own."""


@dataclass(frozen=True, slots=True)
class EpochMarker:
    """A stored marker: publishes that carry `expected` are taken for as long as it is the last one."""

    subject: str
    sequence: int
    epoch: int
    owner: str = ""

    @property
    def expected(self) -> dict[str, str]:
        return expectations(last_subject_seq=self.sequence, last_subject_filter=self.subject)


def marker_subject(stream: str, subjects: Iterable[str], pipeline: str) -> str:
    """A subject of the stream for the marker of a pipeline: behind the fixed part of one of the stream's wildcards."""
    for subject in subjects:
        if subject.endswith(">"):
            return f"{subject[:-1]}{MARKER_TOKEN}.{pipeline}"
    raise ConfigError(
        f"stream {stream!r} has no subject that ends in '>', so that no epoch marker can be stored in it: add one such "
        f"as '{stream}.>', or run the pipeline without standby"
    )


async def read_marker(api: JetStreamApi, stream: str, subject: str) -> EpochMarker | None:
    """The last marker, also one that an earlier version wrote (a bare epoch, or with the pipeline's name)."""
    try:
        found = await api.msg_get(stream, last_by_subj=subject)
    except MessageNotFound:
        return None
    try:
        body = _DECODER.decode(found.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"message {found.seq} of {stream}, on {subject}, is no epoch marker: {error}") from None
    body = _Body(body) if isinstance(body, int) else body
    return EpochMarker(subject, found.seq, body.epoch, body.owner)


async def put_marker(
    api: JetStreamApi, subject: str, epoch: int, owner: str = "", *, expected: dict[str, str] | None = None
) -> EpochMarker:
    """When this returns, nothing that was sent under an earlier marker is stored any more.

    It stands whatever marker was there: for an owner whose epochs may begin anew, or with what it `expected` there.
    """
    body = _ENCODER.encode(_Body(epoch, owner))
    stored = await api.publish(subject, body, headers=_HEADERS | (expected or {}))
    return EpochMarker(subject, stored.seq, epoch, owner)


async def raise_marker(api: JetStreamApi, stream: str, subject: str, *, epoch: int, owner: str) -> EpochMarker:
    """The marker of this epoch, set where it was not; `StaleEpoch` when that of a later one or another owner stands."""
    for _ in range(_ROUNDS):
        found = await read_marker(api, stream, subject)
        if found is not None:
            if (found.epoch, found.owner) == (epoch, owner):
                return found
            if found.epoch >= epoch:
                raise StaleEpoch(f"{found.owner} has set epoch {found.epoch} on {stream}; ours is {epoch}")
        expected = expectations(stream=stream, last_subject_seq=found.sequence if found is not None else 0)
        try:
            return await put_marker(api, subject, epoch, owner, expected=expected)
        except WrongLastSequence:
            continue
    raise StaleEpoch(f"others set markers on {stream} faster than epoch {epoch} could")


def raise_marker_blocking(
    options: ConnectOptions, stream: str, subject: str, *, epoch: int, owner: str
) -> tuple[str, int]:
    """As `raise_marker`, over a connection of its own: the subject and sequence that publishes have to name."""

    async def connected() -> EpochMarker:
        async with await connect(options, name="parti-pipeline-fence") as connection:
            api = JetStreamApi(connection)
            return await retry(
                lambda: raise_marker(api, stream, subject, epoch=epoch, owner=owner),
                backoff=Backoff(),
                clock=SystemClock(),
                classify=_may_retry,
            )

    marker = asyncio.run(connected())
    return marker.subject, marker.sequence


def _may_retry(error: PartiError) -> bool:
    return error.retriable or isinstance(error, UnknownOutcome)  # the marker that is there tells what happened
