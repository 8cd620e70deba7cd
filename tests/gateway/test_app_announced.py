"""A Route Session is there before its prompt is: announced, then begun, refused, or left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shardline.errors import ShardlineError
from shardline.gateway.template import Templates
from tests.support.gateway_stand import Stand, standing


@pytest.fixture
async def stand(tmp_path: Path, shared_templates: Templates) -> AsyncIterator[Stand]:
    async with standing(tmp_path, templates=shared_templates) as made:
        yield made


async def test_the_first_choice_becomes_the_announced_session(stand: Stand) -> None:
    assert (await stand.chat(n=3)).status_code == 200
    assert [g.request.session for g in stand.generations] == ["rs-announced-0", None, None]
    assert stand.announced == {"rs-announced-0": "open"}


async def test_a_refused_request_withdraws_it_with_the_error(stand: Stand) -> None:
    answer = await stand.chat(messages=[{"role": "user", "content": "x" * 100_000}])
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    (withdrawn,) = stand.announced.values()
    assert isinstance(withdrawn, ShardlineError)
    assert withdrawn.code == "context_length_exceeded"
    assert stand.generations == []


async def test_what_is_wrong_in_itself_announces_nothing(stand: Stand) -> None:
    assert (await stand.chat(temperature=9)).status_code == 400
    assert (await stand.chat(model="none")).status_code == 404
    assert stand.announced == {}


async def test_a_client_that_leaves_while_it_waits_for_the_head(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    async def never(*args: object, **more: object) -> list[int]:
        waiting.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr("shardline.gateway.text.TextStore.tokenize", never)
    async with httpx.AsyncClient() as http:
        body = {"model": stand.models[0].model, "messages": [{"role": "user", "content": "hi"}]}
        request = asyncio.create_task(http.post(f"{stand.url}/v1/chat/completions", json=body))
        await waiting.wait()
        assert stand.announced == {"rs-announced-0": "open"}
        request.cancel()
        await asyncio.wait({request})
    async with asyncio.timeout(2):
        while stand.announced["rs-announced-0"] == "open":
            await asyncio.sleep(0.01)
    assert stand.announced == {"rs-announced-0": None}
