"""The registry event by event: expiry, reports, what brings a Node or a link back, the account of sessions given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker import registry as registry_module
from shardline.tracker.registry import FORGET_S, LINK_LIMIT, OPENING_S, PEER_LIMIT, Registry
from shardline.wire.messages import EngineHealth, Heartbeat, KvInfo, PeerProbe
from shardline.wire.tickets import public_bytes
from tests.tracker.cluster_values import SigningNode, shard

SETTINGS = Settings(tracker_expiry_s=4.0)


@pytest.fixture
def registry() -> Registry:
    return Registry(SETTINGS, "epoch")


def join(registry: Registry, first: int, last: int, now: float = 0.0, port: int = 4000, **changes: Any) -> SigningNode:
    """A registered Node at a port of its own."""
    node = SigningNode(f"http://127.0.0.1:{port + len(registry.nodes)}", [shard(first, last, **changes)])
    return admit(registry, node, now)


def admit(registry: Registry, node: SigningNode, now: float) -> SigningNode:
    record = registry.register(node.registration("n", 0.0), public_bytes(node.key), node.url, now)
    node.epoch, node.count = record.epoch, 0
    return node


def beat(registry: Registry, node: SigningNode, now: float, **changes: Any) -> Heartbeat:
    message = node.heartbeat(**changes)
    registry.heartbeat(message, now)
    return message


def probe(node: SigningNode, ok: bool = True, rtt_ms: float | None = 1.0) -> PeerProbe:
    return PeerProbe(peer=node.id, rtt_ms=rtt_ms, ok=ok)


def reason_of(registry: Registry, node: SigningNode) -> str | None:
    (found,) = [c.barred for c in registry.candidates() if c.node == node.id]
    return found


def account(registry: Registry) -> tuple[int, int]:
    (c,) = registry.candidates()
    return c.sessions, c.kv_reserved


def returning(registry: Registry, node: SigningNode) -> bool:
    (found,) = [c.returning for c in registry.candidates() if c.node == node.id]
    return found


def test_a_registered_node_is_a_candidate_under_its_dialled_url(registry: Registry) -> None:
    node = SigningNode(
        "http://a-name:4000", [shard(0, 15)], kv=KvInfo(capacity_tokens=7, reserved_tokens=3, sessions=2)
    )
    registry.register(node.registration("n", 0.0), public_bytes(node.key), "http://10.0.0.1:4000", 0.0)
    (c,) = registry.candidates()
    assert (c.node, c.url, c.kv_capacity, c.kv_reserved, c.sessions) == (node.id, "http://10.0.0.1:4000", 7, 3, 2)
    assert c.barred is None
    assert registry.nodes[node.id].state == "ready"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "loading"}, "loading"),
        ({"state": "testing"}, "testing"),
        ({"state": "failed", "reason": "file is damaged"}, "failed: file is damaged"),
        ({"state": "draining"}, "draining"),
        ({"text_digest": None}, "it is a head without a text bundle"),
    ],
)
def test_only_ready_shards_count(registry: Registry, changes: dict[str, Any], reason: str) -> None:
    assert reason_of(registry, join(registry, 0, 15, **changes)) == reason


def test_a_dead_engine_takes_its_node_out_and_a_live_one_brings_it_back(registry: Registry) -> None:
    node = join(registry, 0, 15)
    dead = EngineHealth(alive=False, last_error="killed")
    beat(registry, node, 1.0, info=node.info(health=dead))
    assert "killed" in (reason_of(registry, node) or "")
    assert registry.nodes[node.id].state == "out"
    beat(registry, node, 2.0)
    assert reason_of(registry, node) is None


@pytest.mark.parametrize(
    ("changes", "returns"),
    [
        ({"state": "loading"}, True),
        ({"state": "testing", "text_digest": None}, True),
        ({"state": "failed"}, False),
        ({"state": "draining"}, False),
        ({"text_digest": None}, False),
        ({}, False),
    ],
)
def test_what_loads_returns_by_itself(registry: Registry, changes: dict[str, Any], returns: bool) -> None:
    node = join(registry, 0, 15, **changes)
    assert returning(registry, node) is returns
    registry.report_node(node.id, "reported: node_lost", 1.0)
    assert not returning(registry, node)  # nobody knows
    registry.leave(node.id, 2.0)
    assert not returning(registry, node)


def test_an_engine_that_ended_returns_and_a_silent_node_does_not(registry: Registry) -> None:
    node = join(registry, 0, 15)
    beat(registry, node, 1.0, info=node.info(health=EngineHealth(alive=False, last_error="killed")))
    assert returning(registry, node)
    beat(registry, node, 2.0)
    registry.report_node(node.id, "reported: engine_lost", 2.0, lives=True)
    assert returning(registry, node)
    registry.sweep(9.0)
    assert not returning(registry, node)


def test_a_silent_node_expires_at_its_deadline_and_is_forgotten_later(registry: Registry) -> None:
    node, other = join(registry, 0, 15), join(registry, 15, 30)
    beat(registry, other, 1.0)
    assert registry.sweep(3.99) == []
    assert registry.sweep(4.0) == [node.id]
    assert registry.nodes[node.id].state == "expired"
    assert reason_of(registry, node) == "it is silent"
    # Time alone expires nobody: between two sweeps nothing changes.
    assert reason_of(registry, other) is None
    with pytest.raises(ShardlineError) as error:
        beat(registry, node, 4.1)
    assert error.value.code == "unknown_node"
    beat(registry, other, 4.5)
    registry.sweep(4.0 + FORGET_S)
    assert node.id not in registry.nodes


def test_a_pause_of_the_tracker_is_not_held_against_the_nodes(registry: Registry) -> None:
    node = join(registry, 0, 15)
    registry.excuse(10.0)
    assert registry.sweep(13.9) == []
    assert registry.sweep(14.0) == [node.id]


def test_heartbeats_must_grow_and_fit_this_registration(registry: Registry) -> None:
    node = join(registry, 0, 15)
    message = beat(registry, node, 1.0)
    with pytest.raises(ShardlineError) as again:
        registry.heartbeat(message, 1.0)
    assert (again.value.code, again.value.param) == ("invalid_value", "count")
    for changes in ({"epoch": "other"}, {"info": node.info(url="http://127.0.0.1:9")}, {"node": "n-nobody"}):
        with pytest.raises(ShardlineError) as unknown:
            registry.heartbeat(node.heartbeat(**changes), 1.0)
        assert unknown.value.code == "unknown_node"


def test_an_old_heartbeat_does_not_fit_a_new_registration(registry: Registry) -> None:
    node = join(registry, 0, 15)
    old = beat(registry, node, 1.0)
    admit(registry, node, 2.0)
    with pytest.raises(ShardlineError) as error:
        registry.heartbeat(old, 2.0)
    assert error.value.code == "unknown_node"
    beat(registry, node, 3.0)


def test_one_identity_at_two_addresses_is_refused_while_the_first_beats(registry: Registry) -> None:
    first = join(registry, 0, 15)
    second = SigningNode("http://127.0.0.1:5000", first.shards, key=first.key)
    with pytest.raises(ShardlineError) as error:
        admit(registry, second, 1.0)
    assert error.value.code == "identity_in_use"
    assert first.url in error.value.message
    assert registry.nodes[first.id].info.url == first.url
    registry.sweep(4.0)
    admit(registry, second, 4.0)
    assert registry.nodes[first.id].info.url == second.url


def test_who_is_expelled_is_listed_as_such_until_that_is_taken_back(registry: Registry) -> None:
    node = join(registry, 0, 30)
    registry.expel(node.id, 1.0)
    record = registry.nodes[node.id]
    assert (record.state, record.beats) == ("expelled", False)
    assert record.reason == f"the operator has thrown it out; back in: shardline expel --undo {node.id}"
    assert all(found.barred is not None for found in registry.candidates())
    registry.expel(node.id, 2.0, undo=True)
    assert record.state == "expired"
    admit(registry, node, 3.0)
    assert registry.nodes[node.id].state == "ready"
    registry.expel("n-unknown", 4.0)


def test_nodes_are_bounded_and_expired_ones_make_room(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "NODE_LIMIT", 2)
    old, young = join(registry, 0, 15), join(registry, 15, 30, now=1.0)
    with pytest.raises(ShardlineError) as error:
        join(registry, 0, 15)
    assert error.value.code == "registration_refused"
    registry.sweep(4.0)
    third = join(registry, 0, 15, now=4.0)
    assert set(registry.nodes) == {young.id, third.id}
    assert old.id not in registry.nodes


def test_leaving_ends_new_routes_at_once_and_for_good(registry: Registry) -> None:
    node = join(registry, 0, 15)
    beat(registry, node, 1.0, leaving=True)
    assert reason_of(registry, node) == "it is leaving"
    beat(registry, node, 2.0)
    assert registry.nodes[node.id].state == "leaving"
    registry.leave(node.id, 3.0)
    assert registry.nodes[node.id].state == "left"
    assert reason_of(registry, node) == "it has left"
    with pytest.raises(ShardlineError) as error:
        beat(registry, node, 3.1)
    assert error.value.code == "unknown_node"
    assert registry.sweep(3.0 + FORGET_S) == []
    assert registry.candidates() == []


def test_one_that_leaves_and_whose_goodbye_is_lost_has_left_all_the_same(registry: Registry) -> None:
    node = join(registry, 0, 15)
    beat(registry, node, 1.0, leaving=True)
    assert registry.sweep(5.0) == [], "nobody fell silent"
    assert registry.nodes[node.id].state == "left"
    admit(registry, node, 6.0)
    assert registry.nodes[node.id].state == "ready"


def test_a_reported_node_is_back_with_a_dial_that_began_after_the_report(registry: Registry) -> None:
    node = join(registry, 0, 15)
    registry.report_node(node.id, "reported: node_lost", 1.0)
    assert "node_lost" in (reason_of(registry, node) or "")
    beat(registry, node, 1.5)
    assert registry.nodes[node.id].state == "out"
    early = registry.nodes[node.id].fault
    assert early is not None
    # Reported again while the dial is on its way: that dial proves nothing about the second report.
    registry.report_node(node.id, "reported: engine_lost", 2.0)
    registry.dialled_back(node.id, early)
    assert registry.nodes[node.id].state == "out"
    late = registry.nodes[node.id].fault
    assert late is not None
    registry.dialled_back(node.id, late)
    assert reason_of(registry, node) is None


def test_a_reported_link_is_back_with_a_probe_that_was_certainly_made_later(registry: Registry) -> None:
    a, b = join(registry, 0, 15), join(registry, 15, 30)
    registry.peers(a.id)
    beat(registry, a, 1.0, peers=[probe(b)])
    registry.report_link(a.id, b.id, "reported: seam_lost")
    assert registry.link(a.id, b.id).out == "reported: seam_lost"  # type: ignore[union-attr]
    # This one may carry what was measured before the report.
    beat(registry, a, 2.0, peers=[probe(b)])
    assert registry.link(a.id, b.id).out is not None  # type: ignore[union-attr]
    beat(registry, a, 3.0, peers=[probe(b, ok=False, rtt_ms=None)])
    assert registry.link(a.id, b.id).out is not None  # type: ignore[union-attr]
    beat(registry, a, 4.0, peers=[probe(b)])
    link = registry.link(a.id, b.id)
    assert link is not None
    assert (link.out, link.ok) == (None, True)
    # The other direction was never in question.
    assert registry.link(b.id, a.id) is None


def test_the_round_trip_of_a_link_is_the_median_of_its_last_probes(registry: Registry) -> None:
    a, b = join(registry, 0, 15), join(registry, 15, 30)
    registry.peers(a.id)
    seen = []
    for i, rtt in enumerate([1.0, 90.0, 1.2, None, 1.1, 1.3, 5.0, 5.0, 5.0]):
        beat(registry, a, float(i), peers=[probe(b, ok=rtt is not None, rtt_ms=rtt)])
        link = registry.link(a.id, b.id)
        assert link is not None
        assert link.ok is (rtt is not None)
        seen.append(link.rtt_ms)
    assert seen == [1.0, 45.5, 1.2, 1.2, 1.15, 1.2, 1.3, 1.3, 5.0]


def test_a_reported_link_outlives_a_new_registration_but_not_its_nodes(registry: Registry) -> None:
    a, b = join(registry, 0, 15), join(registry, 15, 30)
    registry.report_link(a.id, b.id, "reported: seam_lost")
    admit(registry, a, 1.0)
    assert registry.link(a.id, b.id).out is not None  # type: ignore[union-attr]
    registry.peers(a.id)
    beat(registry, a, 2.0, peers=[probe(b)])
    assert registry.link(a.id, b.id).out is None  # type: ignore[union-attr]
    registry.report_link(a.id, b.id, "reported: seam_lost")
    registry.leave(b.id, 3.0)
    registry.sweep(3.0 + FORGET_S)
    assert registry.link(a.id, b.id) is None


def test_nobody_is_believed_about_links_he_was_not_asked_about(registry: Registry) -> None:
    a, b, c = join(registry, 0, 15), join(registry, 15, 30), join(registry, 0, 15)
    registry.peers(a.id)
    beat(registry, a, 1.0, peers=[probe(c), PeerProbe(peer="n-nobody", rtt_ms=0.1, ok=True), probe(b)])
    assert list(registry.nodes[a.id].links) == [b.id]


def test_measured_links_are_bounded_but_reports_are_kept(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "LINK_LIMIT", 2)
    assert LINK_LIMIT > PEER_LIMIT
    a, *others = [join(registry, 0, 15), *(join(registry, 15, 30) for _ in range(4))]
    registry.peers(a.id)
    registry.report_link(a.id, others[0].id, "reported")
    for i, other in enumerate(others):
        beat(registry, a, float(i), peers=[probe(other, ok=False)])
    assert list(registry.nodes[a.id].links) == [others[0].id, others[3].id]


def test_given_sessions_count_until_the_node_tells_of_them(registry: Registry) -> None:
    node = join(registry, 0, 30)
    registry.give("r-1", [node.id], 100, 1.0)
    registry.give("r-2", [node.id], 50, 2.0)
    (c,) = registry.candidates()
    assert (c.sessions, c.kv_reserved) == (2, 150)
    registry.end("r-1", [node.id], 2.0)
    # Given so shortly before the heartbeat that the Node's figures cannot hold it.
    beat(registry, node, 2.0 + OPENING_S / 2)
    (c,) = registry.candidates()
    assert (c.sessions, c.kv_reserved) == (1, 50)
    beat(registry, node, 3.0, info=node.info(kv=KvInfo(capacity_tokens=10_000, reserved_tokens=50, sessions=1)))
    (c,) = registry.candidates()
    assert (c.sessions, c.kv_reserved) == (1, 50)


def test_an_ended_session_counts_no_more_though_its_node_has_not_told_yet(registry: Registry) -> None:
    node = join(registry, 0, 30)
    registry.give("r-1", [node.id], 100, 1.0)
    figures = KvInfo(capacity_tokens=10_000, reserved_tokens=100, sessions=1)
    beat(registry, node, 2.0, info=node.info(kv=figures))
    assert account(registry) == (1, 100)
    registry.end("r-1", [node.id], 2.5)
    assert account(registry) == (0, 0)
    beat(registry, node, 2.5 + OPENING_S / 2, info=node.info(kv=figures))  # made before the end
    assert account(registry) == (0, 0)
    beat(registry, node, 3.5)
    assert account(registry) == (0, 0)
    registry.give("r-2", [node.id], 7, 4.0)
    assert account(registry) == (1, 7)


def test_an_end_that_the_node_has_told_already_makes_nothing_negative(registry: Registry) -> None:
    node = join(registry, 0, 30)
    registry.give("r-1", [node.id], 100, 1.0)
    beat(registry, node, 2.0)
    registry.end("r-1", [node.id], 2.5)
    assert account(registry) == (0, 0)
    registry.give("r-2", [node.id], 100, 3.0)
    beat(registry, node, 4000.0)
    beat(registry, node, 9000.0)
    registry.end("r-2", [node.id], 9001.0)  # long forgotten
    assert not registry.nodes[node.id].ended


def test_waiting_names_what_is_missing_beside_the_nodes_own_layers(registry: Registry) -> None:
    first = join(registry, 0, 10, state="loading")
    assert registry.waiting(first.id) == [(10, 30)]
    last = join(registry, 20, 30)
    assert registry.waiting(first.id) == [(10, 20)]
    # The first one is not ready: to the last one its layers are missing, too.
    assert registry.waiting(last.id) == [(0, 20)]
    middle = join(registry, 10, 20)
    assert registry.waiting(first.id) == []
    assert registry.waiting(middle.id) == [(0, 10)]
    # One that has not loaded its engine knows only a part of its class.
    loading = SigningNode("http://127.0.0.1:9", [shard(0, 10, state="loading")])
    engine = msgspec.structs.replace(loading.info().engine, engine_class="scripted/loading")
    loading.changes["engine"] = engine
    assert registry.waiting(admit(registry, loading, 0.0).id) == []


def test_peers_are_those_that_follow_and_heads_behind_a_tail(registry: Registry) -> None:
    head, tail = join(registry, 0, 15), join(registry, 15, 30)
    join(registry, 14, 30)
    join(registry, 15, 30, state="loading")
    join(registry, 15, 30, content_id="other")
    whole = join(registry, 0, 30)
    assert [p.node for p in registry.peers(head.id)] == [tail.id]
    assert [(p.node, p.url) for p in registry.peers(tail.id)] == [(head.id, head.url)]
    assert registry.peers(whole.id) == []


def test_peers_take_turns_and_those_that_only_a_probe_brings_back_come_first(registry: Registry) -> None:
    head = join(registry, 0, 15)
    tails = [join(registry, 15, 30) for _ in range(PEER_LIMIT + 3)]
    named: set[str] = set()
    for i in range(2):
        peers = registry.peers(head.id)
        assert len(peers) == PEER_LIMIT
        named.update(p.node for p in peers)
        beat(registry, head, 1.0 + i, peers=[PeerProbe(peer=p.node, rtt_ms=1.0, ok=True) for p in peers])
    assert named == {t.id for t in tails}
    latest = registry.peers(head.id)[-1].node
    registry.report_link(head.id, latest, "reported: seam_lost")
    assert registry.peers(head.id)[0].node == latest


@pytest.mark.parametrize("served", [False, True])
def test_a_composite_node_that_left_without_ever_serving_leaves_no_model(registry: Registry, served: bool) -> None:
    node = join(registry, 0, 1, n_layers=1, composite=True, text_digest=None, state="loading")
    assert [c.barred for c in registry.candidates()] == ["loading"]
    if served:
        ready = msgspec.structs.replace(node.shards[0], state="ready")
        beat(registry, node, 0.5, info=node.info(shards=[ready]))
    beat(registry, node, 1.0, leaving=True)
    assert len(registry.candidates()) == 1, "what runs on it goes on"
    registry.leave(node.id, 1.0)
    assert len(registry.candidates()) == served
    assert registry.nodes[node.id].state == "left", "it is listed all the same"
