"""API errors about streams and the messages in them."""

from __future__ import annotations

from parti.wire.errors.base import ApiNotFound, ApiRefused, ApiUnavailable


class MaximumStreamsReached(ApiRefused):
    """The account takes no further stream: raise its limit, or delete streams."""

    err_code = 10027


class MessageNotFound(ApiNotFound):
    """No message matches: it was never stored, or is gone by age, limit, acknowledgement or deletion."""

    err_code = 10037


class SequenceNotFound(ApiNotFound):
    """No message has this sequence any more: read from the stream's first sequence on."""

    err_code = 10043


class StreamInvalidConfig(ApiRefused):
    """The stream's configuration is refused: correct the value that the message names."""

    err_code = 10052


class StreamLimitsExceeded(ApiRefused):
    """The stream's configuration exceeds the account's limits: lower it, or raise them."""

    err_code = 10053


class StreamNameExists(ApiRefused):
    """A stream of this name exists with another configuration: choose another name, or update it."""

    err_code = 10058


class StreamNotFound(ApiRefused):
    """The stream does not exist: create it, or correct the name or the JetStream domain."""

    err_code = 10059


class StreamSubjectOverlap(ApiRefused):
    """Another stream listens on one of the subjects already: choose subjects that do not overlap."""

    err_code = 10065


class ReplicasNotSupported(ApiRefused):
    """A single server cannot replicate: use one replica, or a cluster."""

    err_code = 10074


class StreamSealed(ApiRefused):
    """The stream is sealed and takes no change: write to another one."""

    err_code = 10109


class StreamPurgeFailed(ApiRefused):
    """The stream forbids or failed the purge: see deny_purge and the message."""

    err_code = 10110


class StreamOffline(ApiUnavailable):
    """Too few replicas of the stream are up: bring servers back, then try again."""

    err_code = 10118


class MinLastSequence(ApiUnavailable):
    """The asked replica lags behind the wanted sequence: try again, or ask the leader."""

    err_code = 10180


class StreamOfflineReason(StreamOffline):
    """The stream is offline for the reason given: act on it, then try again."""

    err_code = 10194
