"""`parti audit` on Spark: files and streams as they are written, the command line, and the report in a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from parti.audit import AuditRules, Effects, Published, Report, audit
from parti.audit.html import render_html
from parti.cli import main
from parti.errors import ConfigError, UsageError
from parti.spark.pipeline import Outcomes, Pipeline
from parti.testing import NatsServer, eventually_blocking
from parti.wire.options import ConnectOptions
from parti_lab.bench.audit import PLANTED, write, wrong_counts
from support.spark_streams import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(400)]
COUNT = 200_000


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Messages and effects with the benchmark's faults: of every kind, in known numbers."""
    folder = tmp_path_factory.mktemp("planted")
    write(folder, COUNT, 3, lambda steps: None)
    return folder


@pytest.fixture(scope="module")
def report(spark: Any, planted: Path) -> Report:
    return audit(
        spark,
        Published(stream="BENCH", path=str(planted / "published")),
        Effects.parse(str(planted / "effects")),
        rules=AuditRules(order="partition"),
    )


@pytest.fixture
def clean(tmp_path: Path) -> tuple[str, str]:
    """Paths of 400 messages and of one effect of each."""
    sequences = list(range(1, 401))
    pq.write_table(
        pa.table({"sequence": sequences, "subject": [f"o.k{n % 8}" for n in sequences]}), tmp_path / "p.parquet"
    )
    pq.write_table(effects_table(sequences), tmp_path / "e.parquet")
    return str(tmp_path / "p.parquet"), str(tmp_path / "e.parquet")


def effects_table(sequences: list[int]) -> pa.Table:
    return pa.table(
        {
            "sequence": sequences,
            "finished": [1_700_000_000.0 + place / 1000 for place in range(len(sequences))],
            "partition": [sequence % 4 for sequence in sequences],
            "key": [f"k{sequence % 8}" for sequence in sequences],
            "owner": ["w-1"] * len(sequences),
            "epoch": [1] * len(sequences),
            "latency": [0.005] * len(sequences),
        }
    )


def counts(report: Report, side: int = 0) -> dict[str, int]:
    return {finding.name: finding.count for finding in report.sides[side].findings if finding.count}


def test_every_planted_fault_is_counted_exactly_and_shown_by_examples(report: Report) -> None:
    assert wrong_counts(report) == ""
    assert not report.ok
    assert report.published == COUNT
    (side,) = report.sides
    for name in (*PLANTED, "out_of_order_partition"):
        finding = next(finding for finding in side.findings if finding.name == name)
        assert not finding.ok
        assert len(finding.examples) == 10
        assert all(example.startswith("sequence ") and " of key " in example for example in finding.examples)
    assert side.partitions == 2_000
    assert side.handoffs > 2_000
    assert side.latency is not None
    assert 0.002 < side.latency.p50 < 0.014
    assert side.lag is not None


def test_effects_on_a_stream_are_judged_by_its_order_and_dead_letters_are_effects(
    spark: Any, stream: Stream, server: NatsServer, name: str
) -> None:
    stream.publish(60, subject="k{0}")
    effects = f"{name}-effects"
    stream.connection.api(
        f"STREAM.CREATE.{effects}", {"name": effects, "subjects": [f"fx-{name}.>"], "allow_direct": True}
    )
    bodies = [
        {"sequence": n, "partition": f"p{n % 2}", "epoch": 1, "owner": "w-1", "key": f"k{n % 4}", "took": 0.001}
        for n in [*range(1, 21), 25, *range(22, 25), 21, *range(26, 61), 40]
        if n != 17
    ]
    frames = b"".join(f"PUB fx-{name}.x {len(b)}\r\n{b}\r\n".encode() for b in map(json.dumps, bodies))
    headers = f"NATS/1.0\r\nParti-Sequence: 17\r\nParti-Stream: {stream.name}\r\nParti-Reason: rejected\r\n\r\n"
    frames += f"HPUB fx-{name}.y {len(headers)} {len(headers) + 2}\r\n{headers}no\r\n".encode()
    frames += f"PUB fx-{name}.z 5\r\nhello\r\n".encode()
    stream.connection.send(frames)
    state = f"STREAM.INFO.{effects}"
    eventually_blocking(lambda: stream.connection.api(state)["state"]["messages"] == 62, 60.0, "all effects are stored")
    connect = ConnectOptions(servers=(server.url,))
    report = audit(spark, Published(stream=stream.name, connect=connect), Effects.parse(f"stream:{effects}", connect))
    assert counts(report) == {"duplicated": 1, "out_of_order_key": 1, "out_of_order_partition": 2}
    (side,) = report.sides
    assert side.dead_lettered == 1
    assert side.latency is not None
    examples = {finding.name: finding.examples for finding in side.findings}
    assert examples["duplicated"][0].startswith("sequence 40 of key k0 in partition p0, by w-1")
    assert examples["out_of_order_key"][0].startswith("sequence 21 of key k1")


def test_the_outcomes_of_a_real_pipeline_are_clean_and_parity_names_what_another_run_lacks(
    spark: Any, stream: Stream, server: NatsServer, tmp_path: Path
) -> None:
    stream.publish(300, subject="k{0}")
    connect = ConnectOptions(servers=(server.url,))
    pipeline = Pipeline(
        name="audited",
        stream=stream.name,
        handler=lambda message: None,
        checkpoint=str(tmp_path / "checkpoint"),
        trigger="available-now",
        outcomes=Outcomes(parquet=str(tmp_path / "one")),
        nats=connect,
    )
    with pipeline.start(spark) as running:
        assert running.wait(240)
    shorter = spark.read.parquet(str(tmp_path / "one")).where("sequence not in (7, 8)")
    found = audit(
        spark,
        Published(stream=stream.name, connect=connect),
        Effects.parse(str(tmp_path / "one")),
        compare=Effects(frame=shorter, label="shorter"),
    )
    first, second = found.sides
    assert first.ok
    assert (first.done, first.effects, second.done) == (300, 300, 298)
    assert counts(found, 1) == {"lost": 2}
    assert found.parity is not None
    assert (found.parity.only_first, found.parity.only_second) == (2, 0)
    assert found.parity.examples == ("sequence 7 only in one", "sequence 8 only in one")
    assert not found.ok


def invoke(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["audit", *args])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_exits_0_for_a_clean_run_and_1_for_a_broken_promise(
    spark: Any, clean: tuple[str, str], tmp_path: Path
) -> None:
    published, effects = clean
    code, out, err = invoke("--stream", "S", "--published", published, "--effects", effects, "--compare", effects)
    assert (code, "every promise held" in out, "the same messages" in out) == (0, True, True), err
    sequences = [n for n in range(1, 401) if n not in (5, 6)]
    lines = [json.dumps(row) for row in effects_table([*sequences, 400]).to_pylist()]
    (tmp_path / "broken.jsonl").write_text("\n".join(lines))
    page = tmp_path / "report.html"
    broken = ("--stream", "S", "--published", published, "--effects", str(tmp_path / "broken.jsonl"))
    code, out, err = invoke(*broken, "--duplicates", "1", "--json", "--html", str(page))
    assert code == 1, err
    told = json.loads(out)
    assert told["ok"] is False
    assert told["sides"][0]["findings"]["lost"]["count"] == 2
    assert told["sides"][0]["findings"]["duplicated"] == {
        "count": 1,
        "allowed": 1,
        "ok": True,
        "examples": ["sequence 400 of key k0 in partition 0, by w-1 in epoch 1, then w-1 in epoch 1"],
    }
    assert page.read_text().startswith("<!doctype html>")
    code, out, _ = invoke(*broken)
    assert (code, "a promise is broken" in out, "sequence 5" in out) == (1, True, True)


def test_what_cannot_be_audited_is_refused_with_the_reason(
    spark: Any, clean: tuple[str, str], tmp_path: Path, server: NatsServer
) -> None:
    published, effects = clean
    base = ("--stream", "S", "--published", published)
    pq.write_table(pa.table({"sequence": [1]}), tmp_path / "bare.parquet")
    pq.write_table(pa.table({"number": [1]}), tmp_path / "odd.parquet")
    for args, words in (
        ((*base, "--effects", effects, "--order", "day"), "say key or partition"),
        ((*base, "--effects", str(tmp_path / "none")), "cannot read"),
        ((*base, "--effects", str(tmp_path / "bare.parquet")), "must tell their order"),
        ((*base, "--effects", str(tmp_path / "odd.parquet")), "has no column sequence: it has number"),
        ((*base, "--effects", "stream:"), "names no stream"),
        ((*base, "--effects", effects, "--first", "900"), "nothing of it is to be audited"),
        ((*base, "--effects", effects, "--subjects", "a.b"), "--subjects filters a stream"),
        (("--effects", effects), "Missing option '--stream'"),
    ):
        code, _, err = invoke(*args)
        assert (code, words in err) == (2, True), (args, err)
    with pytest.raises(ConfigError, match="has no column sequence"):
        Published(stream="S", path=str(tmp_path / "odd.parquet")).table(spark)
    with pytest.raises(UsageError, match="name effects"):
        Effects().table(spark, Published(stream="S", path=published, first=1, last=2))


def test_the_report_opens_in_a_browser_without_an_error_and_loads_nothing(report: Report, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    text = page.read_text()
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("<svg") == text.count('role="img"') == 4
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on PATH: install the package chromium to see the report rendered")
    shot = tmp_path / "report.png"
    done = headless(browser, tmp_path, f"--screenshot={shot}", "--window-size=1100,4200", page.as_uri())
    assert "CONSOLE" not in done.stderr, done.stderr
    assert shot.stat().st_size > 50_000
    seen = headless(browser, tmp_path, "--dump-dom", page.as_uri())
    assert "a promise is broken" in seen.stdout


def headless(browser: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
    more: list[Any] = [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *args]
    done = subprocess.run([browser, *flags, *more], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return done
