"""One trace for each request, over the processes of a cluster: what a collector sees of it, and what it never does."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

from tests.support.cluster import Cluster, scripted_cluster
from tests.support.collector import Collector, Seen, collector

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
DIARY = "What I would not tell anybody"
SCRIPT = {
    "answer": [" one", " two", " three"],
    "answers": [{"contains": "endless", "pieces": [" w"] * 3000}],
    "decode_ms": 2,
}


async def test_one_trace_through_all_parts(tmp_path: Path) -> None:
    with collector() as there:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": there.url}
        async with scripted_cluster(tmp_path, layers=("0:3", "3:6"), script=SCRIPT, environment=environment) as cluster:
            await asked(cluster)
            check_trace(there, cluster)
            there.spans.clear()
            answer = await cluster.http.post(
                f"{cluster.gateway.url}/v1/embeddings", json={"model": cluster.model, "input": DIARY}
            )
            assert answer.status_code == 200, answer.text
            vector = one(there.until(4), f"embeddings {cluster.model}")  # route and two Nodes, too
            assert vector.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
            there.spans.clear()
            await lost(cluster)
            check_failure(there)
        assert DIARY not in repr(there.spans) and cluster.credential() not in repr(there.spans)


async def asked(cluster: Cluster) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = cluster.body(DIARY, max_tokens=3, temperature=0.5, seed=7)
    answer = await cluster.http.post(f"{cluster.gateway.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


def check_trace(there: Collector, cluster: Cluster) -> None:
    spans = there.until(10)  # request, route, two Nodes, the session and its five phases
    assert {span.trace for span in spans} == {TRACE} and len(spans) == 10
    chat = one(spans, f"chat {cluster.model}")
    assert (chat.service, chat.parent, chat.failed) == ("shardline-gateway", PARENT, False)
    said = chat.attributes
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", cluster.model)
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (3, 0.5)
    assert said["gen_ai.usage.input_tokens"] > 0 and said["gen_ai.usage.output_tokens"] == 3
    assert (said["shardline.request_id"], said["http.response.status_code"]) == ("mine", 200)
    route = one(spans, "route")
    assert (route.service, route.parent) == ("shardline-tracker", chat.id)
    nodes = [span for span in spans if span.name == "session"]
    assert {span.service for span in nodes} == {"shardline-node"} and {span.parent for span in nodes} == {chat.id}
    assert sorted(span.attributes["shardline.layers"] for span in nodes) == ["0:3", "3:6"]
    session = one(spans, "route session")
    assert session.parent == chat.id and session.attributes["shardline.layers"] == ["0:3", "3:6"]
    phases = sorted((span for span in spans if span.parent == session.id), key=lambda span: span.began_ns)
    assert [span.name for span in phases] == ["queued", "routing", "opening", "prefill", "decode"]
    assert all(a.ended_ns == b.began_ns for a, b in pairwise(phases))
    assert phases[-1].attributes["shardline.tokens"] == 3
    assert chat.began_ns <= route.began_ns <= route.ended_ns <= chat.ended_ns


async def lost(cluster: Cluster) -> None:
    async with cluster.streamed("endless") as stream:
        await stream.read_tokens(2)
        cluster.nodes[1].signal(signal.SIGKILL)
        await stream.read_all()
    assert stream.error is not None and stream.error["code"] == "node_lost"


def check_failure(there: Collector) -> None:
    chat = [span for span in there.until(8) if span.name.startswith("chat")][-1]
    assert chat.trace != TRACE and chat.parent == "" and chat.failed
    assert chat.attributes["error.type"] == "node_lost"


def one(spans: list[Seen], name: str) -> Seen:
    (found,) = [span for span in spans if span.name == name]
    return found
