"""scripts/test.sh: what fails has failed, unless it is marked `timing`; such a test is run once more, once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTEST = Path(sys.executable).with_name("pytest")
FAILS_AT_FIRST = """
from pathlib import Path
import pytest
{mark}
def test_late(request):
    ran = request.config.rootpath / "ran"
    ran.write_text((ran.read_text() if ran.exists() else "") + "x")
    assert len(ran.read_text()) {passes}
"""


OTHER_LANES = """
import pytest
@pytest.mark.spark
def test_one(): pass
@pytest.mark.spark
@pytest.mark.slow
def test_two(): pass
@pytest.mark.cluster
def test_three(): pass
"""


class Project:
    """A few tests, and the script that runs ours."""

    def __init__(self, folder: Path, *, mark: str = "", passes: str = "> 1", where: str = "unit") -> None:
        self.folder = folder
        (folder / "tests" / where).mkdir(parents=True)
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
        test = FAILS_AT_FIRST.format(mark=mark, passes=passes)
        (folder / "tests" / where / "test_it.py").write_text(test)
        (folder / "tests" / where / "test_other_lanes.py").write_text(OTHER_LANES)

    def run(self, *command: str | Path) -> tuple[bool, str]:
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=250, check=False)
        return done.returncode == 0, done.stdout + done.stderr

    def suite(self) -> tuple[bool, str]:
        return self.run(ROOT / "scripts" / "test.sh", PYTEST)

    @property
    def runs(self) -> int:
        return len((self.folder / "ran").read_text())

    @property
    def recorded(self) -> list[str]:
        path = self.folder / "tests" / "reruns.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.slow
def test_what_fails_has_failed(tmp_path: Path) -> None:
    project = Project(tmp_path)
    passed, output = project.suite()
    assert not passed, output
    assert (project.runs, project.recorded) == (1, [])
    assert "tests/unit/test_it.py::test_late" in output


@pytest.mark.slow
def test_a_test_that_hangs_on_the_clock_runs_once_more_and_a_second_entry_of_its_name_fails(tmp_path: Path) -> None:
    project = Project(tmp_path, mark='@pytest.mark.timing("a reason")', passes="in (2, 4)")
    passed, output = project.suite()
    assert passed, output
    assert (project.runs, project.recorded) == (2, ["tests/unit/test_it.py::test_late"])
    passed, output = project.suite()
    assert not passed, output
    assert (project.runs, project.recorded) == (3, ["tests/unit/test_it.py::test_late"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mark", "where", "why"),
    [
        ("@pytest.mark.timing", "unit", "needs its reason"),
        ('@pytest.mark.timing("a reason")', "chaos", "proves a promise"),
    ],
)
def test_the_mark_needs_a_reason_and_is_not_for_proofs(tmp_path: Path, mark: str, where: str, why: str) -> None:
    passed, output = Project(tmp_path, mark=mark, where=where).run(PYTEST, "--collect-only", "tests")
    assert not passed
    assert why in output
