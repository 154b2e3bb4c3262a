"""Databricks' own Python clients."""

from __future__ import annotations

import anyio
import pytest
from clients.table import check, other_python, python_version, rows, run
from support.frames import DONE, delta, done, message, sse
from support.legato import proxied
from support.upstream import Answer

pytestmark = pytest.mark.anyio


async def test_databricks_openai() -> None:
    """``DatabricksOpenAI``, sent to legato by ``DATABRICKS_HOST``; it is openai-python 2 inside."""
    command = other_python("openai_sdk.py", "databricks-create,databricks-stream")
    created, streamed = await rows(command)
    version = python_version("databricks-openai")
    check("databricks-openai, `responses.create`", version, created)
    check("databricks-openai, `responses.stream`", version, streamed, whole=["openai"])


async def test_mlflow_predict_stream() -> None:
    """It takes nothing but ``data:`` lines: a supervisor's raw stream, and no ``event:`` lines."""
    (seen,) = await rows(other_python("mlflow_deployments.py", "predict_stream"))
    check("mlflow, `predict_stream`", python_version("mlflow-skinny"), seen, whole=["raw"])


async def test_mlflow_gets_no_comments() -> None:
    """No heartbeat in a silence that gives another client several, and none of upstream's comments."""
    command = other_python("mlflow_deployments.py", "predict_stream")
    gate = anyio.Event()
    found = []
    async with proxied(heartbeat=0.02) as (upstream, proxy), anyio.create_task_group() as group:
        chunks = [delta("one "), b": upstream\n\n", gate, delta("two"), done(message("one two")), DONE]
        upstream.rule = lambda asked: sse(*chunks) if asked.method == "POST" else Answer(status=404)

        def through_legato() -> bool:
            return sum(asked.method == "POST" for asked in upstream.requests) == 2

        async def drive() -> None:
            found.extend(await run([*command, upstream.url, proxy.url]))

        group.start_soon(drive)
        await upstream.until(through_legato, limit=40)
        async with proxy.start() as other:
            await other.until(b": legato", count=3)
            gate.set()
            await other.rest()
    without, with_legato = found
    assert "Unknown response format with key ''" in without["error"]
    assert (with_legato["text"], with_legato["error"]) == ("one two", None)
