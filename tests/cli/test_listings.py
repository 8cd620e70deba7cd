"""The listings: columns for people, the whole answer as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from shardline.cli.listings import columns, explain_text, full_id, nodes_text, session_text, sessions_text, size
from shardline.cli.main import cli
from shardline.errors import ShardlineError

NODE = {
    "id": "n-0123",
    "url": "http://127.0.0.1:5000",
    "pid": 77,
    "engine": {"engine_class": "torch-f32"},
    "health": {"alive": True},
    "kv": {"used_tokens": 5, "capacity_tokens": 4096, "sessions": 1},
    "rss_bytes": 3 << 29,
    "last_seen_s": 0.42,
    "state": "ready",
    "reason": None,
    "shards": [{"model": "smol", "first": 0, "last": 15, "state": "ready"}],
}


ANSWER: dict[str, Any] = {"model": "smol", "taken": ["n-0"]}
SERVED = {"model": "smol", "content_id": "mac1-77"}


def test_columns_are_aligned_and_nothing_is_cut() -> None:
    assert columns(("A", "B"), [("long cell", "x"), ("y", "z")]) == "A          B\nlong cell  x\ny          z"


def test_sizes_for_people() -> None:
    assert [size(n) for n in (None, 0, 1023, 1536, 3 << 29, 1 << 50)] == [
        *("–", "0 B", "1023 B", "1.5 KiB", "1.5 GiB", "1024.0 TiB")
    ]


def test_nodes_show_layers_state_and_why(stage) -> None:
    failed = {**NODE, "id": "n-9", "shards": [{**NODE["shards"][0], "state": "failed", "reason": "no memory"}]}
    down = {**NODE, "id": "n-8", "state": "out", "reason": "reported: node_lost"}
    listed = [NODE, failed, down, {"id": "n-7", "shards": []}]
    lines = nodes_text(listed).splitlines()
    assert lines[0] == "smol, torch-f32" and lines[1].split()[:3] == ["NODE", "LAYERS", "STATE"]
    assert lines[2].split() == ["n-0123", "0:15", "ready", "0", "%", "1", "127.0.0.1:5000"]
    assert [line.split()[2] for line in lines[3:5]] == ["failed", "out"]
    assert lines[6] == "no model yet, no engine yet" and lines[8].startswith("n-7")
    assert lines[-2:] == ["n-9 is failed: no memory", "n-8 is out: reported: node_lost"]
    assert "shardline node" in nodes_text([]) and "shardline node" in nodes_text([], tracker="http://127.0.0.1:1")
    assert "shardline invite" in nodes_text([], tracker="https://192.0.2.10:7070")
    stage.json("GET /v1/nodes", {"nodes": [NODE]})
    shown = CliRunner().invoke(cli, ["nodes", "--tracker", stage.url, "--json"])
    assert json.loads(shown.stdout) == {"nodes": [NODE]}


def test_nodes_stand_in_the_order_of_their_layers() -> None:
    def node(first: int) -> dict[str, Any]:
        return {**NODE, "id": f"n-{first}", "shards": [{**NODE["shards"][0], "first": first, "last": first + 5}]}

    lines = nodes_text([node(10), node(0), node(5)]).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["n-0", "n-5", "n-10"]


def test_wide_nodes_stand_in_the_same_order() -> None:
    shards = [{**NODE["shards"][0], "first": first, "last": 30} for first in (18, 0)]
    lines = nodes_text([{**NODE, "id": f"n-{s['first']}", "shards": [s]} for s in shards], wide=True).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["n-0", "n-18"]


def test_gateways_of_a_cluster_with_keys_stand_below_the_nodes_and_can_be_expelled_by_what_stands_there(stage) -> None:
    ids = ["gateway-" + "a" * 16, "gateway-" + "b" * 16]
    listed = [
        {"id": ids[0], "state": "calls", "address": "10.0.0.5", "last_seen_s": 0.71},
        {"id": ids[1], "state": "expelled", "address": None, "last_seen_s": None},
    ]
    stage.json("GET /v1/nodes", {"nodes": [NODE], "gateways": listed})
    for flags in ([], ["--wide"]):
        lines = CliRunner().invoke(cli, ["nodes", "--tracker", stage.url, *flags]).stdout.splitlines()
        assert [line.split() for line in lines[-2:]] == [
            [ids[0], "ready", "10.0.0.5", "0.7", "s"],
            [ids[1], "expelled", "–", "–"],
        ]
        assert max(map(len, lines[-4:])) <= 80
    stage.json("GET /v1/nodes", {"nodes": []})
    assert "Gateways" not in CliRunner().invoke(cli, ["nodes", "--tracker", stage.url]).stdout


def test_wide_nodes_have_every_column_in_one_table(stage) -> None:
    failed = {**NODE, "id": "n-9", "shards": [{**NODE["shards"][0], "state": "failed", "reason": "no memory"}]}
    stage.json("GET /v1/nodes", {"nodes": [NODE, failed]})
    lines = CliRunner().invoke(cli, ["nodes", "--tracker", stage.url, "--wide"]).stdout.splitlines()
    wanted = "n-0123 0:15 smol torch-f32 ready 5/4096 1 1.5 GiB 0.4 s 77 http://127.0.0.1:5000"
    assert lines[1].split() == wanted.split()
    assert "failed (no memory)" in lines[2]


def test_nodes_and_sessions_of_ordinary_names_fit_into_80_columns(event: dict[str, Any]) -> None:
    node = {
        **NODE,
        "id": "n-161688efad1577ea",
        "url": "http://192.168.100.200:41723",
        "kv": {"used_tokens": 65536, "capacity_tokens": 65536, "sessions": 100},
        "shards": [{"model": "A-Long-Name-Instruct.Q4_1", "first": 100, "last": 126, "state": "loading"}],
    }
    ended = {**event, "id": "rs-28a88f8b3a21cca5f1cd2692", "phase": "failed", "failure": {"code": "node_lost"}}
    for text in (nodes_text([node]), sessions_text([{**ended, "created": 990.0}], now=1000.0)):
        assert max(map(len, text.splitlines())) <= 80, text


def test_sessions_show_phase_and_failure(event: dict[str, Any], stage) -> None:
    failed = {**event, "id": "rs-2", "phase": "failed", "failure": {"code": "node_lost"}, "created": 940.0}
    listed = [{**event, "created": 990.0}, failed]
    lines = sessions_text(listed, now=1000.0).splitlines()
    assert lines[1].split() == ["rs-1", "41/41", "17", "12.5", "10", "s", "decode"]
    assert "failed (node_lost)" in lines[2] and "60 s" in lines[2]
    assert sessions_text(listed, now=1000.0, wide=True).splitlines()[1].endswith("smol   n-0 0:15 → n-1 15:30")
    assert sessions_text([], 0.0) == "No Route Sessions."


def test_an_embedding_is_no_empty_chat(event: dict[str, Any]) -> None:
    vector = {**event, "output": "vector", "phase": "completed", "created": 990.0, "decode": {"tokens": 0}}
    assert sessions_text([vector], now=1000.0).splitlines()[1].split()[2:4] == ["vector", "–"]
    assert "the prompt becomes a vector" in session_text(vector) and "0 tokens" not in session_text(vector)


def test_a_model_that_nobody_serves_is_told_with_those_that_are(stage) -> None:
    error = {"error": {"code": "model_not_found", "message": "no Node serves a model 'nope'"}}
    stage.json("GET /v1/routes/explain?model=nope", error, status=404)
    for models, words in (([SERVED, SERVED], "there are: smol"), ([], "no Node serves any")):
        stage.json("GET /v1/models", {"models": models})
        done = CliRunner().invoke(cli, ["routes", "explain", "nope", "--tracker", stage.url])
        assert words in str(done.exception)


def test_one_session_shows_its_seams(event: dict[str, Any], stage) -> None:
    count = {"steps": 16, "rows": 16, "bytes": 40960}
    event["seams"] = [
        {"from": "n-0", "to": "n-1", "prefill": {"steps": 1, "rows": 41, "bytes": 94464}, "decode": count}
    ]
    assert session_text(event).splitlines()[-1] == (
        "seam     n-0 → n-1  prefill 1 step, 41 rows, 92.2 KiB  decode 16 steps, 16 rows, 40.0 KiB"
    )
    stage.json("GET /v1/route-sessions", {"sessions": [event]})
    stage.json("GET /v1/route-sessions/rs-1", event)
    shown = CliRunner().invoke(cli, ["sessions", "rs-1", "--gateway", stage.url])
    assert "rs-1" in shown.stdout and "40.0 KiB" in shown.stdout


def test_the_beginning_of_an_id_is_enough(event: dict[str, Any], stage) -> None:
    ids = ["rs-28a88f8b3a21cca5f1cd2692", "rs-28b88f8b3a21cca5f1cd2692", "rs-99"]
    assert full_id("rs-28a", ids) == full_id("28a", ids) == ids[0]
    assert full_id("rs-99", [*ids, "rs-990"]) == "rs-99"
    assert full_id("rs-7", ids) == "rs-7"
    for given in ("rs-28", "28", "rs-"):
        with pytest.raises(ShardlineError, match=f"{ids[0]}, {ids[1]}") as refused:
            full_id(given, ids)
        assert refused.value.code == "invalid_value"
    stage.json("GET /v1/route-sessions", {"sessions": [{**event, "id": one} for one in ids]})
    stage.json(f"GET /v1/route-sessions/{ids[0]}", {**event, "id": ids[0]})
    stage.json(f"DELETE /v1/route-sessions/{ids[1]}", {})
    shown = CliRunner().invoke(cli, ["sessions", "28a", "--gateway", stage.url])
    assert ids[0] in shown.stdout
    shown = CliRunner().invoke(cli, ["sessions", "rs-28b", "--cancel", "--gateway", stage.url])
    assert shown.stdout == f"{ids[1]} cancelled\n"


def test_routes_of_a_model_by_the_beginning_of_its_name(stage) -> None:
    answer = {"model": "smol", "taken": None, "groups": []}
    error = {"error": {"code": "model_not_found", "message": "no Node serves it"}}
    stage.json("GET /v1/models", {"models": [SERVED]})
    stage.json("GET /v1/routes/explain?model=sm", error, status=404)
    stage.json("GET /v1/routes/explain?model=77", error, status=404)
    for full in ("smol", "mac1-77"):
        stage.json(f"GET /v1/routes/explain?model={full}", answer)
    for given in ("sm", "77"):
        shown = CliRunner().invoke(cli, ["routes", "explain", given, "--tracker", stage.url])
        assert "A request for smol now takes: none" in shown.stdout


def test_a_model_of_several_engines_is_told_that_they_do_not_mix() -> None:
    def node(number: int, engine: str) -> dict[str, Any]:
        return {**NODE, "id": f"n-{number}", "engine": {"engine_class": engine}}

    mixed = nodes_text([node(1, "torch-f32"), node(2, "llama/1")])
    assert mixed.splitlines()[-1].startswith("smol: a route uses one engine class")
    for alike in ([node(1, "torch-f32"), node(2, "torch-f32")], [node(1, "torch-f32"), node(2, "torch/loading")]):
        assert "engine class" not in nodes_text(alike)


def test_a_session_can_be_cancelled(stage) -> None:
    stage.json("GET /v1/route-sessions", {"sessions": []})
    stage.json("DELETE /v1/route-sessions/rs-1", {})
    shown = CliRunner().invoke(cli, ["sessions", "rs-1", "--cancel", "--gateway", stage.url])
    assert shown.exit_code == 0 and "rs-1 cancelled" in shown.stdout
    assert CliRunner().invoke(cli, ["sessions", "--cancel"]).exit_code == 2


def test_a_session_id_stays_one_piece_of_the_path(stage) -> None:
    stage.json("GET /v1/route-sessions", {"sessions": []})
    CliRunner().invoke(cli, ["sessions", "../nodes?x=1", "--gateway", stage.url])
    assert stage.asked[-1][0] == "GET /v1/route-sessions/..%2Fnodes%3Fx%3D1"


def test_explain_names_what_is_missing_and_why_a_route_was_not_taken() -> None:
    shard = {"node": "n-0", "layers": [0, 15], "decode_ms": 4.0, "measured": True, "load": 1.0, "usable": True}
    shard |= {"reason": None, "kv_reserved": 0, "kv_capacity": 4096}
    route = {"nodes": ["n-0", "n-1"], "compute_ms": 8.0, "hop_ms": 0.3, "return_ms": 0.3, "estimate_ms": 8.6}
    group = {
        "content_id": "c",
        "engine_class": "torch-f32",
        "n_layers": 30,
        "missing": [[15, 30]],
        "shards": [shard, {**shard, "node": "n-1", "usable": False, "reason": "its engine is down", "measured": False}],
        "blocked": [{"from": "n-0", "to": "n-2", "reason": "reported lost"}],
        "routes": [
            {**route, "taken": True, "reason": "the least cost"},
            {**route, "taken": False, "reason": "2 ms more"},
        ],
        "complete": False,
    }
    text = explain_text({"model": "smol", "taken": ["n-0", "n-1"], "groups": [group]})
    for words in (
        *(
            "takes: n-0 → n-1",
            "missing layers: 15:30",
            "no: its engine is down",
            "4.00 (guessed)",
            "n-0 → n-2: reported lost",
        ),
        *("8.60 ms/token", "not taken: 2 ms more", "and dearer ones"),
    ):
        assert words in text
    assert "30 layers" in text and "1 layer\n" in explain_text({**ANSWER, "groups": [{**group, "n_layers": 1}]})
    assert explain_text({"model": "smol", "taken": None, "groups": []}).endswith("takes: none")


def test_explain_makes_up_no_layers_and_no_times_of_a_composite_node() -> None:
    shard = {"node": "n-0", "layers": [0, 1], "decode_ms": 1.0, "measured": False, "load": 0.0, "usable": True}
    shard |= {"reason": None, "kv_reserved": 0, "kv_capacity": 4096}
    route = {"nodes": ["n-0"], "compute_ms": 1.0, "hop_ms": 0.0, "return_ms": 0.0, "estimate_ms": 1.0}
    group = {"content_id": "name1-c", "engine_class": "upstream/smol", "n_layers": 1, "composite": True, "missing": []}
    group |= {"shards": [shard], "blocked": [], "complete": True}
    group["routes"] = [{**route, "taken": True, "reason": "the least cost"}]
    text = explain_text({**ANSWER, "groups": [group]})
    for invented in ("0:1", "1 layer", "1.00", "guessed"):
        assert invented not in text
    assert "behind another server" in text and " all " in text and "taken: the least cost" in text


def test_config_show_names_sources(monkeypatch) -> None:
    monkeypatch.setenv("SHARDLINE_API_KEY", "sk-secret-key")
    shown = CliRunner().invoke(cli, ["--set", "push_s=9", "config", "show", "--json"])
    answer = json.loads(shown.stdout)
    assert answer["push_s"] == {"value": "9.0", "source": "flag --set"}
    assert answer["api_key"]["value"] == "(set)"
    assert "sk-secret-key" not in shown.stdout


def test_nodes_that_are_long_gone_are_listed_on_demand(stage: Any) -> None:
    kv = {"used_tokens": 5, "capacity_tokens": 10, "sessions": 3}
    listed = [{"id": f"n-{age}", "state": "expired", "last_seen_s": age, "kv": kv} for age in (20.0, 400.0)]
    stage.json("GET /v1/nodes", {"nodes": listed})
    short = CliRunner().invoke(cli, ["nodes", "--tracker", stage.url]).output
    assert "n-20.0" in short and "n-400.0" not in short and "50 %" not in short
    assert "n-400.0" in CliRunner().invoke(cli, ["nodes", "--all", "--tracker", stage.url]).output
