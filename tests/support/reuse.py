"""Completions of token ids whose account is looked at for what was not prefilled."""

from __future__ import annotations

from typing import Any

from tests.support.cluster import Cluster, Json


async def completed(cluster: Cluster, prompt: list[int], count: int = 6, **more: Any) -> Json:
    """A whole answer with its `text`, and its account as `record`. `url`: of another Gateway; `key`: an API key."""
    key, url = more.pop("key", None), more.pop("url", cluster.gateway.url)
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": count, "temperature": 0, **more}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await cluster.http.post(f"{url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    session = answer.headers["shardline-route-session"]
    record = (await cluster.http.get(f"{url}/v1/route-sessions/{session}", headers=headers)).json()
    return {**answer.json(), "record": record, "text": answer.json()["choices"][0]["text"]}


def check_reuse(answer: Json, cached: int, reason: str | None = None) -> None:
    """Usage, telemetry, and the rows that really crossed each Seam say the same."""
    prompt = answer["usage"]["prompt_tokens"]
    prefill = answer["record"]["prefill"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached, prefill
    assert (prefill["cached"], prefill["done"], prefill["total"]) == (cached, prompt, prompt)
    seams = answer["record"]["seams"][:-1]  # the last one leads back to the head, and has no rows
    assert [seam["prefill"]["rows"] for seam in seams] == [prompt - cached] * len(seams)
    assert len(seams) == len(answer["record"]["route"]["hops"]) - 1
    assert prefill["reuse"] == reason
