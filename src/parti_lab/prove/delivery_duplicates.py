"""Counts tasks that were accepted twice, by the fault that explains each, and those that no fault explains. Pure.

A crash may repeat what was in flight, and never more. So a second acceptance counts as explained in three cases: the
first was in flight when a fault happened (up to the process's requests in flight); it could not be acknowledged
because the server was down; or the worker logged that it got no answer. A planned stop explains nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parti_lab.prove.delivery_faults import READ, DeliveryFault

_TOLD = 5.0  # seconds from an endpoint's 2xx until the server has the acknowledgement; generous, as READ is
UNHEARD, UNEXPLAINED = "unheard", "unexplained"
KINDS = ("kill", "freeze", "server", "stall", UNHEARD, UNEXPLAINED)


@dataclass(frozen=True, slots=True)
class Accepted:
    """One request that the endpoint answered with 2xx."""

    at: float
    epoch: int
    attempt: int


def explain(
    accepted: Mapping[str, Sequence[Accepted]],
    faults: Iterable[DeliveryFault],
    unheard: Collection[tuple[str, int]],
    *,
    in_flight: int,
) -> dict[str, int]:
    """How many second acceptances each kind of fault explains; `unheard` holds ids and attempts without an answer.

    `in_flight` is how many requests of one process one fault may repeat.
    """
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    used: Counter[DeliveryFault] = Counter()
    known = sorted(faults, key=lambda fault: fault.begin)
    pairs = [(task, *pair) for task, times in accepted.items() for pair in pairwise(times)]
    for task, first, again in sorted(pairs, key=lambda pair: pair[1].at):
        fitting = [fault for fault in known if fits(fault, first.at, again.at)]
        counted_on = again.epoch > first.epoch or again.attempt > first.attempt
        if (task, first.attempt) in unheard and counted_on:
            found[UNHEARD] += 1
        elif again.epoch == first.epoch:
            # The same owner only repeats a request that got no answer. The attempt log has an entry for it, except
            # while the server was down.
            lost_word = counted_on and any(fault.kind == "server" for fault in fitting)
            found["server" if lost_word else UNEXPLAINED] += 1
        else:
            free = [fault for fault in fitting if fault.kind == "server" or used[fault] < in_flight]
            if free:
                used[free[0]] += 1
            found[free[0].kind if free else UNEXPLAINED] += 1
    return dict(found)


def fits(fault: DeliveryFault, first: float, again: float) -> bool:
    """Whether the first was in flight or not yet acknowledged when the fault happened, and the second came after it."""
    return fault.begin - _TOLD <= first <= fault.last + READ and fault.begin <= again
