"""Fixtures of the Gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shardline.gateway.template import Templates
from shardline.settings import Settings


@pytest.fixture(scope="session")
async def shared_templates(anyio_backend: str) -> AsyncIterator[Templates]:
    """One template worker for all stands: starting one takes longer than most tests."""
    async with Templates(Settings(template_s=20.0)) as made:
        yield made
