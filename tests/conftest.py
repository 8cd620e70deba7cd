"""Fixtures for all tests, and how the whole suite runs side by side (`make test`): files whole, the longest first."""

from __future__ import annotations

import os

import hypothesis
import pytest

# No example has a deadline: how long one takes says more of the machine than of the code.
hypothesis.settings.register_profile("shardline", deadline=None)
hypothesis.settings.load_profile("shardline")

FOLDERS = ("cluster", "model", "cli", "llama", "cases", "gateway", "transport")
"""Those that take longest, longest first: what is begun last should be short."""


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything here is asyncio: one loop, the one that the product uses."""
    return "asyncio"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: at any time some tests wait, for a limit to pass or a silent peer to be missed."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
