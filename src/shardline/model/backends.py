"""Engines by name: which module makes a backend, and how a Node gets an engine of it.

Owns the two tables; a new engine is one line in each. Refuses to import any engine before it is asked for: a library
that is not installed is `engine_unavailable`, and says which; a worker, which loads a backend, imports nothing of the
Node's side. Shown by tests/model/test_backends.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardline.errors import ShardlineError
from shardline.model.backend import Backend, ShardSpec
from shardline.settings import Settings
from shardline.wire.messages import StepTimes

if TYPE_CHECKING:
    from shardline.model.engine import Engine

BACKENDS: dict[str, str] = {
    "torch": "shardline.model.torch_backend:load",
    "llama": "shardline.model.llama_shard:load",
    "llama-window": "shardline.model.llama_window:load",
    "scripted": "shardline.model.scripted:load",
}
"""Name -> `module:factory`. The factory takes a `ShardSpec`, and a keyword `progress(done, total)` if it names one."""

SELF_TESTS: dict[str, str] = {
    "torch": "shardline.model.self_test:self_test",
    "llama": "shardline.model.self_test:self_test",
    "llama-window": "shardline.model.self_test:self_test",
    "scripted": "shardline.model.scripted:self_test",
}
"""Name -> `module:function` from a loaded backend to its `StepTimes`; raises where the Shard does not compute."""


def _find(table: Mapping[str, str], name: str) -> Any:
    path = table.get(name)
    if path is None:
        raise ShardlineError("engine_unavailable", f"no engine is called {name!r:.40}; there are {sorted(table)}")
    module, _, attribute = path.partition(":")
    extra = name.partition("-")[0]
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ShardlineError(
            "engine_unavailable",
            f"the {name} engine cannot be loaded: {error.name or error} is not installed",
            advice=f"Install it: pip install 'shardline[{extra}]', or in a clone: pip install -e '.[{extra}]'",
        ) from error


def load(name: str, spec: ShardSpec, progress: Callable[[int, int], None]) -> Backend:
    """Load a Shard in this process. `engine_unavailable` for an unknown name or a missing library."""
    factory = _find(BACKENDS, name)
    if "progress" in inspect.signature(factory).parameters:
        return factory(spec, progress=progress)  # type: ignore[no-any-return]
    return factory(spec)  # type: ignore[no-any-return]


def self_test(name: str, backend: Backend) -> StepTimes:
    return _find(SELF_TESTS, name)(backend)  # type: ignore[no-any-return]


def engine(
    name: str, spec: ShardSpec, settings: Settings, *, inherited: Mapping[str, str], inline: bool = False
) -> Engine:
    """The engine of a Node: a worker process, or with `inline` the scripted engine on the Node's own loop.

    `inherited`: the environment of this process; the worker gets the few variables of it that engines need.
    """
    if name not in BACKENDS:
        _find(BACKENDS, name)
    if not inline:
        from shardline.model.worker_engine import WorkerEngine

        return WorkerEngine(name, spec, settings, inherited=inherited)
    if name != "scripted":
        raise ShardlineError("setting_invalid", f"the {name} engine runs in a worker process only", param="inline")
    from shardline.model.engine import InlineEngine
    from shardline.model.scripted import load_inline

    return InlineEngine(lambda: load_inline(spec), settings)
