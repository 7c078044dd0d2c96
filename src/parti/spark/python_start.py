"""The Python with which Spark starts its processes on this machine: this interpreter, with the installed pyspark.

Spark puts a zip with pyspark's sources first on the path of every Python process it starts, so each process compiles
pyspark again: 1.2 s of CPU before it does anything, instead of 0.45 with the installed, compiled one. A streaming query
starts at least one such process, and a session its daemon.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_NAME = "PYSPARK_PYTHON"
_SHELL = Path("/bin/sh")
# Entries of Spark's own folders are removed from the path; entries that the user or Spark added stay, in order.
# Spark gives its tasks one thread for linear algebra, but not the other processes: there NumPy starts one for each CPU
# when it is imported, which takes 0.05 s of CPU.
_SCRIPT = """#!/bin/sh
set -f
kept=
IFS=:
for entry in $PYTHONPATH; do
  case $entry in
    {ours}) ;;
    *) kept=${{kept:+$kept:}}$entry ;;
  esac
done
PYTHONPATH=$kept
OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
export PYTHONPATH OMP_NUM_THREADS
exec {python} "$@"
"""


@contextmanager
def quick_python(*, local: bool) -> Iterator[None]:
    """A session created in this block starts its Python processes quickly, if all run on this machine (`local`).

    Afterwards the environment names the interpreter itself: programs started from here may outlive the script. Nothing
    changes for users who chose a Python, or who use another Spark than that of the installed pyspark.
    """
    if _NAME in os.environ:
        yield
        return
    os.environ[_NAME] = (_script() if local else None) or sys.executable
    try:
        yield
    finally:
        os.environ[_NAME] = sys.executable


@lru_cache(maxsize=1)
def _script() -> str | None:
    """The path of a script that replaces our interpreter; None where this is not possible."""
    home = _installed_home()
    if home is None or not _SHELL.exists():
        return None
    folder = tempfile.mkdtemp(prefix="parti-python-")
    atexit.register(_remove, folder, os.getpid())
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return None
    homes = {str(home), str(home.resolve())}  # Spark follows links when it looks for its own folder
    ours = "|".join(shlex.quote(f"{path}/{part}") + "/*" for path in sorted(homes) for part in ("python/lib", "jars"))
    script = Path(folder) / "python"
    script.write_text(_SCRIPT.format(ours=ours, python=shlex.quote(sys.executable)))
    script.chmod(0o700)
    return str(script)


def _remove(folder: str, made_by: int) -> None:
    if os.getpid() == made_by:  # a fork that ends must not delete it for the others
        shutil.rmtree(folder, ignore_errors=True)


def _installed_home() -> Path | None:
    """The pyspark folder with Spark in it; None unless the interpreter finds it by itself, and it is the one used."""
    spec = find_spec("pyspark")
    home = Path(spec.origin).parent if spec is not None and spec.origin else None
    if home is None or str(home.parent) not in {*site.getsitepackages(), site.getusersitepackages()}:
        return None
    if Path(os.environ.get("SPARK_HOME", home)).resolve() != home.resolve():
        return None
    return home if (home / "python" / "lib").is_dir() and (home / "jars").is_dir() else None
