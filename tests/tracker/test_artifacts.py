"""The catalogue: whose word is taken, for how long, how layers are counted, and in which order sources are named."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.artifacts import BURST, PACE_S
from shardline.tracker.bounds import ADVERTISEMENT_LIMIT
from shardline.tracker.challenges import Subject
from shardline.tracker.state import TrackerState
from shardline.wire.artifacts import ArtifactInfo, Fetching
from shardline.wire.bitmap import HeldFile
from shardline.wire.messages import Outcome
from tests.tracker.artifact_values import LAYERS, Offered, advertisement, statement
from tests.tracker.cluster_values import SigningNode, shard
from tests.tracker.test_state import Network, join, route

SETTINGS = Settings(dial_back_s=0.2, tracker_expiry_s=4.0)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Offered:
    return Offered.made(tmp_path_factory.mktemp("offered"))


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def state(network: Network, offered: Offered) -> TrackerState:
    return network.tracker(SETTINGS, offers=[offered.offer])


async def seeder(network: Network, state: TrackerState, address: str = "127.0.0.1", host: str = "here") -> SigningNode:
    url = f"http://{address}:{4000 + len(network.listening)}"
    node = network.listen(SigningNode(url, [], changes={"host": host}))
    return await join(state, node)


def advertise(state: TrackerState, node: SigningNode, offered: Offered, **changes: object) -> None:
    said = advertisement(node, offered, state.clock.unix(), **changes)
    state.advertise(node.id, statement(node, said))


def info(state: TrackerState) -> ArtifactInfo:
    (found,) = state.artifacts().artifacts
    return found


def refusal(state: TrackerState, node: SigningNode, text: str) -> ShardlineError:
    with pytest.raises(ShardlineError) as caught:
        state.advertise(node.id, text)
    return caught.value


def names(state: TrackerState, offered: Offered, asker: str = "", address: str = "127.0.0.1") -> list[str]:
    return [source.node for source in state.sources(offered.content_id, asker, address).sources]


async def test_what_is_offered_and_who_has_it(network: Network, state: TrackerState, offered: Offered) -> None:
    before = info(state)
    assert (before.content_id, before.offered, before.n_layers) == (offered.content_id, True, LAYERS)
    assert before.total_bytes == offered.model.stat().st_size
    assert before.manifest_digest == offered.bundle.manifest_digest
    assert (before.coverage, before.served, before.seeders) == ([0] * LAYERS, [0] * LAYERS, [])
    whole, part = await seeder(network, state), await seeder(network, state)
    advertise(state, whole, offered, bittorrent_port=6881)
    fetching = Fetching(first=2, last=5, done_bytes=1, total_bytes=10, bytes_per_s=3.5)
    advertise(state, part, offered, files=offered.files(offered.layers(2, 5)), fetching=fetching)
    now = info(state)
    assert now.coverage == [1, 1, 2, 2, 2, 1, 1, 1]
    told = {seeder.node: seeder for seeder in now.seeders}
    assert told[whole.id].held_bytes == now.total_bytes
    assert (told[whole.id].servable, told[whole.id].bittorrent) == ([(0, LAYERS)], "127.0.0.1:6881")
    assert (told[part.id].servable, told[part.id].fetching, told[part.id].proven) == ([(2, 5)], fetching, None)


async def test_statements_that_nobody_may_make(network: Network, state: TrackerState, offered: Offered) -> None:
    node, other = await seeder(network, state), await seeder(network, state)
    now = state.clock.unix()
    good = advertisement(node, offered, now)
    cases = [
        (statement(other, good), "unauthorized"),
        (statement(node, good, "heartbeat"), "unauthorized"),
        (statement(other, advertisement(other, offered, now)), "unauthorized"),
        (statement(node, msgspec.structs.replace(good, node=other.id)), "unauthorized"),
        ("nonsense", "unauthorized"),
        ("x" * (ADVERTISEMENT_LIMIT + 1), "invalid_value"),
    ]
    for text, code in cases:
        assert refusal(state, node, text).code == code
    stranger = SigningNode("http://127.0.0.1:1", [], key=Ed25519PrivateKey.generate())
    assert refusal(state, stranger, statement(stranger, good)).code == "unknown_node"
    assert info(state).seeders == []


async def test_advertisements_that_cannot_be(network: Network, state: TrackerState, offered: Offered) -> None:
    node = await seeder(network, state)
    now = state.clock.unix()
    (file,) = offered.files()
    foreign = HeldFile(root="f" * 64, size=file.size, piece_length=file.piece_length, pieces=file.pieces)
    long = HeldFile(root=file.root, size=file.size, piece_length=file.piece_length, pieces=file.pieces + b"\0")
    none = Fetching(first=4, last=4, done_bytes=0, total_bytes=0, bytes_per_s=0.0)
    changes: list[tuple[str, dict[str, object]]] = [
        ("invalid_value", {"files": [foreign]}),
        ("invalid_value", {"files": [long]}),
        ("invalid_value", {"files": [file, file]}),
        ("invalid_value", {"files": [foreign] * 10_001}),
        ("invalid_value", {"expires": now - 61.0}),
        ("invalid_value", {"expires": now + 121.0}),
        ("invalid_value", {"expires": 1e300}),
        ("invalid_value", {"sequence": -1}),
        ("invalid_value", {"sequence": 1 << 53}),
        ("invalid_value", {"bittorrent_port": 65536}),
        ("invalid_value", {"fetching": none}),
        ("invalid_value", {"fetching": msgspec.structs.replace(none, last=LAYERS + 1)}),
        ("invalid_value", {"fetching": msgspec.structs.replace(none, last=5, done_bytes=1)}),
        ("invalid_value", {"fetching": msgspec.structs.replace(none, last=5, bytes_per_s=-1.0)}),
        ("invalid_value", {"accused": ["x" * 600]}),
        ("invalid_value", {"accused": ["x"] * 300}),
        ("not_found", {"content_id": "mac1-" + "0" * 64}),
        ("not_found", {"content_id": ""}),
    ]
    for code, change in changes:
        said = advertisement(node, offered, now, **change)
        assert refusal(state, node, statement(node, said)).code == code, change
    assert info(state).seeders == []
    # And after all of that a good one is taken.
    advertise(state, node, offered)
    assert info(state).coverage == [1] * LAYERS


async def test_an_old_advertisement_is_not_taken_again(network: Network, state: TrackerState, offered: Offered) -> None:
    node = await seeder(network, state)
    first = statement(node, advertisement(node, offered, state.clock.unix()))
    state.advertise(node.id, first)
    network.clock.advance(1.0)
    advertise(state, node, offered, files=[])
    for text in (first, statement(node, advertisement(node, offered, state.clock.unix() - 0.5))):
        error = refusal(state, node, text)
        assert (error.code, error.param) == ("invalid_value", "sequence")
        assert error.details["known"] > 0, "a Node whose clock was set back goes on from it"
    assert info(state).coverage == [0] * LAYERS


async def test_a_flood_of_one_node_is_refused_and_costs_others_nothing(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    node, other = await seeder(network, state), await seeder(network, state)
    took, refused = 0, set()
    for number in range(200):
        files = [] if number % 2 else offered.files()
        network.clock.advance(0.01)
        text = statement(node, advertisement(node, offered, state.clock.unix(), files=files))
        try:
            state.advertise(node.id, text)
            took += 1
        except ShardlineError as error:
            refused.add(error.code)
    assert refused == {"queue_full"} and took <= BURST + 3
    advertise(state, other, offered)
    assert info(state).coverage == [1] * LAYERS or info(state).coverage == [2] * LAYERS
    network.clock.advance(BURST * PACE_S)
    advertise(state, node, offered)
    assert info(state).coverage == [2] * LAYERS, "who keeps the pace again is heard again"


async def test_it_is_true_for_a_minute_by_the_clock_of_the_tracker(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    node, slow = await seeder(network, state), await seeder(network, state)
    advertise(state, node, offered)
    # Its clock is 50 s behind, as at registration it may be.
    advertise(state, slow, offered, expires=state.clock.unix() + 10.0)
    for second in range(59):
        network.clock.advance(1.0)
        for one in (node, slow):
            await state.heartbeat(one.id, one.heartbeat_statement())
        state.sweep(1.0)
        assert info(state).coverage == [2] * LAYERS, second
    network.clock.advance(1.0)
    state.sweep(1.0)
    assert info(state).seeders == []


async def test_a_pause_of_the_tracker_ends_no_advertisement(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    node = await seeder(network, state)
    advertise(state, node, offered)
    state.sweep(1.0)
    network.clock.advance(90.0)
    state.sweep(1.0)
    assert info(state).coverage == [1] * LAYERS


async def test_only_nodes_that_live_and_stay_are_sources(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    nodes = [await seeder(network, state) for _ in range(5)]
    for node in nodes[:4]:
        advertise(state, node, offered)
    assert set(names(state, offered)) == {node.id for node in nodes[:4]}
    assert nodes[1].id not in names(state, offered, nodes[1].id), "never the one that asks"
    state.leave(nodes[0].id, nodes[0].heartbeat_statement(leaving=True))
    await state.heartbeat(nodes[1].id, nodes[1].heartbeat_statement(leaving=True))
    state.registry.report_node(nodes[2].id, "reported", network.clock.now)
    assert names(state, offered) == [nodes[3].id]
    state.drop(nodes[3].id)
    assert names(state, offered) == []
    assert info(state).coverage == [0] * LAYERS


async def test_sources_are_the_nearest_first(network: Network, state: TrackerState, offered: Offered) -> None:
    asker = await seeder(network, state, "10.0.1.1", host="one")
    same_host = await seeder(network, state, "10.0.9.9", host="one")
    same_network = await seeder(network, state, "10.0.1.2", host="two")
    far = [await seeder(network, state, f"10.9.{i}.1", host="far") for i in range(6)]
    for node in (asker, *far, same_network, same_host):
        advertise(state, node, offered)
    found = state.sources(offered.content_id, asker.id, "10.0.1.1").sources
    assert [source.node for source in found[:2]] == [same_host.id, same_network.id]
    assert [source.same_host for source in found] == [True] + [False] * 7
    assert found[1].url == same_network.url
    # One that is not registered yet is known by its address.
    unknown = state.sources(offered.content_id, "n-new", "10.0.1.2").sources
    assert (unknown[0].node, unknown[0].same_host) == (same_network.id, True)
    # Those that are equally near are asked by different Nodes in different order.
    orders = {tuple(names(state, offered, f"n-{i}", "10.200.0.1")) for i in range(10)}
    assert len(orders) > 3
    assert names(state, offered, "n-1", "10.200.0.1") == names(state, offered, "n-1", "10.200.0.1")
    # Addresses of which nothing can be said are far from everything.
    assert not any(source.same_host for source in state.sources(offered.content_id, "", "").sources)


async def test_sources_of_what_is_not_offered(state: TrackerState) -> None:
    with pytest.raises(ShardlineError) as caught:
        state.sources("mac1-" + "0" * 64, "n-1", "127.0.0.1")
    assert caught.value.code == "not_found"


async def test_who_serves_which_layers_and_artifacts_that_are_only_served(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    shards = [
        [shard(0, 5, LAYERS, content_id=offered.content_id)],
        [shard(5, LAYERS, LAYERS, content_id=offered.content_id, state="loading")],
        [shard(4, LAYERS, LAYERS, content_id=offered.content_id)],
        [shard(0, 3, 30, content_id="mac1-file", model="from-a-file")],
    ]
    for i, own in enumerate(shards):
        await join(state, network.listen(SigningNode(f"http://127.0.0.1:{7000 + i}", own)))
    ours, served = state.artifacts().artifacts
    assert ours.served == [1, 1, 1, 1, 2, 1, 1, 1]
    assert (served.name, served.content_id, served.offered) == ("from-a-file", "mac1-file", False)
    assert (served.n_layers, served.served[:4], served.coverage) == (30, [1, 1, 1, 0], [0] * 30)


async def test_nodes_that_are_forgotten_leave_nothing(network: Network, state: TrackerState, offered: Offered) -> None:
    node = await seeder(network, state)
    advertise(state, node, offered)
    network.clock.advance(10.0)
    state.sweep(10.0)
    assert info(state).seeders == [], "it is silent"
    network.clock.advance(700.0)
    state.sweep(700.0)
    assert node.id not in state.registry.nodes
    assert list(state.docket.verdicts()) == []
    # A Node of that name begins anew.
    await join(state, node)
    advertise(state, node, offered)
    assert info(state).coverage == [1] * LAYERS


async def test_whoever_is_accused_of_wrong_bytes_is_asked_for_many_blocks(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    giver, victim = await seeder(network, state), await seeder(network, state)
    advertise(state, giver, offered)
    (due,) = state.docket.take(network.clock.now, 4)
    state.docket.passed(due.subject, network.clock.now)
    assert state.docket.take(network.clock.now, 4) == []
    advertise(state, victim, offered, files=[], accused=[victim.id, "n-nobody", giver.id])
    (due,) = state.docket.take(network.clock.now, 4)
    assert (due.subject.node, due.blocks, due.of_everything) == (giver.id, 60, True)


async def test_whoever_sends_wrong_rows_is_asked_too(network: Network, state: TrackerState, offered: Offered) -> None:
    own = [shard(0, LAYERS, LAYERS, content_id=offered.content_id)]
    node = await join(state, network.listen(SigningNode("http://127.0.0.1:7000", own)))
    advertise(state, node, offered)
    (due,) = state.docket.take(network.clock.now, 4)
    state.docket.passed(due.subject, network.clock.now)
    given = route(state)
    state.outcome(given.route.id, Outcome(status="failed", code="numerical_error", node=node.id))
    (due,) = state.docket.take(network.clock.now, 4)
    assert due.blocks == 60


async def test_a_restarted_tracker_learns_it_again(network: Network, state: TrackerState, offered: Offered) -> None:
    node = await seeder(network, state)
    advertise(state, node, offered)
    again = network.tracker(SETTINGS, offers=[offered.offer])
    assert info(again).coverage == [0] * LAYERS
    assert refusal(again, node, statement(node, advertisement(node, offered, 0.0))).code == "unknown_node"
    await join(again, node)
    network.clock.advance(1.0)
    advertise(again, node, offered)
    assert info(again).coverage == [1] * LAYERS
    assert names(again, offered) == [node.id]


async def test_a_tracker_that_offers_nothing_takes_nothing(network: Network, offered: Offered) -> None:
    state = network.tracker(SETTINGS)
    node = await seeder(network, state)
    assert refusal(state, node, statement(node, advertisement(node, offered, state.clock.unix()))).code == "not_found"
    assert state.artifacts().artifacts == []
    await state.examine()


def test_numbers(state: TrackerState, offered: Offered) -> None:
    state.docket.heard(Subject("n", offered.content_id), 5, 0.0)
    text = state.render_metrics().decode()
    assert "shardline_tracker_artifacts 1.0" in text
    assert 'shardline_tracker_possession{proven="not_judged"} 1.0' in text
    assert 'shardline_tracker_possession{proven="no"} 0.0' in text


async def test_who_was_thrown_out_is_a_source_for_nobody(
    network: Network, state: TrackerState, offered: Offered
) -> None:
    out, other = await seeder(network, state), await seeder(network, state)
    advertise(state, out, offered)
    advertise(state, other, offered)
    assert sorted(names(state, offered)) == sorted([out.id, other.id])
    state.drop(out.id)
    assert names(state, offered) == [other.id]
    assert info(state).coverage == [1] * LAYERS
