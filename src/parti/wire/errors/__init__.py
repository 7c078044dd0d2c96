"""One error class per JetStream API code, named after it: what it means for the caller, and whether to try again.

`docs/errors.md` shows this table and the one of the status lines as one; a test keeps them equal. The categories are
those of docs/requirements.md#r-101: a missing consumer is `not_found` (create it again), a missing stream, a refused
permission or a refused configuration is `policy` (a person has to act), timeouts and 5xx are `transient` (try again),
and what nobody listed is `unknown`.

Promises: every code that the server has is here, or becomes `unknown`; none is swallowed.

Flow: code or status -> the class of `account`, `stream`, `consumer`, `publish` or `status` -> its category.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from parti.wire.errors.account import (
    AccountNotFound,
    AccountResourcesExceeded,
    BadRequest,
    ClusterNotAssigned,
    ClusterNotAvailable,
    ClusterNotLeader,
    IncompleteResults,
    InsufficientResources,
    InvalidJson,
    JetStreamNotEnabled,
    JetStreamNotEnabledForAccount,
    MemoryResourcesExceeded,
    NoSuitablePeers,
    RequiredApiLevel,
    StorageResourcesExceeded,
)
from parti.wire.errors.base import ApiDenied, ApiError, ApiNotFound, ApiRefused, ApiUnavailable
from parti.wire.errors.consumer import (
    ConsumerAlreadyExists,
    ConsumerCreateFailed,
    ConsumerDoesNotExist,
    ConsumerDuplicateFilters,
    ConsumerEmptyFilter,
    ConsumerExistsAndActive,
    ConsumerFilesGone,
    ConsumerFilterNotSubset,
    ConsumerFiltersOverlap,
    ConsumerInvalidDeliverPolicy,
    ConsumerInvalidReset,
    ConsumerMaxAckPendingExcess,
    ConsumerNameExists,
    ConsumerNotFound,
    ConsumerOffline,
    ConsumerOfflineReason,
    ConsumerPullRequiresAck,
    InvalidPriorityGroup,
    MaximumConsumersReached,
    PriorityPolicyWithoutGroup,
    WorkQueueFilterNotUnique,
    WorkQueueRequiresDeliverAll,
    WorkQueueRequiresExplicitAck,
    WorkQueueSecondUnfilteredConsumer,
)
from parti.wire.errors.publish import (
    AtomicPublishDisabled,
    AtomicPublishDuplicate,
    AtomicPublishIncomplete,
    AtomicPublishTooLarge,
    AtomicPublishTooManyInFlight,
    AtomicPublishUnsupportedHeader,
    DuplicateMessageInProcess,
    ExpectedSequenceNotReady,
    MessageTooLarge,
    MessageTtlDisabled,
    MessageTtlInvalid,
    StreamMismatch,
    StreamRollupFailed,
    StreamStoreFailed,
    TooManyRequests,
    WrongLastMsgId,
    WrongLastSequence,
    WrongLastSequenceConstant,
)
from parti.wire.errors.status import (
    STATUS_ERRORS,
    AccessDenied,
    BatchCompleted,
    ConsumerDeleted,
    ConsumerIsPush,
    LeadershipChanged,
    MaxAckPendingReached,
    MessageExceedsMaxBytes,
    NoMessages,
    NoResponder,
    PullExpired,
    PullTooLarge,
    ReplicaBehind,
    RequestRefused,
    ServerShutdown,
    StatusError,
    StatusRow,
    Throttled,
    TooManyPulls,
    TooManyResults,
    WrongPinId,
    status_error,
)
from parti.wire.errors.stream import (
    MaximumStreamsReached,
    MessageNotFound,
    MinLastSequence,
    ReplicasNotSupported,
    SequenceNotFound,
    StreamInvalidConfig,
    StreamLimitsExceeded,
    StreamNameExists,
    StreamNotFound,
    StreamOffline,
    StreamOfflineReason,
    StreamPurgeFailed,
    StreamSealed,
    StreamSubjectOverlap,
)

__all__ = [
    "API_ERRORS",
    "STATUS_ERRORS",
    "AccessDenied",
    "AccountNotFound",
    "AccountResourcesExceeded",
    "ApiDenied",
    "ApiError",
    "ApiNotFound",
    "ApiRefused",
    "ApiUnavailable",
    "AtomicPublishDisabled",
    "AtomicPublishDuplicate",
    "AtomicPublishIncomplete",
    "AtomicPublishTooLarge",
    "AtomicPublishTooManyInFlight",
    "AtomicPublishUnsupportedHeader",
    "BadRequest",
    "BatchCompleted",
    "ClusterNotAssigned",
    "ClusterNotAvailable",
    "ClusterNotLeader",
    "ConsumerAlreadyExists",
    "ConsumerCreateFailed",
    "ConsumerDeleted",
    "ConsumerDoesNotExist",
    "ConsumerDuplicateFilters",
    "ConsumerEmptyFilter",
    "ConsumerExistsAndActive",
    "ConsumerFilesGone",
    "ConsumerFilterNotSubset",
    "ConsumerFiltersOverlap",
    "ConsumerInvalidDeliverPolicy",
    "ConsumerInvalidReset",
    "ConsumerIsPush",
    "ConsumerMaxAckPendingExcess",
    "ConsumerNameExists",
    "ConsumerNotFound",
    "ConsumerOffline",
    "ConsumerOfflineReason",
    "ConsumerPullRequiresAck",
    "DuplicateMessageInProcess",
    "ExpectedSequenceNotReady",
    "IncompleteResults",
    "InsufficientResources",
    "InvalidJson",
    "InvalidPriorityGroup",
    "JetStreamNotEnabled",
    "JetStreamNotEnabledForAccount",
    "LeadershipChanged",
    "MaxAckPendingReached",
    "MaximumConsumersReached",
    "MaximumStreamsReached",
    "MemoryResourcesExceeded",
    "MessageExceedsMaxBytes",
    "MessageNotFound",
    "MessageTooLarge",
    "MessageTtlDisabled",
    "MessageTtlInvalid",
    "MinLastSequence",
    "NoMessages",
    "NoResponder",
    "NoSuitablePeers",
    "PriorityPolicyWithoutGroup",
    "PullExpired",
    "PullTooLarge",
    "ReplicaBehind",
    "ReplicasNotSupported",
    "RequestRefused",
    "RequiredApiLevel",
    "SequenceNotFound",
    "ServerShutdown",
    "StatusError",
    "StatusRow",
    "StorageResourcesExceeded",
    "StreamInvalidConfig",
    "StreamLimitsExceeded",
    "StreamMismatch",
    "StreamNameExists",
    "StreamNotFound",
    "StreamOffline",
    "StreamOfflineReason",
    "StreamPurgeFailed",
    "StreamRollupFailed",
    "StreamSealed",
    "StreamStoreFailed",
    "StreamSubjectOverlap",
    "Throttled",
    "TooManyPulls",
    "TooManyRequests",
    "TooManyResults",
    "WorkQueueFilterNotUnique",
    "WorkQueueRequiresDeliverAll",
    "WorkQueueRequiresExplicitAck",
    "WorkQueueSecondUnfilteredConsumer",
    "WrongLastMsgId",
    "WrongLastSequence",
    "WrongLastSequenceConstant",
    "WrongPinId",
    "api_error",
    "status_error",
]


def _listed(root: type[ApiError]) -> dict[int, type[ApiError]]:
    found = {root.err_code: root} if root.err_code else {}
    for child in root.__subclasses__():
        found |= _listed(child)
    return found


API_ERRORS: Mapping[int, type[ApiError]] = dict(sorted(_listed(ApiError).items()))

_NO_FILE: Final = "no such file or directory"

_FALLBACK: Mapping[int, type[ApiError]] = {
    400: ApiRefused,
    401: ApiDenied,
    403: ApiDenied,
    404: ApiNotFound,
    408: ApiUnavailable,
    409: ApiRefused,
    412: ApiRefused,
    429: ApiUnavailable,
}


def api_error(error: Mapping[str, Any], *, request: str) -> ApiError:
    """The typed error for the `error` object of an API answer; `request` names what was asked."""
    code, err_code = int(error.get("code") or 0), int(error.get("err_code") or 0)
    description = str(error.get("description") or "no description")
    kind = API_ERRORS.get(err_code) or _FALLBACK.get(code) or (ApiUnavailable if 500 <= code < 600 else ApiError)
    if kind is ConsumerCreateFailed and _NO_FILE in description:
        kind = ConsumerFilesGone
    message = f"{request}: {description} (code {code}, err_code {err_code})"
    return kind(message, code=code, err_code=err_code, description=description)
