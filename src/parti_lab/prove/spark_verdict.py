"""The verdict on a generated case: compares the output with the content that the leader reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from parti.subjects import matches
from parti_lab.prove.spark_play import PlayOutcome
from parti_lab.prove.spark_world import SparkWorld


@dataclass(slots=True)
class CaseVerdict:
    """How often each promise was broken, and the first example of each."""

    wrong: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, what: object) -> None:
        self.wrong[kind] += 1
        self.examples.setdefault(kind, str(what)[:2_000])


def judge(outcome: PlayOutcome, world: SparkWorld, filters: tuple[str, ...]) -> CaseVerdict:
    """Every message of the range that the leader has was read once and unchanged; all others were reported as lost.

    Messages that were deleted one by one, and those already gone at an open start (`earliest`), are no loss.
    """
    verdict = CaseVerdict()
    counted = Counter(row.sequence for row in outcome.rows)
    for row in outcome.rows:
        known = world.ledger.get(row.sequence)
        if known is None:
            verdict.note("alien", row)
        elif known != row and replace(row, microseconds=0) != known:  # times during a storm are unknown
            verdict.note("altered", f"{row} instead of {known}")
    for sequence, count in counted.items():
        if count > 1:
            verdict.note("doubled", sequence)
    said = {sequence for first, last in outcome.said for sequence in range(first, last + 1)}
    complete = not (outcome.failures and not outcome.tasks_follow)
    for sequence in world.ledger.keys() - counted.keys() if complete else ():
        if not outcome.begin < sequence <= outcome.end or not _chosen(world.ledger[sequence].subject, filters):
            continue
        if sequence in world.present and sequence not in world.mortal:
            verdict.note("missing", sequence)
        elif (
            sequence in world.front
            and sequence not in said
            and not outcome.tolerant
            and not _before(sequence, outcome, world)
        ):
            verdict.note("silent", sequence)
    for sequence in said:
        if sequence in counted:
            verdict.note("inexact", f"{sequence} was said to be lost and came out")
        elif sequence in world.present:
            verdict.note("inexact", f"{sequence} was said to be lost and is there")
    if (unread := _unread_of_old(counted, outcome, world, filters)) and not outcome.failures:
        verdict.note("silent", f"the stream was recreated under a query that had not read {min(unread)}")
    if outcome.failures and not (world.front | world.gone_at.keys()):
        verdict.note("false_alarms", outcome.failures[0])
    if outcome.differing:
        verdict.note("replays_that_differ", outcome.differing)
    return verdict


def _unread_of_old(
    counted: Counter[int], outcome: PlayOutcome, world: SparkWorld, filters: tuple[str, ...]
) -> set[int]:
    """Messages unread when the stream was recreated, of a query with failOnDataLoss that had begun to read it."""
    reader = world.case.reader
    begun = reader.streaming and reader.options["failOnDataLoss"] == "true" and counted.keys() & world.forgotten
    left = world.forgotten - counted.keys() - world.mortal if begun else set()
    # Messages deleted before are no loss, and the time when a storm's messages were removed is unknown.
    left = {each for each in left if world.gone_at.get(each) == world.remade_at and world.stormy is None}
    return {each for each in left if each > outcome.begin and _chosen(world.ledger[each].subject, filters)}


def _before(sequence: int, outcome: PlayOutcome, world: SparkWorld) -> bool:
    """Whether the sequence was already gone when a task with an open start began."""
    for task in reversed(outcome.tasks):
        if task.after < sequence <= task.to:
            # In a storm the time of removal is unknown: it must at least lie before all that the task read.
            known = world.stormy is None or world.gone_at[sequence] < world.step
            return task.open_start and (world.gone_at[sequence] <= task.began if known else sequence < task.first)
    if not outcome.tasks:  # a real Spark does not report which task read what
        return outcome.open_start
    return outcome.tasks[0].open_start and sequence <= outcome.tasks[0].after


def _chosen(subject: str, filters: tuple[str, ...]) -> bool:
    return not filters or any(matches(pattern, subject) for pattern in filters)
