"""API errors of the server, its cluster and the account: limits, leaders, permissions."""

from __future__ import annotations

from parti.wire.errors.base import ApiRefused, ApiUnavailable


class AccountResourcesExceeded(ApiRefused):
    """The account's JetStream limits are used up: raise them, or delete data."""

    err_code = 10002


class BadRequest(ApiRefused):
    """The request is malformed for this server: correct it, or upgrade the server."""

    err_code = 10003


class IncompleteResults(ApiUnavailable):
    """Some servers of the cluster did not answer: try again."""

    err_code = 10004


class NoSuitablePeers(ApiRefused):
    """The cluster has too few servers for the wanted replicas or placement: lower them, or add servers."""

    err_code = 10005


class ClusterNotAssigned(ApiUnavailable):
    """The asked server does not hold the asset yet: try again."""

    err_code = 10007


class ClusterNotAvailable(ApiUnavailable):
    """The JetStream cluster has no leader right now: try again."""

    err_code = 10008


class ClusterNotLeader(ApiUnavailable):
    """The asked server is not the leader any more: try again."""

    err_code = 10009


class InsufficientResources(ApiUnavailable):
    """The server is out of memory, storage or its own limits: free some, then try again."""

    err_code = 10023


class InvalidJson(ApiRefused):
    """The request is no JSON of the expected shape: correct the named field."""

    err_code = 10025


class MemoryResourcesExceeded(ApiUnavailable):
    """The server's JetStream memory is used up: free some or raise the limit, then try again."""

    err_code = 10028


class AccountNotFound(ApiRefused):
    """The server does not know the connection's account: correct the credentials or the resolver."""

    err_code = 10035


class JetStreamNotEnabledForAccount(ApiRefused):
    """The account has no JetStream: enable it in the account's configuration, or use another account."""

    err_code = 10039


class StorageResourcesExceeded(ApiUnavailable):
    """The server's JetStream storage is used up: free some or raise the limit, then try again."""

    err_code = 10047


class JetStreamNotEnabled(ApiRefused):
    """The server runs without JetStream: enable it (`jetstream {}` in its configuration, or -js)."""

    err_code = 10076


class RequiredApiLevel(ApiRefused):
    """The server's API level is too low for this request: upgrade the server."""

    err_code = 10185
