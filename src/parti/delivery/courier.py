"""One attempt: from a task to the outcome of its request. Never raises for an error of the task or the endpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from parti.clock import Clock
from parti.config.deliver import DeliverSection
from parti.delivery.errors import AddressBlocked, Reason, SecretStoreDown, TaskRefused, unforeseen
from parti.delivery.guard import AddressGuard
from parti.delivery.lease import SendRight
from parti.delivery.pending import Pending
from parti.delivery.policy import AttemptOutcome, DeliveryAttempt, classify, parse_retry_after, request_timeout
from parti.delivery.secrets import SecretStore
from parti.delivery.signing import legacy_signature, sign
from parti.delivery.task import DeliveryTask, request_body
from parti.delivery.transport import Request, SendFailed, Transport
from parti.delivery.urls import Endpoint, check_headers

_DEFAULTS = {"Content-Type": "application/json", "User-Agent": "parti-deliver/1", "Accept": "*/*"}
"""Headers that a task may override."""


class Courier:
    """Builds, signs and sends requests. Checks the lease last, right before the request is sent."""

    def __init__(
        self, config: DeliverSection, transport: Transport, guard: AddressGuard, secrets: SecretStore, clock: Clock
    ) -> None:
        self._config = config
        self._transport = transport
        self._guard = guard
        self._secrets = secrets
        self._clock = clock
        self._token_hosts = frozenset(host.lower() for host in config.token_hosts)

    async def attempt(
        self, held: Pending, lease: SendRight, pace: Callable[[], Awaitable[None]] | None = None
    ) -> DeliveryAttempt:
        """Send the task once, when `pace` returns; `LeaseLost` when this process may no longer send it."""
        task, endpoint = held.task, held.endpoint
        assert task is not None
        assert endpoint is not None
        try:
            self._guard.check_port(endpoint.port)
            request = self._request(held, task, endpoint, lease, pace)
        except TaskRefused as refusal:
            outcome = AttemptOutcome.BLOCKED if isinstance(refusal, AddressBlocked) else AttemptOutcome.REFUSED
            return DeliveryAttempt(outcome, error=str(refusal), reason=refusal.reason)
        except SecretStoreDown as error:
            return DeliveryAttempt(AttemptOutcome.STORE, error=str(error))
        except MemoryError:
            return DeliveryAttempt(AttemptOutcome.LOCAL, error="out of memory")
        except Exception as error:
            return DeliveryAttempt(
                AttemptOutcome.REFUSED, error=str(unforeseen(error, "sent")), reason=Reason.MALFORMED
            )
        try:
            response = await self._transport.post(request)
        except SendFailed as failure:
            return DeliveryAttempt(failure.outcome, error=str(failure), retry_after=failure.wait)
        except AddressBlocked as blocked:
            return DeliveryAttempt(AttemptOutcome.BLOCKED, error=str(blocked), reason=Reason.SSRF_BLOCKED)
        status = response.status
        outcome = classify(status, self._config.retry_statuses)
        if outcome is AttemptOutcome.DELIVERED:
            return DeliveryAttempt(outcome, status)
        wait = parse_retry_after(status, response.retry_after, self._clock.wall())
        return DeliveryAttempt(outcome, status, f"the endpoint answered {status}", response.head, wait)

    def _request(
        self,
        held: Pending,
        task: DeliveryTask,
        endpoint: Endpoint,
        lease: SendRight,
        pace: Callable[[], Awaitable[None]] | None,
    ) -> Request:
        config = self._config
        own = check_headers(task.headers)
        body = request_body(task, held.id, max_size=config.max_body)
        timestamp = int(self._clock.wall())
        headers = {
            **(_DEFAULTS if not own else _defaults_beside(own)),
            **own,
            "Accept-Encoding": "identity",  # the response is stored as it comes, so it must be readable
            "webhook-id": held.id,
            "webhook-timestamp": str(timestamp),
            "X-Parti-Attempt": str(held.attempts + 1),
        }
        if lease.epoch:
            headers["X-Parti-Partition"], headers["X-Parti-Epoch"] = lease.partition, str(lease.epoch)
        if task.secrets_ref:
            keys = self._secrets.keys(task.database, task.secrets_ref)
            headers["webhook-signature"] = sign(keys, held.id, timestamp, body)
            if config.legacy_signature:
                headers["X-Syntrix-Signature"] = legacy_signature(keys[0], timestamp, body)
        if task.pre_issued_token and endpoint.secure and endpoint.host.rpartition(":")[0] in self._token_hosts:
            check_headers({"Authorization": f"Bearer {task.pre_issued_token}"})
            for name in [name for name in headers if name.lower() == "authorization"]:
                del headers[name]  # with two headers of one name, some receivers take the first and some the last
            headers["Authorization"] = f"Bearer {task.pre_issued_token}"
        return Request(endpoint.url, headers, body, request_timeout(task.timeout, config), lease.check, pace)


def _defaults_beside(own: Mapping[str, str]) -> dict[str, str]:
    taken = {name.lower() for name in own}
    return {name: value for name, value in _DEFAULTS.items() if name.lower() not in taken}
