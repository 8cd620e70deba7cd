"""All Nodes of a route reuse the same tokens, or none; and the account says why."""

from __future__ import annotations

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.reuse import OFF, REMEMBERED, HotRoutes, Start, check_opened, gone_on, prefix_of, start_of
from shardline.wire.messages import Opened
from shardline.wire.prefix import blocks_in


def opened(node: str, tokens: int | None, unused: str | None = None) -> Opened:
    return Opened(node=node, kv_reserved=200, reusable_tokens=tokens, unused=unused)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([opened("a", 64), opened("b", 64)], Start(64)),
        ([opened("a", 96), opened("b", 64), opened("c", 96)], Start(64, rollback=True)),
        ([opened("a", 64)], Start(64)),
        ([opened("a", 0), opened("b", 0)], Start(reason="nothing kept of this prompt")),
        ([opened("a", 64), opened("b", 0)], Start(0, True, "Node a kept 64, Node b none")),
        ([opened("a", 0), opened("b", 32), opened("c", 64)],
         Start(0, True, "Node b kept 32, Node c kept 64, Node a none")),
        ([opened("a", 64), opened("old", None)], Start(0, True, "Node a kept 64, Node old none")),
        ([opened("a", 64), opened("b", 0, "engine")], Start(0, True, "Node b: its engine cannot go back exactly")),
        ([opened("a", 0, "off"), opened("b", 0, "lost")],
         Start(reason="Node a: nothing is kept there; Node b: what it kept was lost")),
        ([opened("a", 0, "a reason of tomorrow")], Start(reason="Node a: it keeps nothing")),
    ],
)  # fmt: skip
def test_where_prefill_begins(answers: list[Opened], expected: Start) -> None:
    assert start_of(answers, 200, asked=True) == expected


def test_a_short_prompt_and_a_gateway_that_does_not_ask() -> None:
    assert start_of([opened("a", 0)], 32, asked=True).reason == "the prompt is not longer than a block of 32 tokens"
    assert start_of([opened("a", 64)], 200, asked=False) == Start(reason=OFF)


@pytest.mark.parametrize("tokens", [-32, 33, 200, 224])
def test_a_count_that_no_node_can_have_is_refused(tokens: int) -> None:
    with pytest.raises(ShardlineError) as caught:
        check_opened(opened("a", tokens), 200)
    assert (caught.value.code, caught.value.details["node"]) == ("seam_invalid", "a")
    check_opened(opened("a", 192), 200)
    check_opened(opened("a", None), 200)


def test_a_prompt_is_named_by_its_whole_blocks_and_its_key() -> None:
    mine, yours = prefix_of(list(range(100)), "key-a"), prefix_of(list(range(100)), "key-b")
    assert blocks_in(mine.digests) == 3
    assert mine.salt != yours.salt
    assert mine.digests[:16] != yours.digests[:16]
    assert prefix_of([1, 2], "key-a").digests == b""


def digests(count: int, seed: int = 0, key: str = "k") -> bytes:
    """Of a prompt of `count` tokens; those of one seed begin alike."""
    return prefix_of([seed, *range(count - 1)], key).digests


def test_a_prompt_that_goes_on_is_found_on_the_nodes_that_have_its_beginning() -> None:
    hot = HotRoutes()
    hot.add("c", digests(100), ["a", "b"])
    hot.add("c", digests(64), ["a", "x"])
    hot.add("c", digests(100, seed=1), ["z"])
    assert hot.find("c", digests(200), 200) == {"a": 96, "b": 96, "x": 64}
    assert hot.find("c", digests(96), 96) == {"a": 64, "b": 64, "x": 64}  # the last token is always computed
    assert hot.find("c", digests(40), 40) == {"a": 32, "b": 32, "x": 32}


def test_what_is_of_another_model_or_key_or_too_short_is_not_found() -> None:
    hot = HotRoutes()
    hot.add("c", digests(100), ["a"])
    hot.add("c", digests(20), ["a"])  # not one whole block
    assert hot.find("d", digests(200), 200) == {}
    assert hot.find("c", digests(200, key="other"), 200) == {}
    assert hot.find("c", digests(20), 20) == {}


def test_a_longer_session_stands_for_a_shorter_one_and_the_oldest_is_forgotten() -> None:
    hot = HotRoutes()
    for turn in range(40, 40 + 2 * REMEMBERED):
        hot.add("c", digests(turn), ["a"])
    hot.add("c", digests(64, seed=1), ["b"])
    assert hot.find("c", digests(64, seed=1), 65) == {"b": 64}
    for seed in range(2, REMEMBERED + 2):
        hot.add("c", digests(32, seed=seed), ["b"])
    assert hot.find("c", digests(64), 65) == hot.find("c", digests(64, seed=1), 65) == {}


def test_a_route_with_a_node_that_failed_is_not_hot() -> None:
    hot = HotRoutes()
    hot.add("c", digests(100), ["a", "b"])
    hot.add("c", digests(100), ["c"])
    hot.forget("b")
    assert hot.find("c", digests(200), 200) == {"c": 96}


@pytest.mark.parametrize(
    ("prompt", "generated"), [(0, 0), (1, 31), (31, 1), (40, 90), (64, 64), (70_000, 40), (65_530, 40)]
)
def test_a_prompt_gone_on_is_named_as_one_that_is_sent_whole(prompt: int, generated: int) -> None:
    ids = list(range(prompt + generated))
    named = prefix_of(ids[:prompt], "key")
    assert gone_on(named, ids[:prompt], ids[prompt:]) == prefix_of(ids, "key").digests
