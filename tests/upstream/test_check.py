"""What another version of llama-cpp-python changes is printed, and what the engine cannot take counts as a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from upstream.check import check_version, show_names, show_structs

BEFORE = {"llama_context_params": ["n_ctx: c_uint"], "llama_chat_message": ["role: c_char_p", "content: c_char_p"]}


def test_a_struct_that_is_handed_over_by_value_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    after = {**BEFORE, "llama_context_params": ["n_ctx: c_uint", "moe_cache_size: c_ulong"]}
    assert show_structs(BEFORE, after)
    assert "struct llama_context_params: gone nothing, new ['moe_cache_size: c_ulong']" in capsys.readouterr().out


def test_an_installation_that_was_ended_is_not_taken_for_the_version() -> None:
    with pytest.raises(SystemExit, match=r"rm -r /cache/venv-0\.3\.35"):
        check_version("0.3.36", "0.3.35", Path("/cache/venv-0.3.35/bin/python"))
    check_version("0.3.35", "0.3.35", Path("/cache/venv-0.3.35/bin/python"))


def test_a_struct_that_the_engine_fills_and_that_is_gone_is_a_failure() -> None:
    assert show_structs({**BEFORE, "llama_sampler_i": ["name: CFunctionType"]}, BEFORE)


def test_other_structs_and_orders_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    after = {**BEFORE, "llama_chat_message": BEFORE["llama_chat_message"][::-1], "llama_embd": []}
    assert not show_structs(BEFORE, after)
    said = capsys.readouterr().out
    assert "struct llama_chat_message: gone nothing, new nothing, other order" in said
    assert "structs: 0 gone ; 1 new llama_embd" in said


def test_names_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    show_names("architectures", ["llama", "deepseek4"], ["llama", "deepseek5"])
    assert capsys.readouterr().out == "architectures: 1 gone deepseek4; 1 new deepseek5\n"
