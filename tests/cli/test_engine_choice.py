"""Which engine is taken where nobody says, and how layers are shared out for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardline.cli.demo_model import demo_model
from shardline.cli.engine_choice import engine_for, shared_out
from shardline.errors import ShardlineError


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    assert engine_for(tmp_path / "model.gguf", "scripted") == "scripted"
    assert engine_for(tmp_path, "llama") == "llama"


def test_a_folder_is_for_pytorch(tmp_path: Path) -> None:
    assert engine_for(tmp_path, None) == "torch"


def test_a_file_is_for_llama_cpp_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("raise SystemExit('nobody imports it to find out')")
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert engine_for(file, None) == "llama"
    (tmp_path / "llama_cpp" / "__init__.py").unlink()
    (tmp_path / "llama_cpp").rmdir()
    assert engine_for(file, None) == "torch"


@pytest.mark.smollm2
def test_ranges_cover_the_model_and_are_even_in_what_the_engine_reads() -> None:
    model = demo_model()
    assert shared_out(model, "torch", 3) == [(0, 10), (10, 20), (20, 30)]
    ranges = shared_out(model, "llama", 3)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == 30 and len(ranges) == 3
    assert shared_out(model, "llama", 1) == [(0, 30)]
    with pytest.raises(ShardlineError) as caught:
        shared_out(model, "llama", 31)
    assert caught.value.code == "layers_invalid"
