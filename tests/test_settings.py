"""Settings: where they come from, what they may be, and how problems are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from proxy.settings import Settings, SettingsError, describe, load, shown
from proxy.settings.endpoints import EndpointTable

MiB = 2**20

# A value for each setting that isn't its default: as text, and as it arrives.
SAMPLES: dict[str, tuple[str, object]] = {
    "upstream": ("https://up.example/base/", "https://up.example/base"),
    "connect_timeout": ("0.5", 0.5),
    "max_silence": ("30", 30.0),
    "retry_budget": ("0", 0.0),
    "upstream_proxy": ("http://me:pw@proxy.example:3128", SecretStr("http://me:pw@proxy.example:3128")),
    "upstream_ca": (__file__, Path(__file__)),
    "upstream_body_limit": ("4MiB", 4 * MiB),
    "tell_upstream": ("true", True),
    "host": ("::1", "::1"),
    "port": ("0", 0),
    "prefix": ("/-/legato", "/-/legato"),
    "root_path": ("/agents", "/agents"),
    "write_timeout": ("5", 5.0),
    "drain": ("0", 0.0),
    "log": ("memory:", "memory:"),
    "durability": ("power", "power"),
    "retain": ("60", 60.0),
    "max_log": ("1GiB", 1024 * MiB),
    "engage": ("stream", "stream"),
    "task_routes": ("/a,/b/*/c", ("/a", "/b/*/c")),
    "replay": ("last_pair", "last_pair"),
    "followup_key": ("messages", "messages"),
    "max_cycles": ("7", 7),
    "seam_grace": ("0.1", 0.1),
    "heartbeat": ("20", 20.0),
    "authorization_items": ("login_request", ("login_request",)),
    "endpoint": ('[{"match": "/a", "max_cycles": 3}]', (EndpointTable(match="/a", max_cycles=3),)),
    "max_body": ("1kb", 1000),
    "max_frame": ("2048", 2048),
    "on_disconnect": ("cancel", "cancel"),
    "owner_header": ("X-Forwarded-User", "X-Forwarded-User"),
    "trusted_proxies": ("127.0.0.1,10.0.0.0/8", ("127.0.0.1", "10.0.0.0/8")),
    "partial_answers": ("refuse", "refuse"),
    "max_tasks": ("4", 4),
    "secret": ("0123456789abcdef", SecretStr("0123456789abcdef")),
    "cors_origins": (
        "https://App.example/, http://localhost:80",
        ("https://app.example", "http://localhost"),
    ),
    "log_level": ("WARNING", "warning"),
    "log_format": ("json", "json"),
}


def problems(**environ: str) -> list[str]:
    """What is wrong with an environment of these settings."""
    with pytest.raises(SettingsError) as refused:
        load({}, environ={f"LEGATO_{name.upper()}": value for name, value in environ.items()})
    return str(refused.value).split("\n")


def toml(folder: Path, text: str) -> str:
    """The path of a TOML file that holds ``text``."""
    path = folder / "legato.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_setting_has_a_sample():
    """The tables of this file know every setting, and no other."""
    assert SAMPLES.keys() == Settings.model_fields.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_setting_is_described(name: str):
    """Each has a description in sentences, a group, a form, and says its default."""
    setting = describe()[name]
    assert re.fullmatch(r"[A-Z].*\.", setting.description)
    assert setting.group
    assert setting.form.expects
    assert setting.default
    assert (setting.flag, setting.variable) == (f"--{name.replace('_', '-')}", f"LEGATO_{name.upper()}")


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_setting_comes_from_each_source(name: str, source: str, tmp_path: Path):
    """Flag, variable and TOML key give the same value, and ``sources`` tells them apart."""
    text, expected = SAMPLES[name]
    flags = {name: text} if source == "flag" else {}
    environ = {f"LEGATO_{name.upper()}": text} if source == "environment" else {}
    config = toml(tmp_path, f"{name} = {json.dumps(text)}") if source == "file" else None
    settings = load(flags, environ=environ, config=config)
    assert getattr(settings, name) == expected
    assert settings.sources == dict.fromkeys(SAMPLES, "default") | {name: source}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_default_in_the_docs_is_the_default(name: str):
    """The default as shown, given as a value, means the default."""
    shown = describe()[name].default
    expected = getattr(Settings(), name)
    if shown == "none":
        assert expected in (None, ())
    else:
        assert getattr(load({name: shown}, environ={}), name) == expected


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path):
    """Each source hides the ones below it, one setting at a time."""
    config = toml(tmp_path, "port = 1\nmax_cycles = 1\nmax_tasks = 1")
    environ = {"LEGATO_PORT": "2", "LEGATO_MAX_CYCLES": "2"}
    settings = load({"port": "3"}, environ=environ, config=config)
    assert (settings.port, settings.max_cycles, settings.max_tasks) == (3, 2, 1)


def test_what_is_hidden_is_not_checked():
    """A bad value below a good one does no harm."""
    assert load({"port": "3"}, environ={"LEGATO_PORT": "x"}).port == 3


def test_flags_that_were_not_given_hide_nothing():
    """None is no value."""
    assert load({"port": None}, environ={"LEGATO_PORT": "2"}).port == 2


def test_an_empty_variable_is_not_set():
    """Compose files pass on variables that aren't there as empty ones."""
    settings = load({}, environ={"LEGATO_SECRET": "", "LEGATO_CONFIG": ""})
    assert settings.secret is None
    assert settings.sources["secret"] == "default"


def test_settings_alone_read_nothing(monkeypatch: pytest.MonkeyPatch):
    """Only ``load`` looks at the environment."""
    monkeypatch.setenv("PORT", "1")
    monkeypatch.setenv("LEGATO_PORT", "1")
    assert Settings().port == 8787
    assert load({}).port == 1


def test_settings_are_frozen():
    """Nobody changes them later."""
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_the_file_is_read_only_if_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """./legato.toml counts when a flag or LEGATO_CONFIG names it, the flag first."""
    monkeypatch.chdir(tmp_path)
    toml(tmp_path, "port = 1")
    (tmp_path / "other.toml").write_text("port = 2")
    assert load({}, environ={}).port == 8787
    assert load({}, environ={"LEGATO_CONFIG": "legato.toml"}).port == 1
    assert load({}, environ={"LEGATO_CONFIG": "legato.toml"}, config="other.toml").port == 2


def test_toml_has_types_of_its_own(tmp_path: Path):
    """Numbers, lists and booleans need no quotes."""
    text = 'max_body = 4096\ntask_routes = ["/a,b"]\ntell_upstream = true\nheartbeat = 1.5'
    settings = load({}, environ={}, config=toml(tmp_path, text))
    assert (settings.max_body, settings.task_routes) == (4096, ("/a,b",))
    assert (settings.tell_upstream, settings.heartbeat) == (True, 1.5)


@pytest.mark.parametrize("name", ["max_cycles", "port", "heartbeat", "max_body", "upstream_body_limit"])
def test_true_is_no_number(name: str, tmp_path: Path):
    """TOML's true isn't taken for 1."""
    with pytest.raises(SettingsError, match=f"/ {name}: must be .*, got True"):
        load({}, environ={}, config=toml(tmp_path, f"{name} = true"))


@pytest.mark.parametrize(
    ("text", "told"),
    [("port = ", "is not TOML: "), ("\udcff", "is not TOML: "), (None, "No such file or directory")],
)
def test_a_file_that_cannot_be_read_is_a_problem(text: str | None, told: str, tmp_path: Path):
    """The line names the flag, the variable and the file."""
    path = tmp_path / "legato.toml"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(SettingsError) as refused:
        load({}, environ={}, config=str(path))
    assert len(refused.value.problems) == 1
    assert str(refused.value).startswith("--config / LEGATO_CONFIG: ")
    assert str(path) in str(refused.value)
    assert told in str(refused.value)


def test_an_unknown_key_is_a_problem(tmp_path: Path):
    """A slip of the pen in the file is told, with what may have been meant."""
    config = toml(tmp_path, "max-cycles = 3\n[zzzz]\nport = 1")
    with pytest.raises(SettingsError) as refused:
        load({}, environ={}, config=config)
    assert refused.value.problems == (
        f"max-cycles in {config}: there is no such setting; did you mean max_cycles?",
        f"zzzz in {config}: there is no such setting",
    )


def test_an_unknown_variable_is_a_problem():
    """So is one in the environment; other programs' variables are none of our business."""
    with pytest.raises(SettingsError) as refused:
        load({}, environ={"LEGATO_MAX_CYCLE": "3", "LEGATOR": "1", "PORT": "x"})
    assert refused.value.problems == (
        "LEGATO_MAX_CYCLE: there is no such setting; did you mean LEGATO_MAX_CYCLES?",
    )


def test_an_unknown_flag_is_a_problem():
    """A caller that hands in what doesn't exist is told."""
    with pytest.raises(SettingsError, match="prot: there is no such setting; did you mean port"):
        load({"prot": 1}, environ={})


def test_variables_of_a_kubernetes_service_are_passed_over():
    """A service called legato gives every pod beside it variables that look like ours."""
    environ = {
        "LEGATO_PORT": "tcp://10.0.0.1:8787",
        "LEGATO_SERVICE_HOST": "10.0.0.1",
        "LEGATO_SERVICE_PORT_HTTP": "8787",
        "LEGATO_PORT_8787_TCP": "tcp://10.0.0.1:8787",
        "LEGATO_PORT_8787_TCP_ADDR": "10.0.0.1",
        "LEGATO_WEB_SERVICE_PORT": "80",
        "LEGATO_WEB_PORT": "tcp://10.0.0.2:80",
    }
    settings = load({}, environ=environ)
    assert settings.port == 8787
    assert settings.sources["port"] == "default"


def test_all_problems_are_told_at_once():
    """One line each, whatever the source."""
    with pytest.raises(SettingsError) as refused:
        load({"port": "x"}, environ={"LEGATO_DRAIN": "y", "LEGATO_Z": "z"}, required=["upstream"])
    assert sorted(line.split(":")[0] for line in str(refused.value).split("\n")) == [
        "--drain / LEGATO_DRAIN / drain",
        "--port / LEGATO_PORT / port",
        "--upstream / LEGATO_UPSTREAM / upstream",
        "LEGATO_Z",
    ]


def test_a_problem_names_flag_variable_and_key():
    """The line says what was expected and what was found."""
    assert problems(max_cycles="x") == [
        "--max-cycles / LEGATO_MAX_CYCLES / max_cycles: must be a whole number above 0, got 'x'"
    ]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_cycles", "0", "a whole number above 0, got '0'"),
        ("max_cycles", "1.5", "a whole number above 0"),
        ("port", "65536", "from 0 to 65535"),
        ("port", "-1", "from 0 to 65535"),
        ("heartbeat", "0", "seconds above 0"),
        ("heartbeat", "nan", "seconds above 0"),
        ("max_silence", "inf", "seconds above 0"),
        ("drain", "-1", "0 or more"),
        ("max_body", "16Mi", "a size above 0, such as 16MiB"),
        ("max_body", "16MiB or so", "a size above 0"),
        ("max_body", "0", "a size above 0"),
        ("max_body", "off", "a size above 0"),
        ("upstream_body_limit", "none", "off, or a size"),
        ("tell_upstream", "perhaps", "true or false"),
        ("engage", "always", "one of long_task, stream, force, off, got 'always'"),
        ("task_routes", "/a,b", "a list of paths .* got 'b'"),
        ("task_routes", '["/a"', "a list of paths"),
        ("task_routes", '["/a?b"]', "a list of paths"),
        ("authorization_items", '[""]', "a list of names"),
        ("prefix", "/", "a path such as /legato"),
        ("prefix", "/legato/", "a path such as /legato"),
        ("prefix", "/a/../b", "a path such as /legato"),
        ("root_path", "agents", "a path such as /agents"),
        ("root_path", "/agents/", "a path such as /agents"),
        ("cors_origins", "*", "exact origins such as https://app.example, not \\*"),
        ("cors_origins", "https://a.example, null", "exact origins such as https://app.example, not null"),
        ("cors_origins", "app.example", "a list of origins .* got 'app.example'"),
        ("cors_origins", "https://a.example/path", "a list of origins"),
        ("cors_origins", "https://*.example", "a list of origins"),
        ("cors_origins", "https://u@a.example", "a list of origins"),
        ("host", "http://x", "a host name or an IP address"),
        ("upstream_ca", "/nowhere.pem", "an existing file"),
        ("log", "legato.db", "sqlite:PATH or memory:"),
        ("log", "sqlite:", "sqlite:PATH or memory:"),
        ("log", "memory:x", "sqlite:PATH or memory:"),
        ("log", "redis://x", "not_available: redis logs come in a later version"),
        ("secret", "short", "text of at least 16 characters$"),
        ("upstream", "example.com", "an http:// or https:// URL with a host"),
        ("upstream", "ftp://example.com", "an http:// or https:// URL with a host"),
        ("upstream", "https://", "an http:// or https:// URL with a host"),
        ("upstream", "https://h:x", "an http:// or https:// URL with a host"),
        ("upstream", "https://[::1", "an http:// or https:// URL with a host"),
        ("upstream", "https://h /", "an http:// or https:// URL with a host"),
        ("upstream", "https://h/?", "without query and fragment"),
        ("upstream", "https://h/#a", "without query and fragment"),
        ("upstream", "https://u:p@h", "without credentials"),
        ("upstream_proxy", "socks5://h", "an http:// or https:// URL with a host"),
        ("upstream_proxy", "http://h/path", "without a path"),
    ],
)
def test_a_bad_value_is_refused(name: str, value: str, told: str):
    """Each form says what it takes."""
    lines = problems(**{name: value})
    assert len(lines) == 1
    assert re.search(f"/ {name}: must be .*{told}" if not told.startswith("not_") else told, lines[0])


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1B", 1), ("2 KB", 2000), ("2kib", 2048), (" 3MiB ", 3 * MiB), ("1gb", 10**9)],
)
def test_sizes_are_written_with_or_without_a_unit(text: str, size: int):
    """Powers of two for KiB, MiB, GiB; of ten for KB, MB, GB; capitals don't matter."""
    assert load({"max_body": text}, environ={}).max_body == size


def test_the_body_limit_can_be_switched_off(tmp_path: Path):
    """A flag takes back what the file has set."""
    config = toml(tmp_path, 'upstream_body_limit = "4MiB"')
    assert load({}, environ={}, config=config).upstream_body_limit == 4 * MiB
    assert load({"upstream_body_limit": "off"}, environ={}, config=config).upstream_body_limit is None


@pytest.mark.parametrize("text", ["/a,/b", " /a , /b ,", '["/a", "/b"]'])
def test_lists_are_written_with_commas_or_as_json(text: str):
    """Both mean the same."""
    assert load({"task_routes": text}, environ={}).task_routes == ("/a", "/b")


def test_secrets_are_masked():
    """Neither the settings nor a problem with others shows a secret."""
    secrets = {"secret": "a-secret-of-16-chars", "upstream_proxy": "http://me:hunter2@proxy.example"}
    assert not re.search("a-secret|hunter2", repr(load(secrets, environ={})))
    with pytest.raises(SettingsError) as refused:
        load(secrets | {"port": "x"}, environ={})
    assert not re.search("a-secret|hunter2", str(refused.value))


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://a.example:443", "https://a.example"),
        ("https://a.example:80", "https://a.example:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("HTTPS://A.EXAMPLE/", "https://a.example"),
        ("tauri://localhost", "tauri://localhost"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_origins_are_written_as_browsers_write_them(text: str, origin: str):
    """Else none would ever be equal to what a browser sends."""
    assert load({"cors_origins": text}, environ={}).cors_origins == (origin,)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_value_is_shown_as_it_would_be_written(name: str):
    """For people; a secret is masked."""
    text = shown(name, getattr(load({name: SAMPLES[name][0]}, environ={}), name))
    if isinstance(SAMPLES[name][1], SecretStr):
        assert text == "***"
    elif name != "endpoint":
        assert getattr(load({name: text}, environ={}), name) == SAMPLES[name][1]


def test_settings_made_by_hand_do_not_show_their_input():
    """pydantic's own error is silent about values too."""
    with pytest.raises(ValidationError) as refused:
        Settings(secret=SecretStr("hunter2"), upstream="https://me:hunter2@h")
    assert "hunter2" not in str(refused.value)


def refusal(name: str, value: str) -> SettingsError | None:
    """What is wrong with this value, if anything."""
    try:
        load({name: value}, environ={})
    except SettingsError as exc:
        return exc
    return None


@given(name=st.sampled_from(sorted(SAMPLES)), text=st.text())
def test_any_text_is_taken_or_refused_in_lines(name: str, text: str):
    """No value ends in anything but settings or lines for people, without what may be a secret."""
    refused = refusal(name, f"zq9{text}")
    if refused is not None:
        assert len(str(refused).splitlines()) == len(refused.problems) > 0
        assert describe()[name].form.echo or "zq9" not in str(refused)
