"""Each family's calls are read, in one piece and byte by byte; what is no call stays text, whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.gateway.tools_parts import Call, Content
from shardline.gateway.tools_styles import STYLES, style_of
from tests.support.tool_answers import TEMPLATES, Family, as_tokens, call, plain, tools

OSLO = '{"city": "Oslo"}'
WEATHER = call("get_weather", city="Oslo")
D = {
    name: f"<｜tool▁{name.replace(' ', '▁')}｜>"
    for name in ("calls begin", "calls end", "call begin", "call end", "sep")
}
DEEPSEEK = (
    f"{D['calls begin']}{D['call begin']}get_weather{D['sep']}{OSLO}{D['call end']}"
    f"{D['call begin']}get{D['sep']}{{}}{D['call end']}{D['calls end']}"
)
DEEPSEEK_R1 = (
    f"{D['calls begin']}{D['call begin']}function{D['sep']}get_weather\n"
    f"```json\n{OSLO}\n```{D['call end']}{D['calls end']}"
)
HARMONY_CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + OSLO
READ: list[tuple[str, str, list[Any]]] = [
    ("tagged", "plain text", ["plain text"]),
    ("tagged", f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>', [WEATHER]),
    (
        "tagged",
        f'Let me see.\n\n<tool_call>{{"arguments": {OSLO}, "name": "get_weather"}}</tool_call>',
        ["Let me see.", WEATHER],
    ),
    (
        "tagged",
        f'<tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</tool_call>\n'
        '<tool_call>{"name": "get"}</tool_call>\ndone',
        [WEATHER, call("get", 1), "done"],
    ),
    (
        "tagged",
        '<tool_call>{"name": "get", "arguments": {"city": "</tool_call>"}}</tool_call>',
        [call("get", city="</tool_call>")],
    ),
    ("tagged", '<tool_call>{"name": "get", "arguments": "{\\"city\\": \\"a\\"}"}</tool_call>', [call("get", city="a")]),
    ("tagged", '<tool_call>{"name": "get", "arguments": {}}', [call("get")]),
    (
        "tagged",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [call("get_weather", city="New\nYork", days=3)],
    ),
    (
        "tagged",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        [call("get_weather", city="12", days=2)],
    ),
    ("tagged", "<tool_call>get\n</tool_call>", [call("get")]),
    ("tagged", "<think>hm\n</think>\n\nok", [["hm"], "ok"]),
    ("tagged", '<think>\nhm\n</think>\n<tool_call>{"name": "get"}</tool_call>', [["hm"], call("get")]),
    # Calls that are none.
    ("tagged", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    (
        "tagged",
        '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
        ['<tool_call>{"name": "nope", "arguments": {}}</tool_call>'],
    ),
    (
        "tagged",
        '<tool_call>{"name": "get", "arguments": [1]}</tool_call>',
        ['<tool_call>{"name": "get", "arguments": [1]}</tool_call>'],
    ),
    ("tagged", "a\n<tool_call>\nnothing", ["a\n<tool_call>\nnothing"]),
    ("tagged", '<tool_call>{"name": "get",, }</tool_call> x', ['<tool_call>{"name": "get",, }</tool_call> x']),
    ("tagged", "The mark <tool_call> begins a call.", ["The mark <tool_call> begins a call."]),
    ("tagged", '<tool_call> or <tool_call>{"name": "get"}</tool_call>', ["<tool_call> or ", call("get")]),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}, {{"name": "get", "arguments": {{}}}}]',
        [WEATHER, call("get", 1)],
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}, "id": "abcdefghi"}}]', [WEATHER]),
    ("mistral", "[TOOL_CALLS] [nothing]", ["[TOOL_CALLS] [nothing]"]),
    (
        "mistral by name",
        f"[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]get[CALL_ID]123456789[ARGS]{{}}",
        [WEATHER, call("get", 1)],
    ),
    ("mistral by name", f"[THINK]so[/THINK]Hello[TOOL_CALLS]get_weather[ARGS]{OSLO}", [["so"], "Hello", WEATHER]),
    ("deepseek", DEEPSEEK, [WEATHER, call("get", 1)]),
    ("deepseek", "Well\n" + DEEPSEEK_R1, ["Well", WEATHER]),
    ("deepseek", D["calls begin"] + "nothing", [D["calls begin"] + "nothing"]),
    ("llama", f'{{"name": "get_weather", "parameters": {OSLO}}}', [WEATHER]),
    (
        "llama",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {OSLO}}}; {{"name": "get", "parameters": {{}}}}',
        [WEATHER, call("get", 1)],
    ),
    ("llama", f'{{"type": "function", "function": {{"name": "get_weather", "arguments": {OSLO}}}}}', [WEATHER]),
    (
        "llama",
        "[get_weather(city='O]s\\'lo', days=-3), get()]",
        [call("get_weather", city="O]s'lo", days=-3), call("get", 1)],
    ),
    (
        "llama",
        '[get(a=[1, (2.5,)], b={"x": true, \'y\': None}, c="it\'s")]',
        [call("get", a=[1, [2.5]], b={"x": True, "y": None}, c="it's")],
    ),
    ("llama", "<|python_start|>[get()]<|python_end|>", [call("get")]),
    ("llama", '{"answer": 42}', ['{"answer": 42}']),
    ("llama", '{"name": "Bob"}', ['{"name": "Bob"}']),
    ("llama", 'Look: {"name": "get", "parameters": {}}', ['Look: {"name": "get", "parameters": {}}']),
    ("llama", "[get(x)]", ["[get(x)]"]),
    ("llama", "[get(x=open('f'))]", ["[get(x=open('f'))]"]),
    ("llama", "[get(**{})]", ["[get(**{})]"]),
    ("llama", "[get(x=" + "[" * 200 + "]" * 200 + ")]", ["[get(x=" + "[" * 200 + "]" * 200 + ")]"]),
    ("llama", "[1, 2]", ["[1, 2]"]),
    ("harmony", HARMONY_CALL, [WEATHER]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        + HARMONY_CALL
        + "<|call|>",
        [["Hm."], "I look.", WEATHER],
    ),
    ("harmony", " to=functions.get", [" to=functions.get"]),
    (
        "harmony",
        "<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done",
        [call("get"), "Done"],
    ),
    ("harmony", "<|channel|>final<|message|>Hello<|return|>", ["Hello"]),
    ("harmony", "Hello, no header", ["Hello, no header"]),
    ("harmony", "<|channel|>commentary to=functions.get<|message|>{broken", ["{broken"]),
    ("harmony", "<|channel|>commentary to=functions.nope<|message|>{}<|call|>", ["{}"]),
    ("harmony", "<|channel|>anal", []),
    ("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", [["a\nb"]]),
]
CONTROLS = sorted({mark for style in STYLES for mark in style.marks} | {"[THINK]", "[/THINK]"})


def families(name: str) -> list[Family]:
    """The marks as plain text, and as control tokens."""
    return [Family(name, controls, tools()) for controls in ((), CONTROLS)]


@pytest.mark.parametrize(("name", "text", "parts"), READ, ids=[f"{name}: {text[:40]}" for name, text, _ in READ])
def test_answers_are_read_in_any_pieces(name: str, text: str, parts: list[Any]) -> None:
    plain_marks, controls = families(name)
    assert plain(plain_marks.read(text)) == parts
    assert plain_marks.read(text, [1] * len(text.encode())) == plain_marks.read(text)
    assert controls.read(text, [1] * len(text.encode())) == controls.read(text)


@pytest.mark.parametrize(("name", "text", "parts"), READ, ids=[f"{name}: {text[:40]}" for name, text, _ in READ])
def test_marks_that_are_control_tokens_are_never_shown(name: str, text: str, parts: list[Any]) -> None:
    if '"</tool_call>"' in text:
        return  # a control token within a value is no text: that is no call
    _, family = families(name)
    got = plain(family.read(text))
    assert [part for part in got if not isinstance(part, str)] == [part for part in parts if not isinstance(part, str)]
    shown = "".join(part for part in got if isinstance(part, str))
    expected = "".join(part for part in parts if isinstance(part, str))
    for mark in CONTROLS:
        expected = expected.replace(mark, "")
        assert mark not in shown
    assert shown == expected


def test_a_control_mark_is_not_mistaken_for_text_that_looks_like_it() -> None:
    family = Family("tagged", ["<tool_call>", "</tool_call>"], tools())
    quoted = '<tool_call>{"name": "get"}</tool_call>'
    spelled = [*quoted.encode()]
    reader = family.reading.reader("")
    assert reader is not None and len(as_tokens(quoted, family.words)) < len(spelled)
    assert [*reader.push(quoted), *reader.finish()] != []
    assert reader.calls == 0


PIECES = [
    *[
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "`</think>`",
        "\n",
        " ",
        "`",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "é😀",
    ],
    *[
        '{"name": "get"}',
        '{"name": "get", "arguments": {"a": "}"}}',
        "get",
        "<arg_key>",
        "<function=get>",
        "</function>",
    ],
    *["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[get(x='", "')]", "<|python_tag|>", ";", "text"],
    *D.values(),
    *[
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "analysis",
        "final",
        "commentary",
        " to=functions.get",
    ],
]


@given(
    st.sampled_from(sorted(TEMPLATES)),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join),
    st.lists(st.integers(1, 7), max_size=60),
)
@settings(max_examples=600, deadline=None)
def test_no_cut_changes_what_is_read(name: str, controls: bool, opened: bool, text: str, cuts: list[int]) -> None:
    text = text.encode("utf-8", "ignore").decode()
    family = Family(name, CONTROLS if controls else (), tools(), "<think>\n[THINK]" if opened else "")
    whole = family.read(text)
    assert family.read(text, cuts) == whole
    assert family.read(text, [1] * len(text.encode())) == whole


@given(
    st.sampled_from(["tagged", "mistral", "llama"]),
    st.lists(st.sampled_from([p for p in PIECES if "hink" not in p.lower()]) | st.text(max_size=6), max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_what_is_no_call_is_shown_to_the_last_character(name: str, pieces: list[str]) -> None:
    text = "".join(pieces).encode("utf-8", "ignore").decode()
    parts = Family(name, (), tools()).read(text)
    if not any(isinstance(part, Call) for part in parts):
        assert parts == ([Content(text.lstrip("\r\n"))] if text.lstrip("\r\n") else [])


@pytest.mark.parametrize(
    ("template", "name"),
    [*[(TEMPLATES[key], key) for key in TEMPLATES], ("{{ tools }}", "llama"), ("", "llama")],
)
def test_the_template_tells_the_style(template: str, name: str) -> None:
    assert style_of(template).name == {"mistral by name": "mistral, name by name"}.get(name, name)


def test_an_answer_with_very_long_arguments_is_read_in_time() -> None:
    """Each piece is looked at once: no search begins anew with every token."""
    text = (
        '<tool_call>{"name": "get", "arguments": '
        + json.dumps({"text": 'line "quoted" \\ {[\n' * 4000})
        + "}</tool_call>"
    )
    family = Family("tagged", (), tools())
    (made,) = family.read(text, [3] * (len(text) // 3))
    assert len(made.arguments) > 80_000  # type: ignore[union-attr]
