"""One answer, read as it comes: the model's thinking, what it says, and the calls of tools in between.

Owns where thinking begins and ends, what is held back until it is known what it is, and that nothing is lost: what does
not read as a call is content. Line breaks around thinking and calls are dropped. gpt-oss has a reader of its own
(tools_harmony.py). Pure. Shown by tests/gateway/test_reasoning.py.
"""

from __future__ import annotations

from typing import Literal

from shardline.gateway.tools_marks import Marks, without_controls
from shardline.gateway.tools_parts import Reader
from shardline.gateway.tools_request import Tools
from shardline.gateway.tools_scan import More, No, Scanner, begun
from shardline.gateway.tools_styles import Style

THINKING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks around a model's thinking, as chat templates write them."""


def thinking_of(template: str) -> tuple[str, str] | None:
    """The marks that a chat template knows; None: its model does not think aloud."""
    return next((pair for pair in THINKING if pair[1] in template), None)


def opened(prompt: str, think: tuple[str, str] | None) -> bool:
    """Whether a prompt ends within the model's thinking: the template has begun it."""
    return think is not None and prompt.rstrip().endswith(think[0])


class AnswerReader(Reader):
    """Of models that write their thinking and their calls between marks in the text."""

    def __init__(
        self,
        *,
        marks: Marks,
        think: tuple[str, str] | None = None,
        thinking: bool = False,
        style: Style | None = None,
        tools: Tools | None = None,
    ) -> None:
        """`thinking`: the prompt ends within it. `style` and `tools`: None where no tool may be called."""
        super().__init__()
        self._marks = marks
        self._think = None if think is None else (marks(think[0]), marks(think[1]))
        self._style, self._tools = style, tools
        self._begins = tuple(marks(mark) for mark in style.begins) if style is not None and tools is not None else ()
        self._whole = style is not None and tools is not None and not style.begins
        """Calls are the beginning of the content, which has not come yet."""
        self._mode: Literal["start", "reasoning", "content"] = "reasoning" if thinking else "start"
        self._lead = True
        """Line breaks that come now are dropped."""
        self._scan: Scanner | None = None
        """Of what may be a call, at the beginning of what is held."""

    @property
    def thinking(self) -> bool:
        return self._mode == "reasoning"

    # ---- one thing after another, until more must come -------------------------------------------------------

    def _advance(self, *, final: bool) -> None:
        while self._step(final):
            pass

    def _step(self, final: bool) -> bool:
        """Read one thing off the beginning of what is held; False: nothing is left, or more must come first."""
        if self._lead:
            self._held = self._held.lstrip("\r\n")
            self._lead = not self._held
        if not self._held:
            return False
        if self._mode == "start":
            return self._start(final)
        if self._mode == "content" and self._whole:
            return self._call("", "", final)
        found = self._first_mark(final)
        if found is None:
            ready = len(self._held) if final else self._ready(len(self._held))
            self._emit(self._held[:ready])
            self._held = self._held[ready:]
            return False
        place, mark = found
        front = self._held[:place].rstrip("\r\n")
        breaks = self._held[len(front) : place]
        self._emit(front)
        self._held = self._held[len(front) :]
        if mark in self._begins:
            return self._call(breaks, mark, final)
        self._held = self._held[len(breaks) + len(mark) :]
        self._mode, self._lead = "content", True
        return True

    def _start(self, final: bool) -> bool:
        """Whether the answer begins with thinking."""
        begin = "" if self._think is None else self._think[0]
        text = self._held.lstrip()
        if begin and text.startswith(begin):
            self._held = text[len(begin) :]
            self._mode, self._lead = "reasoning", True
        elif begin.startswith(text) and begin and not final:
            return False
        else:
            self._mode = "content"
        return True

    def _call(self, breaks: str, mark: str, final: bool) -> bool:
        """What is held is `breaks` and then a call, or the beginning of one, or neither. The breaks are dropped where
        it is a call, and are text where it is none."""
        if self._scan is None:
            self._scan = Scanner()
        self._scan.feed(self._held[len(breaks) :], final=final)
        try:
            if self._style is None or self._tools is None:
                raise No
            calls = self._style.read(self._scan, self._tools, self._marks)
        except More:
            return False
        except No:
            front = len(breaks) + len(mark)
            self._emit(self._held[:front])
            self._held = self._held[front:]
        else:
            for called in calls:
                self._parts.call(called)
            self._held = self._held[len(breaks) + self._scan.at :]
            self._mode, self._lead = "content", True
        self._scan = None
        self._whole = False
        return True

    def _first_mark(self, final: bool) -> tuple[int, str] | None:
        places = [(self._held.find(mark), mark) for mark in self._begins]
        if self._mode == "reasoning" and self._think is not None:
            places.append((self._end_of_thinking(final), self._think[1]))
        return min(((place, mark) for place, mark in places if place >= 0), default=None)

    def _end_of_thinking(self, final: bool) -> int:
        """Where its mark stands, other than between backquotes: there the model speaks of it."""
        mark = self._think[1] if self._think is not None else ""
        place = self._held.find(mark)
        while place > 0 and self._held[place - 1] == "`":
            behind = self._held[place + len(mark) : place + len(mark) + 1]
            if behind == "" and not final:
                return -1
            if behind != "`":
                break
            place = self._held.find(mark, place + 1)
        return place

    def _ready(self, end: int) -> int:
        """How much of what is held, without a mark in it, can be nothing else than text."""
        marks = [*self._begins]
        if self._mode == "reasoning" and self._think is not None:
            mark = self._think[1]
            marks.append(mark)
            if self._held.endswith("`" + mark):
                end -= len(mark) + 1
        kept = max((begun(self._held[:end], mark) for mark in marks), default=0)
        unclosed = self._held.rfind("\udc00")
        if unclosed > self._held.rfind("\udc01"):
            kept = max(kept, end - unclosed)
        return len(self._held[: end - kept].rstrip("\r\n"))

    def _emit(self, text: str) -> None:
        self._parts.text(without_controls(text), reasoning=self._mode == "reasoning")
