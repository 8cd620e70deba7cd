"""Challenges from the drawing to the verdict, and what a verdict changes: sources and placement, never identity."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from shardline.errors import ShardlineError
from shardline.settings import Settings
from shardline.tracker.challenges import AGAIN_S, RETRY_S, Subject, Summons
from shardline.tracker.examination import Examiner, draw
from shardline.tracker.state import TrackerState
from shardline.transport.failures import ConnectFailed, OwnLack, TimedOut
from shardline.wire.bitmap import Pieces
from shardline.wire.messages import PlacementRequest
from tests.tracker.artifact_values import LAYERS, Holders, Offered, advertisement, statement
from tests.tracker.cluster_values import CLASS, SigningNode, shard
from tests.tracker.test_state import Network, join, missing_now

SETTINGS = Settings(dial_back_s=0.2, tracker_expiry_s=4.0)
NONCE = bytes(range(32))


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Offered:
    return Offered.made(tmp_path_factory.mktemp("offered"))


@dataclass
class Stand:
    """A Tracker that offers the artifact, and Nodes that really have what is in `holders`."""

    network: Network
    state: TrackerState
    holders: Holders
    examiner: Examiner

    @property
    def offered(self) -> Offered:
        return self.holders.offered

    async def node(self, claims: Pieces | None, has: Pieces, layers: tuple[int, int] | None = None) -> SigningNode:
        """One that says `claims` (all, if None), and holds `has`."""
        own = [] if layers is None else [shard(*layers, LAYERS, content_id=self.offered.content_id)]
        url = f"http://127.0.0.1:{4000 + len(self.network.listening)}"
        node = await join(self.state, self.network.listen(SigningNode(url, own)))
        self.holders.held[url] = has
        self.advertise(node, claims)
        return node

    def advertise(self, node: SigningNode, claims: Pieces | None) -> None:
        self.network.clock.advance(0.001)
        said = advertisement(node, self.offered, self.state.clock.unix(), files=self.offered.files(claims))
        self.state.advertise(node.id, statement(node, said))

    async def ask(self) -> int:
        """All challenges that are due; how many there were."""
        due = self.state.docket.take(self.network.clock.now, 4)
        for summons in due:
            await self.examiner.examine(summons)
        return len(due)

    async def ask_twice(self) -> None:
        assert await self.ask()
        self.network.clock.advance(RETRY_S)
        assert await self.ask()

    def proven(self, node: SigningNode) -> bool | None:
        return self.state.docket.proven(Subject(node.id, self.offered.content_id))

    def sources(self) -> set[str]:
        found = self.state.sources(self.offered.content_id, "n-asks", "127.0.0.1").sources
        return {source.node for source in found}

    def place(self) -> tuple[int, int]:
        request = PlacementRequest(
            content_id=self.offered.content_id,
            engine_class=CLASS,
            n_layers=LAYERS,
            memory_bytes=60,
            layer_bytes=[10] * LAYERS,
            embedding_bytes=0,
            output_bytes=0,
            node="n-asks",
        )
        found = self.state.place(request)
        return found.first, found.last


@pytest.fixture
def stand(offered: Offered) -> Stand:
    network = Network()
    holders = Holders(offered)
    state = network.tracker(SETTINGS, offers=[offered.offer], ask=holders.ask)
    examiner = Examiner(
        state.catalogue,
        state.docket,
        state.registry,
        ask=holders.ask,
        now=state.clock.monotonic,
        metrics=state.metrics,
    )
    return Stand(network, state, holders, examiner)


def everything(offered: Offered) -> Pieces:
    return Pieces.all(offered.count)


async def test_who_has_what_it_says_is_proven(stand: Stand, offered: Offered) -> None:
    node = await stand.node(None, everything(offered))
    assert await stand.ask() == 1
    assert stand.proven(node) is True
    ((url, blocks),) = stand.holders.asked
    assert (url, 15 <= len(blocks) <= 20) == (node.url, True)
    assert await stand.ask() == 0
    assert stand.sources() == {node.id}


async def test_a_liar_is_no_source_until_it_has_what_it_says(stand: Stand, offered: Offered) -> None:
    honest = await stand.node(None, everything(offered))
    liar = await stand.node(None, offered.layers(0, 2))
    await stand.ask()
    assert stand.proven(liar) is None
    assert stand.sources() == {honest.id, liar.id}, "one failure is no verdict"
    stand.network.clock.advance(RETRY_S)
    await stand.ask()
    assert stand.proven(liar) is False
    assert stand.sources() == {honest.id}
    (told,) = stand.state.artifacts().artifacts
    assert told.coverage == [1] * LAYERS
    shown = {seeder.node: seeder for seeder in told.seeders}[liar.id]
    assert (shown.proven, shown.reason is not None) == (False, True)
    (listed,) = [n for n in stand.state.nodes()["nodes"] if n["id"] == liar.id]
    assert (listed["state"], listed["artifacts"][0]["proven"]) == ("ready", False), "its identity stays"
    # It says so again and again: nothing changes before it has shown it.
    stand.advertise(liar, None)
    assert stand.sources() == {honest.id}
    stand.holders.held[liar.url] = everything(offered)
    stand.network.clock.advance(AGAIN_S)
    stand.advertise(honest, None)
    stand.advertise(liar, None)
    await stand.ask()
    assert stand.proven(liar) is True
    assert stand.sources() == {honest.id, liar.id}


async def test_a_shard_whose_pieces_cannot_be_shown_does_not_count_for_placement(
    stand: Stand, offered: Offered
) -> None:
    await stand.node(None, everything(offered), layers=(0, 5))
    liar = await stand.node(None, Pieces(offered.count), layers=(5, LAYERS))
    stand.network.clock.advance(0.1)
    assert stand.place() == (0, 5), "all is there: another copy of as much as fits"
    await stand.ask_twice()
    assert stand.proven(liar) is False
    assert stand.place() == (5, LAYERS), "as if nobody had these layers"
    # Routes still take it: what it computes is not what was judged.
    assert missing_now(stand.state) is None
    line = next(s for g in stand.state.explain("tiny", 0).groups for s in g.shards if s.node == liar.id)
    assert (line.usable, line.proven) == (True, False)
    stand.holders.held[liar.url] = everything(offered)
    stand.network.clock.advance(AGAIN_S)
    stand.advertise(liar, None)
    await stand.ask()
    assert stand.proven(liar) is True
    assert stand.place() == (0, 5)


async def test_wrong_bytes_are_noticed(stand: Stand, offered: Offered) -> None:
    node = await stand.node(None, everything(offered))
    right = stand.holders.ask

    async def wrong(url: str, challenge: object, size: int) -> bytes:
        raw = bytearray(await right(url, challenge, size))  # type: ignore[arg-type]
        raw[size // 2] ^= 1
        return bytes(raw)

    stand.examiner._ask = wrong
    await stand.ask_twice()
    assert stand.proven(node) is False


@pytest.mark.parametrize(
    "fault",
    [
        ConnectFailed("10.0.0.1:1", "no connection (refused)"),
        TimedOut("10.0.0.1:1", "possession", 10.0),
        ShardlineError("not_found", "no such artifact is given away here"),
        ShardlineError("queue_full", "too many"),
    ],
)
async def test_no_answer_is_no_proof(stand: Stand, offered: Offered, fault: Exception) -> None:
    node = await stand.node(None, everything(offered))
    stand.holders.fault = {node.url: fault}
    await stand.ask_twice()
    assert stand.proven(node) is False
    stand.holders.fault = {}
    stand.network.clock.advance(AGAIN_S - 1)
    stand.advertise(node, None)
    stand.network.clock.advance(1)
    await stand.ask()
    assert stand.proven(node) is True


async def test_what_the_tracker_itself_lacks_judges_nobody(stand: Stand, offered: Offered) -> None:
    node = await stand.node(None, everything(offered))
    stand.holders.fault = {node.url: OwnLack("10.0.0.1:1", "open files of the process", "the Tracker")}
    for _ in range(3):
        await stand.ask()
        stand.network.clock.advance(RETRY_S)
    assert stand.proven(node) is None


async def test_a_node_that_leaves_meanwhile_is_not_judged(stand: Stand, offered: Offered) -> None:
    node = await stand.node(None, everything(offered))

    async def leaves(url: str, challenge: object, size: int) -> bytes:
        stand.state.drop(node.id)
        raise ConnectFailed("10.0.0.1:1", "no connection (refused)")

    stand.examiner._ask = leaves
    await stand.ask()
    stand.network.clock.advance(RETRY_S)
    await stand.ask()
    assert stand.proven(node) is None
    assert stand.state.docket.reason(Subject(node.id, offered.content_id)) is None


async def test_who_holds_nothing_any_more_is_not_asked(stand: Stand, offered: Offered) -> None:
    node = await stand.node(None, Pieces(offered.count))
    await stand.ask_twice()
    asked = len(stand.holders.asked)
    stand.advertise(node, Pieces(offered.count))
    stand.network.clock.advance(AGAIN_S)
    await stand.ask()
    assert (len(stand.holders.asked), stand.proven(node)) == (asked, False)


def test_half_the_blocks_are_of_the_shard_that_the_node_serves(offered: Offered) -> None:
    held = {0: everything(offered)}
    own = offered.layers(2, 3)
    length = offered.tree.piece_length // (16 << 10)
    asked = Summons(Subject("n", offered.content_id), 20, of_everything=False)
    blocks = draw(offered.offer, held, [(2, 3)], NONCE, bytes(32), asked)
    inside = sum(block // length in own for _, block in blocks)
    assert len(blocks) >= 17
    assert 8 <= inside <= 11
    # Of all alike under suspicion, for one without a Shard, and for one that does not say it has its pieces.
    for shards, pieces, of_everything in (
        ([(2, 3)], held, True),
        ([], held, False),
        ([(2, 3)], {0: offered.layers(5, 8)}, False),
    ):
        blocks = draw(
            offered.offer, pieces, shards, NONCE, bytes(32), asked._replace(of_everything=of_everything, blocks=60)
        )
        assert {block // length for _, block in blocks} <= set(pieces[0])
        assert len(blocks) > 40
    # A Node that has its Shard and nothing else is asked for nothing else.
    blocks = draw(offered.offer, {0: own}, [(2, 3)], NONCE, bytes(32), asked)
    assert len(blocks) > 15


async def test_it_runs_by_itself_and_ends_when_it_is_told(stand: Stand, offered: Offered) -> None:
    node = await stand.node(None, everything(offered))
    running = asyncio.create_task(stand.state.examine())
    async with asyncio.timeout(5):
        while stand.proven(node) is None:
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stand.proven(node) is True
