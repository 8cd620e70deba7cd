"""What a Tracker knows of the artifacts that it offers: layers, what pieces are worth, whose bundle it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.artifact.bundle import TrustPolicy
from shardline.artifact.ranges import pieces_of, servable, shard_ranges
from shardline.errors import ShardlineError
from shardline.tracker.offers import Offer, covers, load_offers
from shardline.wire.bitmap import HeldFile, Pieces
from tests.support.artifacts import publisher, signed_bundle, split_gguf
from tests.support.stores import ANYBODY
from tests.tracker.artifact_values import LAYERS, Offered


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Offered:
    return Offered.made(tmp_path_factory.mktemp("offered"))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Offer:
    folder = tmp_path_factory.mktemp("split")
    (folder / "model").mkdir()
    model = split_gguf(folder / "model")[0]
    return Offer.of(signed_bundle(model, folder / "bundle"))


def test_a_shard_is_the_pieces_that_its_node_fetches(offered: Offered, split: Offer) -> None:
    for offer in (offered.offer, split):
        for first, last in ((0, 1), (0, offer.n_layers), (3, 5), (offer.n_layers - 1, offer.n_layers)):
            wanted = pieces_of(offer.bundle.manifest, shard_ranges(offer.bundle.manifest, first, last))
            assert {file: list(pieces) for file, pieces in offer.shard(first, last).items()} == wanted


@given(data=st.data())
def test_what_pieces_can_serve_is_what_the_node_would_say(offered: Offered, data: st.DataObject) -> None:
    held = {0: Pieces.of(offered.count, data.draw(st.sets(st.integers(0, offered.count - 1))))}
    assert offered.offer.servable(held) == servable(offered.bundle.manifest, held)
    tree = offered.tree
    sizes = [end - start for start, end in map(tree.piece_range, held[0])]
    assert offered.offer.bytes_of(held) == sum(sizes)


def test_facts(offered: Offered) -> None:
    offer = offered.offer
    assert (offer.n_layers, offer.content_id, offer.quantisation) == (LAYERS, offered.content_id, "F32")
    assert covers(offer.shard(0, 4), offer.shard(1, 3))
    assert not covers(offer.shard(0, 4), offer.shard(0, 5))
    assert not covers({}, offer.shard(0, 1))


def test_what_is_not_of_the_artifact_is_refused(offered: Offered) -> None:
    (good,) = offered.files()
    assert offered.offer.held([good]) == {0: Pieces.all(offered.count)}
    assert offered.offer.held([]) == {}
    assert offered.offer.held(offered.files(Pieces(offered.count))) == {}
    length, raw = good.piece_length, good.pieces
    bad: list[list[HeldFile]] = [
        [HeldFile(root="0" * 64, size=good.size, piece_length=length, pieces=raw)],
        [good, good],
        [HeldFile(root=good.root, size=good.size + 1, piece_length=length, pieces=raw)],
        [HeldFile(root=good.root, size=good.size, piece_length=length // 2, pieces=raw)],
        [HeldFile(root=good.root, size=good.size, piece_length=0, pieces=raw)],
        [HeldFile(root=good.root, size=good.size, piece_length=length, pieces=raw + b"\0")],
        [HeldFile(root=good.root, size=good.size, piece_length=length, pieces=raw[:-1])],
        [HeldFile(root=good.root, size=good.size, piece_length=length, pieces=b"\xff" * len(raw))],
        [HeldFile(root=good.root, size=good.size, piece_length=length, pieces=b"\xff" * (1 << 19))],
    ]
    for files in bad:
        with pytest.raises(ShardlineError) as caught:
            offered.offer.held(files)
        assert caught.value.code == "invalid_value"


def test_only_bundles_that_the_operator_trusts_are_offered(offered: Offered, tmp_path: Path) -> None:
    folder = offered.bundle.folder
    assert [offer.content_id for offer in load_offers([folder], ANYBODY)] == [offered.content_id]
    for policy in (TrustPolicy(), TrustPolicy(keys=(publisher().public_key(),))):
        with pytest.raises(ShardlineError) as caught:
            load_offers([folder], policy)
        assert caught.value.code in ("artifact_untrusted", "artifact_invalid")
        assert str(folder) in caught.value.message
    signed = signed_bundle(offered.model, tmp_path / "signed")
    (found,) = load_offers([signed.folder], TrustPolicy(keys=(publisher().public_key(),)))
    assert found.bundle.signed_by is not None
    with pytest.raises(ShardlineError) as caught:
        load_offers([folder, signed.folder], ANYBODY)
    assert caught.value.code == "setting_invalid"
    with pytest.raises(ShardlineError) as caught:
        load_offers([tmp_path / "nothing"], ANYBODY)
    assert caught.value.code == "artifact_invalid"
