"""Engines by name, and what is said when one is not there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest

from shardline.errors import ShardlineError
from shardline.model import backends
from shardline.model.backend import ShardSpec
from shardline.model.engine import InlineEngine
from shardline.model.worker_engine import WorkerEngine
from shardline.settings import Settings


def nothing(done: int, total: int) -> None:
    pass


def test_the_tables_name_the_same_engines_and_real_modules() -> None:
    assert set(backends.BACKENDS) == set(backends.SELF_TESTS) == {"llama", "llama-window", "torch", "scripted"}
    for path in backends.BACKENDS.values():
        assert importlib.util.find_spec(path.partition(":")[0]) is not None


def test_a_script_is_loaded_with_progress(spec: Callable[..., ShardSpec]) -> None:
    seen: list[tuple[int, int]] = []
    backend = backends.load("scripted", spec(0, 3), lambda done, total: seen.append((done, total)))
    assert backend.describe().last == 3
    assert seen == [(0, 3), (3, 3)]
    assert backends.self_test("scripted", backend).decode_ms == 0


def test_an_unknown_engine_and_a_missing_library(
    monkeypatch: pytest.MonkeyPatch, spec: Callable[..., ShardSpec]
) -> None:
    with pytest.raises(ShardlineError, match=r"\['llama', 'llama-window', 'scripted', 'torch'\]") as caught:
        backends.load("vllm", spec(), nothing)
    assert caught.value.code == "engine_unavailable"
    with pytest.raises(ShardlineError):
        backends.engine("vllm", spec(), Settings(), inherited={})
    monkeypatch.setitem(backends.BACKENDS, "torch", "shardline.model.no_such_module:load")
    with pytest.raises(ShardlineError, match="no_such_module is not installed") as caught:
        backends.load("torch", spec(), nothing)
    assert caught.value.code == "engine_unavailable"
    assert "pip install -e '.[torch]'" in caught.value.advice


def test_only_the_scripted_engine_runs_inline(spec: Callable[..., ShardSpec]) -> None:
    assert isinstance(backends.engine("scripted", spec(), Settings(), inherited={}, inline=True), InlineEngine)
    assert isinstance(backends.engine("scripted", spec(), Settings(), inherited={}), WorkerEngine)
    with pytest.raises(ShardlineError) as caught:
        backends.engine("torch", spec(), Settings(), inherited={}, inline=True)
    assert caught.value.code == "setting_invalid"


def test_naming_an_engine_imports_no_library(spec: Callable[..., ShardSpec]) -> None:
    import subprocess

    code = (
        "import sys; from shardline.model.backends import engine; from shardline.model.backend import ShardSpec;"
        "from shardline.settings import Settings;"
        "[engine(name, ShardSpec('x', 0, 1), Settings(), inherited={}) for name in ('torch', 'llama')];"
        "print({'torch', 'llama_cpp'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "set()"
