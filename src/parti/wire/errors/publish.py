"""API errors that answer a publish: expectations, limits, TTL, atomic batches."""

from __future__ import annotations

from parti.wire.errors.base import ApiRefused, ApiUnavailable


class MessageTooLarge(ApiRefused):
    """The message is larger than the stream takes: shorten it, or raise max_msg_size."""

    err_code = 10054


class StreamMismatch(ApiRefused):
    """The subject belongs to another stream than the one expected: correct the subject or the expectation."""

    err_code = 10060


class WrongLastMsgId(ApiRefused):
    """Another message came last than the publisher expected: read the state again, then decide."""

    err_code = 10070


class WrongLastSequence(ApiRefused):
    """Somebody else wrote since the expected revision: read the state again, then decide."""

    err_code = 10071


class StreamStoreFailed(ApiUnavailable):
    """The stream could not store the message (full with discard=new, or storage trouble): make room, try again."""

    err_code = 10077


class StreamRollupFailed(ApiRefused):
    """The stream refuses the rollup header: set allow_rollup_hdrs."""

    err_code = 10111


class DuplicateMessageInProcess(ApiUnavailable):
    """A message with the same id is being stored right now: try again."""

    err_code = 10158


class ExpectedSequenceNotReady(ApiUnavailable):
    """The new leader cannot check the expected sequence yet: try again."""

    err_code = 10163


class WrongLastSequenceConstant(WrongLastSequence):
    """Somebody else wrote at the same time: read the state again, then decide."""

    err_code = 10164


class MessageTtlInvalid(ApiRefused):
    """The message's TTL is malformed or below one second: correct it."""

    err_code = 10165


class MessageTtlDisabled(ApiRefused):
    """The stream takes no TTL per message: set allow_msg_ttl."""

    err_code = 10166


class TooManyRequests(ApiUnavailable):
    """The server sheds load: back off and try again."""

    err_code = 10167


class AtomicPublishDisabled(ApiRefused):
    """The stream takes no atomic batch: set allow_atomic."""

    err_code = 10174


class AtomicPublishIncomplete(ApiRefused):
    """A message of the batch did not arrive or came too late; nothing of it was stored: publish it again."""

    err_code = 10176


class AtomicPublishUnsupportedHeader(ApiRefused):
    """A header may not be used inside an atomic batch: remove it."""

    err_code = 10177


class AtomicPublishTooLarge(ApiRefused):
    """The atomic batch has more messages than the server takes (1,000): split it."""

    err_code = 10199


class AtomicPublishDuplicate(ApiRefused):
    """A message id of the atomic batch was stored before, so that nothing of it was stored: it may be done already."""

    err_code = 10201


class AtomicPublishTooManyInFlight(ApiUnavailable):
    """Too many atomic batches are open: back off and try again."""

    err_code = 10210
