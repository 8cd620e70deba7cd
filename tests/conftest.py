"""Fixtures for all tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything here is asyncio: one loop, the one that the product uses."""
    return "asyncio"
