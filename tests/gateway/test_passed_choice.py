"""What several answers of a composite model took: for the client all or nothing, for the books what was told."""

from __future__ import annotations

from typing import Any

from shardline.gateway.passed_choice import PassedChoice
from shardline.gateway.replies import _usage_told
from shardline.wire.composite import UpstreamUsage


def choice(index: int, usage: UpstreamUsage | None) -> PassedChoice:
    nothing: Any = None
    made = PassedChoice(index, nothing, chat=True, calls="whole")
    made.usage = usage
    return made


def test_usage_of_several_choices() -> None:
    told = UpstreamUsage(prompt_tokens=5, completion_tokens=2, cached_tokens=4, reasoning_tokens=1)
    both = [choice(0, told), choice(1, UpstreamUsage(prompt_tokens=5, completion_tokens=3))]
    usage = _usage_told(both[:1], both)
    assert usage.fields() == {
        "prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 1},
    }  # fmt: skip
    assert _usage_told(both[1:], both).cached_tokens is None
    one = [choice(0, told), choice(1, None)]
    usage = _usage_told(one[:1], one)
    assert usage.fields() is None, "a sum of some of them would look whole"
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2), "which the books count"
    none = [choice(0, None)]
    assert _usage_told(none, none).fields() is None and _usage_told(none, none).completion_tokens == 0
