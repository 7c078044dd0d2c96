"""Judges a delivery run by the published tasks, the requests that endpoints received, and the dead letters. Pure.

It checks order per policy, loss, attempts counted without a request, forgotten attempts, early retries, rates and
concurrency. It excuses what a fault explains: a request that was in flight when a process died, froze or lost its
connection may be sent again, as if it had never been sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parti_lab.prove.delivery_duplicates import fits
from parti_lab.prove.delivery_faults import READ, DeliveryFault
from parti_lab.prove.delivery_scenario import Trigger

_EARLY = 0.02  # seconds that clocks and rounding may differ by
Blame = Callable[[str, str], None]
_UNSEEN = frozenset({"dead", "no_dns"})
"""Kinds of hosts that do not see the request of every attempt."""


@dataclass(slots=True)
class SeenRequest:
    """One request as its endpoint received it, and the answer."""

    at: float
    id: str
    trigger: str
    document: str
    number: int
    attempt: int
    status: int
    """0: the sender got no answer."""
    epoch: int = 0
    wait: float = 0.0
    """Seconds, from Retry-After."""
    ended: float = 0.0
    partition: str = ""

    @property
    def accepted(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class PublishedTask:
    """One task that the stream stored, with its time."""

    id: str
    trigger: str
    document: str
    number: int
    at: float


@dataclass(frozen=True, slots=True)
class RestedTask:
    """One dead letter."""

    id: str
    trigger: str
    reason: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Circumstances that excuse a finding."""

    faults: Sequence[DeliveryFault]
    timeouts: Collection[tuple[str, int]]
    """Ids and attempts that timed out at their senders; a stalled endpoint may not have read these requests."""
    processes: int
    stall: float
    """The longest stall of the endpoints themselves; requests sent meanwhile arrive all at once afterwards."""
    forgetful: bool = False
    """The successor of a crashed process does not know what that process sent in its last second."""


def judge(
    triggers: Iterable[Trigger],
    published: Sequence[PublishedTask],
    seen: Sequence[SeenRequest],
    letters: Sequence[RestedTask],
    run: Circumstances,
) -> tuple[dict[str, int], list[str]]:
    """Counts of findings by kind, and one line of text for each of the first few."""
    faults, timeouts = run.faults, run.timeouts
    by_name = {trigger.name: trigger for trigger in triggers}
    wrong: dict[str, int] = dict.fromkeys(KINDS, 0)
    words: list[str] = []

    def blame(kind: str, what: str) -> None:
        wrong[kind] += 1
        if len(words) < 20:
            words.append(f"{kind}: {what}")

    accepted = {request.id for request in seen if request.accepted}
    rested = {letter.id: letter for letter in letters}
    newest = {(task.trigger, task.document): task.id for task in published}
    for task in published:
        latest = by_name[task.trigger].order == "latest" and newest[task.trigger, task.document] != task.id
        if task.id not in accepted and task.id not in rested and not latest:
            blame("lost", f"{task.id} of {by_name[task.trigger].rules}")
    _order(by_name, seen, faults, blame)
    _attempts(by_name, prompt(seen, timeouts), rested, faults, Counter(task for task, _ in timeouts), blame)
    for letter in letters:
        if letter.id in accepted and not faults:
            blame("buried_although_accepted", f"{letter.id} {letter.reason}")
    _limits(by_name, seen, run.processes, run.stall, faults if run.forgetful else (), blame)
    return wrong, words


KINDS = (
    "lost",
    "inversions",
    "attempts_without_a_request",
    "attempts_forgotten",
    "too_early",
    "over_rate",
    "over_concurrency",
    "letters_wrong",
    "buried_although_accepted",
)


def prompt(seen: Sequence[SeenRequest], timeouts: Collection[tuple[str, int]]) -> list[SeenRequest]:
    """The requests without those read late: their sender had timed out and sent another one before they were read.

    A machine that stalls reads the data waiting in its sockets in any order. A sender cannot take a request back after
    its timeout; a receiver that remembers ids, as docs/delivery.md asks for, recognises the repeat.
    """
    highest: dict[str, int] = defaultdict(int)
    found = []
    for request in seen:
        if request.attempt < highest[request.id] and (request.id, request.attempt) in timeouts:
            continue
        highest[request.id] = max(highest[request.id], request.attempt)
        found.append(request)
    return found


def _order(
    triggers: Mapping[str, Trigger], seen: Sequence[SeenRequest], faults: Sequence[DeliveryFault], blame: Blame
) -> None:
    """First acceptances of a document come in publishing order; the policy `skip` promises no order.

    Where an acceptance could not be acknowledged, the next owner repeats the tasks before it. With `latest` that may be
    a task that was never sent, because the accepted one had replaced it; the newest still comes last.
    """
    last: dict[tuple[str, str], SeenRequest] = {}
    known: set[str] = set()
    for request in seen:
        if not request.accepted or request.id in known or triggers[request.trigger].order == "skip":
            continue
        known.add(request.id)
        place = request.trigger, request.document
        before = last.get(place)
        if before is None or request.number > before.number:
            last[place] = request
        elif not (
            triggers[request.trigger].order == "latest"
            and request.epoch > before.epoch
            and any(fits(fault, before.at, request.at) for fault in faults)
        ):
            blame("inversions", f"{request.id} of {triggers[request.trigger].rules} after {before.number}")


def _attempts(
    triggers: Mapping[str, Trigger],
    seen: Sequence[SeenRequest],
    rested: Mapping[str, RestedTask],
    faults: Sequence[DeliveryFault],
    unread: Counter[str],
    blame: Blame,
) -> None:
    by_id: dict[str, list[SeenRequest]] = defaultdict(list)
    for request in seen:
        by_id[request.id].append(request)
    for requests in by_id.values():
        trigger = triggers[requests[0].trigger]
        for count, request in enumerate(requests, start=1):
            if request.attempt > count + unread[request.id] and trigger.host not in _UNSEEN:
                blame("attempts_without_a_request", f"{request.id} says {request.attempt}, and it is the {count}th")
        for before, request in pairwise(requests):
            gap = request.at - before.at
            if before.accepted or _explained(before, request, faults):
                continue
            if request.attempt <= before.attempt:
                blame("attempts_forgotten", f"{request.id}: {before.attempt}, then {request.attempt}")
            least = max(before.wait, trigger.backoff * 0.8)
            if gap < least - _EARLY:
                blame("too_early", f"{request.id}: {gap:.3f} s after {before.status}, not {least:.2f} s")
    for letter in rested.values():
        requests, trigger = by_id.get(letter.id, []), triggers[letter.trigger]
        if trigger.host in _UNSEEN:
            continue
        if letter.attempts > len(requests) + unread[letter.id]:
            blame("attempts_without_a_request", f"letter {letter.id}: {letter.attempts} of {len(requests)}")
        if letter.reason != "exhausted" or letter.attempts != trigger.attempts:
            blame(
                "letters_wrong", f"{letter.id} {letter.reason} after {letter.attempts} of {trigger.attempts or 'many'}"
            )


def _explained(before: SeenRequest, after: SeenRequest, faults: Sequence[DeliveryFault]) -> bool:
    """Whether a fault happened between two requests or right before the first, so that its result may not be stored."""
    return any(fault.begin - READ <= after.at and before.at <= fault.last + READ for fault in faults)


def _limits(
    triggers: Mapping[str, Trigger],
    seen: Sequence[SeenRequest],
    processes: int,
    stall: float,
    excused: Sequence[DeliveryFault],
    blame: Blame,
) -> None:
    for trigger in triggers.values():
        own = [
            request
            for request in seen
            if request.trigger == trigger.name
            and not any(fault.begin <= request.at <= fault.last + READ for fault in excused)
        ]
        if trigger.rate:
            # A fifth above the rate; at a few requests per second and process, one more for each process.
            most, first = max(1.2 * trigger.rate * (1 + stall), trigger.rate * (1 + stall) + processes), 0
            for last, request in enumerate(own):
                while own[first].at <= request.at - 1.0:
                    first += 1
                if last - first + 1 > most:
                    blame("over_rate", f"{trigger.rules}: {last - first + 1} within a second")
                    break
        if trigger.concurrency:
            moves = sorted([(r.at, 1) for r in own] + [(r.ended, -1) for r in own if r.ended])
            running = highest = 0
            for _, step in moves:
                running += step
                highest = max(highest, running)
            if highest > max(trigger.concurrency, processes):
                blame("over_concurrency", f"{trigger.rules}: {highest} at once")
