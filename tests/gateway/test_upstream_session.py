"""What a composite Node may say on its stream, and in which order; what a hostile one says ends its session."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.upstream_session import UpstreamSession
from shardline.settings import Settings
from shardline.telemetry.records import Record
from shardline.wire.composite import Answered, CallPiece, Taken, Text, UpstreamUsage
from shardline.wire.messages import Beat, Failed, Finished, Hop, Opened, Progress, Route, RouteAnswer, Sampling, Token

OPENED = Opened(node="whoever", kv_reserved=10)


def session() -> UpstreamSession:
    """Of a Node that only speaks: nothing is asked of it."""
    hop = Hop(index=0, node="n-1", url="http://x", first=0, last=1, engine_class="upstream/m", content_id="name1-0")
    route = Route(
        id="r-1", model="m", content_id="name1-0", engine_class="upstream/m", n_layers=1, hops=[hop], prefill_chunk=1,
        context_length=100, vocab_size=0, text_digest="",
    )  # fmt: skip
    record = Record(key_id="k", model="m", prompt_tokens=0, settings=Settings())
    record.passed_on = True
    nothing: Any = None
    return UpstreamSession(
        answer=RouteAnswer(route=route, tickets=["t"]), prompt=[], max_tokens=8, sampling=Sampling(), prefix=None,
        client=nothing, carrier=nothing, liveness=nothing, record=record, settings=Settings(), tasks=nothing,
    )  # fmt: skip


def hear(*events: Any) -> UpstreamSession:
    made = session()
    for event in events:
        made._heard(made._lines[0], msgspec.json.encode(event))
    return made


async def test_an_answer() -> None:
    usage = UpstreamUsage(prompt_tokens=5, completion_tokens=2)
    pieces = [Text(text="a"), Text(reasoning="b", calls=[CallPiece(index=0, arguments="{")])]
    made = hear(OPENED, Beat(), Taken(), *pieces, Answered(reason="length", usage=usage))
    assert made.failure is None
    await made.taken()
    assert await made.next_texts() == pieces
    assert await made.next_texts() == []
    ending = made.ending()
    assert ending is not None
    assert (ending.reason, ending.generated, ending.usage) == ("length", 2, usage)


async def test_what_came_is_given_out_before_the_failure() -> None:
    error = ShardlineError("engine_lost", "gone").body()
    made = hear(OPENED, Taken(), Text(text="a"), Failed(error=error))
    assert await made.next_texts() == [Text(text="a")]
    with pytest.raises(ShardlineError) as failed:
        await made.next_texts()
    assert (failed.value.code, failed.value.details["node"]) == ("engine_lost", "n-1")
    assert failed.value.details["position"] is failed.value.details["tokens_delivered"] is None


async def test_an_answer_that_is_whole_has_lost_nothing() -> None:
    error = ShardlineError("engine_lost", "gone").body()
    made = hear(OPENED, Taken(), Text(text="a"), Answered(reason="stop"), Failed(error=error))
    await made.taken()
    assert await made.next_texts() == [Text(text="a")] and await made.next_texts() == []


@pytest.mark.parametrize(
    "events",
    [
        [Text(text="a")],
        [Taken(), Taken()],
        [Answered(reason="stop")],
        [Taken(), Answered(reason="stop"), Text(text="more")],
        [Taken(), Answered(reason="stop"), Answered(reason="stop")],
        [Token(id=1, index=0)],
        [Progress(position=1)],
        [Taken(), Finished(reason="stop", generated=3)],
        [Taken(), Text(text="x" * 70_000)],
        [Taken(), *[Text()] * 5_000],
        [Taken(), Text(calls=[CallPiece(index=0, id="x" * 70_000)])],
        [Taken(), Text(calls=[CallPiece(index=-1)])],
        [Taken(), Text(calls=[CallPiece(index=10**6)])],
        [Taken(), Answered(reason="stop", stop="not asked for")],
        [Taken(), Answered(reason="stop", usage=UpstreamUsage(prompt_tokens=-1, completion_tokens=1))],
        [Taken(), Answered(reason="stop", usage=UpstreamUsage(prompt_tokens=1, completion_tokens=1 << 50))],
        [Taken(), Answered(reason="stop", usage=UpstreamUsage(prompt_tokens=1, completion_tokens=1, cached_tokens=2))],
        [
            Taken(),
            Answered(reason="stop", usage=UpstreamUsage(prompt_tokens=1, completion_tokens=1, reasoning_tokens=-1)),
        ],
    ],
)
def test_what_a_composite_node_does_not_say(events: list[Any]) -> None:
    made = hear(OPENED, *events)
    assert made.failure is not None
    assert (made.failure.code, made.failure.details["node"]) == ("seam_invalid", "n-1")


def test_whose_fault_it_is() -> None:
    """Its upstream may find the request wrong; of itself it says what every Node may say, and of others nothing."""
    for code in ("unsupported_parameter", "invalid_value", "context_length_exceeded"):
        made = hear(OPENED, Failed(error=ShardlineError(code, "no", param="top_k").body()))
        assert made.failure is not None and (made.failure.code, made.failure.param) == (code, "top_k")
    for said, told in (("unauthorized", "engine_error"), ("setting_invalid", "engine_error"), ("capacity", "capacity")):
        made = hear(OPENED, Failed(error={**ShardlineError(said, "no").body(), "node": "n-other"}))
        assert made.failure is not None and (made.failure.code, made.failure.details["node"]) == (told, "n-1")
