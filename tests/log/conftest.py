"""Fixtures for the tests of the logs."""

from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The logs are asyncio's only."""
    return "asyncio"
