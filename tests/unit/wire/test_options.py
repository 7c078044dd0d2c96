import json
import os
import pickle
import ssl
from pathlib import Path

import nkeys
import pytest

from parti.errors import ConfigError
from parti.wire.options import ConnectOptions


def frame(options: ConnectOptions, **info: object) -> dict[str, object]:
    line = options.connect_frame(info)
    assert line.startswith(b"CONNECT {")
    assert line.endswith(b"}\r\n")
    body: dict[str, object] = json.loads(line[8:])
    return body


def seed() -> str:
    return str(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())


def creds_text(user_seed: str) -> str:
    return (
        "-----BEGIN NATS USER JWT-----\neyJ0.body.sig\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user_seed}\n------END USER NKEY SEED------\n"
    )


def write_context(home: Path, name: str, *, selected: bool = False, **content: object) -> dict[str, str]:
    folder = home / "nats" / "context"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content))
    if selected:
        (home / "nats" / "context.txt").write_text(f"{name}\n")
    return {"XDG_CONFIG_HOME": str(home)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nats://a:1234", ["nats://a:1234"]),
        ("a", ["nats://a:4222"]),
        ("a:99, tls://b", ["nats://a:99", "tls://b:4222"]),
        ("nats://[::1]:4333", ["nats://[::1]:4333"]),
        ("NATS://Host/", ["nats://host:4222"]),
    ],
)
def test_addresses_are_read_as_the_nats_cli_reads_them(text: str, expected: list[str]) -> None:
    assert [address.url for address in ConnectOptions(servers=(text,)).server_list()] == expected


@pytest.mark.parametrize("text", ["", "ws://a", "nats://", "a:notaport", "nats://a:1/path", "a:99999"])
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        ConnectOptions(servers=(text,))


def test_a_malformed_address_is_not_quoted_because_it_may_hold_a_password() -> None:
    with pytest.raises(ConfigError) as raised:
        ConnectOptions(servers=("nats://u:hunter2@host:port",))
    assert "hunter2" not in str(raised.value)
    assert "hunter2" not in repr(raised.value.__cause__)


def test_credentials_in_a_url_are_moved_out_and_percent_decoded() -> None:
    options = ConnectOptions(servers=("nats://bob:p%40ss%2Fword@a:1,nats://bob:p%40ss%2Fword@b:2",))
    assert (options.user, options.password) == ("bob", "p@ss/word")
    assert options.servers == ("nats://a:1", "nats://b:2")


def test_a_lone_user_in_a_url_is_a_token() -> None:
    assert ConnectOptions(servers=("nats://t0ken@a",)).token == "t0ken"


def test_urls_with_different_credentials_are_refused() -> None:
    with pytest.raises(ConfigError, match="different credentials"):
        ConnectOptions(servers=("nats://a:b@x,nats://c:d@y",))


def test_a_url_that_contradicts_the_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="password is given twice"):
        ConnectOptions(servers=("nats://a:b@x",), user="a", password="c")


def test_the_repr_and_str_show_no_secret() -> None:
    user_seed = seed()
    for options in (
        ConnectOptions(servers=("nats://bob:hunter2@a",)),
        ConnectOptions(token="hunter2"),
        ConnectOptions(nkey_seed=f"{user_seed}"),
        ConnectOptions(creds=creds_text(user_seed)),
    ):
        for text in (repr(options), str(options), f"{options!r:>10}"):
            assert "hunter2" not in text
            assert user_seed not in text
            assert "***" in text


def test_options_travel_by_pickle_and_compare_equal() -> None:
    options = ConnectOptions(servers=("nats://bob:pw@a", "tls://b"), domain="hub", connect_timeout=1.5)
    assert pickle.loads(pickle.dumps(options)) == options


def test_options_travel_as_text() -> None:
    options = ConnectOptions(
        servers=("a,b",), user="u", password="p", tls_first=True, request_timeout=0.25, max_reconnects=7, name="job"
    )
    texts = {
        "nats.servers": "a,b",
        "nats.user": "u",
        "nats.password": "p",
        "nats.tls_first": "true",
        "nats.request_timeout": "0.25",
        "nats.max_reconnects": "7",
        "nats.name": "job",
    }
    assert ConnectOptions.from_mapping(texts) == options


def test_option_names_survive_the_lower_casing_of_spark() -> None:
    assert ConnectOptions.from_mapping({"nats.credsfile": "/x", "nats.inboxprefix": "_I"}) == ConnectOptions(
        creds_file="/x", inbox_prefix="_I"
    )


def test_an_unknown_option_is_refused_with_the_nearest_known_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown NATS option 'nats.pasword'; did you mean 'password'\?"):
        ConnectOptions.from_mapping({"nats.pasword": "hunter2"})


@pytest.mark.parametrize(
    "mapping",
    [
        {"tls_first": "perhaps"},
        {"max_reconnects": "many"},
        {"connect_timeout": "soon"},
        {"connect_timeout": 0},
        {"url": "a", "servers": "b"},
        {"password": "x"},
        {"tls_cert": "only"},
        {"domain": "d", "api_prefix": "p"},
        {"domain": "d.*"},
        {"user": "u", "token": "t"},
        {"nkey_seed": "S", "creds_file": "c"},
    ],
)
def test_contradicting_or_malformed_values_are_refused(mapping: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ConnectOptions.from_mapping(mapping)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("250ms", 0.25), ("1m30s", 90.0), ("1h", 3600.0), ("0.5", 0.5), (2, 2.0)]
)
def test_durations_are_read_with_their_units(text: str | float, seconds: float) -> None:
    assert ConnectOptions.from_mapping({"request_timeout": text}).request_timeout == pytest.approx(seconds)


def test_the_api_prefix_follows_domain_and_prefix() -> None:
    assert ConnectOptions().js_prefix == "$JS.API"
    assert ConnectOptions(domain="hub").js_prefix == "$JS.hub.API"
    assert ConnectOptions(api_prefix="js.acc.").js_prefix == "js.acc"


def test_the_connect_frame_carries_user_and_password() -> None:
    body = frame(ConnectOptions(user="bob", password="pw"), auth_required=True)
    assert (body["user"], body["pass"]) == ("bob", "pw")
    assert (body["headers"], body["no_responders"], body["echo"], body["protocol"]) == (True, True, False, 1)


def test_the_connect_frame_signs_the_nonce_with_the_nkey() -> None:
    user_seed = seed()
    body = frame(ConnectOptions(nkey_seed=user_seed), nonce="abc123")
    pair = nkeys.from_seed(bytearray(user_seed.encode()))
    assert body["nkey"] == pair.public_key.decode()
    assert "=" not in str(body["sig"])
    assert "jwt" not in body
    assert user_seed not in json.dumps(body)


def test_the_connect_frame_carries_the_jwt_of_a_credentials_file(tmp_path: Path) -> None:
    user_seed = seed()
    file = tmp_path / "user.creds"
    file.write_text(creds_text(user_seed))
    options = ConnectOptions(creds_file=str(file))
    body = frame(options, nonce="abc123")
    assert body["jwt"] == "eyJ0.body.sig"
    shipped = options.self_contained()
    file.unlink()
    assert frame(shipped, nonce="abc123") == body


def test_an_nkey_file_can_be_shipped_too(tmp_path: Path) -> None:
    file = tmp_path / "user.nk"
    user_seed = seed()
    file.write_text(f"# my key\n{user_seed}\n")
    assert ConnectOptions(nkey_file=str(file)).self_contained() == ConnectOptions(nkey_seed=user_seed)


@pytest.mark.parametrize("content", ["nothing here", "SUAnotaseed", creds_text("SUAnotaseed")])
def test_a_broken_secret_file_is_named_and_not_quoted(tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken"
    file.write_text(content)
    for options in (ConnectOptions(creds_file=str(file)), ConnectOptions(nkey_file=str(file))):
        with pytest.raises(ConfigError, match="broken") as raised:
            options.identity()
        assert "SUAnotaseed" not in str(raised.value)


def test_a_missing_secret_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.creds"):
        ConnectOptions(creds_file="nowhere.creds").identity()


def test_tls_is_on_when_anything_asks_for_it() -> None:
    assert ConnectOptions().ssl_context() is None
    for context in (
        ConnectOptions(servers=("tls://a",)).ssl_context(),
        ConnectOptions(tls_first=True).ssl_context(),
        ConnectOptions().ssl_context(required=True),
    ):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname


def test_a_missing_certificate_authority_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        ConnectOptions(tls_ca="nowhere.pem").ssl_context()


def test_without_any_setting_the_default_server_is_used(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert ConnectOptions.resolve({}, env).servers == ("nats://127.0.0.1:4222",)


def test_the_caller_wins_over_the_environment_and_the_environment_over_the_context(tmp_path: Path) -> None:
    env = write_context(
        tmp_path, "prod", url="nats://ctx:1", user="c", password="cp", inbox_prefix="_C", jetstream_domain="cd"
    ) | {"NATS_CONTEXT": "prod", "NATS_URL": "nats://env:2", "NATS_TIMEOUT": "7s"}
    options = ConnectOptions.resolve({"servers": "nats://flag:3"}, env)
    assert options.servers == ("nats://flag:3",)
    assert options.request_timeout == 7.0
    assert (options.user, options.inbox_prefix, options.domain) == ("c", "_C", "cd")


def test_credentials_come_as_a_whole_from_the_highest_level(tmp_path: Path) -> None:
    env = write_context(tmp_path, "prod", url="nats://x:y@ctx:1", selected=True) | {"NATS_CREDS": "/e.creds"}
    options = ConnectOptions.resolve({}, env)
    assert (options.creds_file, options.user, options.password) == ("/e.creds", None, None)
    options = ConnectOptions.resolve({"token": "t"}, env)
    assert (options.token, options.creds_file, options.user) == ("t", None, None)
    assert options.servers == ("nats://ctx:1",)


def test_a_domain_of_the_caller_replaces_the_api_prefix_of_the_context(tmp_path: Path) -> None:
    env = write_context(tmp_path, "prod", jetstream_api_prefix="js.x", selected=True)
    assert ConnectOptions.resolve({"domain": "hub"}, env).js_prefix == "$JS.hub.API"


def test_the_selected_context_is_left_out_when_the_caller_names_the_servers(tmp_path: Path) -> None:
    env = write_context(tmp_path, "prod", url="nats://ctx", token="secret", selected=True)
    assert ConnectOptions.resolve({"url": "nats://other"}, env).token is None
    assert ConnectOptions.resolve({}, env).token == "secret"


def test_a_user_without_a_password_in_the_environment_is_a_token(tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path), "NATS_USER": "t0ken"}
    options = ConnectOptions.resolve({}, env)
    assert (options.token, options.user) == ("t0ken", None)


def test_paths_in_a_context_may_name_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    env = write_context(tmp_path, "prod", creds="~/a.creds", selected=True)
    assert ConnectOptions.resolve({}, env).creds_file == "/home/someone/a.creds"


def test_a_missing_context_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gone' does not exist"):
        ConnectOptions.resolve({}, {"XDG_CONFIG_HOME": str(tmp_path), "NATS_CONTEXT": "gone"})


@pytest.mark.parametrize("name", ["../x", "a/b"])
def test_a_context_name_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no context name"):
        ConnectOptions.resolve({}, {"XDG_CONFIG_HOME": str(tmp_path), "NATS_CONTEXT": name})


def test_a_context_that_needs_a_proxy_is_refused_instead_of_half_used(tmp_path: Path) -> None:
    env = write_context(tmp_path, "prod", socks_proxy="socks5://p:1", selected=True)
    with pytest.raises(ConfigError, match="socks_proxy"):
        ConnectOptions.resolve({}, env)


def test_a_broken_context_file_is_not_quoted(tmp_path: Path) -> None:
    env = write_context(tmp_path, "prod", selected=True)
    (tmp_path / "nats" / "context" / "prod.json").write_text('{"password": "hunter2"')
    with pytest.raises(ConfigError) as raised:
        ConnectOptions.resolve({}, env)
    assert "hunter2" not in str(raised.value)
