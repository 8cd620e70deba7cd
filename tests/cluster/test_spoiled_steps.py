"""A proxy between two Nodes repeats, swaps, drops, delays and changes steps: the text stays right, or the session
fails with a structure; never a wrong token. And what the proxy counts is what telemetry says."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, scripted_cluster, until
from tests.support.step_proxy import Rule, Seen, pass_on

SCRIPT: dict[str, Any] = {"answer": [f" t{i}" for i in range(30)], "layout": [["hidden", "F32", [64]]]}
TEXT = "".join(f" t{i}" for i in range(30))
PROMPT = "word " * 20
STEP = 14
"""Number of the step that is spoiled: behind the chunks of the prompt, in decode."""


@asynccontextmanager
async def proxied(folder: Path, **more: Any) -> AsyncIterator[Cluster]:
    """Node 0 pushes to Node 1 through a proxy."""
    script = {**SCRIPT, **more.pop("script", {})}
    settings = {"push_s": 1.0, "prefill_chunk_max": 64, **more.pop("settings", {})}
    async with scripted_cluster(folder, layers=("0:3", "3:6"), script=script, settings=settings, proxied=(1,)) as it:
        yield it


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One cluster for all tests that its Nodes outlive. No session has anything of one before it."""
    settings = {"step_s": 2.0, "prefix_sessions": 0}
    async with proxied(tmp_path_factory.mktemp("running"), settings=settings) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """With a proxy that has seen nothing; it passes all on afterwards."""
    running.proxies[1].seen = Seen()
    yield running
    running.proxies[1].rule = pass_on


async def repeat(number: int, body: bytes) -> list[bytes]:
    return [body] * 3


async def delay(number: int, body: bytes) -> list[bytes]:
    await asyncio.sleep(0.05 if number % 3 else 0.2)
    return [body]


class Old:
    """Delivers the step before once more in front of each step: old ones change nothing."""

    def __init__(self) -> None:
        self.last: list[bytes] = []

    async def __call__(self, number: int, body: bytes) -> list[bytes]:
        previous, self.last = self.last, [body]
        return [*previous, body]


class Swap:
    """Delivers a step behind the one that follows it."""

    def __init__(self) -> None:
        self.held: list[bytes] = []

    async def __call__(self, number: int, body: bytes) -> list[bytes]:
        if number == STEP:
            self.held = [body]
            return []
        held, self.held = self.held, []
        return [body, *held]


async def drop(number: int, body: bytes) -> list[bytes]:
    return [] if number == STEP else [body]


async def cut(number: int, body: bytes) -> list[bytes] | None:
    return None if number == STEP else [body]


def first_row(body: bytes) -> int:
    """Offset of the first hidden value of a step document with one row."""
    (header,) = struct.unpack_from("<Q", body)
    return 8 + header + 40 + 4


def changed(what: str) -> Rule:
    async def rule(number: int, body: bytes) -> list[bytes]:
        if number != STEP:
            return [body]
        spoiled = bytearray(body)
        at = first_row(body)
        if what == "bit":
            spoiled[at] ^= 1
        elif what == "zeros":
            spoiled[at:] = bytes(len(body) - at)
        elif what == "nan":
            spoiled[at : at + 4] = struct.pack("<f", float("nan"))
        elif what == "seq":
            spoiled[at - 28] = 200
        elif what == "position":
            spoiled[at - 24] ^= 1
        elif what == "token":
            spoiled[at - 4 : at] = struct.pack("<i", 2**31 - 1)
        elif what == "key":
            spoiled[at - 44] ^= 1
        elif what == "hop":
            spoiled[at - 16 : at - 15] = b"\x07"
        elif what == "cut short":
            spoiled = spoiled[:-10]
        return [bytes(spoiled)]

    return rule


@pytest.mark.parametrize("rule", [repeat, delay, Old()], ids=["repeat", "delay", "old"])
async def test_what_ordering_and_counting_make_harmless(cluster: Cluster, rule: Rule) -> None:
    cluster.proxies[1].rule = rule
    async with cluster.streamed(PROMPT) as stream:
        await stream.read_all()
    assert (stream.text, stream.error) == (TEXT, None)
    await cluster.until_free()


@pytest.mark.parametrize(
    ("rule", "codes"),
    [
        (drop, {"deadline"}),
        (Swap(), {"deadline"}),
        (cut, None),
        (changed("nan"), {"numerical_error"}),
        (changed("seq"), {"seam_gap"}),
        (changed("position"), {"seam_gap"}),
        (changed("token"), {"seam_invalid"}),
        (changed("key"), {"deadline"}),
        (changed("hop"), {"seam_invalid"}),
        (changed("cut short"), {"seam_invalid"}),
    ],
    ids=["drop", "swap", "cut", "nan", "seq", "position", "token", "key", "hop", "cut-short"],
)
async def test_what_is_lost_or_changed_is_a_failure_and_never_a_wrong_token(
    cluster: Cluster, rule: Rule, codes: set[str] | None
) -> None:
    """The text before is right; what follows is the right text or an error. The next request is served."""
    cluster.proxies[1].rule = rule
    async with cluster.streamed(PROMPT) as stream:
        await stream.read_all()
    if codes is None:
        assert (stream.text, stream.error) == (TEXT, None)
    else:
        assert stream.error is not None, stream.text[:100]
        assert stream.error["code"] in codes, stream.error
        assert TEXT.startswith(stream.text), stream.text[:100]
        assert len(stream.text) > 0
        assert not stream.done
    await cluster.until_free()
    cluster.proxies[1].rule = pass_on

    async def served() -> bool:
        # A Node that was reported is out until its next heartbeat.
        return (await cluster.ask(PROMPT)).status_code == 200

    await until(served, 10)
    assert await cluster.text(PROMPT) == TEXT


@pytest.mark.parametrize("what", ["bit", "zeros"])
async def test_one_changed_bit_in_a_row_changes_what_follows(cluster: Cluster, what: str) -> None:
    """The negative control: the rows that cross are the ones that the answer is made of."""
    cluster.proxies[1].rule = changed(what)
    text = await cluster.text(PROMPT, max_tokens=20)
    right, _, wrong = text.partition("<wrong-rows>")
    assert TEXT.startswith(right) and len(right) > 0
    assert wrong.replace("<wrong-rows>", "") == ""
    assert text != TEXT[: len(text)]


async def test_the_proxy_counts_what_telemetry_says(tmp_path: Path) -> None:
    async with proxied(tmp_path, script={"eos": False}) as cluster:
        proxy = cluster.proxies[1]
        answer = await cluster.ask(PROMPT, max_tokens=200)
        record = await cluster.session(answer.headers["shardline-route-session"])
        seam = record["seams"][0]
        counted = proxy.seen.bytes
        said = seam["prefill"]["bytes"] + seam["decode"]["bytes"]
        assert abs(said - counted) <= 0.01 * counted
        assert (seam["decode"]["steps"], seam["decode"]["rows"]) == (199, 199)
        assert seam["prefill"]["rows"] == answer.json()["usage"]["prompt_tokens"]
        decode = proxy.seen.bodies[-199:]
        row = 64 * 4
        assert max(decode) <= row + 512
        assert decode[9] == decode[-1], "bytes of a step do not grow with the context"


async def test_two_tensors_of_rank_two_and_three_cross_a_seam(tmp_path: Path) -> None:
    layout = [["streams", "F32", [4, 8]], ["aux", "F16", [3]], ["ids", "I32", [1]]]
    async with scripted_cluster(tmp_path, script={**SCRIPT, "layout": layout}) as cluster:
        assert await cluster.text(PROMPT) == TEXT
