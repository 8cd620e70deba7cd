"""Reported bugs of such servers, tried on a whole cluster: bodies, prompts and paths in the exact shapes of reports.

What is refused by the checks of fields alone stands field by field in tests/gateway/test_openai_requests.py.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from shardline.errors import ShardlineError
from shardline.gateway import json_body
from shardline.gateway.openai_requests import chat_request
from shardline.settings import Settings
from shardline.telemetry.logs import configure_logs
from tests.support.api_cluster import CHAT, COUNTING, TEXT, ApiCluster, api_cluster
from tests.support.gateway_stand import Stand, standing

PLAIN = {"content-type": "application/json"}


@pytest.fixture
def debug_log() -> Iterator[io.StringIO]:
    """Everything that the process logs, at level debug, as JSON lines."""
    root, ours = logging.getLogger(), logging.getLogger("shardline")
    before = (root.handlers[:], root.level, ours.level)
    out = io.StringIO()
    configure_logs(role="test", style="json", level="debug", stream=out)
    yield out
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])
    structlog.reset_defaults()


async def refused(cluster: ApiCluster, path: str, body: Any, param: str | None) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await cluster.http.post(cluster.url + path, content=raw, headers=PLAIN)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), (raw[:80], error)
    assert param is None or error["param"] == param


async def test_empty_prompts_and_messages(tmp_path: Path) -> None:
    """No messages in four ways, no prompt in three, on a model without a BOS: 400 by name; the request after each is
    served. With a BOS an empty prompt is one."""
    async with api_cluster(tmp_path, script=COUNTING) as cluster:
        model = {"model": cluster.model}
        for body in ({"messages": []}, {"messages": None}, {}, {"messages": {}}):
            await refused(cluster, CHAT, {**model, **body}, "messages")
            assert await cluster.text(max_tokens=1) == " t0"
        for body in ({"prompt": ""}, {"prompt": [""]}, {"prompt": []}, {}, {"prompt": None}):
            await refused(cluster, TEXT, {**model, **body}, "prompt")
            assert await cluster.text(max_tokens=1) == " t0"
    (tmp_path / "bos").mkdir()
    async with api_cluster(tmp_path / "bos", script={**COUNTING, "add_bos": True}) as cluster:
        answer = await cluster.answer("", max_tokens=2)
        assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["text"]) == (1, " t0 t1")


async def test_token_ids_that_are_none_with_everything_logged(tmp_path: Path, debug_log: io.StringIO) -> None:
    """Ids out of range and things that are no ids, with logging at debug: refused by name, no session anywhere, and
    each line of the log is one JSON object without the prompt in it."""
    async with api_cluster(tmp_path, script=COUNTING) as cluster:
        size = (await cluster.info(0)).shards[0].vocab_size
        for prompt in ([-1], [2147483647], [size], [1, "a"], [[1, 2], [3, "a"]], [1.5], [[1, 2], [size]]):
            await refused(cluster, TEXT, {"model": cluster.model, "prompt": prompt}, "prompt")
        assert [(await cluster.info(number)).kv.sessions for number in (0, 1)] == [0, 0]
        both = await cluster.answer([[1, 2], [3]], max_tokens=1)
        assert both["usage"]["prompt_tokens"] == 3
        await cluster.text("a very secret prompt", max_tokens=3)
        await cluster.until_free()
    lines = debug_log.getvalue().splitlines()
    assert lines and all(isinstance(json.loads(line), dict) for line in lines)
    assert "very secret" not in debug_log.getvalue()


def test_a_form_that_does_not_exist_is_refused() -> None:
    """Schemas, JSON mode and tools are never ignored (tests/cases/test_structured_answers.py, test_tool_answers.py)."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "nope"}}
    with pytest.raises(ShardlineError) as caught:
        chat_request(json.dumps(body).encode())
    error = caught.value
    assert (error.code, error.param, error.fault.status) == ("unsupported_parameter", "response_format", 400)


LIMIT = 4 << 20


def filled(before: bytes, item: bytes, behind: bytes) -> bytes:
    """A body of the permitted size."""
    return before + item * ((LIMIT - len(before) - len(behind)) // len(item)) + behind


HEAVY = {
    "one long text": filled(b'{"model":"tiny","prompt":"', b"x", b'"}'),
    "escapes": filled(b'{"model":"tiny","prompt":"', b"\\n", b'"}'),
    "commas in a text": filled(b'{"model":"tiny","prompt":"', b",:[", b'"}'),
    "many numbers": filled(b'{"model":"tiny","prompt":[', b"7,", b"7]}"),
    "many lists": filled(b'{"model":"tiny","prompt":[', b"[7],", b"[7]]}"),
    "many biases": filled(b'{"model":"tiny","prompt":"a","logit_bias":{', b'"1":1,', b'"1":1}}'),
    "many members": filled(b'{"model":"tiny","prompt":"a","metadata":{', b'"a":"b",', b'"a":"b"}}'),
    "a compressed bomb": filled(b"\x1f\x8b", b"\0", b""),
    "deep lists": filled(b'{"model":"tiny","prompt":', b"[", b""),
    "quotes": filled(b'{"model":"tiny","prompt":', b'"', b""),
}


@pytest.mark.parametrize("body", HEAVY.values(), ids=HEAVY)
async def test_memory_for_a_body_is_a_small_multiple_of_it(
    tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies of just the permitted size, made to be expensive: refused, and what they took meanwhile is bounded. All
    limits are a quarter of what they are by default."""
    settings = Settings()
    assert settings.api_body_bytes == 4 * LIMIT
    for name in ("VALUES", "MEMBERS"):
        monkeypatch.setattr(json_body, name, getattr(json_body, name) // 4)
    stand = Stand(settings=msgspec.structs.replace(settings, api_body_bytes=LIMIT))
    async with standing(tmp_path, stand=stand, context_length=1000):
        assert (await stand.complete()).status_code == 200
        tracemalloc.start()
        try:
            answer = await posted(int(stand.url.rsplit(":", 1)[1]), body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), answer[:200]
        assert b'"error"' in answer
        assert peak < 4 * LIMIT, f"{peak / LIMIT:.1f} times the limit"
        assert (await stand.complete()).status_code == 200


async def posted(port: int, body: bytes) -> bytes:
    """The answer to `body`, sent in pieces, so that what is measured is not the client's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    for start in range(0, len(body), 1 << 18):
        writer.write(body[start : start + (1 << 18)])
        await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_odd_paths(tmp_path: Path) -> None:
    """A model and a state folder under names with umlauts, Cyrillic, CJK, an ideographic space, a space, a `%` and a
    quote, in a path of more than 300 characters."""
    folder = tmp_path / "ü" / "модель" / "имя\u3000x" / "模型 100% 'x'"
    while len(str(folder)) < 300:
        folder /= "深" * 20
    folder.mkdir(parents=True)
    async with api_cluster(folder, script=COUNTING, identity_path=folder / "ключ", layers=[(0, 6)]) as cluster:
        assert await cluster.text(max_tokens=2) == " t0 t1"
        assert (folder / "ключ").exists() and list((folder / "text").iterdir())
