"""Metrics of a Gateway: names and units of the conventions, labels that stay bounded."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from shardline.errors import ShardlineError
from shardline.gateway.metrics import MODELS, OTHER, EndedSession, GatewayMetrics, ended_session
from shardline.settings import Settings
from shardline.telemetry.records import Record

DONE = EndedSession(
    status="completed",
    code=None,
    model="smol",
    tokens=11,
    prompt_tokens=40,
    cached_tokens=8,
    lasted_s=2.5,
    first_token_s=0.5,
    decode_s=2.0,
)


def samples(metrics: GatewayMetrics, running: int = 0, waiting: int = 0) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(metrics.text(running, waiting).decode())
    return {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}


async def test_a_session_is_in_the_histograms_of_the_conventions() -> None:
    metrics = GatewayMetrics()
    metrics.ended(DONE)
    metrics.ended(replace(DONE, status="failed", code="node_lost", tokens=0, first_token_s=None, decode_s=None))
    metrics.ended(replace(DONE, status="cancelled", tokens=1, decode_s=0.0))
    seen = samples(metrics, running=2, waiting=3)
    assert seen["gen_ai_server_time_to_first_token_seconds_sum", ("smol",)] == 1.0
    assert seen["gen_ai_server_time_to_first_token_seconds_count", ("smol",)] == 2
    assert seen["gen_ai_server_time_per_output_token_seconds_sum", ("smol",)] == 0.2
    assert seen["gen_ai_server_time_per_output_token_seconds_count", ("smol",)] == 1
    for error in ("", "node_lost", "cancelled"):
        assert seen["gen_ai_server_request_duration_seconds_sum", (error, "smol")] == 2.5
    assert seen["shardline_gateway_sessions_ended_total", ("node_lost", "failed")] == 1
    assert seen["shardline_gateway_tokens_total", ()] == 12
    assert (seen["shardline_gateway_sessions", ()], seen["shardline_gateway_waiting", ()]) == (2, 3)


async def test_many_models_make_no_more_labels() -> None:
    metrics = GatewayMetrics()
    for n in range(MODELS + 10):
        metrics.ended(replace(DONE, model=f"m{n}"))
    metrics.ended(replace(DONE, model="m0"))
    seen = samples(metrics)
    assert seen["gen_ai_server_request_duration_seconds_count", ("", OTHER)] == 10
    assert seen["gen_ai_server_request_duration_seconds_count", ("", "m0")] == 2


def test_what_is_counted_stands_in_the_record() -> None:
    record = Record(key_id="k", model="smol", prompt_tokens=40, settings=Settings())
    record.enter("prefill")
    record.token()
    record.token()
    record.enter("completed")
    session = ended_session(record)
    assert (session.status, session.code, session.model, session.tokens) == ("completed", None, "smol", 2)
    assert session.prompt_tokens == 40 and session.first_token_s is not None and session.decode_s is not None
    assert 0 <= session.first_token_s <= session.lasted_s
    refused = Record(key_id="k", model="smol", prompt_tokens=40, settings=Settings())
    refused.fail(ShardlineError("capacity", "full"))
    session = ended_session(refused)
    assert (session.status, session.code, session.prompt_tokens) == ("failed", "capacity", 0)
    assert session.first_token_s is None and session.decode_s is None
