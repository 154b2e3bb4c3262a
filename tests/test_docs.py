"""The docs: complete, up to date, and their commands, code and links work."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import httpx
import pytest
from anyio.from_thread import start_blocking_portal

import proxy
from proxy import errors
from proxy.cli import COMMANDS, main
from proxy.core import messages, task
from proxy.settings import Settings, SettingsError, load
from proxy.settings.endpoints import EndpointTable
from proxy.simulator import Scenario, parse_scenario, simulator_app
from proxy.web import auth, options, start
from proxy.web.app import create_app
from proxy.web.server import serving

ROOT = Path(__file__).parent.parent
PACKAGE = Path(proxy.__file__).parent
CODE = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

each_page = pytest.mark.parametrize("page", PAGES)


# --- reading the pages --------------------------------------------------------------------------------


def text(page: str) -> str:
    """All of a page."""
    return PAGES[page].read_text()


def blocks(page: str, language: str) -> list[str]:
    """Its code blocks in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def table(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose first column has this head."""
    rows = text(page).split(f"\n| {head} |", 1)[1].split("\n\n", 1)[0].split("\n")[2:]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


def quoted(words: str) -> set[str]:
    """What stands in backticks, code blocks aside."""
    return set(re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", words, flags=re.DOTALL | re.MULTILINE)))


def typed(program: str) -> list[list[str]]:
    """Every call of a program in a console block of any page, as words."""
    lines = [
        line
        for page in PAGES
        for block in blocks(page, "console")
        for line in re.findall(r"^\$ (.*)$", block.replace("\\\n", " "), re.MULTILINE)
    ]
    calls = [[word for word in shlex.split(line) if not re.match("LEGATO_|&", word)] for line in lines]
    return [words for words in calls if Path(words[0]).name == program]


# --- what the code says -------------------------------------------------------------------------------


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call in it, with the last part of the name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id, node


def strings(tree: ast.AST) -> set[str]:
    """Every text in it."""
    return {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def values(node: ast.expr, function: ast.FunctionDef) -> set[str]:
    """What this argument can be; nothing where the function hands on what it was given."""
    if isinstance(node, ast.Constant | ast.IfExp):
        return strings(node.orelse) | strings(node.body) if isinstance(node, ast.IfExp) else strings(node)
    if isinstance(node, ast.Name):
        if node.id in {argument.arg for argument in function.args.args}:
            return set()
        made = [a.value for a in ast.walk(function) if isinstance(a, ast.Assign) and _names(a, node.id)]
        return set().union(*(values(value, function) for value in made))
    if isinstance(node, ast.Attribute) and node.attr == "rule":
        return {str(ast.literal_eval(c.args[0])) for n, c in calls(CODE["core/rules.py"]) if n == "Verdict"}
    raise AssertionError(f"teach this test to read {ast.unparse(node)} in {function.name}")


def _names(assignment: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in assignment.targets)


def states(function: ast.FunctionDef) -> set[str]:
    """The states in which this function leaves a task."""
    ends = [c.args[0] for name, c in calls(function) if name == "_finish"]
    return {end.value for end in ends if isinstance(end, ast.Constant)}


def stream_codes() -> Iterator[tuple[str, str, str]]:
    """Code, event and state for every way in which legato itself ends a stream badly."""
    methods = {n.name: n for n in ast.walk(CODE["core/task.py"]) if isinstance(n, ast.FunctionDef)}
    for method in methods.values():
        for name, call in calls(method):
            if name in ("_fail", "_own_failure", "_stop"):
                event = "response.incomplete" if name == "_stop" else "response.failed"
                found = values(call.args[1], method)
            elif name == "_own":
                event = str(ast.literal_eval(call.args[0]))
                reasons = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
                found = set().union(*(values(reason, method) for reason in reasons))
            else:
                continue
            left = states(method if name.startswith("_own") else methods[name])
            assert len(left) == 1 or not found, f"{method.name} leaves {left}"
            yield from ((code, event, *left) for code in found)


def http_errors() -> Iterator[tuple[str, str, str]]:
    """Code, status and x-should-retry of every error that some file makes."""
    made = {name for path, tree in CODE.items() if path != "errors.py" for name, _ in calls(tree)}
    for name in made & set(dir(errors)):
        kind = getattr(errors, name)
        if issubclass(kind, errors.LegatoError) and kind is not errors.ClientFault:
            yield kind.code, str(kind.status), "yes" if kind.should_retry else "no"
    for node in ast.walk(CODE["web/control.py"]):  # the two that Starlette finds
        if isinstance(node, ast.Assign) and "fault.code" in ast.unparse(node.targets[0]):
            yield from ((code, str(HTTPStatus[code.upper()].value), "no") for code in strings(node))


def reachable() -> set[str]:
    """The states that a task can come to by what the shell tells the core."""
    told = {
        getattr(messages, node.attr)
        for path, tree in CODE.items()
        if not path.startswith("core/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "m"
    }
    found, new = set(), {"queued"}
    while new:
        found |= new
        rows = [task.TABLE[state] for state in new]
        new = {after for row in rows for kind in row.keys() & told for after in row[kind]} - found
    return found


# --- legato, with a simulated supervisor behind it ----------------------------------------------------


@contextmanager
def running(scenario: str | Scenario) -> Iterator[tuple[str, str]]:
    """URLs of legato and of the supervisor, both on real sockets in a loop of their own."""
    with start_blocking_portal() as portal:
        supervisor = serving(simulator_app(scenario, speed=0))
        with portal.wrap_async_context_manager(supervisor) as upstream:
            app = create_app(Settings(upstream=upstream, log="memory:"))
            with portal.wrap_async_context_manager(serving(app)) as url:
                yield url, upstream


@pytest.fixture(scope="module")
def legato() -> Iterator[tuple[str, str]]:
    """With the scenario that the README speaks of."""
    with running("default") as urls:
        yield urls


def ask(url: str, **headers: str) -> httpx.Response:
    """One task, to its end."""
    body = {"input": "Hi", "stream": True, "databricks_options": {"long_task": True}}
    return httpx.post(f"{url}/serving-endpoints/x/invocations", json=body, headers=headers, timeout=10)


def look(url: str, answer: httpx.Response) -> dict[str, Any]:
    """What legato says of the task that this answer came from."""
    return httpx.get(f"{url}/legato/tasks/{answer.headers['legato-task']}").json()


# --- what is generated --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """``docs/generate.py``."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_page
def test_what_is_generated_is_up_to_date(page: str, generate: ModuleType):
    """``make docs`` would change nothing."""
    assert text(page) == generate.fresh(text(page)), "run make docs"


def test_all_that_can_be_generated_is(generate: ModuleType):
    """Settings, routes, scenarios and commands stand on one page each."""
    names = [found[1] for page in PAGES for found in generate.GENERATED.findall(text(page))]
    assert sorted(names) == sorted(generate.MAKERS)


def test_every_option_is_in_the_docs():
    """Of every command, in all its forms."""
    known = {word for words in quoted(text("commands.md") + text("settings.md")) for word in words.split()}
    known |= {word.rstrip(",") for word in known}
    context = click.Context(main)
    for name in COMMANDS:
        command = main.get_command(context, name)
        assert f"## legato {name}\n" in text("commands.md")
        for option in command.params:
            if isinstance(option, click.Option):
                assert {*option.opts, *option.secondary_opts} <= known


# --- errors -------------------------------------------------------------------------------------------


def test_the_error_table_has_every_http_error():
    """With its status and whether to try again; none that nobody makes."""
    rows = [row for row in table("errors.md", "Code") if row[1].isdigit()]
    assert sorted((row[0].strip("`"), row[1], row[2]) for row in rows) == sorted(set(http_errors()))


def test_the_error_table_has_every_code_in_a_stream():
    """With its event and the state that it leaves; none that the core can't say."""
    rows = [row for row in table("errors.md", "Code") if not row[1].isdigit()]
    assert sorted((row[0].strip("`"), row[1].strip("`"), row[3].strip("`")) for row in rows) == sorted(
        set(stream_codes())
    )


def test_only_the_state_machine_speaks_in_a_stream():
    """So that reading it for codes is enough; a restart says what the machine would have said."""
    speaking = {path for path, tree in CODE.items() if "own_event" in dict(calls(tree))}
    assert speaking == {"core/task.py", "core/restart.py"}
    said = {row[0].strip("`") for row in table("errors.md", "Code")}
    assert {"upstream_incomplete", "continuation_unknown"} <= said


def test_the_example_of_an_error_is_a_real_one(legato: tuple[str, str]):
    """Word for word."""
    answer = ask(legato[0], **{"legato-engage": "maybe"})
    assert json.loads(blocks("errors.md", "json")[0]) == answer.json()


# --- HTTP ---------------------------------------------------------------------------------------------


def test_every_header_is_in_the_docs():
    """Each ``Legato-…`` that the code names."""
    texts = [
        node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        for path, tree in CODE.items()
        if path.startswith("web/") or path in ("tasks.py", "runner.py", "upstream.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    ]
    named = {name.lower() for words in texts for name in re.findall(r"\bLegato-[a-z-]+", words, re.I)}
    assert named
    assert named <= {name.lower() for name in quoted(text("http.md"))}


def test_every_value_of_a_header_is_in_the_docs():
    """And those that are refused are said to be."""
    rows = {name.lower(): row for row in table("http.md", "Header") for name in quoted(row[0])}
    for header, allowed in options._CHOICES.items():
        assert quoted(rows[header][1]) == set(allowed)
        assert ("not_available" in rows[header][2]) == (header in options._LATER)


def test_every_header_that_is_dropped_or_believed_is_in_the_docs():
    """Of the client's request; ``Content-Length`` aside, which every request has of its own."""
    named = {name.lower() for name in quoted(text("http.md"))}
    dropped = {name.decode() for name in start._FIRST_ONLY | start._OURS} - {"content-length"}
    assert dropped | set(auth._CREDENTIALS) <= named


def test_every_event_of_legatos_own_is_in_the_docs():
    """And no other."""
    made = {str(ast.literal_eval(c.args[0])) for n, c in calls(CODE["core/task.py"]) if n == "_own"}
    assert {row[0].strip("`") for row in table("http.md", "Type")} == made


def test_every_state_is_in_the_docs():
    """Each that a task can come to, and no other."""
    assert {name for row in table("http.md", "State") for name in quoted(row[0])} == reachable()


def test_every_reason_is_in_the_docs():
    """Of a state without a code: what the core gives as one."""
    given = {
        reason.value
        for name, call in calls(CODE["core/task.py"])
        if name == "_finish" and isinstance(reason := call.args[1], ast.Constant)
    }
    assert given <= quoted(text("http.md")) | quoted(text("errors.md"))


def test_every_member_of_a_task_is_in_the_docs(legato: tuple[str, str]):
    """As legato answers it."""
    shown = look(legato[0], ask(legato[0], **{"x-simulate": "approval"}))
    assert shown["state"] == "input_required"
    assert shown.keys() | shown["required_actions"][0].keys() <= quoted(text("http.md"))


# --- how it works, the simulator, settings ------------------------------------------------------------


def test_the_stories_and_tests_that_are_named_exist():
    """Folders of fixtures, test files and tests."""
    page = text("how-it-works.md")
    for names in re.findall(r"\[(`[^]]+`)\](?!\()", page):
        assert all((ROOT / "fixtures" / name / "story.toml").is_file() for name in quoted(names)), names
    named = [name.partition("::") for name in quoted(page) if name.startswith("tests/")]
    assert named
    for path, _, function in named:
        assert f"def {function}" in (ROOT / path).read_text(), path


def test_the_scenario_of_the_docs_does_what_they_say():
    """It breaks while the tool runs, and legato doesn't send the follow-up again."""
    with running(parse_scenario(blocks("simulator.md", "toml")[0], name="my-scenario")) as (url, upstream):
        answer = ask(url)
        assert look(url, answer)["reason"] == "continuation_unknown"
        assert "The outcome of pay (" in answer.text
        counted = httpx.get(f"{upstream}/simulator/requests").json()
    assert counted["follow_ups"] == 1
    tasks = next(iter(counted["by_task"].values()))
    assert counted.keys() | tasks.keys() <= quoted(text("simulator.md"))


@pytest.mark.parametrize("file", blocks("settings.md", "toml") + blocks("recipes.md", "toml"))
def test_a_settings_file_of_the_docs_can_be_used(file: str, tmp_path: Path):
    """Every key is known and every value good."""
    path = tmp_path / "legato.toml"
    path.write_text(file)
    assert "file" in load({}, environ={}, config=str(path)).sources.values()


def test_every_key_of_an_endpoint_is_in_the_docs():
    """And no other."""
    keys = {name for row in table("settings.md", "Key") for name in quoted(row[0])}
    assert keys == set(EndpointTable.model_fields)
    problem = blocks("settings.md", "text")[0].strip()
    with pytest.raises(SettingsError) as refused:
        load({"endpoint": '[{"match": "/a"}, {"model": "quick-*", "replay": "pair"}]'}, environ={})
    assert str(refused.value) == problem


# --- links, commands, code ----------------------------------------------------------------------------


@each_page
def test_links_lead_somewhere(page: str):
    """Files exist, and so do the headings behind a ``#``."""
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text(page)):
        path = PAGES[page].parent / target if target else PAGES[page]
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if heading else []
        assert not heading or heading in [name.lower().replace(" ", "-") for name in headings]


def test_commands_of_the_docs_are_understood():
    """legato knows each command, its options and their values."""
    context = click.Context(main)
    assert typed("legato")
    for _, name, *args in typed("legato"):
        command = main.get_command(context, name)
        with command.make_context(name, args, parent=context) as own:
            if name == "serve":
                load({key: value for key, value in own.params.items() if key != "config"}, environ={})


def test_make_targets_of_the_docs_exist():
    """Each that is typed."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {word for words in typed("make") for word in words[1:]} <= set(targets)


def test_the_demo_shows_what_the_readme_says():
    """Line for line, but for the time that a seam took."""
    environ = {**os.environ, "COLUMNS": "120"}
    command = [str(Path(sys.executable).with_name("legato")), "demo", "--speed", "0"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    shown = [re.sub(r"[\d.]+ ms", "N ms", line).rstrip() for line in done.stdout.split("\n")]
    promised = re.sub(r"[\d.]+ ms", "N ms", blocks("README.md", "text")[0]).split("\n")
    assert [line for line in promised if line.strip() != "..." and line not in shown] == []


@pytest.mark.parametrize("number", range(len(typed("curl"))))
def test_curl_of_the_docs_starts_a_task(number: int, legato: tuple[str, str]):
    """Sent as curl would: its URL, headers and body."""
    words = [word.replace("$TOKEN", "YOUR-TOKEN") for word in typed("curl")[number]]
    url = next(word for word in words if word.startswith("http"))
    headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
    body = words[words.index("-d") + 1]
    answer = httpx.post(legato[0] + httpx.URL(url).path, content=body, headers=headers, timeout=10)
    assert answer.status_code == 200
    assert answer.headers["legato-task"]


def test_the_python_of_the_readme_runs(legato: tuple[str, str], capsys: pytest.CaptureFixture[str]):
    """With the OpenAI SDK, through legato: it prints the whole answer, from all five cycles."""
    code = blocks("README.md", "python")[0]
    assert 'base_url="http://127.0.0.1:8787' in code
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8787", legato[0]), "README.md", "exec"), names)
    names["client"].close()
    printed = capsys.readouterr().out
    assert "I'll start with the figures" in printed
    assert "Tents lost €125,500 in Q2" in printed
