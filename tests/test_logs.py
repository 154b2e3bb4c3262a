"""The program's own log: its form, and what never appears in it."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import structlog

from proxy import logs

log = structlog.stdlib.get_logger("proxy.tests")


class Terminal(io.StringIO):
    """A stderr that says it is one."""

    def isatty(self) -> bool:
        """For people."""
        return True


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., io.StringIO]]:
    """``logs.configure`` writing to a text that is returned; all is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("proxy")
    levels = root.level, ours.level

    def set_up(*args: str, stderr: io.StringIO | None = None, **kwargs: object) -> io.StringIO:
        stream = io.StringIO() if stderr is None else stderr
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure(*args, **kwargs)
        return stream

    yield set_up
    for handler in [handler for handler in root.handlers if handler.name == "legato"]:
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    structlog.reset_defaults()


def test_json_holds_the_facts(configure):
    """One object for each line, facts under their names."""
    written = configure("info", "json")
    log.info("task started", task="task_1", cycles=2, ok=None)
    line = json.loads(written.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "task started",
        "task": "task_1",
        "cycles": 2,
        "ok": None,
        "level": "info",
        "logger": "proxy.tests",
    }


def test_auto_is_json_where_nobody_reads_along(configure):
    """A file or a collector gets JSON."""
    written = configure("info", "auto")
    log.info("task started")
    assert json.loads(written.getvalue())["event"] == "task started"


def test_auto_is_for_people_at_a_terminal(configure):
    """A terminal gets colours and words."""
    written = configure("info", "auto", stderr=Terminal())
    log.info("task started", task="task_1")
    assert not written.getvalue().startswith("{")
    assert "\x1b[" in written.getvalue()


def test_console_has_no_colours_in_a_file(configure):
    """Asked for words, a file gets them plain."""
    written = configure("info", "console")
    log.info("task started", task="task_1")
    assert "task started" in written.getvalue()
    assert "task=task_1" in written.getvalue()
    assert "\x1b" not in written.getvalue()


def test_levels_below_are_left_out(configure):
    """Our own loggers write from the level on; libraries only trouble."""
    written = configure("info", "json")
    log.debug("no")
    logging.getLogger("httpx").info("no")
    log.info("yes")
    logging.getLogger("httpx").warning("yes")
    assert [json.loads(line)["event"] for line in written.getvalue().splitlines()] == ["yes", "yes"]


def test_a_second_set_up_replaces_the_first(configure):
    """No line is written twice."""
    first = configure("info", "json")
    second = configure("info", "json")
    log.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer hunter2",
        "basic aHVudGVyMjpodW50ZXIy hunter2"[:-8],
        "token dapi0123456789abcdef-2",
        "key sk-proj-hunter2hunter2",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.c2lnbmF0dXJl",
        "http://me:hunter2@proxy.example:3128 is down",
        "GET /legato/tasks/task_1/events?after=3&token=hunter2",
        "POST /x?api_key=hunter2&a=b",
        "registered-value",
    ],
)
def test_credentials_are_masked_wherever_they_stand(configure, format: str, text: str):
    """In the text, in facts at any depth, in objects, in exceptions and in lines of libraries."""
    written = configure("info", format, secrets=["registered-value", ""])
    log.info(text)
    log.info("a fact", fact=text, deep={"a": [text, {"b": (text,)}]}, raw=text.encode())
    logging.getLogger("other").warning("a library says %s", text)
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("an exception")
    secrets = ["hunter2", "aHVudGVyMjpodW50ZXIy", "0123456789abcdef", "eyJzdWIi", "registered-value"]
    assert [secret for secret in secrets if secret in written.getvalue()] == []
    assert written.getvalue().count("***") >= 6


@pytest.mark.parametrize("name", ["authorization", "Cookie", "x-api-key", "client_secret", "read_token"])
def test_what_is_named_like_a_secret_is_masked(configure, name: str):
    """Whatever the value looks like."""
    written = configure("info", "json")
    log.info("a request", headers={name: "plain"}, **{name: "plain"})
    line = json.loads(written.getvalue())
    assert (line[name], line["headers"]) == ("***", {name: "***"})


def test_counts_of_tokens_are_no_secrets(configure):
    """Usage stays readable."""
    written = configure("info", "json")
    log.info("usage", max_tokens=5, input_tokens="6", prompt_cache_key="k")
    line = json.loads(written.getvalue())
    assert (line["max_tokens"], line["input_tokens"], line["prompt_cache_key"]) == (5, "6", "k")


@pytest.mark.parametrize("format", ["json", "console"])
def test_an_exception_is_told_without_variables(configure, format: str):
    """The traceback is there; what the variables held isn't."""
    written = configure("info", format)
    try:
        held = "value " * 2
        raise ValueError(len(held))
    except ValueError:
        log.exception("broken")
    assert "ValueError: 12" in written.getvalue()
    assert "value value" not in written.getvalue()


def test_a_cut_that_is_passed_on_is_no_error(configure):
    """uvicorn's line about an unfinished response is left out, its other errors aren't."""
    written = configure("info", "json")
    logging.getLogger("uvicorn.error").error("ASGI callable returned without completing response.")
    logging.getLogger("uvicorn.error").error("ASGI callable returned without starting response.")
    assert [json.loads(line)["event"] for line in written.getvalue().splitlines()] == [
        "ASGI callable returned without starting response."
    ]
