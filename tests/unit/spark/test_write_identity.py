"""Counted writes: no two have the same identity, and a replayed batch gives its writes the same identities again."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.spark.sink.write_identity import Ticket, WriteLedger, WritePlace, kind_of


def place(batch: int = 0, run: str = "r1", query: str = "q") -> WritePlace:
    return WritePlace(query, run, str(batch))


def identity(ticket: Ticket, where: WritePlace) -> tuple[object, ...]:
    number = ticket.number(where)
    return (ticket.kind, where.query, where.batch, number) if number is not None else (ticket.writer,)


def test_a_place_is_read_from_the_tasks_properties() -> None:
    found = WritePlace.of({"sql.streaming.queryId": "a-b", "streaming.sql.batchId": "7", "spark.jobGroup.id": "run"})
    assert found == WritePlace("ab", "run", "7")
    assert WritePlace.of({}) is None


def test_the_ledger_lives_in_a_folder_of_the_application_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    assert WriteLedger.of_application() is None  # a folder that outlives the application would remember too much
    own = tmp_path / "blockmgr-1"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{own},{tmp_path}")
    assert WriteLedger.of_application() is None
    own.mkdir()
    assert repr(WriteLedger.of_application()) == f"<WriteLedger {own / 'parti-writes.json'}>"


def test_a_write_that_failed_is_the_same_write_when_it_is_tried_again(tmp_path: Path) -> None:
    ledger = WriteLedger(tmp_path)
    first = ledger.begin("k")
    ledger.failed(first)
    second = ledger.begin("k")
    assert (first.number(place()), second.number(place())) == (0, 0)


def test_a_write_beside_an_equal_one_counts_nothing(tmp_path: Path) -> None:
    ledger = WriteLedger(tmp_path)
    first, second, other = ledger.begin("k"), ledger.begin("k"), ledger.begin(kind_of("k", "v"))
    assert [ticket.number(place()) for ticket in (first, second, other)] == [0, None, 0]


def test_the_ledger_does_not_grow_with_batches_and_queries(tmp_path: Path) -> None:
    ledger = WriteLedger(tmp_path)
    for batch in range(300):
        ledger.succeeded(ledger.begin("k"), place(batch))
        ledger.succeeded(ledger.begin("k"), place(0, query=f"q{batch}"))
    assert os.path.getsize(tmp_path / "parti-writes.json") < 20_000


Step = st.tuples(
    st.sampled_from(["save", "begin", "end", "fail", "restart", "next"]), st.integers(0, 1), st.integers(0, 1)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(Step, max_size=60))
def test_whatever_happens_two_writes_never_share_an_identity(steps: Any) -> None:
    """Queries, kinds, overlaps, failures, restarts and replays at random."""
    with TemporaryDirectory() as folder:
        ledger = WriteLedger(Path(folder))
        runs, batches = [0, 0], [0, 0]
        open_writes: list[tuple[Ticket, WritePlace]] = []
        stored: dict[tuple[str, str], set[tuple[object, ...]]] = {}  # of a run of a query: what succeeded in its batch
        for action, query, kind in steps:
            where = place(batches[query], f"r{runs[query]}", f"q{query}")
            if action in ("save", "begin"):
                open_writes.append((ledger.begin(f"kind{kind}"), where))
            if action in ("save", "end") and open_writes:
                ticket, its = open_writes.pop()
                mine = stored.setdefault((its.query, f"{its.run}/{its.batch}"), set())
                assert identity(ticket, its) not in mine  # taken for a repeat, although another write of this try
                mine.add(identity(ticket, its))
                ledger.succeeded(ticket, its)
            elif action == "fail" and open_writes:
                ledger.failed(open_writes.pop()[0])
            elif action == "restart":
                runs[query] += 1
            elif action == "next":
                batches[query] += 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=12), st.integers(0, 12))
def test_a_replay_in_the_same_order_gives_every_write_the_identity_it_had(kinds: Any, died_after: Any) -> None:
    with TemporaryDirectory() as folder:
        ledger = WriteLedger(Path(folder))

        def attempt(run: str, until: int) -> list[tuple[object, ...]]:
            found = []
            for kind in kinds[:until]:
                ticket = ledger.begin(f"kind{kind}")
                found.append(identity(ticket, place(run=run)))
                ledger.succeeded(ticket, place(run=run))
            return found

        first, second = attempt("r1", died_after), attempt("r2", len(kinds))
        assert second[: len(first)] == first
        assert len(set(second)) == len(second)
