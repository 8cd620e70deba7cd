"""Tools in a request: the functions that a model may call, and whether it may, must, or must not.

Owns the fields `tools`, `tool_choice` and `parallel_tool_calls` and their checks. How a model is told of them is its
chat template's; how it calls them is tools_styles.py's. Pure. Shown by tests/gateway/test_tools_request.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from shardline.gateway.json_body import refuse, unsupported
from shardline.gateway.request_fields import NO_EFFECT, NOT_SENT, check_nothing_asked, matching, one_of, only, shown

FUNCTIONS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
"""Of a function."""


TOOL_CHOICES = ("none", "auto", "required")
ONLY_FUNCTION = one_of(("function",))


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, matching(NAME)]
    description: str | None = None
    parameters: Annotated[msgspec.Raw, shown(type=["object", "null"])] = NOT_SENT
    strict: bool | None = None
    type: Annotated[Literal["function"] | None, NO_EFFECT] = None
    """Said once more by clients that take the tool of another API for a function."""


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, ONLY_FUNCTION]
    function: FunctionTool | None = None
    custom: Annotated[msgspec.Raw, only()] = NOT_SENT


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, ONLY_FUNCTION]
    function: NamedFunction | None = None
    custom: Annotated[msgspec.Raw, only()] = NOT_SENT
    allowed_tools: Annotated[msgspec.Raw, only()] = NOT_SENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    name: str
    schema: str
    """Of its arguments: a JSON object, as it was sent."""
    properties: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a request that may call tools asks for."""

    functions: tuple[Function, ...]
    shown: list[dict[str, Any]]
    """For the chat template."""
    required: bool = False
    """At least one of `callable` must be called."""
    named: str | None = None
    """Only this one, and it must be."""
    parallel: bool = True

    @property
    def callable(self) -> tuple[Function, ...]:
        return tuple(f for f in self.functions if self.named in (None, f.name))

    def find(self, name: str) -> Function | None:
        return next((f for f in self.functions if f.name == name), None)


def tools_of(sent: list[Tool] | None, choice: str | ToolChoice | None, parallel: bool | None) -> Tools | None:
    """The tools that may be called; None where there are none, or none may be. Raises what docs/api.md says."""
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(sent or [])]
    if len(functions) > FUNCTIONS:
        refuse("tools", f"'tools' has {len(functions)} functions, at most {FUNCTIONS} are taken")
    names = [function.name for function, _ in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        refuse("tools", f"'tools' has two functions of the name '{twice}'")
    named = _named(choice)
    if named is not None and named not in names:
        refuse("tool_choice", f"'tool_choice' names '{named[:64]}', which is not among 'tools'")
    if choice == "required" and not names:
        refuse("tool_choice", "'tool_choice' is required, but there are no 'tools'")
    if not functions or choice == "none":
        return None
    return Tools(
        functions=tuple(function for function, _ in functions),
        shown=[shown for _, shown in functions],
        required=choice == "required" or named is not None,
        named=named,
        parallel=parallel is not False,
    )


def _named(choice: str | ToolChoice | None) -> str | None:
    if choice is None or choice in TOOL_CHOICES:
        return None
    if isinstance(choice, str):
        words = ", ".join(TOOL_CHOICES)
        refuse("tool_choice", f"'tool_choice' must be one of {words}, or name a function, not '{choice[:40]}'")
    if choice.type != "function":
        unsupported("tool_choice", f"'tool_choice' of type '{choice.type[:40]}' is not supported")
    check_nothing_asked(choice, at="tool_choice")
    if choice.function is None:
        refuse("tool_choice", "'tool_choice' of type function needs 'function' with a 'name'")
    return choice.function.name


def _function(tool: Tool, at: str) -> tuple[Function, dict[str, Any]]:
    if tool.type != "function":
        unsupported("tools", f"'{at}': a tool of type '{tool.type[:40]}' is not supported")
    check_nothing_asked(tool, at=at)
    sent = tool.function
    if sent is None:
        refuse("tools", f"the field '{at}.function' is required")
    if not NAME.fullmatch(sent.name):
        refuse("tools", f"'{at}.function.name' must be 1 to 64 of a-z, A-Z, 0-9, _, - and dots")
    raw = bytes(sent.parameters).strip()
    try:
        # Templates read it as an object; one that is absent, or empty, means a function without parameters.
        schema = msgspec.json.decode(raw, type=dict[str, Any]) if raw not in (b"", b"null") else {}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        refuse("tools", f"'{at}.function.parameters' must be an object")
    shown = {"name": sent.name, "description": sent.description or "", "parameters": schema or _NO_PARAMETERS}
    properties = schema.get("properties")
    function = Function(
        name=sent.name,
        schema=raw.decode()
        if schema
        else msgspec.json.encode({**_NO_PARAMETERS, "additionalProperties": False}).decode(),
        properties=properties if isinstance(properties, dict) else {},
    )
    return function, {"type": "function", "function": shown}


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
