"""Keys of the state folder at a running Gateway: scopes, limits, usage, and changes while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shardline.errors import ShardlineError
from shardline.gateway.clients import Clients
from shardline.gateway.key_file import add_key, revoke_key
from shardline.gateway.keys import ApiKeys
from shardline.gateway.ledger import USAGE_FILE, kept_usage
from shardline.gateway.template import Templates
from shardline.options import KEYS_FILE
from tests.support.gateway_stand import Piece, Stand, Wait, say, standing

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
FIXED = "sk-0123456789abcdef"


async def becomes(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 5
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_scopes_limits_and_usage(tmp_path: Path, shared_templates: Templates) -> None:
    path = tmp_path / "state" / KEYS_FILE
    alice, _ = add_key(path, "alice", now=1.0, requests_per_minute=2)
    looker, _ = add_key(path, "looker", now=1.0, scopes=("look",))
    async with standing(
        tmp_path,
        templates=shared_templates,
        keys=[FIXED],
        state=path.parent,
        stand=Stand(script=lambda request: say("a", "b")),
    ) as stand:
        assert (await stand.post(CHAT, BODY)).status_code == 401
        for key in (alice, FIXED, alice):
            assert (await stand.post(CHAT, BODY, authorization=f"Bearer {key}")).status_code == 200
        refused = await stand.post(CHAT, BODY, authorization=f"Bearer {alice}")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(refused.headers["retry-after"]) <= 60 and alice not in refused.text
        barred = await stand.post(CHAT, BODY, authorization=f"Bearer {looker}")
        assert (barred.status_code, barred.json()["error"]["code"]) == (403, "forbidden")
        models = await stand.http.get(stand.url + "/v1/models", headers={"authorization": f"Bearer {looker}"})
        assert models.status_code == 200
    used = kept_usage(path.parent / USAGE_FILE)
    assert (used["alice"].requests, used["alice"].refused) == (2, 1)
    assert used["alice"].completion_tokens == 4 and used["alice"].prompt_tokens > 0
    assert len(used) == 2 and "looker" not in used


async def test_as_many_at_a_time_as_the_key_may(tmp_path: Path, shared_templates: Templates) -> None:
    path = tmp_path / "state" / KEYS_FILE
    key, _ = add_key(path, "narrow", now=1.0, concurrent=1)
    go = asyncio.Event()
    stand = Stand(script=lambda request: [Piece(b"a"), Wait(go)])
    async with standing(tmp_path, templates=shared_templates, state=path.parent, stand=stand):
        first = asyncio.create_task(stand.post(CHAT, BODY, authorization=f"Bearer {key}"))

        async def runs() -> bool:
            return bool(stand.generations)

        await becomes(runs)
        refused = await stand.post(CHAT, BODY, authorization=f"Bearer {key}")
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "concurrency_limit_exceeded"
        go.set()
        assert (await first).status_code == 200
        assert (await stand.post(CHAT, BODY, authorization=f"Bearer {key}")).status_code == 200


async def test_a_running_gateway_notices_changes(tmp_path: Path, shared_templates: Templates) -> None:
    path = tmp_path / "state" / KEYS_FILE
    async with standing(tmp_path, templates=shared_templates, state=path.parent) as stand:

        async def status(key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return (await stand.http.get(stand.url + "/v1/models", headers=headers)).status_code

        assert await status(None) == 200
        key, _ = add_key(path, "alice", now=1.0)

        async def asks() -> bool:
            return await status(None) == 401

        await becomes(asks)
        assert await status(key) == 200
        revoke_key(path, "alice", now=2.0)

        async def refuses() -> bool:
            return await status(key) == 401

        await becomes(refuses)
        assert await status(None) == 401, "without a valid key nobody comes in"


async def test_a_file_that_is_damaged_or_gone_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / KEYS_FILE
    key, _ = add_key(path, "alice", now=1.0)
    clients = Clients(ApiKeys([]), tmp_path)
    for spoil in (lambda: path.write_bytes(b"{"), path.unlink):
        spoil()
        running = asyncio.create_task(clients.run())
        await asyncio.sleep(0)
        clients._look()
        running.cancel()
        await asyncio.wait([running])
        assert clients.client(f"Bearer {key}").name == "alice"
        with pytest.raises(ShardlineError):
            clients.client(None)


def test_a_damaged_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / KEYS_FILE).write_bytes(b"{")
    (tmp_path / KEYS_FILE).chmod(0o600)
    with pytest.raises(ShardlineError) as caught:
        Clients(ApiKeys([]), tmp_path)
    assert caught.value.code == "setting_invalid"
