"""Parts of the demonstration that can be tested alone: the log of effects, and a quiet terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from parti.testing.history import Effect
from parti_lab.demo import effects
from parti_lab.demo.effects import EffectLog
from parti_lab.demo.quiet import quietly


def test_effects_are_kept_in_files_in_the_order_they_were_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "_ROWS", 3)
    log = EffectLog(tmp_path / "effects", "S")
    for counter in range(7):
        log.take(
            Effect("p1", f"p1.k{counter % 2}", "pub", counter, "pid-1", 4), 10 + counter, 1.5, 1, time.time() - 2.0
        )
    log.close()
    log.close()
    assert [file.name for file in sorted((tmp_path / "effects").iterdir())] == [f"0000{n}.parquet" for n in range(3)]
    rows = pq.read_table(tmp_path / "effects").sort_by("order").to_pylist()
    assert [row["sequence"] for row in rows] == list(range(10, 17))
    assert [row["order"] for row in rows] == list(range(1, 8))
    assert all(2.0 <= row["took"] < 60.0 for row in rows)
    assert {(row["stream"], row["partition"], row["epoch"], row["owner"], row["timestamp"]) for row in rows} == {
        ("S", "p1", 4, "pid-1", 1.5)
    }


def test_what_children_write_to_stderr_goes_to_the_log_and_our_words_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shout = [sys.executable, "-c", "import sys; print('Traceback of a child', file=sys.stderr)"]
    with quietly(tmp_path / "log") as terminal:
        subprocess.run(shout, check=True)
        os.write(2, b"ours by mistake\n")
        print("hello", file=terminal)
    subprocess.run(shout, check=True)
    assert (tmp_path / "log").read_text() == "Traceback of a child\nours by mistake\n"
    assert capfd.readouterr().err == "hello\nTraceback of a child\n"
