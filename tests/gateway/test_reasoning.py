"""Where thinking ends, what is held back, and what is told of it."""

from __future__ import annotations

from shardline.gateway.reasoning import opened, thinking_of
from shardline.gateway.tools_answer import Reading
from tests.support.tool_answers import TEMPLATES, Family, call, plain, tools, vocabulary

THINKS = "{{ messages }}<think></think>"


def family(prompt: str = "", *, with_tools: bool = False) -> Family:
    return Family(TEMPLATES["tagged"] if with_tools else THINKS, (), tools() if with_tools else None, prompt)


def read(pieces: list[str], prompt: str = "...<think>\n", *, with_tools: bool = False) -> list[object]:
    """As the pieces come, which must be the same as all at once."""
    one = family(prompt, with_tools=with_tools)
    text = "".join(pieces)
    got = plain(one.read(text, [len(piece.encode()) for piece in pieces]))
    assert got == plain(one.read(text))
    return got


def test_a_template_that_opens_the_block() -> None:
    assert read(["why", "</thi", "nk>", "ok"]) == [["why"], "ok"]
    assert read(["why"]) == [["why"]]
    assert read(["</think>", "\n\n", "ok"]) == ["ok"]


def test_a_mark_between_backquotes_is_spoken_of() -> None:
    assert read(["a `</think>` b", "</think>", "ok"]) == [["a `</think>` b"], "ok"]
    assert read(["a `</think", ">ok"]) == [["a `"], "ok"]
    assert read(["a `</think>"]) == [["a `"]]


def test_a_call_before_thinking_is_closed() -> None:
    pieces = ["plan ", "<tool_", 'call>{"name":"get","arguments":{}}</tool', "_call>"]
    assert read(pieces, with_tools=True) == [["plan "], call("get")]
    assert read(["I could <tool_call> it", "</think>", "no"], with_tools=True) == [["I could <tool_call> it"], "no"]


def test_a_model_that_opens_the_block_itself() -> None:
    assert read(["\n", "<think>", "\nwhy\n", "</think>\n\n", "ok"], "") == [["why"], "ok"]
    assert read(["<thinly>"], "") == ["<thinly>"]
    assert read(["so <think>x</think>"], "") == ["so <think>x</think>"]


def test_a_closed_block_in_the_prompt_is_not_open() -> None:
    assert opened("x<think>\n", ("<think>", "</think>"))
    assert not opened("x<think>\n\n</think>\n\n", ("<think>", "</think>"))
    assert not opened("x<think>", None)
    assert thinking_of("nothing") is None


def test_text_goes_out_as_soon_as_it_can_be_nothing_else() -> None:
    reader = family("<think>").reading.reader("<think>")
    assert reader is not None
    seen = [plain(reader.push(piece)) for piece in ("a", "b\n", "\nc </th", "e", "</think>", "\n", "d <x")]
    assert seen == [[["a"]], [["b"]], [["\n\nc "]], [["</the"]], [], [], ["d <x"]]
    assert not reader.thinking and reader.finish() == []


def test_without_thinking_and_tools_there_is_nothing_to_read() -> None:
    assert Reading(vocabulary("{{ messages }}"), None).reader("") is None
    assert Reading(vocabulary(THINKS), None, inline=True).reader("<think>") is None
    assert Reading(vocabulary(THINKS, ["<think>", "</think>"]), None, inline=True).marks == {}
    assert len(Reading(vocabulary(THINKS, ["<think>", "</think>"]), None).marks) == 2
