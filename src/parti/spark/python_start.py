"""The Python with which Spark starts its processes on this machine: ours, and pyspark as it is installed, compiled.

Spark puts a zip with pyspark's sources before everything else on the path of every Python process it starts, so that
each compiles pyspark anew: 1.2 s of CPU until it does anything, in place of 0.45. A streaming query starts one of them
at least, and a session its daemon.
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
# What lies in Spark's own folders leaves the path; what the user or Spark added besides stays, in its order.
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
export PYTHONPATH
exec {python} "$@"
"""


@contextmanager
def quick_python(*, local: bool) -> Iterator[None]:
    """A session that is made in here starts its Python processes quickly, if they all run on this machine (`local`).

    Afterwards the environment names the interpreter itself: programs that are started from here may outlive the script.
    Nothing is changed for those who chose a Python, or who use another Spark than the installed pyspark's.
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
    """The path of a script that is as good as our interpreter; None where there cannot be one."""
    home = _installed_home()
    if home is None or not _SHELL.exists():
        return None
    folder = tempfile.mkdtemp(prefix="parti-python-")
    atexit.register(_remove, folder, os.getpid())
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return None
    homes = {str(home), str(home.resolve())}  # Spark follows links when it looks for itself
    ours = "|".join(shlex.quote(f"{path}/{part}") + "/*" for path in sorted(homes) for part in ("python/lib", "jars"))
    script = Path(folder) / "python"
    script.write_text(_SCRIPT.format(ours=ours, python=shlex.quote(sys.executable)))
    script.chmod(0o700)
    return str(script)


def _remove(folder: str, made_by: int) -> None:
    if os.getpid() == made_by:  # a fork that ends must not take it from the rest
        shutil.rmtree(folder, ignore_errors=True)


def _installed_home() -> Path | None:
    """The folder of pyspark with Spark in it; None unless the interpreter finds that one by itself, and it is used."""
    spec = find_spec("pyspark")
    home = Path(spec.origin).parent if spec is not None and spec.origin else None
    if home is None or str(home.parent) not in {*site.getsitepackages(), site.getusersitepackages()}:
        return None
    if Path(os.environ.get("SPARK_HOME", home)).resolve() != home.resolve():
        return None
    return home if (home / "python" / "lib").is_dir() and (home / "jars").is_dir() else None
