"""Spark's Python processes on this machine start from the installed pyspark, compiled, and not from its zip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from parti.spark.python_start import quick_python

HOME = Path(pyspark.__file__).parent
LOOK = "import sys, pyspark as p; print(p.__file__, sys.executable, sys.argv[1:], *sys.path, sep='\\n')"


def look(python: str, path: str) -> list[str]:
    command = [python, "-c", LOOK, "two words", "*"]
    done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("home", [HOME, HOME.resolve()])
def test_pyspark_comes_compiled_and_what_the_user_put_on_the_path_stays_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Any
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    lib = sorted(str(archive) for archive in (home / "python" / "lib").iterdir())
    mine = [str(tmp_path / "a folder"), "/tmp/*", str(tmp_path / "b")]
    with quick_python(local=True):
        python = os.environ["PYSPARK_PYTHON"]
        found, executable, arguments, *path = look(python, ":".join([*lib, f"{home}/jars/spark-core.jar", *mine]))
    assert Path(found).suffix == ".py"
    assert Path(found).parent == HOME
    assert executable == sys.executable
    assert arguments == "['two words', '*']"
    assert [entry for entry in path if entry in {*lib, *mine}] == mine
    assert os.environ["PYSPARK_PYTHON"] == sys.executable  # the script ends with this process


@pytest.mark.parametrize(("given", "threads"), [({}, "1"), ({"OMP_NUM_THREADS": "3"}, "3")])
def test_one_thread_for_linear_algebra_unless_somebody_chose_more(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], threads: str
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with quick_python(local=True):
        command = [os.environ["PYSPARK_PYTHON"], "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == threads


@pytest.mark.parametrize(("name", "value"), [("PYSPARK_PYTHON", "/usr/bin/chosen"), ("SPARK_HOME", "/opt/spark")])
def test_who_chose_a_python_or_a_spark_keeps_it(monkeypatch: pytest.MonkeyPatch, name: Any, value: Any) -> None:
    from parti.spark import python_start

    python_start._script.cache_clear()
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setenv(name, value)
    with quick_python(local=True):
        assert os.environ["PYSPARK_PYTHON"] == (value if name == "PYSPARK_PYTHON" else sys.executable)
    python_start._script.cache_clear()


def test_executors_elsewhere_are_given_no_script_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with quick_python(local=False):
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
