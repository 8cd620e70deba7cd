"""Grammars as masks: what may come, what is refused with which words, and that an answer keeps to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from shardline.errors import ShardlineError
from shardline.model import grammar as grammar_module
from shardline.model.backend import BackendEntry, ShardSpec, SlotSpec
from shardline.model.generation import Generator, SampledToken, StepResult
from shardline.model.grammar import Constraint, Grammars
from shardline.model.sampling import Sampler
from shardline.model.scripted import load_inline
from shardline.wire.messages import GRAMMAR_BYTES, Grammar, Sampling, TextBundle

pytest.importorskip("llguidance")
SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
END, THINK_END = 256, 257
VOCAB = 260
TEXT = TextBundle(
    pieces=[bytes([i]) for i in range(256)] + [b"<|end|>", b"</think>", b"<|call|>"],
    special=[256, 258],
    eog=[256],
    bos=None,
    eos=256,
    add_bos=False,
    chat_template=None,
    context_length=64,
)
CLOSED = {"type": "object", "additionalProperties": False}
PERSON = json.dumps(
    {**CLOSED, "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
)


def schema(text: str, **more: Any) -> Grammar:
    return Grammar(kind="json_schema", text=text, field="response_format", **more)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(msgspec.msgpack.encode(TEXT), VOCAB)


def may_come(constraint: Constraint) -> set[int]:
    mask = constraint.mask()
    assert mask.penalty.dtype == np.float32 and mask.penalty.shape == (VOCAB,)
    assert set(np.unique(mask.penalty)) <= {0.0, -np.inf}
    return set(np.flatnonzero(mask.penalty == 0).tolist())


def letters(constraint: Constraint) -> str:
    return bytes(sorted(i for i in may_come(constraint) if i < 256)).decode("latin-1")


def after(grammars: Grammars, grammar: Grammar, text: bytes) -> Constraint:
    constraint = grammars.constraint(grammar)
    constraint.observe(0, list(text))
    return constraint


def test_masks_follow_the_tokens_that_come(grammars: Grammars) -> None:
    yes_or_no = Grammar(kind="regex", text="yes|no", field="regex")
    assert letters(grammars.constraint(yes_or_no)) == "ny"
    assert letters(after(grammars, yes_or_no, b"ye")) == "s"
    whole = after(grammars, yes_or_no, b"yes")
    assert may_come(whole) == {END}
    assert whole.mask().complete


def test_what_was_observed_before_changes_nothing_and_another_token_goes_back(grammars: Grammars) -> None:
    constraint = after(grammars, Grammar(kind="regex", text="yes|no", field="regex"), b"ye")
    constraint.observe(1, list(b"e"))
    assert letters(constraint) == "s"
    constraint.observe(0, list(b"no"))
    assert may_come(constraint) == {END}
    constraint.rollback(1)
    assert letters(constraint) == "o"
    constraint.rollback(0)
    assert letters(constraint) == "ny"


def test_a_token_that_the_grammar_does_not_have_is_told_by_the_next_mask(grammars: Grammars) -> None:
    constraint = after(grammars, Grammar(kind="regex", text="yes", field="regex"), b"x")
    with pytest.raises(ShardlineError) as told:
        constraint.mask()
    assert (told.value.code, told.value.param) == ("grammar_invalid", "regex")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'start: "yes" | "no"'),
        ("grammar", 'root ::= "yes" | "no"'),
        ("regex", "yes|no"),
        ("json_schema", '{"enum": ["yes", "no"]}'),
    ],
)
def test_lark_gbnf_regex_and_schema(grammars: Grammars, kind: Any, text: str) -> None:
    quote = '"' if kind == "json_schema" else ""
    constraint = grammars.constraint(Grammar(kind=kind, text=text, field="grammar"))
    assert letters(constraint) == (quote or "ny")


def test_what_stands_in_front_comes_first(grammars: Grammars) -> None:
    before = 'before: thought BLANK?\nthought[suffix="</think>"]: /(?s:.*)/\nBLANK: /[ \\n]{1,8}/'
    for kind, text in (("json_schema", '{"type": "object"}'), ("grammar", 'start: "{}"'), ("regex", r"\{\}")):
        grammar = Grammar(kind=kind, text=text, field="grammar", before=before)  # type: ignore[arg-type]
        constraint = grammars.constraint(grammar)
        assert len(letters(constraint)) > 150
        constraint.observe(0, [*b"{ hm", THINK_END])
        assert letters(constraint) == "\n {"
        constraint.observe(6, list(b"\n{"))
        assert "}" in letters(constraint)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"type": "string", "pattern": "^(?!x)a$"}', "look-around"),
        ('{"type": "nope"}', "nope"),
        ('{"not": {"type": "string"}}', "not"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"$ref": "https://x/y"}', "https://x/y"),
        ("[1]", "schema"),
        ("{", "not JSON"),
        ("[" * 5000, "nested"),
        ('{"type": "string", "format": "nope"}', "nope"),
        (json.dumps({"type": "string", "description": "x" * GRAMMAR_BYTES}), "bytes"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_the_reason(grammars: Grammars, text: str, reason: str) -> None:
    with pytest.raises(ShardlineError) as refused:
        grammars.check(schema(text))
    assert (refused.value.code, refused.value.param) == ("grammar_invalid", "response_format")
    assert reason in refused.value.message


@pytest.mark.parametrize("text", ["root ::= foo", "start: a", 'start: "a" %%', "x ::= (((", "root ::= " + "(" * 9_000])
def test_a_grammar_that_is_none_is_refused(grammars: Grammars, text: str) -> None:
    with pytest.raises(ShardlineError, match="'grammar': "):
        grammars.check(Grammar(kind="grammar", text=text, field="grammar"))


def test_rules_that_name_each_other_thousands_deep_do_not_end_the_process(grammars: Grammars) -> None:
    """On the stack of an ordinary thread the compiler would run off its end."""
    chain = "\n".join(["start: r0", *(f'r{n}: r{n + 1} | "a"' for n in range(5000)), 'r5000: "b"'])
    constraint = grammars.constraint(Grammar(kind="lark", text=chain, field="grammar"))
    assert letters(constraint) == "ab"


def test_gbnf_has_a_smaller_bound_and_lark_may_have_its_sign_in_a_text(grammars: Grammars) -> None:
    long = "root ::= " + " | ".join(f'"w{n}"' for n in range(3000))
    with pytest.raises(ShardlineError, match="Lark"):
        grammars.check(Grammar(kind="grammar", text=long, field="grammar"))
    assert letters(grammars.constraint(Grammar(kind="lark", text='start: "::="', field="grammar"))) == ":"


def test_a_request_does_not_choose_how_its_schema_is_compiled(grammars: Grammars) -> None:
    sent = {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": "[ ]*"}, "not": {}}
    with pytest.raises(ShardlineError, match="not"):
        grammars.check(schema(json.dumps(sent)))


def test_two_thousand_properties_and_recursion_compile(grammars: Grammars) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    grammars.check(schema(json.dumps(many)))
    grammars.check(schema('{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}'))
    assert grammars.constraint(schema(json.dumps(many))).mask()


def test_blank_space_between_tokens_has_an_end(grammars: Grammars) -> None:
    constraint = after(grammars, schema('{"type": "object"}'), b"{" + b"\n" * 40)
    assert "\n" not in letters(constraint) and "}" in letters(constraint)


def test_without_the_library_every_grammar_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ShardlineError, match="llguidance") as refused:
        Grammars(msgspec.msgpack.encode(TEXT), VOCAB).check(schema("{}"))
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "response_format")
    with pytest.raises(ShardlineError, match="no text"):
        Grammars(None, 0).check(schema("{}"))


def test_the_trie_of_a_small_vocabulary_is_made_with_the_first_grammar_of_a_large_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Grammars(msgspec.msgpack.encode(TEXT), VOCAB)
    assert made._trie is None
    made.check(schema("{}"))
    trie = made._trie
    assert trie is not None
    made.check(schema("true"))
    assert made._trie is trie
    monkeypatch.setattr(grammar_module, "_MADE_LATER_TOKENS", VOCAB - 1)
    assert Grammars(msgspec.msgpack.encode(TEXT), VOCAB)._trie is not None


def test_a_vocabulary_that_the_library_refuses_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    asked = []

    def refuse(*_: object, **__: object) -> None:
        asked.append(1)
        raise ValueError("no")

    monkeypatch.setattr(llguidance, "LLTokenizer", refuse)
    made = Grammars(msgspec.msgpack.encode(TEXT), VOCAB)
    for _ in range(2):
        with pytest.raises(ShardlineError, match="cannot read its vocabulary"):
            made.check(schema("{}"))
    assert asked == [1]


def test_a_vocabulary_with_a_very_long_token(grammars: Grammars) -> None:
    made = Grammars(msgspec.msgpack.encode(msgspec.structs.replace(TEXT, pieces=[*TEXT.pieces, b"a" * 5000])), VOCAB)
    assert may_come(made.constraint(Grammar(kind="regex", text="a*", field="regex"))) == {ord("a"), END}


def test_a_panic_of_the_library_is_an_error_of_one_session(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: object) -> None:
        raise PanicException("at the disco")

    constraint = grammars.constraint(Grammar(kind="regex", text="a*", field="regex"))
    monkeypatch.setattr(constraint, "_mask", panic)
    constraint.observe(0, [ord("a")])
    with pytest.raises(ShardlineError, match="disco") as told:
        constraint.mask()
    assert told.value.code == "engine_error"
    monkeypatch.setattr(grammars, "_source", panic)
    with pytest.raises(ShardlineError, match="disco"):
        grammars.check(Grammar(kind="regex", text="never seen", field="regex"))


def test_compiled_grammars_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "COMPILED_KEPT", 2)
    grammars = Grammars(msgspec.msgpack.encode(TEXT), VOCAB)
    for n in range(4):
        grammars.check(Grammar(kind="regex", text=f"a{n}", field="regex"))
    assert [key[1] for key in grammars._compiled] == ["a2", "a3"]


def test_many_threads_may_check_at_once(grammars: Grammars) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: grammars.check(Grammar(kind="regex", text=f"b{n % 5}", field="regex")), range(40)))


# ---- sampling --------------------------------------------------------------------------------------------------------


def sampler(grammars: Grammars, grammar: Grammar, **fields: Any) -> Sampler:
    sampling = Sampling(temperature=fields.pop("temperature", 0.0), grammar=grammar, **fields)
    constraint = grammars.constraint(grammar)
    return Sampler(sampling, vocab_size=VOCAB, prompt_tokens=2, end_ids=[END], constraint=constraint)


def said(made: Sampler, logits: Callable[[int], np.ndarray[Any, Any]], limit: int = 200) -> bytes:
    """What is sampled until the end; the rows come round as they do in a ring."""
    made.observe(np.array([1, 2], dtype=np.int32))
    out = b""
    for step in range(limit):
        token = made.sample(logits(step)).id
        if token == END:
            return out
        out += bytes([token])
        made.observe(np.array([token], dtype=np.int32))
    return out + b"..."


def noise(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).normal(size=VOCAB).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whatever_the_model_says_the_answer_keeps_to_the_schema(grammars: Grammars, temperature: float) -> None:
    choice, flag = {"enum": ["x", "yy"]}, {"type": "boolean"}
    bounded = json.dumps({**CLOSED, "properties": {"a": choice, "b": flag}, "required": ["a"]})
    for seed in range(10):
        made = sampler(grammars, schema(bounded), temperature=temperature, seed=seed)
        value = json.loads(said(made, lambda step, seed=seed: noise(1000 * seed + step)))  # type: ignore[misc]
        assert value["a"] in ("x", "yy") and set(value) <= {"a", "b"}


def test_a_complete_grammar_ends_whatever_holds_the_end_back(grammars: Grammars) -> None:
    for fields in ({"min_tokens": 50}, {"ignore_eos": True}, {"logit_bias": {END: -100.0}}):
        assert said(sampler(grammars, Grammar(kind="regex", text="abc", field="regex"), **fields), noise) == b"abc"


def test_bans_that_leave_the_grammar_nothing_are_an_error(grammars: Grammars) -> None:
    made = sampler(grammars, Grammar(kind="regex", text="abc", field="regex"), logit_bias={ord("b"): -100.0})
    with pytest.raises(ShardlineError, match="grammar") as refused:
        said(made, noise)
    assert refused.value.code == "no_token_left"


def test_logprobs_stay_those_of_the_model(grammars: Grammars) -> None:
    made = sampler(grammars, Grammar(kind="regex", text="abc", field="regex"), logprobs=1)
    made.observe(np.array([1, 2], dtype=np.int32))
    logits = noise(7)
    choice = made.sample(logits)
    assert choice.id == ord("a") and choice.top is not None and choice.logprob is not None
    assert choice.top[0][0] == int(logits.argmax()) != ord("a")
    assert choice.logprob < choice.top[0][1]


def test_after_a_rollback_the_same_answer_comes_again(grammars: Grammars) -> None:
    made = sampler(grammars, Grammar(kind="regex", text="[ab]{4}", field="regex"), temperature=1.0, seed=3)
    made.observe(np.array([1, 2], dtype=np.int32))
    out = []
    for step in range(3):
        out.append(made.sample(noise(step)).id)
        made.observe(np.array([out[-1]], dtype=np.int32))
    made.rollback(3)
    again = []
    for step in range(1, 3):
        again.append(made.sample(noise(step)).id)
        made.observe(np.array([again[-1]], dtype=np.int32))
    assert again == out[1:]


# ---- the generator ---------------------------------------------------------------------------------------------------


def test_a_slot_keeps_to_its_grammar_and_says_length_where_it_was_cut(spec: SpecMaker, entry: MakeEntry) -> None:
    generator = Generator(load_inline(spec(answer=["Sure", "!"], sharpness=2.0)))

    def answer(max_tokens: int, grammar: Grammar) -> tuple[bytes, str | None]:
        generator.open(0, SlotSpec(3, max_tokens, Sampling(temperature=0.0, grammar=grammar)))
        out: list[SampledToken] = []
        ids, position = [1, 2, 3], 0
        while not out or out[-1].end is None:
            (result,) = generator.run([entry(position, ids)])
            assert isinstance(result, StepResult) and result.token is not None, result
            out.append(result.token)
            position, ids = position + len(ids), [out[-1].id]
        generator.close(0)
        vocabulary = generator.backend.vocabulary  # type: ignore[attr-defined]
        return vocabulary.text(t.id for t in out if t.id != vocabulary.end), out[-1].end

    assert answer(50, Grammar(kind="regex", text="[0-9]{3}", field="regex"))[1] == "stop"
    text, end = answer(
        50,
        schema(json.dumps({**CLOSED, "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})),
    )
    assert end == "stop" and json.loads(text)["ok"] in (True, False)
    text, end = answer(4, schema(PERSON))
    assert end == "length" and text.startswith(b"{")


def test_a_refused_grammar_leaves_no_slot(spec: SpecMaker) -> None:
    generator = Generator(load_inline(spec()))
    with pytest.raises(ShardlineError, match="nope"):
        generator.open(0, SlotSpec(3, 5, Sampling(grammar=schema('{"type": "nope"}'))))
    assert generator.slots == 0
