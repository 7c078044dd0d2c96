"""The visible status of an instance: state, owned partitions, events and metrics always agree."""

from __future__ import annotations

from parti.clock import Clock
from parti.groups.events import EventKind, GroupEvent, GroupEvents, Listener, MemberState
from parti.groups.summed_gauges import SummedGauges
from parti.observe import group_metrics as m
from parti.observe.health import HealthCheck
from parti.observe.metrics import Metrics


class MemberStatus:
    """The observable part of a joined instance."""

    def __init__(
        self, place: tuple[str, str, str], *, clock: Clock, metrics: Metrics, on_event: Listener | None
    ) -> None:
        self.stream, self.group, self.member = place
        self.events = GroupEvents(stream=self.stream, group=self.group, member=self.member)
        if on_event is not None:
            self.events.listen(on_event)
        self.state = MemberState.STARTING
        self._owned: tuple[int, ...] = ()
        self._clock = clock
        self._metrics = SummedGauges(metrics)

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions of this member, whether or not this instance is active."""
        return self._owned

    def health_check(self) -> HealthCheck:
        """Fails while the member should consume but does not."""

        def probe() -> str | None:
            if self.state in (MemberState.FAILED, MemberState.JOINING):
                last = self.events.recent[-1].detail if self.events.recent else ""
                return f"{self.stream}/{self.group}/{self.member} is {self.state.value}: {last}"
            if (stuck := self._stuck()) is not None:
                return f"{self.stream}/{self.group}/{self.member}: {stuck}"
            return None

        return HealthCheck(f"group-{self.group}-{self.member}", probe)

    def _stuck(self) -> str | None:
        """Describes what has blocked later messages for a long time; None when nothing has."""
        return None

    def _be(self, state: MemberState) -> None:
        self.state = state
        self._metrics.set(m.PINNED, int(state is MemberState.ACTIVE))

    def _gain(self, partitions: tuple[int, ...]) -> None:
        gained = set(partitions) - set(self._owned)
        self._owned = partitions
        self._metrics.set(m.PARTITIONS, len(partitions))
        if gained:
            self._tell(EventKind.ASSIGNED, partitions=partitions)

    def _lose(self, partitions: tuple[int, ...]) -> None:
        lost = tuple(partition for partition in self._owned if partition in partitions)
        self._owned = tuple(partition for partition in self._owned if partition not in partitions)
        self._metrics.set(m.PARTITIONS, len(self._owned))
        if lost:
            self._tell(EventKind.REVOKED, partitions=lost)

    def _tell(self, kind: EventKind, *, partitions: tuple[int, ...] = (), detail: str = "") -> None:
        self._metrics.count(m.EVENTS, kind=kind.value)
        self.events.tell(GroupEvent(kind, self._clock.wall(), partitions, detail))
