"""The model of the demo is found without importing its package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardline.cli.demo_model import FILE, PACKAGE, demo_model
from shardline.errors import ShardlineError


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the path, with a package that must not be imported."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_the_file_is_found(packages: Path) -> None:
    (packages / FILE).write_bytes(b"GGUF")
    assert demo_model() == packages / FILE
    assert PACKAGE not in sys.modules


def test_a_package_without_the_file_says_what_to_install(packages: Path) -> None:
    with pytest.raises(ShardlineError) as missing:
        demo_model()
    assert missing.value.code == "demo_model_missing"
    assert "--no-deps" in missing.value.fault.advice
