"""The configuration: precedence, origins, refusals, and secrets that stay hidden."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.pretty import pretty_repr

from parti.backoff import Backoff
from parti.config import (
    Config,
    ControlConfig,
    LogLevel,
    NatsSection,
    ObserveSection,
    RetrySection,
    WorkerConfig,
    env_name,
    known_keys,
    load_config,
)
from parti.config.load import sections
from parti.config.setting import SettingKey, Unit
from parti.errors import ConfigError
from parti.wire.configured import configured_backoff, configured_options
from parti.wire.options import ConnectOptions


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "some.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_defaults_apply_where_nothing_is_set() -> None:
    loaded = load_config(environ={})
    assert loaded.config == Config()
    assert {str(origin) for origin in loaded.origins.values()} == {"default"}


def test_flag_wins_over_environment_over_file_over_default() -> None:
    path = write('[retry]\nretry_base = "300ms"\nretry_max = "7s"\nretry_multiplier = 2\n')
    environ = {"PARTI_RETRY__RETRY_BASE": "400ms", "PARTI_RETRY__RETRY_MAX": "8s"}
    loaded = load_config(path, environ=environ, flags={"retry.retry_base": "500ms"})
    assert loaded.config.retry == RetrySection(retry_base=0.5, retry_max=8.0, retry_multiplier=2.0)
    assert {name: str(origin) for name, origin in loaded.origins.items() if name.startswith("retry.")} == {
        "retry.retry_base": "flag",
        "retry.retry_max": "env PARTI_RETRY__RETRY_MAX",
        "retry.retry_multiplier": "file some.toml:4",
        "retry.max_control_retries": "default",
    }


def test_the_file_is_the_named_one_then_parti_config_then_parti_toml() -> None:
    for name, retries in (("named.toml", 1), ("env.toml", 2), ("parti.toml", 3)):
        write(f"[retry]\nmax_control_retries = {retries}\n", name)
    environ = {"PARTI_CONFIG": "env.toml"}
    assert load_config("named.toml", environ=environ).config.retry.max_control_retries == 1
    assert load_config(environ=environ).config.retry.max_control_retries == 2
    assert load_config(environ={}).config.retry.max_control_retries == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[retry]\nretry_bas = "1s"',
            "unknown key 'retry.retry_bas' (file some.toml:2): did you mean 'retry.retry_base'?",
        ),
        ("[rety]\n", "unknown section 'rety' (file some.toml:1): did you mean [retry]?"),
        ("[zzz]\n", "unknown section 'zzz' (file some.toml:1): the sections are nats, retry, observe"),
        ("retry = 3", "retry (file some.toml:1) must be a table: write [retry]"),
        ("[retry]\nzzz = 1", "unknown key 'retry.zzz' (file some.toml:2): [retry] has retry_base, retry_multiplier"),
        ("[retry]\nretry_base = 3", "retry.retry_base (file some.toml:2): '3': it has no unit"),
        ('[retry]\nretry_base = "10s"', "retry.retry_max (5s) is below retry.retry_base (10s)"),
        ("[retry]\nmax_control_retries = 0", "0 is too small; the least is 1"),
        ("[retry]\nretry_multiplier = 99", "99.0 is too large; the most is 10.0"),
        ('[retry]\nmax_control_retries = "many"', "'many' is not a whole number"),
        ("[retry]\nretry_multiplier = nan", "nan is not a number to calculate with"),
        ('[observe]\nlog_level = "loud"', "'loud' is not one of debug, info, warning, error"),
        ('[observe]\nlisten = "9464"', "observe.listen is '9464': write host:port"),
        ('[observe]\nlisten = "localhost:99999"', "observe.listen is 'localhost:99999'"),
        ('[nats]\ntls_first = "perhaps"', "'perhaps' is not true or false"),
        ("[nats]\nservers = [1, 2]", "******** is not a list of texts"),
        ("[nats]\npassword = 5", "nats.password (file some.toml:2): ******** is not a text"),
        ("[retry\n", "the configuration file some.toml is no valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place_and_what_to_do(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(text), environ={})
    assert message in str(error.value)


def test_a_file_that_was_named_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file missing\.toml: No such file"):
        load_config("missing.toml", environ={})
    with pytest.raises(ConfigError, match="missing"):
        load_config(environ={"PARTI_CONFIG": "missing.toml"})
    Path("binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config("binary.toml", environ={})


def test_an_unknown_variable_is_refused_with_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"env PARTI_RETRY__RETRY_BAES.*'retry\.retry_base'"):
        load_config(environ={"PARTI_RETRY__RETRY_BAES": "1s"})


def test_a_variable_with_one_underscore_too_few_is_refused_instead_of_ignored() -> None:
    with pytest.raises(ConfigError, match="did you mean PARTI_RETRY__RETRY_BASE"):
        load_config(environ={"PARTI_RETRY_RETRY_BASE": "1s"})


def test_variables_of_other_parts_are_left_alone() -> None:
    assert load_config(environ={"PARTI_NATS_SERVER": "nats-server", "HOME": "x"}).config == Config()


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'observe\.log_levl' \(flag\): did you mean 'observe\.log_level'"
    ):
        load_config(environ={}, flags={"observe.log_levl": "debug"})


def test_texts_from_the_environment_become_typed_values() -> None:
    environ = {
        "PARTI_NATS__SERVERS": "nats://a:1, nats://b:2",
        "PARTI_NATS__TLS_FIRST": "true",
        "PARTI_RETRY__MAX_CONTROL_RETRIES": "9",
        "PARTI_OBSERVE__LOG_LEVEL": "debug",
    }
    config = load_config(environ=environ).config
    assert config.nats.servers == ("nats://a:1", "nats://b:2")
    assert config.nats.tls_first is True
    assert config.retry.max_control_retries == 9
    assert config.observe.log_level is LogLevel.DEBUG


@given(
    st.dictionaries(
        st.sampled_from([*known_keys(), "retry", "retry.x", "x.y", ""]),
        st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text())),
        max_size=5,
    )
)
def test_any_values_give_a_config_or_a_config_error(flags: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        load_config(environ={}, flags=flags)


def test_the_configuration_cannot_be_changed_after_loading() -> None:
    config = load_config(environ={}).config
    with pytest.raises(AttributeError):
        config.retry.retry_base = 1.0  # type: ignore[misc]


def test_no_secret_appears_in_any_representation() -> None:
    environ = {
        "PARTI_NATS__PASSWORD": "hunter2",
        "PARTI_NATS__USER": "me",
        "PARTI_NATS__SERVERS": "nats://u:hunter2@h:1,u:hunter2@h:2,nats://hunter2@h:3",
        "PARTI_NATS__NKEY_SEED": "hunter2",
        "PARTI_NATS__CREDS": "hunter2",
    }
    loaded = load_config(environ=environ)
    shown = [repr(loaded), str(loaded.config), pretty_repr(loaded.config)]
    shown += [key.show(value) for _, key, value, _ in loaded.rows()]
    assert "hunter2" not in "".join(shown)
    assert "nats://********@h:1" in repr(loaded)


def test_a_listen_address_gives_host_and_port() -> None:
    assert ObserveSection(listen="127.0.0.1:9464").address() == ("127.0.0.1", 9464)
    assert ObserveSection(listen="[::1]:0").address() == ("::1", 0)


def test_every_key_has_a_one_line_reason_and_its_own_variable() -> None:
    for name, key in known_keys().items():
        assert 10 < len(key.setting.reason) < 100, name
        assert "\n" not in key.setting.reason, name
    assert len({env_name(name) for name in known_keys()}) == len(known_keys())


def test_the_nats_section_has_the_fields_and_defaults_of_the_connect_options() -> None:
    options = {field.name: field.default for field in dataclasses.fields(ConnectOptions)}
    section = {name: getattr(NatsSection(), name) for name in NatsSection.__struct_fields__ if name != "context"}
    assert section == options


def test_the_retry_section_is_the_backoff_that_the_code_uses() -> None:
    assert configured_backoff(load_config(environ={})) == Backoff()
    custom = load_config(environ={}, flags={"retry.retry_base": "1s", "retry.max_control_retries": "2"})
    assert configured_backoff(custom) == Backoff(base=1.0, max_tries=2)


def test_sections_are_declared_in_one_place() -> None:
    assert list(sections()) == ["nats", "retry", "observe", "worker", "control", "deliver"]


class TestConnectOptions:
    """What the [nats] section, the variables of the `nats` CLI and its contexts add up to."""

    def options(
        self, environ: dict[str, str], path: Path | None = None, **flags: str
    ) -> tuple[dict[str, object], dict[str, str]]:
        environ = {"HOME": str(Path.cwd()), **environ}
        loaded = load_config(path, environ=environ, flags={f"nats.{name}": value for name, value in flags.items()})
        resolved = configured_options(loaded, environ)
        values = dataclasses.asdict(resolved.options)
        set_fields = {name: str(origin) for name, origin in resolved.origins.items() if str(origin) != "default"}
        return values, set_fields

    def context(self, name: str, content: str, *, selected: bool = False) -> None:
        folder = Path.cwd() / ".config" / "nats"
        (folder / "context").mkdir(parents=True, exist_ok=True)
        (folder / "context" / f"{name}.json").write_text(content)
        if selected:
            (folder / "context.txt").write_text(name)

    def test_the_variables_of_the_nats_cli_win_over_the_file(self) -> None:
        path = write('[nats]\nservers = ["nats://file:1"]\nuser = "me"\npassword = "p"\ndomain = "hub"\n')
        values, origins = self.options({"NATS_URL": "nats://env:2", "NATS_TOKEN": "t"}, path)
        assert values["servers"] == ("nats://env:2",)
        assert (values["user"], values["password"], values["token"]) == (None, None, "t")
        assert origins == {"servers": "env NATS_URL", "token": "env NATS_TOKEN", "domain": "file some.toml:5"}

    def test_our_own_variables_and_flags_win_over_those_of_the_nats_cli(self) -> None:
        environ = {"NATS_URL": "nats://env:2", "PARTI_NATS__SERVERS": "nats://ours:3"}
        assert self.options(environ)[0]["servers"] == ("nats://ours:3",)
        values, origins = self.options(environ, servers="nats://flag:4")
        assert values["servers"] == ("nats://flag:4",)
        assert origins == {"servers": "flag"}

    def test_user_and_password_variables_are_named_as_origins(self) -> None:
        _, origins = self.options({"NATS_USER": "me", "NATS_PASSWORD": "p"})
        assert origins == {"user": "env NATS_USER", "password": "env NATS_PASSWORD"}

    def test_a_context_fills_what_nobody_else_set(self) -> None:
        self.context("prod", '{"url": "nats://ctx:5", "user": "u", "password": "p", "jetstream_domain": "d"}')
        values, origins = self.options({}, context="prod")
        assert (values["servers"], values["user"], values["domain"]) == (("nats://ctx:5",), "u", "d")
        assert origins == dict.fromkeys(("servers", "user", "password", "domain"), "nats context prod")

    def test_the_selected_context_is_not_used_for_servers_that_were_named(self) -> None:
        self.context("prod", '{"url": "nats://ctx:5", "user": "u", "password": "p"}', selected=True)
        assert self.options({})[1]["servers"] == "nats context prod"
        values, origins = self.options({}, servers="nats://flag:4")
        assert values["user"] is None
        assert origins == {"servers": "flag"}

    def test_credentials_inside_a_url_are_attributed_to_the_url(self) -> None:
        values, origins = self.options({"NATS_URL": "nats://u:p@env:2"})
        assert values["servers"] == ("nats://env:2",)
        assert origins == dict.fromkeys(("servers", "user", "password"), "env NATS_URL")


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, k in known_keys().items() if k.setting.at_least is not None])
def test_a_section_made_in_python_is_held_to_the_bounds_of_a_file(name: str, key: SettingKey) -> None:
    section, _, field = name.partition(".")
    low = key.setting.at_least
    assert low is not None
    with pytest.raises(ConfigError, match=rf"{section}\.{field}: .* (is too small|is below 0)"):
        sections()[section](**{field: type(key.default)(low - 1)})


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: WorkerConfig(stream="s", ack_wait="30s"), r"worker.ack_wait: '30s' is no number of seconds"),  # type: ignore[arg-type]
        (lambda: WorkerConfig(stream="s", lanes="keys"), r"worker.lanes: 'keys' is not one of partition, key"),  # type: ignore[arg-type]
        (lambda: WorkerConfig(stream="s", max_subjects=2.5), r"worker.max_subjects: 2.5 is not a whole number"),  # type: ignore[arg-type]
        (lambda: WorkerConfig(stream="s", concurrency=True), r"worker.concurrency: True is not a whole number"),
        (lambda: WorkerConfig(stream=None), r"worker.stream: None is not a text"),  # type: ignore[arg-type]
        (lambda: ControlConfig(heartbeat_ttl=float("nan")), r"control.heartbeat_ttl: nan is not a number"),
        (lambda: ControlConfig(strategy="stickyy"), r"control.strategy: 'stickyy' is not one of sticky"),  # type: ignore[arg-type]
        (lambda: ControlConfig(partitions=(1, 2)), r"control.partitions: .* is not a list of texts"),  # type: ignore[arg-type]
        (lambda: ControlConfig(worker_id_prefix="a.b"), r"control.worker_id_prefix 'a.b' contains a dot"),
        (lambda: ControlConfig(alert_after=("1s", "2s", "3s", "never")), r"'never': it is not a duration"),
        (lambda: WorkerConfig(consumer_prefix="a b"), r"worker.consumer_prefix 'a b': token 1 contains a blank"),
        (lambda: WorkerConfig(subject_template="x..{partition}"), r"worker.subject_template .*: token 2 is empty"),
    ],
)
def test_a_section_made_in_python_refuses_what_a_file_would(made: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        made()


_ANYTHING = st.one_of(
    st.sampled_from([-1, -0.5, 0, 0.5, 3, 2**63, 1e300, float("inf"), float("nan"), True, None, "x", "5s", b"x"]),
    st.floats(-1e6, 1e6).map(lambda seconds: round(seconds, 6) + 0.0),
    st.integers(),
    st.sampled_from([("a",), (1,), ["a"], ()]),
)


@given(st.sampled_from(sorted(known_keys())), _ANYTHING)
def test_what_python_may_set_a_file_may_set_too(name: str, value: object) -> None:
    key, (section, _, field) = known_keys()[name], name.partition(".")
    try:
        sections()[section](**{field: value})
    except ConfigError:
        return
    written: object = list(value) if isinstance(value, tuple) else value
    if key.setting.unit and isinstance(value, int | float):
        written = f"{Decimal(repr(value)):f}{'s' if key.setting.unit is Unit.DURATION else 'B'}"
    assert getattr(load_config(environ={}, flags={name: written}).section(section), field) == pytest.approx(value)
