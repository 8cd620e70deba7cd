"""Answers of models that call tools, as their families write them, and the means to read them in pieces of any size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardline.gateway.detokenize import TextStream, Vocabulary
from shardline.gateway.tools_answer import Reading
from shardline.gateway.tools_parts import Call, Content, Part, Reasoning
from shardline.gateway.tools_request import FunctionTool, Tool, Tools, tools_of
from shardline.wire.messages import TextBundle, Token

PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TEMPLATES = {
    "harmony": "{{ tools }}<|start|><|channel|><|message|>",
    "deepseek": "{{ tools }}<｜tool▁calls▁begin｜></think>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "mistral by name": "{{ tools }}[TOOL_CALLS][ARGS][THINK][/THINK]",
    "tagged": "{{ tools }}<tool_call></tool_call><think></think>",
    "llama": "{{ tools }}<|python_tag|>",
}


def tools(choice: Any = None, *, parallel: bool | None = None, schema: Any = PLACE) -> Tools:
    sent = [
        Tool(type="function", function=FunctionTool(name=name, parameters=msgspec.Raw(json.dumps(schema).encode())))
        for name in ("get_weather", "get")
    ]
    made = tools_of(sent, choice, parallel)
    assert made is not None
    return made


def vocabulary(template: str, controls: Sequence[str] = ()) -> Vocabulary:
    """Single bytes, an end, and control tokens."""
    pieces = [bytes([i]) for i in range(256)] + [b"<|eot|>"] + [control.encode() for control in controls]
    bundle = TextBundle(
        pieces=pieces,
        special=list(range(256, len(pieces))),
        eog=[256],
        bos=None,
        eos=256,
        add_bos=False,
        chat_template=template,
        context_length=4096,
    )
    return Vocabulary(bundle)


def as_tokens(text: str, words: Vocabulary) -> list[int]:
    """Control tokens where they stand in the text, else bytes."""
    data = text.encode()
    controls = [(words.piece(token), token) for token in range(257, words.size)]
    tokens = []
    at = 0
    while at < len(data):
        piece, token = next(((p, t) for p, t in controls if data.startswith(p, at)), (data[at : at + 1], data[at]))
        tokens.append(token)
        at += len(piece)
    return tokens


@dataclass
class Family:
    """A template, and which of its marks are control tokens."""

    template: str
    controls: Sequence[str] = ()
    tools: Tools | None = None
    prompt: str = ""

    def __post_init__(self) -> None:
        self.words = vocabulary(TEMPLATES.get(self.template, self.template), self.controls)
        self.reading = Reading(self.words, self.tools)

    def read(self, text: str, cuts: Iterable[int] = ()) -> list[Part]:
        """The parts of `text`, which comes cut into pieces behind so many tokens each; at the end in one piece."""
        numbers = itertools.count()
        make_id: Callable[[], str] = lambda: f"id{next(numbers)}"  # noqa: E731
        reader = self.reading.reader(self.prompt)
        assert reader is not None
        reader._parts._make_id = make_id
        stream = TextStream(self.words, (), self.reading.marks)
        found: list[Part] = []
        tokens = as_tokens(text, self.words)
        for size in [*cuts, len(tokens)]:
            piece, tokens = tokens[:size], tokens[size:]
            found += reader.push("".join(stream.push(Token(id=token, index=0)).text for token in piece))
        found += reader.push(stream.finish().text)
        found += reader.finish()
        assert reader.calls == sum(isinstance(part, Call) for part in found)
        return merged(found)


def merged(parts: Iterable[Part]) -> list[Part]:
    """What a client has that joins deltas of one kind."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + part.text)
        else:
            out.append(part)
    return out


def call(name: str, index: int = 0, /, **arguments: Any) -> tuple[str, int, dict[str, Any]]:
    return name, index, arguments


def plain(parts: Iterable[Part]) -> list[Any]:
    """Calls without their ids, arguments as values; reasoning in a list; content as it is."""
    out: list[Any] = []
    for part in parts:
        match part:
            case Call():
                out.append(call(part.name, part.index, **json.loads(part.arguments)))
            case Reasoning(text):
                out.append([text])
            case Content(text):
                out.append(text)
    return out
