"""The rows of the table in ``docs/clients.md`` whose clients have more tests of their own elsewhere."""

from __future__ import annotations

import shutil

import openai
import pytest
from clients.table import check, needs, our_python, rows

pytestmark = pytest.mark.anyio


async def test_openai() -> None:
    """The official Python SDK, whatever release of it is installed."""
    created, streamed = await rows(our_python("openai_sdk.py", "create,stream"))
    version = openai.__version__.split(".")[0]
    check("openai-python, `responses.create`", version, created)
    check("openai-python, `responses.stream`", version, streamed, whole=["openai"])


async def test_curl() -> None:
    """Every byte, heartbeats included."""
    needs(shutil.which("curl") is not None, "curl")
    (seen,) = await rows(our_python("curl.py", "curl"))
    assert [bool(line["heartbeats"]) for line in seen.values()] == [False, True, False, True]
    check("curl", "", seen)
