"""Fixtures for the rooms that import them: a model of 8 MiB in pieces, its description, and a store without a piece."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.artifact.bundle import Bundle
from shardline.artifact.store import Store, StoredArtifact
from tests.support.stores import described, layered_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layered_model(tmp_path_factory.mktemp("layered"))


@pytest.fixture(scope="session")
def bundle(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return described(model, tmp_path_factory.mktemp("layered-bundle") / "a")


@pytest.fixture
def artifact(tmp_path: Path, bundle: Bundle) -> Iterator[StoredArtifact]:
    store = Store(tmp_path / "store", reserve_bytes=0)
    with store.add(bundle) as made:
        yield made
    store.close()
