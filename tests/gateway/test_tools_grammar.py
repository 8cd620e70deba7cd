"""Calls that must be made, written by a grammar: whatever it allows is read as calls again."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.tools_request import NamedFunction, ToolChoice
from shardline.gateway.tools_scan import begun
from shardline.gateway.tools_styles import STYLES
from shardline.model.grammar import Grammars
from shardline.model.sampling import Sampler
from shardline.wire.messages import Grammar, Sampling
from tests.support.tool_answers import PLACE, TEMPLATES, Family, as_tokens, plain, tools

pytest.importorskip("llguidance")
CONTROLS = sorted({mark for style in STYLES for mark in style.marks} | {"<think>", "</think>", "[THINK]", "[/THINK]"})
SMALL = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "boolean"}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = Grammar(kind="json_schema", text=json.dumps({"enum": [1, 2]}), field="response_format")


def said(family: Family, grammar: Grammar, seed: int, limit: int = 1500) -> str:
    """What a model says that says anything at all, but must keep to the grammar. It ends its thinking after a while."""
    words = family.words
    grammars = Grammars(msgspec.msgpack.encode(words.bundle), words.size)
    made = Sampler(
        Sampling(temperature=1.0, seed=seed, grammar=grammar),
        vocab_size=words.size,
        prompt_tokens=0,
        end_ids=[256],
        constraint=grammars.constraint(grammar),
    )
    bias = np.zeros(words.size, dtype=np.float32)
    bias[257:] = 4.0
    bias[256] = 5.0
    out: list[int] = []
    close = next((mark for mark in ("</think>", "[/THINK]") if mark in str(words.bundle.chat_template)), "")
    for step in range(limit):
        logits = np.random.default_rng(seed * 10_000 + step).normal(size=words.size).astype(np.float32) + bias
        said_so_far = b"".join(words.piece(t) for t in out).decode("utf-8", "replace")
        if close and close not in said_so_far and step > 12:
            logits[next(iter(as_tokens(close[begun(said_so_far, close) :], words)))] += 12
        token = made.sample(logits).id
        if token == 256:
            return b"".join(words.piece(t) for t in out).decode("utf-8", "replace")
        out.append(token)
        made.observe(np.array([token], dtype=np.int32))
    return ""


@pytest.mark.parametrize("controls", [(), CONTROLS], ids=["plain", "control"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("choice", ["required", "named"])
def test_calls_that_must_be_made_are_read_as_such(name: str, controls: Any, choice: str) -> None:
    if name == "harmony" and not controls:
        pytest.skip("its marks are control tokens in every vocabulary; as text they do not end a message")
    wanted: Any = "required"
    if choice == "named":
        wanted = ToolChoice(type="function", function=NamedFunction("get"))
    family = Family(name, controls, tools(wanted, schema=SMALL))
    grammar = family.reading.grammar(None, "", continued=False)
    assert grammar is not None and grammar.field == "tool_choice"
    read = 0
    for seed in range(6):
        text = said(family, grammar, seed)
        parts = [part for part in plain(family.read(text)) if not isinstance(part, list)] if text else []
        for called, number, arguments in parts:
            assert called in (("get",) if choice == "named" else ("get", "get_weather"))
            assert arguments["city"] in ("Oslo", "Rome") and number < 16
            read += 1
    assert read >= 3


def test_one_call_alone_where_parallel_ones_are_not_wanted() -> None:
    family = Family("tagged", (), tools("required", parallel=False, schema=SMALL))
    grammar = family.reading.grammar(None, "</think>", continued=False)
    assert grammar is not None and grammar.before == ""
    for seed in range(4):
        assert len(plain(family.read(said(family, grammar, seed)))) == 1


def test_an_answer_of_a_form_or_calls() -> None:
    family = Family("tagged", (), tools(schema=SMALL))
    grammar = family.reading.grammar(ANSWER, "</think>", continued=False)
    assert grammar is not None and grammar.field == "tools"
    kinds = {type(plain(family.read(said(family, grammar, seed)))[0]).__name__ for seed in range(12)}
    assert kinds == {"str", "tuple"}


@pytest.mark.parametrize("prompt", ["", "...<think>\n"])
@pytest.mark.parametrize("controls", [(), CONTROLS], ids=["plain", "control"])
def test_a_form_begins_behind_the_thinking(prompt: str, controls: Any) -> None:
    family = Family("{{ messages }}<think></think>", controls, None, prompt)
    grammar = family.reading.grammar(ANSWER, prompt, continued=False)
    assert grammar is not None and grammar.before
    ended = [plain(family.read(text)) for seed in range(8) if (text := said(family, grammar, seed))]
    assert ended and all(parts[-1] in ("1", "2") for parts in ended)
    assert any(len(parts) == 2 for parts in ended)


def test_a_form_of_gpt_oss_is_its_last_message() -> None:
    family = Family("harmony", CONTROLS)
    grammar = family.reading.grammar(ANSWER, "", continued=False)
    assert grammar is not None
    ended = [plain(family.read(text)) for seed in range(8) if (text := said(family, grammar, seed))]
    assert ended and all(parts[-1] in ("1", "2") for parts in ended)


def test_what_does_not_go_together_is_refused() -> None:
    for form in (
        Grammar(kind="regex", text="a", field="regex"),
        Grammar(kind="grammar", text="start: /a/", field="grammar"),
    ):
        with pytest.raises(ShardlineError) as refused:
            Family("tagged", (), tools()).reading.grammar(form, "", continued=False)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", form.field)
    with pytest.raises(ShardlineError) as refused:
        Family("{{ messages }}", (), tools())
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
    assert refused.value.advice.startswith("Ask a model whose chat template shows tools")


def test_a_schema_with_definitions_of_its_own_keeps_them() -> None:
    schema = {**PLACE, "properties": {"city": {"$ref": "#/$defs/c"}}, "$defs": {"c": {"enum": ["Oslo"]}}}
    family = Family("tagged", (), tools("required", schema=schema))
    grammar = family.reading.grammar(None, "</think>", continued=False)
    assert grammar is not None
    assert plain(family.read(said(family, grammar, 1)))[0][2] == {"city": "Oslo"}
