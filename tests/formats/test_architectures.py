"""The table of architectures: whole, without contradictions, and forgiving to names it does not know."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.formats.architectures import ROWS, Architecture, check_torch, llama_rules, of_gguf, of_model_type

PROVEN = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "mistral", "phi3", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("model_type", PROVEN)
def test_proven_architectures_are_supported(model_type: str) -> None:
    row = of_model_type(model_type)
    assert row.torch == "supported"
    assert row.layout == "hidden"
    assert row.rollback != "never"
    check_torch(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_are_whole(row: Architecture) -> None:
    assert row.gguf or row.model_types
    assert (row.torch == "refused") == (row.reason is not None)
    if row.llama is not None:
        assert row.gguf, "llama.cpp knows an architecture by its name in GGUF files"
        assert (row.llama.proof == "refused") == (row.llama.reason is not None)
        assert row.llama.residual.format(last=3) in ("l_out-3", "h_nextn", "nemotron_h_block_out-3", "ffn_residual-3")
        assert bool(row.llama.zero_keys) == bool(row.llama.zero_reason)
        assert row.llama.count_cure is None or row.llama.counts
    for name in row.gguf:
        assert of_gguf(name) == row
    for name in row.model_types:
        assert of_model_type(name) == row


def test_no_name_stands_twice() -> None:
    for column in (
        [row.name for row in ROWS],
        [n for r in ROWS for n in r.gguf],
        [n for r in ROWS for n in r.model_types],
    ):
        assert len(set(column)) == len(column)


@pytest.mark.parametrize("name", ["qwen3next", "mamba", "jamba", "lfm2", "rwkv7", "gemma3n"])
def test_what_cannot_be_cut_for_now_is_refused_by_name(name: str) -> None:
    with pytest.raises(ShardlineError, match="the PyTorch engine does not run") as caught:
        check_torch(of_gguf(name))
    assert caught.value.code == "architecture_unsupported"
    assert "for now" in caught.value.message or "across any cut" in caught.value.message


@pytest.mark.parametrize("name", ["foo", "", "constructor", "llama5"])
def test_an_unknown_name_may_be_tried(name: str) -> None:
    for row in (of_gguf(name), of_model_type(name)):
        assert (row.name, row.torch, row.rollback, row.layout) == (name, "untried", "exact", "hidden")
        check_torch(row)


def test_what_no_engine_runs_is_refused_with_its_page() -> None:
    for row in (of_gguf("deepseek41"), of_model_type("deepseek_v41")):
        for check in (check_torch, llama_rules):
            with pytest.raises(ShardlineError, match=r"deepseek4\.1 is not supported: no released version") as caught:
                check(row)
            assert caught.value.advice == "Choose another model: see docs/audits/deepseek-v4-flash.md."


def test_pages_are_there() -> None:
    docs = Path(__file__).parents[2] / "docs"
    pages = {row.page for row in ROWS if row.page is not None}
    assert len(pages) == 3
    assert all((docs / page).is_file() for page in pages)


def test_rollback_depends_on_the_window() -> None:
    assert of_gguf("llama").can_roll_back(100_000, 4096)
    assert of_gguf("gemma3").can_roll_back(1023, 1024)
    assert not of_gguf("gemma3").can_roll_back(1024, 1024)
    assert of_gguf("qwen3").can_roll_back(100_000, None)
    assert not of_gguf("mamba").can_roll_back(1, None)


def test_what_llama_cpp_runs_only_whole_says_why() -> None:
    assert llama_rules(of_gguf("llama")).residual == "l_out-{last}"
    for name, why in (("foo", "nobody has compared"), ("rwkv7", "normalises"), ("deepseek4", "more than one row")):
        with pytest.raises(ShardlineError, match=f"llama.cpp runs .* only whole: .*{why}") as caught:
            llama_rules(of_gguf(name))
        assert caught.value.code == "architecture_unsupported"
        assert "one Node" in caught.value.advice


def test_no_state_of_a_recurrent_layer_is_taken_back() -> None:
    for row in ROWS:
        if row.llama is not None and row.llama.recurrent is not None:
            assert row.rollback == "never", row.name
