"""Answers of gpt-oss: messages on channels, some of them to functions, read as they come.

Owns the headers of messages and what becomes of each: analysis is reasoning, what is addressed to a function of the
request is a call, all else is content. A call that does not read as one is content. Pure.
Shown by tests/gateway/test_tools_styles.py.
"""

from __future__ import annotations

import re

from shardline.gateway.tools_marks import Marks, without_controls
from shardline.gateway.tools_parts import Reader
from shardline.gateway.tools_request import Tools
from shardline.gateway.tools_scan import No, as_object, begun
from shardline.gateway.tools_styles import Called

_HEADER_CHARACTERS = 256
_CHANNEL = re.compile(r"[a-z]+")
_RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.-]+)")


class HarmonyReader(Reader):
    """Of messages between control tokens. The first message has no beginning of its own: the prompt has written it."""

    def __init__(self, *, marks: Marks, tools: Tools | None = None) -> None:
        super().__init__()
        self._tools = tools
        self._channel, self._message, self._start = marks("<|channel|>"), marks("<|message|>"), marks("<|start|>")
        self._ends = (marks("<|end|>"), marks("<|call|>"), marks("<|return|>"))
        self._borders = (*self._ends, self._start, self._channel)
        self._in_header = True
        self._reasoning = False
        self._function: str | None = None
        """The message is to this one."""
        self._said = {False: False, True: False}
        """Whether there was content, and reasoning, before this message."""
        self._first = True

    @property
    def thinking(self) -> bool:
        return self._reasoning and not self._in_header

    def _advance(self, *, final: bool) -> None:
        while self._held and (self._header(final) if self._in_header else self._body(final)):
            pass

    def _header(self, final: bool) -> bool:
        """Up to the mark behind which the text of a message is; text without a header is content."""
        text = self._held.lstrip()
        begins = (self._start, self._channel)
        if not any(text.startswith(begin) for begin in begins):
            if any(begin.startswith(text) for begin in begins) and not final:
                return False
            return self._begin(None, None)
        header, found, rest = text.partition(self._message)
        if not found and len(header) <= _HEADER_CHARACTERS + len(self._message):
            if final:
                self._held = ""  # an answer that was cut here has no text in this message
            return False
        if not found or len(header) > _HEADER_CHARACTERS:
            self._held = next(text[len(begin) :] for begin in begins if text.startswith(begin))
            return self._begin(None, None)
        self._held = rest
        channel = _CHANNEL.match(header.partition(self._channel)[2].lstrip())
        recipient = _RECIPIENT.search(without_controls(header.replace(self._channel, " ")))
        return self._begin(channel and channel[0], recipient and recipient[1])

    def _begin(self, channel: str | None, recipient: str | None) -> bool:
        name = (recipient or "").removeprefix("functions.")
        self._function = name if self._tools is not None and self._tools.find(name) is not None else None
        self._reasoning = channel == "analysis" and self._function is None
        self._in_header = False
        self._first = True
        return True

    def _body(self, final: bool) -> bool:
        places = [(place, border) for border in self._borders if (place := self._held.find(border)) >= 0]
        if not places:
            if self._function is not None:
                return self._end_of_call(len(self._held)) if final else False
            self._emit(len(self._held) if final else self._ready())
            return False
        place, border = min(places)
        if self._function is not None:
            self._end_of_call(place)
        else:
            self._emit(place)
        if border in self._ends:
            self._held = self._held[len(border) :]
        self._in_header = True
        return True

    def _end_of_call(self, place: int) -> bool:
        raw = self._held[:place].strip()
        try:
            as_object(raw)
        except No:
            self._reasoning = False
            self._emit(place)
        else:
            self._parts.call(Called(self._function or "", raw))
            self._held = self._held[place:]
        return False

    def _emit(self, end: int) -> None:
        text = without_controls(self._held[:end])
        self._held = self._held[end:]
        if not text:
            return
        if self._first and self._said[self._reasoning]:
            text = "\n" + text  # one message below another
        self._first = False
        self._said[self._reasoning] = True
        self._parts.text(text, reasoning=self._reasoning)

    def _ready(self) -> int:
        """How much of what is held can be nothing else than text."""
        return len(self._held) - max(begun(self._held, border) for border in self._borders)
