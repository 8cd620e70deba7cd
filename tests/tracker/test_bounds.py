"""Every text, list, map and number that the Tracker is sent has a bound, found by trying each place of each message."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker import admission
from shardline.tracker.bounds import LIST_LIMIT, STATEMENT_LIMIT, TEXT_LIMIT, check_bounds
from shardline.tracker.state import TrackerState
from shardline.wire.messages import (
    EngineHealth,
    Heartbeat,
    NodeInfo,
    NodeProof,
    Outcome,
    PeerProbe,
    PlacementRequest,
    Registration,
    RouteRequest,
)
from shardline.wire.tickets import public_bytes, sign
from tests.tracker.cluster_values import SigningNode, shard

NODE = SigningNode("http://127.0.0.1:4000", [shard(0, 15, reason="r", tensors_digest="d" * 64)])
INFO = NODE.info(
    health=EngineHealth(alive=True, running_step_age_ms=1.0, pid=1, last_error="e"), pieces={"piece": "held"}
)
PLACEMENT = PlacementRequest(
    content_id="c",
    engine_class="e",
    n_layers=2,
    memory_bytes=1 << 30,
    layer_bytes=[1, 1],
    embedding_bytes=0,
    output_bytes=0,
    legal_cuts=[1],
    node="n",
    host="h",
    host_memory_bytes=1 << 30,
)
ROUTE = RouteRequest(
    model="m",
    kv_tokens=1,
    gateway="g",
    avoid_nodes=["n"],
    avoid_links=[("a", "b")],
    reusable_tokens={"n": 1},
    prefix_digests=["d"],
)
OUTCOME = Outcome(status="failed", code="node_lost", node="n", link=("a", "b"), phase="decode", tokens=1)
REGISTRATION = NODE.registration("nonce", 5.0, info=INFO)
HEARTBEAT = NODE.heartbeat(info=INFO, peers=[PeerProbe(peer="p", rtt_ms=1.0, ok=True)])
FIXED = ("status", "state")
"""Words that the contract enumerates: nothing else decodes."""
Path = tuple[str | int, ...]


async def _dials_nobody(url: str, nonce: str) -> NodeProof:
    raise AssertionError("nobody is dialled")


def tracker() -> TrackerState:
    return TrackerState(Settings(), dial=_dials_nobody, loopback=True)


def open_registration(message: Registration) -> None:
    admission.open_registration(sign(NODE.key, "register", message))


def open_heartbeat(message: Heartbeat) -> None:
    admission.open_heartbeat(sign(NODE.key, "heartbeat", message), public_bytes(NODE.key), NODE.id)


DOORS: list[tuple[msgspec.Struct, Callable[[Any], object]]] = [
    (REGISTRATION, open_registration),
    (HEARTBEAT, open_heartbeat),
    (PLACEMENT, lambda message: tracker().place(message)),
    (ROUTE, lambda message: tracker().route(message)),
    (OUTCOME, lambda message: tracker().outcome("r-1", message)),
]


def places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value in `value`, with the way to it."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def put(tree: Any, path: Path, value: Any) -> Any:
    changed = copy.deepcopy(tree)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def too_large(value: Any) -> list[Any]:
    """What must be refused in the place of `value`; texts of a size in between are in the test below."""
    match value:
        case bool():
            return []
        case str():
            return ["x" * 10_000, "a\x1b[2Jb"]
        case int() | float():
            return [1 << 60]
        case dict():
            key, item = next(iter(value.items()))
            return [{**value, "k" * 10_000: item}, {f"{key}{i}": item for i in range(5000)}]
        case list():
            return [value * 5000]
    return []  # null


def _cases() -> list[Any]:
    found = []
    for message, door in DOORS:
        tree = msgspec.json.decode(msgspec.json.encode(message))
        for path, value in places(tree):
            is_struct = isinstance(value, dict) and path[-1:] not in (("pieces",), ("reusable_tokens",))
            if not path or is_struct or path[-1] in FIXED:
                continue
            pair = path[-1] == "link" or (len(path) > 1 and path[-2] == "avoid_links")
            for i, wrong in enumerate([] if pair else too_large(value)):
                name = f"{type(message).__name__}-{'.'.join(map(str, path))}-{i}"
                found.append(pytest.param(type(message), put(tree, path, wrong), door, id=name))
    return found


@pytest.mark.parametrize(("kind", "tree", "door"), _cases())
def test_nothing_too_large_gets_in_anywhere(kind: Any, tree: Any, door: Callable[[Any], object]) -> None:
    with pytest.raises(ShardlineError) as error:
        door(msgspec.convert(tree, kind))
    assert error.value.fault.status < 500
    assert len(error.value.message) < 1000


def test_the_places_that_had_no_bound_are_among_them() -> None:
    tried = {case.id for case in _cases()}
    for place in ("shards.0.reason", "shards.0.text_digest", "pieces", "pieces.piece", "engine.build", "version"):
        assert f"Registration-info.{place}-0" in tried


def test_what_is_just_within_its_bound_passes() -> None:
    text = "é" * TEXT_LIMIT
    check_bounds(NODE.info(shards=[shard(0, 15, reason=text)], pieces={text: text}))
    check_bounds(RouteRequest(model="m", kv_tokens=1, gateway="g", avoid_nodes=["n"] * LIST_LIMIT))


@pytest.mark.parametrize(
    ("message", "code", "param", "path"),
    [
        (INFO, "registration_refused", "shards", "shards[0].reason"),
        (INFO, "registration_refused", "pieces", "pieces[1]"),
    ],
)
def test_the_refusal_says_where_and_not_what(message: NodeInfo, code: str, param: str, path: str) -> None:
    long = "x" * 600
    changes: dict[str, Any] = {"shards": [shard(0, 15, reason=long)]} if param == "shards" else {"pieces": {"p": long}}
    with pytest.raises(ShardlineError) as error:
        check_bounds(msgspec.structs.replace(message, **changes), code)
    assert (error.value.code, error.value.param) == (code, param)
    assert error.value.message == f"{path} has 600 characters, at most {TEXT_LIMIT} are taken"


def test_a_statement_that_is_too_long_is_not_read() -> None:
    statement = "x" * (STATEMENT_LIMIT + 1)
    with pytest.raises(ShardlineError) as first:
        admission.open_registration(statement)
    with pytest.raises(ShardlineError) as second:
        admission.open_heartbeat(statement, public_bytes(Ed25519PrivateKey.generate()), "n")
    assert (first.value.code, second.value.code) == ("registration_refused", "invalid_value")
    assert first.value.param == second.value.param == "statement"
