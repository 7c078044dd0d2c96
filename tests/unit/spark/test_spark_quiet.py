"""Spark's log output does not reach the terminal; errors and our own output do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parti.spark.quiet import Chatter, without_chatter

GREETING = """\
WARNING: Using incubator modules: jdk.incubator.vector
Using Spark's default log4j profile: org/apache/spark/log4j2-defaults.properties
Setting default log level to "WARN".
To adjust logging level use sc.setLogLevel(newLevel). For SparkR, use setLogLevel(newLevel).
26/11/15 18:54:26 WARN NativeCodeLoader: Unable to load native-hadoop library for your platform... using builtin-java
26/11/15 18:54:27 WARN ResolveWriteToStream: spark.sql.adaptive.enabled is not supported
26/11/15 18:54:29 WARN DAGScheduler: Failed to cancel job group 466ec6a8. Cannot find active jobs for it.
"""
FAREWELL = """\
Traceback (most recent call last):
  File "pyspark.zip/pyspark/daemon.py", line 264, in manager
  File "pyspark.zip/pyspark/daemon.py", line 95, in worker
BrokenPipeError: [Errno 32] Broken pipe
"""
FAILURE = """\
26/11/15 18:54:27 ERROR TaskSetManager: Task 0 in stage 1.0 failed 4 times; aborting job
Traceback (most recent call last):
  File "pyspark.zip/pyspark/daemon.py", line 95, in worker
  File "handler.py", line 3, in handle
    raise ValueError("no such customer")
ValueError: no such customer
26/11/15 18:54:28 WARN ProcessingTimeExecutor: Current batch is falling behind.
"""


def sifted(text: str) -> str:
    chatter = Chatter()
    shown = [line for given in text.splitlines(keepends=True) for line in chatter.sift(given)]
    return "".join(shown + chatter.rest())


def test_greetings_and_farewells_are_dropped_and_everything_else_is_shown_in_order() -> None:
    assert sifted(GREETING + FAREWELL + FAILURE + FAREWELL + "the end\n") == FAILURE + "the end\n"


def test_a_traceback_that_is_cut_off_is_shown_as_far_as_it_came() -> None:
    cut = "".join(FAILURE.splitlines(keepends=True)[:3])
    assert sifted(GREETING + cut) == cut


def test_a_traceback_without_end_is_not_held_for_ever() -> None:
    endless = "Traceback (most recent call last):\n" + "  File\n" * 500
    assert sifted(endless) == endless


def test_children_are_sifted_inside_the_block_and_beyond_it(capfd: pytest.CaptureFixture[str]) -> None:
    say = [sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])"]
    with without_chatter():
        subprocess.run([*say, GREETING + FAILURE], check=True)
        later = subprocess.Popen([*say[:2], f"import sys; sys.stdin.read(); {say[2]}", FAREWELL], stdin=subprocess.PIPE)
        os.write(2, b"ours\n")
    os.write(2, b"afterwards\n")
    later.communicate(timeout=60)
    assert capfd.readouterr().err == FAILURE + "ours\nafterwards\n"


def test_a_command_draws_its_own_words_at_once_and_fails_as_ever() -> None:
    script = (
        "import os, sys\nfrom parti.spark.quiet import without_chatter\n"
        "with without_chatter():\n"
        f"    os.write(2, {GREETING.encode()!r})\n"
        "    print('ours', sys.stderr.fileno() != 2, file=sys.stderr)\n"
        "    raise ValueError('visible')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert (lines[0], lines[-1], "Spark" in ended.stderr) == ("ours True", "ValueError: visible", False)
