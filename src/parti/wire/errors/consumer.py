"""API errors about consumers."""

from __future__ import annotations

from parti.wire.errors.base import ApiNotFound, ApiRefused, ApiUnavailable


class ConsumerCreateFailed(ApiRefused):
    """The consumer's configuration is refused, or changes what cannot change: correct it, or delete and recreate."""

    err_code = 10012


class ConsumerFilesGone(ConsumerCreateFailed):
    """The consumer works, but its files are gone at the server, so that nothing can change it: delete and recreate it.

    A consumer that is created just while somebody deletes one of its name loses its folder (measured on 2.15.1).
    """

    err_code = 0  # the same code as its parent: told apart by the server's words


class ConsumerNameExists(ApiRefused):
    """A consumer of this name exists with another configuration: choose another name, or update it."""

    err_code = 10013


class ConsumerNotFound(ApiNotFound):
    """The consumer does not exist (any more): create it again from the stored position."""

    err_code = 10014


class MaximumConsumersReached(ApiRefused):
    """The stream takes no further consumer: set max_consumers above the wanted number (default limit 1,000)."""

    err_code = 10026


class ConsumerPullRequiresAck(ApiRefused):
    """A pull consumer on a work queue needs explicit acks: set ack_policy to explicit."""

    err_code = 10084


class ConsumerFilterNotSubset(ApiRefused):
    """A filter matches none of the stream's subjects: correct the filter."""

    err_code = 10093


class ConsumerInvalidDeliverPolicy(ApiRefused):
    """The deliver policy contradicts the start sequence or time: correct one of them."""

    err_code = 10094


class WorkQueueRequiresExplicitAck(ApiRefused):
    """A consumer on a work queue needs explicit acks: set ack_policy to explicit."""

    err_code = 10098


class WorkQueueSecondUnfilteredConsumer(ApiRefused):
    """A work queue takes one consumer without a filter: give each consumer its own filters."""

    err_code = 10099


class WorkQueueFilterNotUnique(ApiRefused):
    """Another consumer of the work queue owns one of the subjects: it has to drop it first."""

    err_code = 10100


class WorkQueueRequiresDeliverAll(ApiRefused):
    """A consumer on a work queue must start at the beginning: set deliver_policy to all."""

    err_code = 10101


class ConsumerExistsAndActive(ApiRefused):
    """The push consumer is in use by somebody else: use another name."""

    err_code = 10105


class ConsumerOffline(ApiUnavailable):
    """Too few replicas of the consumer are up: bring servers back, then try again."""

    err_code = 10119


class ConsumerMaxAckPendingExcess(ApiRefused):
    """max_ack_pending exceeds the server's limit: lower it."""

    err_code = 10121


class ConsumerDuplicateFilters(ApiRefused):
    """filter_subject and filter_subjects are both set: keep one."""

    err_code = 10136


class ConsumerFiltersOverlap(ApiRefused):
    """Two filters of the consumer match the same subject: remove the duplicate or the wider one."""

    err_code = 10138


class ConsumerEmptyFilter(ApiRefused):
    """A filter is empty: remove it."""

    err_code = 10139


class ConsumerAlreadyExists(ApiRefused):
    """action=create found the consumer with another configuration: update it, or choose another name."""

    err_code = 10148


class ConsumerDoesNotExist(ApiNotFound):
    """action=update found no consumer: create it again from the stored position."""

    err_code = 10149


class PriorityPolicyWithoutGroup(ApiRefused):
    """A priority policy needs a priority group: set priority_groups."""

    err_code = 10159


class InvalidPriorityGroup(ApiRefused):
    """The consumer has no such priority group: correct the name."""

    err_code = 10160


class ConsumerOfflineReason(ConsumerOffline):
    """The consumer is offline for the reason given: act on it, then try again."""

    err_code = 10195


class ConsumerInvalidReset(ApiRefused):
    """The reset is outside of what the consumer's start policy allows: correct the sequence."""

    err_code = 10204
