"""Logs: events with fields, and no secrets, whatever a caller logs."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from parti.config import LogFormat, LogLevel, ObserveSection
from parti.config.redact import is_secret_name, redact_urls
from parti.observe.logs import configure_logging, get_logger


@pytest.fixture(autouse=True)
def restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def written(format: LogFormat = LogFormat.JSON, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(ObserveSection(log_format=format, log_level=level), stream=stream)
    return stream


def test_an_event_is_one_json_line_with_its_fields() -> None:
    stream = written()
    get_logger("handoff", worker="w-3").info("handoff.committed", partition=7, took=0.083)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "handoff.committed",
        "component": "handoff",
        "worker": "w-3",
        "partition": 7,
        "took": 0.083,
        "level": "info",
    }


def test_where_nobody_configured_logging_warnings_go_to_stderr_masked_and_nothing_else_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()
    log = get_logger("x", worker="w-3")
    log.debug("quiet")
    log.info("quiet")
    log.warning("loud", password="hunter2")
    log.bind(more=1).error("louder")
    out, err = capsys.readouterr()
    assert out == ""
    loud, louder = (json.loads(line) for line in err.splitlines())
    assert (loud["event"], loud["component"], loud["worker"], louder["more"]) == ("loud", "x", "w-3", 1)
    assert "hunter2" not in err


def test_a_logger_that_was_made_before_the_configuration_follows_it() -> None:
    structlog.reset_defaults()
    log = get_logger("x")
    stream = written()
    log.info("event")
    assert json.loads(stream.getvalue())["event"] == "event"


def test_a_logger_can_be_copied_with_what_holds_it() -> None:
    log = pickle.loads(pickle.dumps(copy.deepcopy(get_logger("x", a=1))))
    stream = written()
    log.info("event")
    assert json.loads(stream.getvalue())["a"] == 1


def test_events_below_the_level_are_not_written() -> None:
    stream = written(level=LogLevel.WARNING)
    log = get_logger("x")
    log.info("quiet")
    log.warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_auto_writes_json_where_nobody_watches() -> None:
    stream = written(LogFormat.AUTO)
    get_logger("x").info("event")
    assert json.loads(stream.getvalue())["event"] == "event"


@pytest.mark.parametrize("format", [LogFormat.JSON, LogFormat.CONSOLE])
def test_secrets_are_masked_in_every_format(format: LogFormat) -> None:
    stream = written(format)
    get_logger("x").info(
        "connecting to nats://me:hunter2@host:4222",
        password="hunter2",
        nkey_seed="hunter2",
        options={"token": "hunter2", "nested": [{"authorization": "hunter2"}]},
        servers=["nats://me:hunter2@host:1", "tls://hunter2@host:2"],
        creds="hunter2",
        user="me",
    )
    assert "hunter2" not in stream.getvalue()
    assert "********" in stream.getvalue()
    assert "me" in stream.getvalue()


@pytest.mark.parametrize("format", [LogFormat.JSON, LogFormat.CONSOLE])
def test_a_traceback_shows_no_local_variables(format: LogFormat) -> None:
    stream = written(format)
    password = "hunter" + "2"
    try:
        password.index("?")
    except ValueError:
        get_logger("x").exception("failed")
    assert "Traceback" in stream.getvalue()
    assert "hunter2" not in stream.getvalue()


def test_a_value_that_contains_itself_does_not_hang_the_logger() -> None:
    stream = written(LogFormat.CONSOLE)
    loop: dict[str, object] = {}
    loop["self"] = loop
    get_logger("x").info("event", value=loop)
    assert "event" in stream.getvalue()


def test_numbers_keep_their_value_even_under_a_secret_name() -> None:
    stream = written()
    get_logger("x").info("parsed", max_token=3, seed=42)
    event = json.loads(stream.getvalue())
    assert (event["max_token"], event["seed"]) == (3, 42)


@pytest.mark.parametrize("name", ["password", "PASSWORD", "db_password", "token", "nkey_seed", "jwt", "api_key"])
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["creds_file", "user", "tokens_in_subject", "partition", "key", "compass"])
def test_names_of_other_fields_are_not(name: str) -> None:
    assert not is_secret_name(name)


def test_a_password_with_an_at_sign_is_masked_whole() -> None:
    assert redact_urls("see nats://u:p@ss@host:1/x and tls://h") == "see nats://********@host:1/x and tls://h"


def test_two_threads_may_write_their_first_event_at_once() -> None:
    """The import of structlog takes a while; a thread that logs meanwhile found half a module, and died of it."""
    program = """
import importlib.abc, importlib.machinery, sys, threading
from parti.observe.logs import get_logger

half, go_on = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "structlog._base" and not half.is_set():
            half.set()
            go_on.wait(20)
        return None

sys.meta_path.insert(0, Slow())
log = get_logger("test")
first = threading.Thread(target=lambda: log.warning("first"))
first.start()
assert half.wait(20)
threading.Timer(0.2, go_on.set).start()
log.warning("second")
first.join(20)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "first" in ran.stderr
    assert "second" in ran.stderr
