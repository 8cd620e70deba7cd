"""Both event loops that the product may run on: every asynchronous test of this room runs on each."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session", params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}
