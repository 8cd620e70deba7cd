"""Grammars around an answer: calls that must be made, and the thinking that comes first.

Owns how a style's calls, and a model's thinking, are written as rules of Lark. Whether they compile, the tail says.
Pure. Shown by tests/gateway/test_tools_grammar.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from shardline.gateway.structured import checked, in_lark
from shardline.gateway.tools_marks import Marks
from shardline.gateway.tools_request import Tools
from shardline.gateway.tools_styles import Style
from shardline.wire.messages import Grammar

CALLS = 16
"""Most calls of one answer that must have some."""
_TEXT = "/(?s:.*)/"


def calls_grammar(tools: Tools, style: Style, marks: Marks, *, or_else: Grammar | None = None) -> Grammar:
    """For an answer that is calls of `tools`; or, where it may be, what `or_else` says."""
    field = "tool_choice" if tools.required else "tools"
    rules = _rules(tools, style, marks)
    if or_else is None:
        rules.insert(0, "start: calls")
    else:
        rules[:0] = ["start: calls | answer", f"answer: {in_lark(or_else.text)}"]
    return checked(Grammar(kind="lark", text="\n".join(rules), field=field))


def _rules(tools: Tools, style: Style, marks: Marks) -> list[str]:
    def lark(part: str) -> str:
        return marks.lark(style.written(part, marks))

    several = tools.parallel and style.name != "harmony"  # whose calls end an answer
    more = f"({lark(style.between)} call){{0,{CALLS - 1}}}" if several else ""
    rules = [f"calls: {lark(style.lead)} call {more} {lark(style.trail)}"]
    rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(tools.callable))))
    for n, function in enumerate(tools.callable):
        rules.append(f"call_{n}: {lark(style.open.replace('NAME', function.name))} arguments_{n} {lark(style.close)}")
        rules.append(f"arguments_{n}: {in_lark(function.schema)}")
    return rules


def behind_thinking(grammar: Grammar, think: tuple[str, str], marks: Marks, *, opened: bool) -> Grammar:
    """`grammar` for what follows a model's thinking, which it begins itself, or may, unless the prompt did."""
    begin, end = think
    close = marks(end)
    thought = f"{_TEXT} {marks.lark(close)}" if close != end else "unended"
    rules = [f"unended[suffix={json.dumps(end)}]: {_TEXT}"] if close == end else []
    front = f"thought: {thought} BLANK?"
    before = "before: thought" if opened else f"before: (BLANK? {marks.lark(marks(begin))} thought)?"
    return _with(grammar, [before, front, "BLANK: /\\n{1,2}/", *rules])


def behind_messages(grammar: Grammar, marks: Marks, *, calls: bool) -> Grammar:
    """gpt-oss: `grammar` for its last message, or (`calls`) for calls, which are messages of their own."""
    channel, message, end, start = (marks.lark(marks(f"<|{name}|>")) for name in ("channel", "message", "end", "start"))
    thought = f'thought: {channel} "analysis" {message} {_TEXT} {end} {start} "assistant"'
    final = "" if calls else f'{channel} "final" {message}'
    return _with(grammar, [f"before: thought* {final}" if final else "before: thought*", thought])


def _with(grammar: Grammar, rules: Sequence[str]) -> Grammar:
    return checked(msgspec.structs.replace(grammar, before="\n".join(rules)))
