"""What one chat answer is read as, and kept to: the style, marks, thinking and grammar of its model and its request.

Owns the choice that follows from a chat template, a prompt and a request. How calls look is tools_styles.py's, how
they are read tools_harmony.py's and reasoning.py's. Pure. Shown by tests/cases/test_tool_answers.py and
tests/gateway/test_tools_grammar.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.json_body import unsupported
from shardline.gateway.reasoning import AnswerReader, opened, thinking_of
from shardline.gateway.tools_grammar import behind_messages, behind_thinking, calls_grammar
from shardline.gateway.tools_harmony import HarmonyReader
from shardline.gateway.tools_marks import Marks
from shardline.gateway.tools_parts import Reader
from shardline.gateway.tools_request import Tools
from shardline.gateway.tools_styles import style_of
from shardline.wire.messages import Grammar


class Reading:
    """Of one request to one model."""

    def __init__(self, vocabulary: Vocabulary, tools: Tools | None, *, inline: bool = False) -> None:
        """`inline`: thinking stays in the content, with its marks. Raises `unsupported_parameter` for tools that the
        chat template cannot show to the model."""
        template = vocabulary.bundle.chat_template or ""
        if tools is not None and "tools" not in template:
            advice = (
                "Ask a model whose chat template shows tools (Qwen 2.5 and 3, Llama 3.1 and later, Mistral, GLM, …)."
            )
            unsupported("tools", "'tools': the chat template of the model knows of none", advice)
        self._tools = tools
        self._style = style_of(template)
        self._harmony = self._style.name == "harmony"
        self._think = None if self._harmony else thinking_of(template)
        self._inline = inline
        known = self._style.marks if self._harmony or tools is not None else ()
        shown = self._think if self._think is not None and not inline else ()
        self._marks = Marks(vocabulary, [*known, *shown])
        self._grammar_marks = Marks(vocabulary, [*self._style.marks, *(self._think or ())])

    @property
    def marks(self) -> Mapping[int, str]:
        """Control tokens that the reader must see."""
        return self._marks.shown

    def reader(self, prompt: str) -> Reader | None:
        """A new one, for one answer; None where the text is all that there is."""
        if self._harmony:
            return HarmonyReader(marks=self._marks, tools=self._tools)
        think = None if self._inline else self._think
        if think is None and self._tools is None:
            return None
        return AnswerReader(
            marks=self._marks,
            think=think,
            thinking=opened(prompt, think),
            style=self._style if self._tools is not None else None,
            tools=self._tools,
        )

    def grammar(self, asked: Grammar | None, prompt: str, *, continued: bool) -> Grammar | None:
        """What the whole answer must be, thinking and calls included; None: anything."""
        tools, marks = self._tools, self._grammar_marks
        grammar = asked
        if tools is not None and tools.required:
            grammar = calls_grammar(tools, self._style, marks)
        elif tools is not None and asked is not None:
            if asked.kind != "json_schema" or self._harmony:
                unsupported(asked.field, f"'{asked.field}' with tools that may be called is not supported")
            grammar = calls_grammar(tools, self._style, marks, or_else=asked)
        if grammar is None or continued:
            return grammar
        if self._harmony:
            return behind_messages(grammar, marks, calls=tools is not None and tools.required)
        think = self._think
        if think is None or prompt.rstrip().endswith(think[1]):
            return grammar
        return behind_thinking(grammar, think, marks, opened=opened(prompt, think))
