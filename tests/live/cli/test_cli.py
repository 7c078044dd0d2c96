"""The `parti` command as a user runs it: a real process, its exit code, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import parti
from parti.cli import main
from parti.cli.lazy import LazyCommand, RootGroup
from parti.errors import ConnectionFailed, TransientError
from parti.progress import Advance
from parti_lab.bench.experiments import ExperimentGroup, experiment_command
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import Benchmark, Experiment, ExperimentOption, Proof, Result, RunContext

PROGRAM = [sys.executable, "-m", "parti.cli"]


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PARTI_", "NATS_"))}
    env = {**clean, "HOME": str(Path.cwd()), **environ}
    env.pop("XDG_CONFIG_HOME", None)
    return subprocess.run([*PROGRAM, *args], env=env, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("flag", ["-h", "--help", None])
def test_help_lists_every_command_and_imports_nothing_heavy(flag: str | None) -> None:
    done = run(*([flag] if flag else []))
    assert done.returncode == 0
    for command in ("server", "doctor", "config", "bench", "prove", "version"):
        assert f"\n  {command} " in done.stdout
    code = (
        "import sys; from parti.cli import main; main(['--help'], standalone_mode=False); "
        "print([m for m in ('numpy', 'pyarrow', 'pyspark', 'nats', 'aiohttp', 'rich', 'msgspec') if m in sys.modules])"
    )
    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_every_subcommand_explains_itself() -> None:
    for args in (("server",), ("doctor",), ("config",), ("config", "show"), ("bench",), ("prove",), ("version",)):
        done = run(*args, "-h")
        assert (done.returncode, done.stderr) == (0, ""), args
        assert done.stdout.startswith("Usage: "), args


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["benhc"], "Error: No such command 'benhc'. Did you mean 'bench'?"),
        (["zzz"], "Error: No such command 'zzz'. There are: run, server, doctor,"),
        (["config", "show", "--sett", "x"], "Error: No such option '--sett'."),
        (["config", "show", "--set", "nonsense"], "Error: --set takes KEY=VALUE"),
        (["config", "show", "--set", "retry.bse=1s"], "Error: unknown key 'retry.bse' (flag): did you mean"),
        (["config", "show", "--config", "missing.toml"], "Error: cannot read the configuration file missing.toml"),
        (["config", "show", "--context", "none"], "Error: the NATS context 'none' does not exist"),
    ],
)
def test_a_wrong_command_line_or_configuration_is_one_line_and_exit_2(args: list[str], message: str) -> None:
    done = run(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_debug_shows_the_traceback_of_a_typed_error() -> None:
    assert "Traceback" not in run("config", "show", "--set", "a.b=1").stderr
    done = run("--debug", "config", "show", "--set", "a.b=1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_version_names_every_part() -> None:
    done = run("version", "--json")
    versions = json.loads(done.stdout)
    assert done.returncode == 0
    assert list(versions) == ["parti", "python", "nats-py", "pyspark", "pyarrow", "java", "nats-server"]
    assert versions["parti"] == parti.__version__
    assert versions["nats-server"].startswith("2.")
    assert versions["parti"] in run("version").stdout


def test_config_show_names_the_origin_of_each_value_and_hides_secrets() -> None:
    Path("parti.toml").write_text('[nats]\nuser = "me"\npassword = "hunter2"\n[retry]\nretry_max = "9s"\n')
    environ = {"PARTI_RETRY__RETRY_BASE": "300ms", "NATS_URL": "nats://somewhere:4222"}
    done = run("config", "show", "--json", "--set", "observe.log_level=debug", **environ)
    assert done.returncode == 0, done.stderr
    shown = {name: (row["value"], row["origin"]) for name, row in json.loads(done.stdout).items()}
    assert shown["nats.password"] == ("********", "file parti.toml:3")
    assert shown["nats.servers"] == ("nats://somewhere:4222", "env NATS_URL")
    assert shown["retry.retry_max"] == ("9s", "file parti.toml:5")
    assert shown["retry.retry_base"] == ("300ms", "env PARTI_RETRY__RETRY_BASE")
    assert shown["observe.log_level"] == ("debug", "flag")
    assert shown["observe.listen"] == ("off", "default")
    table = run("config", "show", "--help-text", **environ)
    assert "first wait" in table.stdout
    assert "hunter2" not in done.stdout + table.stdout + done.stderr + table.stderr


def test_config_show_names_the_context_of_the_nats_cli() -> None:
    folder = Path(".config/nats/context")
    folder.mkdir(parents=True)
    (folder / "prod.json").write_text('{"url": "nats://prod:4222", "token": "hunter2"}')
    Path(".config/nats/context.txt").write_text("prod")
    done = run("config", "show", "--json")
    shown = {name: (row["value"], row["origin"]) for name, row in json.loads(done.stdout).items()}
    assert shown["nats.servers"] == ("nats://prod:4222", "nats context prod")
    assert shown["nats.token"] == ("********", "nats context prod")
    assert shown["nats.context"] == ("prod", "nats context prod")


def invoke(experiment: Experiment, *args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(experiment_command(experiment), args, catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def measured(ctx: RunContext) -> dict[str, Figure]:
    advance: Advance
    with ctx.progress("counting", ctx.options["count"]) as advance:
        advance(ctx.options["count"])
    return {"lost": 0 if ctx.options["count"] < 10 else 3, "draw": ctx.random().random()}


BENCH = Benchmark(
    name="some",
    help="Counts.",
    run=measured,
    goals={"lost": "<= 0"},
    options=(ExperimentOption("count", 5, "how many"), ExperimentOption("with_acks", False, "ack too")),
)


def test_a_benchmark_prints_its_result_last_on_stdout_and_exits_by_it() -> None:
    code, out, _ = invoke(BENCH, "--json", "--seed", "7", "--quick")
    result = Result.from_json(out.splitlines()[-1])
    assert (code, result.ok) == (0, True)
    assert (result.figures["seed"], result.figures["quick"]) == (7, True)
    code, out, err = invoke(BENCH, "--json", "--count", "10")
    assert (code, Result.from_json(out).ok) == (1, False)
    assert "not ok: lost is 3, goal <= 0" in err


def test_the_same_seed_repeats_a_run_and_no_seed_tells_its_own() -> None:
    first, second = (Result.from_json(invoke(BENCH, "--json", "--seed", "7")[1]) for _ in range(2))
    assert first.figures["draw"] == second.figures["draw"]
    fresh = Result.from_json(invoke(BENCH, "--json")[1])
    repeated = Result.from_json(invoke(BENCH, "--json", "--seed", str(fresh.figures["seed"]))[1])
    assert repeated.figures["draw"] == fresh.figures["draw"]


def test_without_json_a_table_is_printed_and_html_is_written() -> None:
    code, out, err = invoke(BENCH, "--html", "result.html", "--with-acks")
    assert code == 0
    assert "some: ok" in out
    assert "lost" in out
    assert "met" in out
    assert "seed" in err
    assert "<svg" in Path("result.html").read_text()


def test_help_of_an_experiment_names_its_goals_and_options() -> None:
    _, out, _ = invoke(BENCH, "--help")
    for words in ("Counts.", "Goals: lost <= 0.", "--count INTEGER", "--with-acks", "--quick", "--seed"):
        assert words in out


def test_a_proof_that_cannot_run_is_a_result_that_is_not_ok() -> None:
    def broken(ctx: RunContext) -> dict[str, Figure]:
        raise ConnectionFailed("nothing listens there")

    code, out, err = invoke(Proof(name="p", help="", run=broken, goals={"lost": "<= 0"}), "--json")
    result = Result.from_json(out)
    assert (code, result.ok, result.figures["error"]) == (1, False, "ConnectionFailed: nothing listens there")
    assert "nothing listens there" in err


def test_a_module_that_cannot_be_imported_breaks_only_its_own_command() -> None:
    group = ExperimentGroup("bench", registry={"gone": "parti_lab.bench.no_such_module"}, attribute="BENCH")
    listed = CliRunner().invoke(group, ["--help"])
    assert (listed.exit_code, "gone" in listed.stdout) == (0, True)
    called = CliRunner().invoke(group, ["gone"])
    assert called.exit_code == 1
    assert "gone cannot be loaded" in called.stderr


@click.command()
def failing() -> None:
    raise TransientError("try\nlater")


def test_a_failure_of_the_work_is_one_line_and_exit_1() -> None:
    root = RootGroup("parti", entries={"fail": LazyCommand(f"{__name__}:failing", "Fails.")})
    done = CliRunner().invoke(root, ["fail"])
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "Error: try later\n")


def test_the_installed_program_is_the_same_command() -> None:
    assert main.name == "main"
    program = Path(sys.executable).parent / "parti"
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == run("--help").stdout
