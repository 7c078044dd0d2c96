"""`parti doctor` against real servers: what it finds, what it prints, and its exit code."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import nats
import pytest
from click.testing import CliRunner

from parti.cli import main
from parti.cli.checks import Check, CheckVerdict
from parti.cli.checks.judge import CheckedStream, ServerFacts, judge_server, judge_stream, worst
from parti.cli.checks.local import judge_java, judge_nats_server, judge_python, judge_spark
from parti.cli.checks.server import gather, sync_interval
from parti.clock import SystemClock
from parti.errors import ConnectionFailed
from parti.java import Java
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions


@pytest.fixture(autouse=True)
def a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "NATS_URL", "NATS_CONTEXT", "PARTI_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def doctor(*args: str) -> tuple[int, dict[str, Check], str]:
    done = CliRunner().invoke(main, ["doctor", "--json", *args], catch_exceptions=False)
    document = json.loads(done.stdout)
    checks = [Check(**{**check, "verdict": CheckVerdict(check["verdict"])}) for check in document["checks"]]
    assert document["ok"] is (done.exit_code == 0)
    return done.exit_code, {check.name: check for check in checks}, done.stdout + done.stderr


async def make_stream(server: NatsServer, name: str, subjects: int, storage: str) -> None:
    connection = await nats.connect(server.url)
    stream = connection.jetstream()
    await stream.add_stream(name=name, subjects=[f"{name}.*"], storage=storage)
    await asyncio.gather(*(stream.publish(f"{name}.{number}", b"") for number in range(subjects)))
    await connection.close()


def test_no_reachable_server_is_a_warning_unless_one_is_required() -> None:
    code, checks, _ = doctor("--server", "nats://127.0.0.1:1")
    assert (code, checks["server"].verdict) == (0, CheckVerdict.WARN)
    assert "parti server" in checks["server"].advice
    code, checks, _ = doctor("--server", "nats://127.0.0.1:1", "--require-server")
    assert (code, checks["server"].verdict) == (1, CheckVerdict.FAIL)


def test_a_healthy_server_is_described(server: NatsServer) -> None:
    code, checks, _ = doctor("--server", server.url, "--require-server")
    assert code == 0
    assert checks["server version"].verdict is CheckVerdict.OK
    assert checks["jetstream"].found.startswith("on, API level ")
    assert checks["clock"].verdict is CheckVerdict.OK
    assert checks["fsync"].verdict is CheckVerdict.WARN
    assert "unknown" in checks["fsync"].found
    assert "the default is 2 minutes" in checks["fsync"].found


def test_a_stream_in_the_multi_filter_cliff_is_named(server: NatsServer, name: str) -> None:
    asyncio.run(make_stream(server, name, 320, "file"))
    code, checks, _ = doctor("--server", server.url, "--stream", name)
    assert code == 0
    check = checks[f"stream {name}"]
    assert (check.verdict, "320 subjects" in check.found) == (CheckVerdict.WARN, True)
    assert "may never catch up" in check.advice


def test_a_stream_that_does_not_exist_is_a_failure(server: NatsServer) -> None:
    code, checks, _ = doctor("--server", server.url, "--stream", "NOSUCH")
    assert (code, checks["stream NOSUCH"].verdict) == (1, CheckVerdict.FAIL)


def test_a_server_without_jetstream_is_a_failure_that_says_what_to_do() -> None:
    with NatsServer(jetstream=False) as plain:
        code, checks, _ = doctor("--server", plain.url)
    assert (code, checks["jetstream"].verdict) == (1, CheckVerdict.FAIL)
    assert "-js" in checks["jetstream"].advice


def test_refused_credentials_are_a_failure_and_no_secret_is_printed() -> None:
    with NatsServer(config='authorization { user: "me", password: "right" }') as closed:
        code, checks, text = doctor("--server", closed.client_url(user="me", password="hunter2"))
        assert (code, checks["server"].verdict) == (1, CheckVerdict.FAIL)
        assert "refused the credentials" in checks["server"].found
        assert "hunter2" not in text
        assert doctor("--server", closed.client_url(user="me", password="right"))[0] == 0


def test_the_monitoring_port_tells_the_fsync_interval(server: NatsServer) -> None:
    _, checks, _ = doctor("--server", server.url, "--monitor", server.monitor_url)
    assert (checks["fsync"].verdict, checks["fsync"].found) == (CheckVerdict.WARN, "every 2m")
    with NatsServer(sync_interval="always") as careful:
        _, checks, _ = doctor("--server", careful.url, "--monitor", careful.monitor_url)
        assert checks["fsync"].verdict is CheckVerdict.OK
    _, checks, _ = doctor("--server", server.url, "--monitor", "http://127.0.0.1:1")
    assert checks["fsync"].found.startswith("unknown: cannot read http://127.0.0.1:1/varz")


async def test_what_is_no_monitoring_port_is_a_clear_error(server: NatsServer) -> None:
    with pytest.raises(ConnectionFailed, match="cannot read"):
        await sync_interval(server.url.replace("nats://", "http://"))
    with NatsServer(jetstream=False) as plain, pytest.raises(ConnectionFailed, match="shows no JetStream"):
        await sync_interval(plain.monitor_url)


async def test_the_clock_offset_is_measured_against_the_server(server: NatsServer) -> None:
    class Late(SystemClock):
        """A machine whose wall clock is ten minutes slow."""

        def wall(self) -> float:
            return super().wall() - 600

    facts = await gather(ConnectOptions(servers=(server.url,)), clock=Late())
    assert facts.clock_offset == pytest.approx(600, abs=5)
    verdicts = {check.name: check.verdict for check in judge_server(facts)}
    assert verdicts["clock"] is CheckVerdict.FAIL


def test_the_table_shows_each_check_and_its_advice() -> None:
    done = CliRunner().invoke(main, ["doctor", "--server", "nats://127.0.0.1:1"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "nats-server" in done.stdout
    assert "→ start one" in done.stdout


GOOD = ServerFacts("n1", (2, 15, 1), jetstream=True, clock_offset=0.0, clock_error=0.001, sync_interval=0.0)


@pytest.mark.parametrize(
    ("change", "check", "verdict"),
    [
        ({"version": (2, 10, 9)}, "server version", CheckVerdict.FAIL),
        ({"version": (2, 11, 0)}, "server version", CheckVerdict.OK),
        ({"clock_offset": None}, "clock", CheckVerdict.WARN),
        ({"clock_offset": -0.7}, "clock", CheckVerdict.WARN),
        ({"clock_offset": 0.7, "clock_error": 0.3}, "clock", CheckVerdict.OK),
        ({"clock_offset": -31.0}, "clock", CheckVerdict.FAIL),
        ({"sync_interval": 10.0}, "fsync", CheckVerdict.WARN),
        ({"sync_interval": 0.0}, "fsync", CheckVerdict.OK),
        ({"streams_in_all": 300}, "streams", CheckVerdict.WARN),
    ],
)
def test_facts_are_judged(change: dict[str, object], check: str, verdict: CheckVerdict) -> None:
    facts = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    assert {found.name: found.verdict for found in judge_server(facts)}[check] is verdict


@pytest.mark.parametrize(
    ("stream", "clustered", "words"),
    [
        (CheckedStream("S", "file", 3, 299), True, ""),
        (CheckedStream("S", "file", 1, 10), False, ""),
        (CheckedStream("S", "file", 3, 300), True, "may never catch up"),
        (CheckedStream("S", "file", 3, 99_999), True, "may never catch up"),
        (CheckedStream("S", "file", 3, 190_000), True, ""),
        (CheckedStream("S", "memory", 3, 2_000), True, ""),
        (CheckedStream("S", "memory", 1, 10), False, "a restart of the server empties it"),
        (CheckedStream("S", "file", 1, 10), True, "one server down stops it"),
        (CheckedStream("S", "file", 2, 10), True, "2 replicas stop"),
    ],
)
def test_streams_are_judged_by_storage_replicas_and_subjects(
    stream: CheckedStream, clustered: bool, words: str
) -> None:
    check = judge_stream(stream, clustered=clustered)
    assert check.verdict is (CheckVerdict.WARN if words else CheckVerdict.OK)
    assert words in check.advice


def test_this_machine_is_judged_by_what_is_installed() -> None:
    home = Path("jvm")
    assert judge_python((3, 10)).verdict is CheckVerdict.FAIL
    assert judge_java(None).verdict is CheckVerdict.WARN
    assert judge_java(Java(home, "11.0.2", "PATH")).advice.startswith("too old")
    assert judge_java(Java(home, "17.0.2", "PATH")).verdict is CheckVerdict.OK
    assert judge_java(Java(home, "17.0.2", "jvm")).advice.endswith("export JAVA_HOME=jvm")
    assert judge_spark(None).verdict is CheckVerdict.WARN
    assert judge_spark("3.5.1").verdict is CheckVerdict.WARN
    assert judge_spark("4.3.0").verdict is CheckVerdict.OK
    assert judge_nats_server(None, "install one").advice == "install one"


def test_the_worst_check_decides() -> None:
    good, bad = judge_spark("4.3.0"), judge_python((3, 10))
    assert [worst([]), worst([good]), worst([bad, good])] == [CheckVerdict.OK, CheckVerdict.OK, CheckVerdict.FAIL]
