"""The live members as one member sees them: tracks renewals, confirms missing ones, and reports changes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from parti.clock import Clock
from parti.control import membership
from parti.control.lease import LeaseTerms
from parti.control.membership import Change, Membership
from parti.errors import PartiError
from parti.manager.kv_store import LeaseChange, Store
from parti.model import WorkerId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger
from parti.observe.metrics import Metrics


class Roster:
    """Performs what `control.membership` decides. `changed` is called after every step, even if nothing changed."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        terms: LeaseTerms,
        *,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
        changed: Callable[[Membership, tuple[Change, ...]], None],
    ) -> None:
        self.members: Membership | None = None
        """None before the whole current state has been read."""
        self.hold_judgement_until = float("-inf")
        """No member is declared dead before this time: after an outage all members get time to renew."""
        self._store = store
        self._clock = clock
        self._terms = terms
        self._spawn = spawn
        self._changed = changed
        self._metrics = metrics
        self._log = get_logger("control", namespace=store.namespace)

    def begin(self) -> None:
        """The whole bucket has been read: from now on missing renewals count."""
        self.members = Membership(self._terms, self._clock.now())

    def tick(self, now: float) -> None:
        if now >= self.hold_judgement_until:
            self._step(membership.Tick(now))

    def heard(self, seen_lease: LeaseChange) -> None:
        now = self._clock.now()
        self._step(
            membership.LeaseSeen(
                now, seen_lease.worker, seen_lease.record, seen_lease.revision, expired=seen_lease.expired
            )
        )

    def others(self, mine: WorkerId) -> bool:
        """Whether another member is live and not leaving."""
        return self.members is not None and any(worker != mine for worker in self.members.active())

    def _step(self, event: membership.Event) -> None:
        if self.members is None:
            return
        self.members, effects = membership.step(self.members, event)
        for effect in effects:
            if isinstance(effect, membership.Confirm):
                self._spawn(self._confirm(effect.worker), "parti-confirm")
        changes = tuple(effect for effect in effects if not isinstance(effect, membership.Confirm))
        for change in changes:
            self._log.info(f"member.{type(change).__name__.lower()}", change=str(change))
        self._changed(self.members, changes)
        if changes:
            self._metrics.set(m.MEMBERS, len(self.members.active()))

    async def _confirm(self, worker: WorkerId) -> None:
        """This worker has not renewed for too long: check that with the bucket's leader."""
        asked = self._clock.now()
        try:
            record, revision = await self._store.lease(worker)
        except PartiError:
            return  # retried at one of the next ticks
        self._step(membership.LeaseSeen(self._clock.now(), worker, record, revision, asked))
