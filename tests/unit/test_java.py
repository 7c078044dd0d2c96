"""Java for Spark: found in JAVA_HOME, on PATH or in the JVM folder; installed only where that is allowed.

Real scripts stand in for java, apt-get and id, so that nothing is installed and the result does not depend on the
machine: PATH holds only the folder with them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from parti.java import find_java

ENSURE = Path(__file__).parents[2] / "scripts" / "ensure-java.sh"


class Machine:
    """A machine of our own making: what is on PATH, in the JVM folder and in JAVA_HOME."""

    def __init__(self, root: Path) -> None:
        self.bin, self.jvm, self.log = root / "bin", root / "jvm", root / "apt.log"
        self.bin.mkdir()
        self.jvm.mkdir()
        self.env = {"PATH": str(self.bin), "PARTI_JVM_DIR": str(self.jvm)}
        self.program(self.bin / "readlink", f'exec {shutil.which("readlink")} "$@"')

    def program(self, path: Path, body: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    def java(self, home: Path, version: str) -> Path:
        self.program(home / "bin" / "java", f"echo 'openjdk version \"{version}\" 2026-01-01' >&2")
        return home

    def apt(self, *, user: int, offers: str = "openjdk-17-jre-headless", installs: str = "17.0.9") -> None:
        self.program(self.bin / "id", f"echo {user}")
        self.program(self.bin / "apt-cache", f'case "$2" in {offers}) exit 0;; *) exit 100;; esac')
        home = self.jvm / "installed" / "bin"
        java = f'printf \'#!/bin/sh\\necho "openjdk version \\\\"{installs}\\\\"" >&2\\n\' > {home}/java'
        install = f"/bin/mkdir -p {home}; {java}; /bin/chmod +x {home}/java"
        self.program(self.bin / "apt-get", f'echo "$@" >> {self.log}\nif [ "$1" = install ]; then {install}; fi')

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/bash", str(ENSURE), *args], env=self.env, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_java_home_comes_before_path_and_the_jvm_folder(machine: Machine, tmp_path: Path) -> None:
    first = machine.java(tmp_path / "home", "17.0.1")
    second = machine.java(tmp_path / "other", "21")
    (machine.bin / "java").symlink_to(second / "bin" / "java")
    third = machine.java(machine.jvm / "java-25", "25.0.1")
    for expected in (first, second, third):
        if expected == first:
            machine.env["JAVA_HOME"] = str(first)
        elif expected == second:
            del machine.env["JAVA_HOME"]
        else:
            (machine.bin / "java").unlink()
        assert machine.run().stdout == f"{expected}\n"
        java = find_java(machine.env, machine.jvm)
        assert java is not None
        assert java.home == expected


def test_a_java_that_is_too_old_or_broken_is_passed_over(machine: Machine, tmp_path: Path) -> None:
    machine.env["JAVA_HOME"] = str(machine.java(tmp_path / "eight", "1.8.0_402"))
    machine.program(machine.bin / "java", "exit 1")
    good = machine.java(machine.jvm / "java-17", "17.0.9")
    assert machine.run("--dry-run").stdout == f"use {good}\n"
    java = find_java(machine.env, machine.jvm)
    assert java is not None
    assert (java.major, java.origin) == (17, str(good))


def test_only_an_old_java_is_still_reported(machine: Machine, tmp_path: Path) -> None:
    machine.env["JAVA_HOME"] = str(machine.java(tmp_path / "eight", "1.8.0_402"))
    machine.java(machine.jvm / "java-11", "11.0.2")
    java = find_java(machine.env, machine.jvm)
    assert java is not None
    assert java.major == 11


def test_without_java_nothing_is_found(machine: Machine) -> None:
    assert find_java(machine.env, machine.jvm) is None


def test_root_with_apt_would_install_and_a_dry_run_changes_nothing(machine: Machine) -> None:
    machine.apt(user=0)
    assert machine.run("--dry-run").stdout == "install openjdk-17-jre-headless\n"
    assert not machine.log.exists()


def test_root_with_apt_installs_and_then_uses_it(machine: Machine) -> None:
    machine.apt(user=0)
    done = machine.run()
    assert (done.returncode, done.stdout) == (0, f"{machine.jvm}/installed\n")
    assert machine.log.read_text().splitlines() == [
        "update",
        "install -y --no-install-recommends openjdk-17-jre-headless",
    ]
    assert machine.run().stdout == done.stdout
    assert len(machine.log.read_text().splitlines()) == 2, "the second run must not install again"


def test_where_17_is_not_offered_another_package_is_taken(machine: Machine) -> None:
    machine.apt(user=0, offers="default-jre-headless", installs="25")
    assert machine.run("--dry-run").stdout == "install default-jre-headless\n"


def test_an_installation_that_brings_an_old_java_is_an_error(machine: Machine) -> None:
    machine.apt(user=0, installs="11.0.2")
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "apt-get installed no Java 17" in done.stderr


def test_a_user_who_is_not_root_is_told_what_to_install(machine: Machine) -> None:
    machine.apt(user=1000)
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert "sudo apt-get install openjdk-17-jre-headless" in done.stderr
    assert not machine.log.exists()


def test_a_machine_without_apt_is_told_what_to_install(machine: Machine) -> None:
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: Spark needs Java 17 or newer")
    assert machine.run("--dry-run").stdout == "ask\n"
