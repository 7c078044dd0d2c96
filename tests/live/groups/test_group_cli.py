"""`parti group`: the commands of the reference's tool, usable in scripts, on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from parti.cli import main
from parti.testing import NatsServer, eventually_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions

COLUMNS = "GROUP PARTITION OWNER PINNED STATE ACK-FLOOR LAST-SEQ LAG LAG-SECONDS INFLIGHT REDELIVERED"


class Cli:
    """Runs `parti group` in this process against one server, and publishes to its stream."""

    def __init__(self, server: NatsServer, stream: str) -> None:
        self.url, self.stream = server.url, stream
        with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
            subjects = [f"{stream}.>", *(f"{partition}.{stream}" for partition in range(8))]
            connection.api(f"STREAM.CREATE.{stream}", {"name": stream, "subjects": subjects, "allow_direct": True})

    def __call__(self, line: str, code: int = 0, stdin: str | None = None) -> Result:
        words = line.replace("STREAM", self.stream).split()
        result = CliRunner().invoke(main, ["group", *words, "--server", self.url], input=stdin)
        assert result.exit_code == code, (line, result.output, result.stderr)
        return result

    def json(self, line: str, code: int = 0) -> Any:
        return json.loads(self(f"{line} --json", code).stdout.splitlines()[-1])

    def publish(self, count: int, subject: str = "STREAM.{n}") -> None:
        with BlockingConnection.open(ConnectOptions(servers=(self.url,))) as connection:
            for n in range(count):
                connection.request(subject.replace("STREAM", self.stream).format(n=n), b"%d" % n)


@pytest.fixture
def cli(server: NatsServer, name: str) -> Cli:
    return Cli(server, name)


def test_an_elastic_group_from_its_creation_to_its_end(cli: Cli) -> None:
    made = cli.json("elastic create STREAM g 6 --filter STREAM.*.* --wildcards 2,1 --max-buffered-msgs 500")
    assert made["partitioning_filters"] == [{"filter": f"{cli.stream}.*.*", "partitioning_wildcards": [2, 1]}]
    cli("elastic create STREAM g 6 --filter STREAM.*.* --wildcards 2,1 --max-buffered-msgs 500")
    assert "use those, or delete it" in cli("elastic create STREAM g 7", code=1).stderr
    assert cli("elastic ls STREAM").stdout == "g\n"
    assert cli.json("elastic list STREAM") == ["g"]
    planned = cli.json("elastic add STREAM g m1 m2 --dry-run")
    assert (planned["executed"], len(planned["moves"])) == (False, 6)
    assert cli.json("elastic info STREAM g")["members"] == []
    assert cli.json("elastic add STREAM g m1 m2")["members"] == {"m1": [0, 1, 2], "m2": [3, 4, 5]}
    dropped = cli.json("elastic drop STREAM g m1")
    assert dropped["moves"] == [{"partition": p, "from": "m1", "to": "m2"} for p in (0, 1, 2)]
    assert "PARTITIONS" in cli("elastic info STREAM g").stdout
    cli("elastic cm STREAM g a:0,1,2,3 b:5,4")
    assert "change those, or delete them first" in cli("elastic add STREAM g m9", code=1).stderr
    assert "member_mappings" in cli.json("elastic info STREAM g")
    cli("elastic dm STREAM g")
    plan = cli.json("elastic rm STREAM g")
    assert (plan["executed"], plan["streams"]) == (False, [f"{cli.stream}-g"])
    assert "would delete" in cli("elastic delete STREAM g --dry-run").stdout
    assert "nothing was deleted" in cli("elastic delete STREAM g", code=1).stderr  # nobody there to answer
    assert cli.json("elastic ls STREAM") == ["g"]
    assert "deleted" in cli("elastic delete STREAM g -f").stdout
    assert cli.json("elastic ls STREAM") == []
    assert "there is no elastic group" in cli("elastic info STREAM g", code=1).stderr


def test_a_static_group_from_its_creation_to_its_end(cli: Cli) -> None:
    cli("static create balanced STREAM g 4 m2 m1 --filter STREAM")
    again = cli.json("static create balanced STREAM g 4 m1 m2 --filter STREAM")  # the reference refuses this
    assert (again["members"], again["filters"]) == (["m2", "m1"], [cli.stream])
    assert cli.json("static create mapped STREAM h 2 a:1 b:0")["member_mappings"][0] == {
        "member": "a",
        "partitions": [1],
    }
    assert cli.json("static ls STREAM") == ["g", "h"]
    info = cli.json("static minfo STREAM g m1")
    assert (info["listed"], info["active"]) == (True, False)
    assert "no instance of member" in cli("static sd STREAM g m1", code=1).stderr
    cli("static rm STREAM g --execute")
    assert cli.json("static ls STREAM") == ["h"]


def test_wrong_input_is_one_line_and_exit_code_two(cli: Cli) -> None:
    for line in (
        "elastic create STREAM g 0",
        "elastic create STREAM a.b 2",
        "elastic create STREAM g 2 --filter a.*.* --wildcards 1,x",
        "elastic create STREAM g 2 --wildcards 1",
        "elastic create STREAM g 2 --filter a.b",
        "elastic create STREAM g 2 --start-time yesterday",
        "static create mapped STREAM g 2 a",
        "elastic add STREAM g",
        "elastic consume STREAM g m --sleep 5",
        "static consume STREAM g m --automatic",
        "elastic lst STREAM",
    ):
        result = cli(line, code=2)
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
    assert "Did you mean 'ls'" in cli("elastic lss STREAM", code=2).stderr


def test_describe_shows_each_partition_with_its_owner_and_lag(cli: Cli) -> None:
    cli("elastic create STREAM g 2")
    cli("elastic add STREAM g m1")
    cli.publish(10)

    def lag() -> int:
        return sum(row["lag"] for row in cli.json("elastic describe STREAM g"))

    eventually_blocking(lambda: lag() == 10, what="the work queue")
    rows = cli.json("elastic describe STREAM g")
    *columns, waiting = rows[0]
    assert " ".join(columns).upper().replace("_", "-").replace("IN-FLIGHT", "INFLIGHT") == COLUMNS
    assert (waiting, rows[0][waiting]) == ("next_to_source", None)
    assert [(row["partition"], row["owner"], row["state"]) for row in rows] == [
        (0, "m1", "absent"),
        (1, "m1", "absent"),
    ]
    table = cli("elastic describe STREAM g").stdout
    assert table.splitlines()[0].split() == COLUMNS.split()


def test_consume_prints_messages_and_stops_after_the_wanted_number(cli: Cli) -> None:
    cli("elastic create STREAM g 2")
    cli("elastic add STREAM g m1")
    cli.publish(5)
    result = cli("elastic consume STREAM g m1 --count 3 --sleep 0 --json")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["sequence"] for line in lines if line["type"] == "message"] == [1, 2, 3]
    assert [line["kind"] for line in lines if line["type"] == "event"][:3] == ["assigned", "joined", "pinned"]
    result = cli("elastic join STREAM g m1 --count 2 --sleep 1ms --order key --max-ack-pending 10")
    assert f"{cli.stream}.3 seq=4 3" in result.stdout
    assert "2 messages" in result.stderr


def test_consuming_from_a_group_that_is_not_there_is_exit_code_one(cli: Cli) -> None:
    assert "there is no elastic group" in cli("elastic consume STREAM g m1", code=1).stderr
    assert "there is no static group" in cli("static consume STREAM g m1", code=1).stderr


@pytest.mark.slow
def test_metrics_and_health_of_a_consuming_member_are_served(cli: Cli) -> None:
    cli("static create balanced STREAM g 1 m1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(cli, f"static consume STREAM g m1 --set observe.listen=127.0.0.1:{port}")
    try:
        until(process, "joined")
        cli.publish(2, subject="0.STREAM")
        until(process, "pinned")

        def page(path: str) -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
                return str(answer.read().decode())

        eventually_blocking(lambda: 'parti_group_messages_total{outcome="ack"} 2.0' in page("/metrics"), what="metrics")
        assert "parti_group_pinned 1.0" in page("/metrics")
        assert json.loads(page("/readyz"))["checks"] == {"group-g-m1": "ok"}
    finally:
        process.terminate()
        process.communicate(timeout=60)


def start(cli: Cli, line: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "parti.cli", "group", *line.replace("STREAM", cli.stream).split(), "-s", cli.url]
    return subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(process: subprocess.Popen[str], wanted: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if wanted in (found["type"], found.get("kind")):
            return found
    raise AssertionError(f"no {wanted}: {process.stderr.read() if process.stderr else ''}")


@pytest.mark.slow
def test_sigterm_ends_consuming_after_the_message_in_hand_with_exit_code_zero(cli: Cli) -> None:
    cli("static create balanced STREAM g 1 m1")
    process = start(cli, "static consume STREAM g m1 --sleep 300ms")
    until(process, "joined")
    cli.publish(2, subject="0.STREAM")
    until(process, "message")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert '"kind":"stopped"' in output
    with BlockingConnection.open(ConnectOptions(servers=(cli.url,))) as connection:
        info = connection.api(f"CONSUMER.INFO.{cli.stream}.g-m1")
    assert (info["ack_floor"]["stream_seq"], info["num_ack_pending"]) == (1, 0)


@pytest.mark.slow
def test_a_frozen_member_joins_again_and_handles_nothing_from_before_the_freeze(cli: Cli) -> None:
    cli("elastic create STREAM g 2")
    cli("elastic add STREAM g m1")
    process = start(cli, "elastic consume STREAM g m1 --sleep 0 --ack-wait 1s")
    try:
        until(process, "joined")
        cli.publish(1)
        until(process, "message")

        def queue(counter: str) -> int:
            with BlockingConnection.open(ConnectOptions(servers=(cli.url,))) as connection:
                return int(connection.api(f"STREAM.INFO.{cli.stream}-g")["state"][counter])

        eventually_blocking(lambda: queue("messages") == 0, what="the acknowledgement")
        os.kill(process.pid, signal.SIGSTOP)
        eventually_blocking(lambda: queue("consumer_count") == 0, timeout=60, what="the consumer's end")
        os.kill(process.pid, signal.SIGCONT)
        cli.publish(1)
        assert until(process, "joined")
        assert until(process, "message")["sequence"] == 2
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_group_error_while_consuming_is_exit_code_one(cli: Cli) -> None:
    cli("static create balanced STREAM g 2 m1")
    process = start(cli, "static consume STREAM g m1")
    until(process, "joined")
    from parti.wire.api import JetStreamApi
    from parti.wire.connect import connect
    from parti.wire.kv import KeyValue

    async def tamper() -> None:
        async with await connect(ConnectOptions(servers=(cli.url,))) as connection:
            bucket = KeyValue(JetStreamApi(connection), "static-consumer-groups")
            await bucket.put(f"{cli.stream}.g", b'{"max_members":3,"members":["m1"]}')

    asyncio.run(tamper())
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "changed while it was in use" in errors


def test_automatic_members_need_no_administrator(cli: Cli) -> None:
    cli("elastic create STREAM g 2")
    cli.publish(2)
    result = cli("elastic consume STREAM g me --automatic --count 2 --sleep 0 --json")
    assert '"type":"message"' in result.stdout
    assert cli.json("elastic info STREAM g")["member_mappings"] == []


def test_the_prompt_asks_for_what_is_missing_and_speaks_the_same_verbs(cli: Cli) -> None:
    stream = cli.stream
    lines = [
        "help",
        f"create {stream} g 2",
        "add",
        stream,
        "g",
        "m1 m2",
        f"info {stream} g",
        "processing-time 1ms",
        "static",
        f"create balanced {stream} s 2 m1",
        f"ls {stream}",
        "nonsense",
        "elastic",
        f"consume {stream} g m1",
        "jobs",
        "stop",
        f"createmapping {stream} g m1:0 m2:1",
        f"delete {stream} g",
        "y",
        f"ls {stream}",
        "quit",
    ]
    result = CliRunner().invoke(main, ["group", "prompt", "-s", cli.url], input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    assert "[elastic]>" in result.stdout
    assert "[static]>" in result.stdout
    assert "consuming beside the prompt" in result.stderr
    assert f"0: elastic {stream} g m1" in result.stdout
    assert "No such command 'nonsense'" in result.stderr
    assert "will delete the elastic group g" in result.stdout
    assert cli.json("static ls STREAM") == ["s"]
    assert cli.json("elastic ls STREAM") == []


def test_help_needs_no_server() -> None:
    for line in ("group --help", "group elastic --help", "group static create balanced --help", "group prompt --help"):
        assert CliRunner().invoke(main, line.split()).exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_a_completion_script(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert "_PARTI_COMPLETE" in result.stdout


@pytest.mark.slow
def test_streams_groups_and_members_are_completed(cli: Cli, tmp_path: Path) -> None:
    cli("elastic create STREAM grouped 2")
    cli("elastic add STREAM grouped memberly")

    def complete(words: str) -> str:
        line = f"parti group elastic {words}".replace("STREAM", cli.stream)
        environ = os.environ | {
            "_PARTI_COMPLETE": "bash_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
            "NATS_URL": cli.url,
        }
        command = [sys.executable, "-m", "parti.cli"]
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout

    assert f"plain,{cli.stream}" in complete("info STREA"[:5] + cli.stream[:6])
    assert "plain,grouped" in complete("info STREAM gro")
    assert "plain,memberly" in complete("step-down STREAM grouped mem")


def test_flags_may_stand_before_the_verb_as_in_the_reference(cli: Cli) -> None:
    cli("elastic create STREAM g 2 --filter STREAM.*")
    words = ["group", "--server", cli.url, "elastic", "--json", "ls", cli.stream]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, json.loads(result.stdout)) == (0, ["g"])
    cli("elastic add STREAM g m1")
    words = [
        "group",
        f"--server={cli.url}",
        "elastic",
        "--sleep",
        "1ms",
        "consume",
        cli.stream,
        "g",
        "m1",
        "--count",
        "1",
    ]
    cli.publish(1)
    assert CliRunner().invoke(main, words).exit_code == 0


def test_a_deletion_asks_and_a_piped_answer_counts(cli: Cli) -> None:
    cli("elastic create STREAM g 2 --filter STREAM.*")
    words = ["group", "elastic", "delete", cli.stream, "g", "-s", cli.url]
    refused = CliRunner().invoke(main, words, input="n\n")
    assert (refused.exit_code, cli.json("elastic ls STREAM")) == (1, ["g"])
    assert cli.json("elastic delete STREAM g")["executed"] is False
    agreed = CliRunner().invoke(main, words, input="y\n")
    assert (agreed.exit_code, cli.json("elastic ls STREAM")) == (0, [])


def test_a_dry_run_is_refused_where_the_change_would_be(cli: Cli) -> None:
    cli("elastic create STREAM g 2 --filter STREAM.*")
    cli("elastic cm STREAM g m1:0 m2:1")
    for verb in ("add", "drop"):
        assert "change those" in cli(f"elastic {verb} STREAM g m9 --dry-run", code=1).stderr
    assert cli.json("elastic info STREAM g")["member_mappings"] != []


def test_a_prompt_begins_with_its_kind_and_deletes_what_it_showed(cli: Cli) -> None:
    cli("static create balanced STREAM one 2 m1")
    cli("static create balanced STREAM two 2 m1")
    lines = ["delete", cli.stream, "one", "y", "quit"]
    words = ["group", "static", "prompt", "-s", cli.url]
    result = CliRunner().invoke(main, words, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    assert "[static]>" in result.stdout
    assert cli.json("static ls STREAM") == ["two"]


def test_a_member_without_an_instance_is_an_answer_and_for_scripts_a_failure(cli: Cli) -> None:
    cli("static create balanced STREAM g 2 m1")
    assert cli.json("static minfo STREAM g m1")["active"] is False
    cli("static minfo STREAM g m1 --check", code=1)
    assert "no instance" in cli("static sd STREAM g m1 --json", code=1).stderr
