"""How models call tools: one way of writing calls a family, told by the chat template, read by one function each.

Owns the table of styles: their marks, how a call is read, and how one is written (which a grammar needs). What does not
read as a call of a function that the request named is no call: whoever asked shows it as text. Pure.
Shown by tests/gateway/test_tools_styles.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from shardline.gateway.tools_marks import Marks
from shardline.gateway.tools_request import Function, Tools
from shardline.gateway.tools_scan import No, Scanner, as_object

_NAME_CHARACTERS = 128
_PYTHON_CHARACTERS = 64 << 10


class Called(NamedTuple):
    """A call as the model made it. `arguments`: a JSON object, as text."""

    name: str
    arguments: str
    id: str | None = None


Read = Callable[[Scanner, Tools, Marks], list[Called]]
"""Reads the calls that begin where the scanner is; raises `More`, or `No` where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    name: str
    told_by: tuple[str, ...]
    """Any of these in a chat template."""
    marks: tuple[str, ...]
    begins: tuple[str, ...]
    """The marks with which calls begin anywhere in an answer. Empty: they are the beginning of the answer."""
    read: Read
    lead: str = ""
    """A call is written as lead, then open (with NAME), arguments, close, with `between` two; then trail. MARKS stand
    in these as they are."""
    open: str
    close: str
    between: str = ""
    trail: str = ""

    def written(self, part: str, marks: Marks) -> str:
        """`part` of this style, with its marks as the vocabulary has them."""
        for mark in sorted(self.marks, key=len, reverse=True):
            part = part.replace(mark, marks(mark))
        return part


def style_of(template: str) -> Style:
    """The style that a chat template was written for; the last of the table where it shows no sign."""
    return next((style for style in STYLES if any(sign in template for sign in style.told_by)), STYLES[-1])


# ---- JSON objects that name a function -------------------------------------------------------------------------------


class _Json(msgspec.Struct):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    function: msgspec.Raw = msgspec.Raw()
    id: str | None = None


def _called(raw: str | msgspec.Raw, tools: Tools) -> Called:
    """The call that a JSON object describes; raises `No` for one that names no function of the request."""
    try:
        sent = msgspec.json.decode(raw, type=_Json)
        if bytes(sent.function).startswith(b"{"):
            sent = msgspec.json.decode(sent.function, type=_Json)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise No from None
    if tools.find(sent.name) is None:
        raise No
    return Called(sent.name, _arguments(sent.arguments if bytes(sent.arguments) else sent.parameters), sent.id)


def _arguments(raw: msgspec.Raw) -> str:
    """As the model wrote them; where it wrote an object into a string, that. Absent ones are none."""
    text = bytes(raw).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    if text in ("", "null"):
        return "{}"
    as_object(text)
    return text


# ---- the styles ------------------------------------------------------------------------------------------------------


def read_tagged(scan: Scanner, tools: Tools, marks: Marks) -> list[Called]:
    """`<tool_call>`, then JSON (Hermes, Qwen), tags named like functions (Qwen Coder), or keys and values (GLM)."""
    scan.take(marks("<tool_call>"))
    scan.blank()
    if scan.text.startswith("{", scan.at):
        called = _called(scan.bracketed(), tools)
        scan.blank()
    elif scan.maybe("<function="):
        called = _parameters(scan, tools)
    else:
        return [_keys_and_values(scan, tools, marks)]
    _close(scan, marks("</tool_call>"))
    return [called]


def _close(scan: Scanner, mark: str) -> None:
    """A model that ends its answer where the mark should be has said all."""
    if not scan.ended:
        scan.take(mark)


def _known(scan: Scanner, tools: Tools, behind: str = "") -> Function:
    """The name of a function of the request, and `behind`."""
    for function in sorted(tools.functions, key=lambda f: -len(f.name)):
        if scan.maybe(function.name + behind):
            return function
    raise No


def _parameters(scan: Scanner, tools: Tools) -> Called:
    function = _known(scan, tools, ">")
    values: dict[str, Any] = {}
    scan.blank()
    while not scan.maybe("</function>"):
        scan.take("<parameter=")
        key = scan.until(">", _NAME_CHARACTERS)
        text = scan.until("</parameter>")
        values[key] = _typed(function, key, text.removeprefix("\n").removesuffix("\n"))
        scan.blank()
    scan.blank()
    return Called(function.name, _written(values))


def _keys_and_values(scan: Scanner, tools: Tools, marks: Marks) -> Called:
    function = _known(scan, tools)
    values: dict[str, Any] = {}
    scan.blank()
    while not (scan.ended or scan.maybe(marks("</tool_call>"))):
        scan.take(marks("<arg_key>"))
        key = scan.until(marks("</arg_key>"), _NAME_CHARACTERS)
        scan.blank()
        scan.take(marks("<arg_value>"))
        values[key] = _typed(function, key, scan.until(marks("</arg_value>")))
        scan.blank()
    return Called(function.name, _written(values))


def _typed(function: Function, key: str, text: str) -> Any:
    """A value that was written without quotes: text where the schema wants text, else JSON where it is some."""
    wanted = function.properties.get(key)
    if isinstance(wanted, dict) and wanted.get("type") == "string":
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text


def _written(values: dict[str, Any]) -> str:
    try:
        return msgspec.json.encode(values).decode()
    except (OverflowError, UnicodeError, RecursionError):
        raise No from None


def read_mistral(scan: Scanner, tools: Tools, marks: Marks) -> list[Called]:
    """`[TOOL_CALLS]`, then a list of JSON objects, or name `[ARGS]` arguments."""
    scan.take(marks("[TOOL_CALLS]"))
    scan.blank()
    if scan.text.startswith("[", scan.at):
        return [_called(raw, tools) for raw in _list(scan.bracketed())]
    name, sign, number = scan.until(marks("[ARGS]"), 2 * _NAME_CHARACTERS).partition(marks("[CALL_ID]"))
    if tools.find(name.strip()) is None:
        raise No
    scan.blank()
    raw = scan.json_object()
    return [Called(name.strip(), raw, number.strip() if sign else None)]


def _list(raw: str) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise No from None


def read_deepseek(scan: Scanner, tools: Tools, marks: Marks) -> list[Called]:
    """A list of calls between marks: name and arguments, or (up to V3 and R1) a kind, name and a block of JSON."""
    scan.take(marks("<｜tool▁calls▁begin｜>"))
    calls: list[Called] = []
    scan.blank()
    while not (scan.ended or scan.maybe(marks("<｜tool▁calls▁end｜>"))):
        scan.take(marks("<｜tool▁call▁begin｜>"))
        name = scan.until(marks("<｜tool▁sep｜>"), _NAME_CHARACTERS).strip()
        block = name == "function"
        if block:
            name = scan.until("\n", _NAME_CHARACTERS).strip()
            scan.take("```json")
        if tools.find(name) is None:
            raise No
        scan.blank()
        raw = scan.json_object()
        calls.append(Called(name, raw))
        scan.blank()
        if block:
            scan.take("```")
            scan.blank()
        _close(scan, marks("<｜tool▁call▁end｜>"))
        scan.blank()
    if not calls:
        raise No
    return calls


def read_llama(scan: Scanner, tools: Tools, marks: Marks) -> list[Called]:
    """An answer that is nothing but JSON objects with `;` between them, or a list of calls in Python."""
    scan.blank()
    python_mark = scan.maybe(marks("<|python_start|>"))
    scan.maybe(marks("<|python_tag|>"))
    scan.blank()
    if scan.text.startswith("[", scan.at):
        calls = _python(scan, tools)
        if python_mark:
            _close(scan, marks("<|python_end|>"))
        return calls
    calls = []
    while True:
        begin = scan.at
        scan.take("{")
        scan.blank()
        # An answer that is JSON, and no call, need not be held back to its end.
        scan.one_of('"name"', '"type"', '"function"', '"id"')
        scan.at = begin
        calls.append(_called(scan.bracketed(), tools))
        scan.blank()
        if not scan.maybe(";"):
            return calls
        scan.blank()


def _python(scan: Scanner, tools: Tools) -> list[Called]:
    begin = scan.at
    scan.take("[")
    scan.blank()
    _known(scan, tools, "(")
    scan.at = begin
    raw = scan.bracketed(python=True)
    if len(raw) > _PYTHON_CHARACTERS:
        raise No
    try:
        tree = ast.parse(raw, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise No from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise No
    return [_python_call(node, tools) for node in tree.elts]


def _python_call(node: ast.expr, tools: Tools) -> Called:
    if not isinstance(node, ast.Call) or node.args:
        raise No
    name = ast.unparse(node.func)
    if tools.find(name) is None or any(keyword.arg is None for keyword in node.keywords):
        raise No
    return Called(name, _written({str(keyword.arg): _value(keyword.value) for keyword in node.keywords}))


_NAMES = {"true": True, "false": False, "null": None}


def _value(node: ast.expr) -> Any:
    """What a literal says; models that think in JSON write its names."""
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(item) for item in node.elts]
        case ast.Dict():
            return {str(_value(key)): _value(value) for key, value in _members(node)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_value(node.operand)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
    raise No


def _members(node: ast.Dict) -> Iterator[tuple[ast.expr, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            raise No
        yield key, value


def read_none(scan: Scanner, tools: Tools, marks: Marks) -> list[Called]:
    """gpt-oss: its calls are messages of their own, which tools_harmony.py reads."""
    raise No


STYLES: tuple[Style, ...] = (
    Style(
        name="harmony",
        told_by=("<|channel|>",),
        marks=("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
        begins=(),
        read=read_none,
        open="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        close="",
    ),
    Style(
        name="deepseek",
        told_by=("<｜tool▁calls▁begin｜>",),
        marks=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        begins=("<｜tool▁calls▁begin｜>",),
        read=read_deepseek,
        lead="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>",
        trail="<｜tool▁calls▁end｜>",
    ),
    Style(
        name="mistral, name by name",
        told_by=("[ARGS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        begins=("[TOOL_CALLS]",),
        read=read_mistral,
        open="[TOOL_CALLS]NAME[ARGS]",
        close="",
    ),
    Style(
        name="mistral",
        told_by=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        begins=("[TOOL_CALLS]",),
        read=read_mistral,
        lead="[TOOL_CALLS][",
        open='{"name": "NAME", "arguments": ',
        close="}",
        between=", ",
        trail="]",
    ),
    Style(
        name="tagged",
        told_by=("<tool_call>",),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        begins=("<tool_call>",),
        read=read_tagged,
        open='<tool_call>\n{"name": "NAME", "arguments": ',
        close="}\n</tool_call>",
        between="\n",
    ),
    Style(
        name="llama",
        told_by=("<|python_tag|>", "<|python_start|>"),
        marks=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        begins=(),
        read=read_llama,
        open='{"name": "NAME", "parameters": ',
        close="}",
        between="; ",
    ),
)
"""In the order in which they are looked for."""
