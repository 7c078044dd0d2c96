"""How a waiting task affects later ones of its document, and the rules of each trigger. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from parti.config.deliver import DeliverSection
from parti.errors import ConfigError


class TaskOrder(StrEnum):
    """The order policy of a trigger: what happens to later tasks of a document while one waits for its retry."""

    BLOCK = "block"
    """They wait behind it: in memory for up to a minute, then parked together with it."""
    PARK = "park"
    """They wait behind it, parked at once: nothing of the document stays in memory."""
    SKIP = "skip"
    """They continue; the failed task comes back alone, after them."""
    LATEST = "latest"
    """Only the newest counts: it replaces the waiting one, which is dropped."""


class OrderHold(StrEnum):
    """Where a task waits."""

    MEMORY = "memory"
    PARK = "park"
    ALONE = "alone"
    """Scheduled by itself; its document continues."""


@dataclass(frozen=True, slots=True)
class OrderRules:
    """The rules of one trigger."""

    order: TaskOrder = TaskOrder.BLOCK
    rate: float = 0.0
    """Requests per second; 0 is no limit."""
    concurrency: int = 0
    """Concurrent requests; 0 is no limit except the total and the host's."""


def hold(order: TaskOrder, *, wait: float, blocked: float, queued: int, config: DeliverSection) -> OrderHold:
    """Where a failed task waits: it first failed `blocked` seconds ago, `queued` tasks are behind it."""
    if order is TaskOrder.SKIP:
        return OrderHold.ALONE
    if order is TaskOrder.PARK:
        return OrderHold.PARK
    if blocked + wait > config.block_for or queued >= config.block_queue:
        return OrderHold.PARK
    return OrderHold.MEMORY


class RuleBook:
    """The rules of every trigger: its own, else those of "*", else the configured order without limits."""

    def __init__(self, entries: Iterable[str], default: str) -> None:
        """Entries such as "billing: order=park rate=10 concurrency=4"; a malformed one is a `ConfigError`."""
        self._default = OrderRules(TaskOrder(default))
        own: dict[str, OrderRules] = {}
        for entry in entries:
            trigger, colon, words = entry.partition(":")
            if not colon or not trigger.strip():
                raise ConfigError(f'deliver.triggers {entry!r}: write "<trigger id>: order=skip rate=10 concurrency=4"')
            own[trigger.strip()] = _parse(entry, words, self._default)
        self._default = own.pop("*", self._default)
        self._own = own

    def of(self, trigger: str) -> OrderRules:
        return self._own.get(trigger, self._default)


def _parse(entry: str, words: str, rules: OrderRules) -> OrderRules:
    for word in words.split():
        name, _, value = word.partition("=")
        try:
            match name:
                case "order":
                    rules = replace(rules, order=TaskOrder(value))
                case "rate":
                    rules = replace(rules, rate=_positive(float(value)))
                case "concurrency":
                    rules = replace(rules, concurrency=int(_positive(int(value))))
                case _:
                    raise ValueError(name)
        except ValueError:
            raise ConfigError(
                f"deliver.triggers {entry!r}: {word!r} is not understood; there are order=block|park|skip|latest, "
                "rate=<requests a second> and concurrency=<requests at once>"
            ) from None
    return rules


def _positive(value: float) -> float:
    if not 0 < value < 1e6:
        raise ValueError(value)
    return value
