"""The Tracker without HTTP: the order of the checks, the dial-back, and what a failure does to later routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.state import Clock, TrackerState
from shardline.transport.failures import ConnectFailed, HttpFailure
from shardline.wire.messages import (
    KvInfo,
    NodeProof,
    Outcome,
    PeerProbe,
    PlacementRequest,
    RouteAnswer,
    RouteRequest,
    Ticket,
)
from shardline.wire.tickets import sign, verify
from tests.tracker.cluster_values import CLASS, ManualClock, SigningNode, shard

SETTINGS = Settings(dial_back_s=0.2, tracker_expiry_s=4.0)


@dataclass
class Network:
    """What answers at which URL; the Tracker's dial and its resolver."""

    clock: ManualClock = field(default_factory=ManualClock)
    listening: dict[str, Callable[[str], Awaitable[NodeProof]]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    dialled: list[str] = field(default_factory=list)

    async def dial(self, url: str, nonce: str) -> NodeProof:
        self.dialled.append(url)
        if url not in self.listening:
            raise ConnectFailed(url.removeprefix("http://"), "no connection (refused)")
        return await self.listening[url](nonce)

    async def resolve(self, host: str, port: int) -> tuple[str, int]:
        return self.names.get(host, host), port

    def listen(self, node: SigningNode, at: str | None = None) -> SigningNode:
        async def answer(nonce: str) -> NodeProof:
            return node.prove(nonce)

        self.listening[at or node.url] = answer
        return node

    def tracker(self, settings: Settings = SETTINGS, **named: Any) -> TrackerState:
        clock = Clock(self.clock.monotonic, self.clock.unix_time)
        values: dict[str, Any] = dict(dial=self.dial, resolve=self.resolve, loopback=True, clock=clock)
        return TrackerState(settings, **{**values, **named})

    def node(self, first: int, last: int, **changes: Any) -> SigningNode:
        url = f"http://127.0.0.1:{4000 + len(self.listening)}"
        return self.listen(SigningNode(url, [shard(first, last, **changes)]))


@pytest.fixture
def network() -> Network:
    return Network()


async def join(state: TrackerState, node: SigningNode) -> SigningNode:
    answer = await state.register(statement_of(state, node))
    node.epoch, node.count = answer.epoch, 0
    return node


def statement_of(state: TrackerState, node: SigningNode, **changes: Any) -> str:
    return node.register_statement(state.nonce().nonce, state.clock.unix(), **changes)


def route(state: TrackerState, **changes: Any) -> RouteAnswer:
    values: dict[str, Any] = dict(model="tiny", kv_tokens=10, gateway="g-1")
    return state.route(RouteRequest(**{**values, **changes}))


async def refused(work: Awaitable[Any]) -> ShardlineError:
    with pytest.raises(ShardlineError) as error:
        await work
    return error.value


def missing_now(state: TrackerState) -> list[list[int]] | None:
    try:
        route(state)
    except ShardlineError as error:
        assert error.code == "model_unavailable"
        return error.details["missing"]  # type: ignore[no-any-return]
    return None


async def test_nodes_join_minutes_apart_and_the_route_is_there_with_the_last(network: Network) -> None:
    state = network.tracker()
    head, tail = network.node(0, 15), network.node(15, 30)
    answer = await state.register(statement_of(state, head))
    assert answer.waiting == [(15, 30)]
    assert (answer.node, answer.heartbeat_s) == (head.id, SETTINGS.tracker_heartbeat_s)
    assert missing_now(state) == [[15, 30]]
    network.clock.advance(3.0)
    answer = await state.register(statement_of(state, tail))
    assert answer.waiting == []
    given = route(state)
    assert [hop.node for hop in given.route.hops] == [head.id, tail.id]
    assert verify(bytes.fromhex(answer.ticket_key), "ticket", given.tickets[1], Ticket).next.node == head.id


async def test_nobody_is_dialled_before_key_signature_nonce_time_and_url_are_right(network: Network) -> None:
    state = network.tracker()
    node = network.node(0, 15)
    other = SigningNode("http://127.0.0.1:9", [])
    nonce = state.nonce().nonce
    now = network.clock.unix
    statements = [
        sign(other.key, "register", node.registration(nonce, now)),
        node.register_statement("not-ours", now),
        node.register_statement(state.nonce().nonce, now - 61),
        statement_of(state, node, info=node.info(url="http://169.254.169.254:80")),
        statement_of(state, node, info=node.info(url="http://127.0.0.1:4000/v1/node")),
        statement_of(state, node, info=node.info(shards=[shard(3, 2)])),
        statement_of(state, node, info=node.info(protocol=2)),
        "garbage",
    ]
    codes = [(await refused(state.register(statement))).code for statement in statements]
    assert codes == [
        *["registration_refused"] * 3,
        "address_refused",
        "registration_refused",
        "layers_invalid",
        "protocol_mismatch",
        codes[-1],
    ]
    assert network.dialled == []
    assert state.nodes() == {"nodes": []}


async def test_a_registration_cannot_be_played_again(network: Network) -> None:
    state = network.tracker()
    node = network.node(0, 15)
    statement = statement_of(state, node)
    await state.register(statement)
    assert (await refused(state.register(statement))).code == "registration_refused"


async def test_loopback_is_refused_by_a_tracker_that_others_reach(network: Network) -> None:
    state = network.tracker(loopback=False)
    assert (await refused(state.register(statement_of(state, network.node(0, 15))))).code == "address_refused"
    assert network.dialled == []


@pytest.mark.parametrize(
    ("host", "loopback", "why"),
    [
        # Spellings that only the resolver turns into addresses.
        ("127.1", False, "loopback"),
        ("2130706433", False, "loopback"),
        ("0xa9fea9fe", True, "metadata"),
    ],
)
async def test_a_name_that_resolves_to_a_forbidden_address_is_not_dialled(
    network: Network, host: str, loopback: bool, why: str
) -> None:
    state = network.tracker(loopback=loopback, resolve=None)
    node = SigningNode(f"http://{host}:80", [shard(0, 15)])
    error = await refused(state.register(statement_of(state, node)))
    assert (error.code, why in error.message) == ("address_refused", True)
    assert network.dialled == []


async def test_a_name_is_resolved_once_and_only_its_address_goes_into_tickets(network: Network) -> None:
    state = network.tracker()
    network.names["node.lan"] = "10.0.0.7"
    node = network.listen(SigningNode("http://node.lan:80", [shard(0, 30)]), at="http://10.0.0.7:80")
    await join(state, node)
    # Whoever owns the name can make it mean something else now.
    network.names["node.lan"] = "169.254.169.254"
    given = route(state)
    assert given.route.hops[0].url == "http://10.0.0.7:80"
    ticket = verify(state.office.public_key, "ticket", given.tickets[0], Ticket)
    assert ticket.next.url == "http://10.0.0.7:80"
    state.outcome(given.route.id, Outcome(status="failed", code="node_lost", node=node.id))
    await state.heartbeat(node.id, node.heartbeat_statement())
    assert network.dialled == ["http://10.0.0.7:80"] * 2
    (shown,) = state.nodes()["nodes"]
    assert (shown["url"], shown["dialled_url"], shown["state"]) == ("http://node.lan:80", "http://10.0.0.7:80", "ready")


async def test_whoever_does_not_answer_the_dial_back_as_this_node_is_refused(network: Network) -> None:
    state = network.tracker()
    node = SigningNode("http://127.0.0.1:4000", [shard(0, 15)])
    error = await refused(state.register(statement_of(state, node)))
    assert (error.code, "no connection" in error.message, node.url in error.message) == (
        "registration_refused",
        True,
        True,
    )

    async def other_key(nonce: str) -> NodeProof:
        return SigningNode(node.url, []).prove(nonce)

    async def old_answer(nonce: str) -> NodeProof:
        return node.prove("0" * 32)

    async def silence(nonce: str) -> NodeProof:
        await asyncio.Event().wait()
        raise AssertionError

    async def another_program(nonce: str) -> NodeProof:
        raise ShardlineError("not_found", "nothing is served at this path")

    async def broken(nonce: str) -> NodeProof:
        raise HttpFailure("127.0.0.1:4000", "it does not speak HTTP")

    for answer in (other_key, old_answer, silence, another_program, broken):
        network.listening[node.url] = answer
        error = await refused(state.register(statement_of(state, node)))
        assert error.code == "registration_refused", answer
        assert node.url in error.message
    assert state.nodes() == {"nodes": []}


async def test_two_processes_with_one_key_first_unharmed(network: Network) -> None:
    state = network.tracker()
    first = await join(state, network.node(0, 15))
    second = network.listen(SigningNode("http://127.0.0.1:5000", [shard(0, 15)], key=first.key))
    error = await refused(state.register(statement_of(state, second)))
    assert (error.code, error.details["url"]) == ("identity_in_use", first.url)
    await state.heartbeat(first.id, first.heartbeat_statement())
    (shown,) = state.nodes()["nodes"]
    assert (shown["url"], shown["state"]) == (first.url, "ready")


async def test_a_killed_node_comes_back_at_another_port_at_once(network: Network) -> None:
    state = network.tracker()
    first = await join(state, network.node(0, 15))
    del network.listening[first.url]
    again = network.listen(SigningNode("http://127.0.0.1:5000", [shard(0, 15)], key=first.key))
    await join(state, again)
    (shown,) = state.nodes()["nodes"]
    assert (shown["url"], shown["state"]) == (again.url, "ready")
    # The first one was only stopped: it does not take the place back.
    assert (await refused(state.heartbeat(first.id, first.heartbeat_statement()))).code == "unknown_node"


async def test_a_restarted_tracker_does_not_know_the_nodes_and_they_join_again(network: Network) -> None:
    before, after = network.tracker(), network.tracker()
    node = await join(before, network.node(0, 30))
    assert (await refused(after.heartbeat(node.id, node.heartbeat_statement()))).code == "unknown_node"
    old_epoch = node.epoch
    await join(after, node)
    assert node.epoch != old_epoch
    assert route(after).route.hops[0].node == node.id


async def test_a_key_that_is_kept_signs_after_a_restart_as_before(network: Network) -> None:
    key = Ed25519PrivateKey.generate()
    before, after = network.tracker(key=key), network.tracker(key=key)
    assert before.office.public_key == after.office.public_key


async def test_a_reported_node_is_out_until_a_heartbeat_that_is_dialled_back(network: Network) -> None:
    state = network.tracker()
    head = await join(state, network.node(0, 15))
    tail = await join(state, network.node(15, 30))
    given = route(state)
    state.outcome(given.route.id, Outcome(status="failed", code="node_lost", node=tail.id))
    assert missing_now(state) == [[15, 30]]
    # It beats, but its port is dead.
    answer = network.listening.pop(tail.url)
    await state.heartbeat(tail.id, tail.heartbeat_statement())
    assert missing_now(state) == [[15, 30]]
    network.listening[tail.url] = answer
    await state.heartbeat(head.id, head.heartbeat_statement())
    assert missing_now(state) == [[15, 30]]
    await state.heartbeat(tail.id, tail.heartbeat_statement())
    assert missing_now(state) is None


async def test_a_reported_link_is_out_until_it_is_probed(network: Network) -> None:
    state = network.tracker()
    head = await join(state, network.node(0, 15))
    tail = await join(state, network.node(15, 30))
    given = route(state)
    state.outcome(given.route.id, Outcome(status="failed", code="seam_lost", link=(head.id, tail.id)))
    assert missing_now(state) is not None
    probe = PeerProbe(peer=tail.id, rtt_ms=2.0, ok=True)
    for _ in range(2):
        answer = await state.heartbeat(head.id, head.heartbeat_statement(peers=[probe]))
        assert [p.node for p in answer.peers] == [tail.id]
    assert missing_now(state) is None
    assert state.route(RouteRequest(model="tiny", kv_tokens=1, gateway="g")).route.hops[0].rtt_ms == 2.0


async def test_only_routes_that_were_given_can_blame_and_only_their_own_nodes(network: Network) -> None:
    state = network.tracker()
    nodes = [await join(state, network.node(*r)) for r in ((0, 15), (15, 30), (0, 30))]
    blame = Outcome(status="failed", code="node_lost", node=nodes[2].id)
    with pytest.raises(ShardlineError) as unknown:
        state.outcome("r-made-up", blame)
    assert unknown.value.code == "session_not_found"
    given = route(state, avoid_nodes=[nodes[2].id])
    with pytest.raises(ShardlineError) as foreign:
        state.outcome(given.route.id, blame)
    assert foreign.value.code == "invalid_value"
    assert {n["state"] for n in state.nodes()["nodes"]} == {"ready"}


async def test_a_full_node_and_a_faulty_client_are_nobodys_fault(network: Network) -> None:
    state = network.tracker()
    node = await join(state, network.node(0, 30))
    for code in ("kv_exhausted", "context_length_exceeded"):
        state.outcome(route(state).route.id, Outcome(status="failed", code=code, node=node.id))
    assert missing_now(state) is None


async def test_bursts_spread_and_ended_sessions_make_room(network: Network) -> None:
    state = network.tracker()
    nodes = sorted([(await join(state, network.node(0, 30))).id for _ in range(3)])
    given = [route(state) for _ in range(6)]
    assert [g.route.hops[0].node for g in given] == nodes * 2
    state.outcome(given[4].route.id, Outcome(status="completed", tokens=3))
    assert route(state).route.hops[0].node == nodes[1]


async def test_a_full_cluster_still_gives_a_route(network: Network) -> None:
    state = network.tracker()
    node = network.node(0, 30)
    node.kv = KvInfo(capacity_tokens=100, reserved_tokens=95, sessions=1)
    await join(state, node)
    answer = route(state, kv_tokens=50)
    assert answer.route.hops[0].node == node.id
    assert answer.route.estimate_ms_per_token == pytest.approx(10.0 * (1 + 1 + 0.95))


async def test_leaving_by_heartbeat_and_by_goodbye(network: Network) -> None:
    state = network.tracker()
    node = await join(state, network.node(0, 30))
    with pytest.raises(ShardlineError) as error:
        state.leave(node.id, node.heartbeat_statement())
    assert error.value.param == "leaving"
    thief = SigningNode(node.url, node.shards, epoch=node.epoch)
    with pytest.raises(ShardlineError) as stolen:
        state.leave(node.id, thief.heartbeat_statement(node=node.id, info=node.info(), leaving=True))
    assert stolen.value.code == "unauthorized"
    assert missing_now(state) is None
    await state.heartbeat(node.id, node.heartbeat_statement(leaving=True))
    assert missing_now(state) == [[0, 30]]
    state.leave(node.id, node.heartbeat_statement(leaving=True))
    (shown,) = state.nodes()["nodes"]
    assert (shown["state"], shown["reason"]) == ("left", "it has left")
    assert missing_now(state) == [[0, 30]], "its model is still known"
    assert 'state="left"} 1.0' in state.render_metrics().decode()
    assert (await refused(state.heartbeat(node.id, node.heartbeat_statement()))).code == "unknown_node"


async def test_a_silent_node_leaves_new_routes_and_returns_by_itself(network: Network) -> None:
    state = network.tracker()
    head, tail = await join(state, network.node(0, 15)), await join(state, network.node(15, 30))
    for _ in range(8):
        network.clock.advance(0.5)
        state.sweep(0.5)
        await state.heartbeat(head.id, head.heartbeat_statement())
    assert missing_now(state) == [[15, 30]]
    shown = {n["id"]: n["state"] for n in state.nodes()["nodes"]}
    assert shown == {head.id: "ready", tail.id: "expired"}
    assert (await refused(state.heartbeat(tail.id, tail.heartbeat_statement()))).code == "unknown_node"
    await join(state, tail)
    assert missing_now(state) is None


async def test_a_tracker_that_stood_still_expires_nobody_for_it(network: Network) -> None:
    state = network.tracker()
    node = await join(state, network.node(0, 30))
    network.clock.advance(0.5)
    state.sweep(0.5)
    network.clock.advance(30.0)
    assert missing_now(state) is None
    state.sweep(0.5)
    network.clock.advance(0.5)
    state.sweep(0.5)
    assert missing_now(state) is None
    # From now on its silence is its own.
    for _ in range(8):
        network.clock.advance(0.5)
        state.sweep(0.5)
    assert missing_now(state) == [[0, 30]]
    assert (await refused(state.heartbeat(node.id, node.heartbeat_statement()))).code == "unknown_node"


async def test_two_nodes_that_see_the_same_gap_do_not_take_the_same_layers(network: Network) -> None:
    state = network.tracker()

    def ask(node: SigningNode) -> tuple[int, int]:
        asked = PlacementRequest(
            content_id="c" * 8,
            engine_class=CLASS,
            n_layers=30,
            memory_bytes=150,
            layer_bytes=[10] * 30,
            embedding_bytes=0,
            output_bytes=0,
            node=node.id,
            host=node.url,
        )
        answer = state.place(asked)
        return answer.first, answer.last

    one, two, three = (network.node(0, 15), network.node(15, 30), network.node(0, 15))
    assert (ask(one), ask(two), ask(one)) == ((0, 15), (15, 30), (0, 15))
    # The first one loads for longer than its claim lasts: registered, it holds its layers all the same.
    one.shards = [shard(0, 15, state="loading")]
    await join(state, one)
    network.clock.advance(61.0)
    await state.heartbeat(one.id, one.heartbeat_statement())
    assert ask(three) == (15, 30)


async def test_a_name_that_loads_late_is_visible_with_its_next_heartbeat(network: Network) -> None:
    state = network.tracker()
    node = network.node(0, 30, state="loading")
    await join(state, node)
    (model,) = state.models().models
    assert not model.ready
    with pytest.raises(ShardlineError) as error:
        state.check_ready()
    assert error.value.details["models"] == [{"model": "tiny", "content_id": "c" * 8, "missing": [(0, 30)]}]
    await state.heartbeat(node.id, node.heartbeat_statement(info=node.info(shards=[shard(0, 30)])))
    assert state.check_ready() == ["tiny"]
    assert route(state).route.model == "tiny"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"kv_tokens": -5}, "kv_tokens"),
        ({"kv_tokens": 10**30}, "kv_tokens"),
        ({"gateway": ""}, "gateway"),
        ({"gateway": "g" * 600}, "gateway"),
        ({"avoid_nodes": ["n"] * 300}, "avoid_nodes"),
        ({"avoid_links": [("a", "b")] * 300}, "avoid_links"),
    ],
)
async def test_bad_route_requests_are_named(network: Network, changes: dict[str, Any], param: str) -> None:
    state = network.tracker()
    await join(state, network.node(0, 30))
    with pytest.raises(ShardlineError) as error:
        route(state, **changes)
    assert (error.value.code, error.value.param) == ("invalid_value", param)
