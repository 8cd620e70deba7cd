"""BEP 52 trees: against roots of libtorrent 2.1.1, against a naive tree, and against wrong proofs."""

from __future__ import annotations

import hashlib
import io
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.formats.merkle import BLOCK, hash_file, pieces_root, tree_of_layer, verify_block


def content(size: int) -> bytes:
    """Bytes that no two blocks have in common."""
    return b"".join(hashlib.sha256(b"shardline %d" % i).digest() for i in range(-(-size // 32)))[:size]


# size -> (pieces root, SHA-256 of the piece layer at 64 KiB), from libtorrent 2.1.1 (`create_torrent`, v2 only).
LIBTORRENT = {
    1: ("a5ab782c805e8bfbe34cb65742a0471cf5a53a97f0a1160ab6cccbb64c9131ce", None),
    BLOCK - 1: ("d8657d9ebc2da1b6e92efffacba146b071712f89ed7202aaec07c591edd9db2d", None),
    BLOCK: ("1d768a99d78ff91e314e86168d0825c6c8f1421b92bae779f41169d5f4a764f1", None),
    BLOCK + 1: ("b21c01e5a371e6027353b9fcc0780d8bebb797d617bb85c3b47ef492c2809c60", None),
    3 * BLOCK: ("71c1554e621a9c2a7bb886256c220e2b63a8ea56dac4634d85f1c5eccd0ef625", None),
    4 * BLOCK: ("513f1d2159dd6e12bdfeab71ea270ae64f192e59843be28d8630652139eafca1", None),
    4 * BLOCK + 5: (
        "109d404aadb958e3e5e657019685eea8140fc45fd956a9b0ec35e4c3e2cbf415",
        "109d404aadb958e3e5e657019685eea8140fc45fd956a9b0ec35e4c3e2cbf415",
    ),
    16 * BLOCK: (
        "86f105388ced30b958917a1c43aaa39867bca0fc649234d39b2bbd167a9e6e9c",
        "748a2d4a113427f4dd31e3de898c863ce75048af7e442189947709d84c538164",
    ),
    16 * BLOCK + 1: (
        "32dc6a38fa524499219a63e6b9b8412b3131df5d38c2259718b32313c71bbd11",
        "4c96fa2df120bc2503518b64ab6bf53d908a509391d6027ff58a7676c3c5d654",
    ),
    40 * BLOCK + 7: (
        "b7867374e5b183a0cb567e6ebc398e6c209562c0b6fb07ffa26ee6b50fbdcc4d",
        "b5b16f416b6c406f03702c398243c2d7df76f410c2e7bb24e43f000523f1dcf9",
    ),
    64 * BLOCK: (
        "b335db5de52427fe2ba42f469440dd2f2d22179fa1997241ddc9aca930641afe",
        "e71729510e128a5bac868c8faaa937ac918c7b5108a94756cf203e466d9f7bc4",
    ),
}


def naive_root(data: bytes) -> bytes | None:
    """The definition, written down: leaves to the next power of two, then halves."""
    leaves = [hashlib.sha256(data[i : i + BLOCK]).digest() for i in range(0, len(data), BLOCK)]
    width = 1
    while width < len(leaves):
        width *= 2
    leaves += [bytes(32)] * (width - len(leaves))

    def top(row: list[bytes]) -> bytes:
        half = len(row) // 2
        return row[0] if len(row) == 1 else hashlib.sha256(top(row[:half]) + top(row[half:])).digest()

    return top(leaves) if data else None


@pytest.mark.parametrize("size", LIBTORRENT)
def test_roots_and_layers_are_those_of_libtorrent(size: int) -> None:
    root, layer_digest = LIBTORRENT[size]
    tree = hash_file(io.BytesIO(content(size)), 4 * BLOCK)
    assert tree.size == size
    assert tree.root is not None
    assert tree.root.hex() == root
    if layer_digest is None:
        assert tree.layer == (tree.root,)
    else:
        assert hashlib.sha256(b"".join(tree.layer)).hexdigest() == layer_digest


def test_empty_file_has_no_root() -> None:
    tree = hash_file([])
    assert (tree.size, tree.root, tree.layer) == (0, None, ())
    assert tree_of_layer(0, BLOCK, None, []) == hash_file([], BLOCK)


@given(st.integers(0, 12 * BLOCK), st.sampled_from([BLOCK, 2 * BLOCK, 4 * BLOCK, 64 * BLOCK]), st.integers(1, 99_999))
@settings(max_examples=80, deadline=None)
def test_root_does_not_depend_on_pieces_or_chunks(size: int, piece_length: int, chunk: int) -> None:
    data = content(size)
    chunks = [data[i : i + chunk] for i in range(0, size, chunk)]
    tree = hash_file(chunks, piece_length)
    assert tree.root == naive_root(data) == pieces_root(io.BytesIO(data))
    assert tree_of_layer(size, piece_length, tree.root, tree.layer) == tree


@given(st.data(), st.integers(1, 10 * BLOCK), st.sampled_from([BLOCK, 4 * BLOCK, 16 * BLOCK]))
@settings(max_examples=60, deadline=None)
def test_every_block_can_be_proved_and_nothing_else(draw: st.DataObject, size: int, piece_length: int) -> None:
    data = content(size)
    tree = hash_file([data], piece_length)
    assert tree.root is not None
    blocks = -(-size // BLOCK)
    block = draw.draw(st.integers(0, blocks - 1))
    start, end = tree.piece_range(block * BLOCK // piece_length)
    proof = tree.prove_block(block, data[start:end])
    wanted = data[block * BLOCK : (block + 1) * BLOCK]
    assert verify_block(tree.root, size, block, wanted, proof)
    flipped = bytes([wanted[0] ^ 1]) + wanted[1:]
    assert not verify_block(tree.root, size, block, flipped, proof)
    assert not verify_block(tree.root, size, block, wanted + b"x", proof)
    assert not verify_block(tree.root, size, block, wanted, [*proof, bytes(32)])
    for wrong in (-1, block + 1, block ^ 1, blocks):
        if wrong != block:
            assert not verify_block(tree.root, size, wrong, wanted, proof)
    if proof:
        assert not verify_block(tree.root, size, block, wanted, proof[:-1])
        assert not verify_block(tree.root, size, block, wanted, [bytes(32), *proof[1:]]) or proof[0] == bytes(32)


def test_pieces_are_verified_with_their_length() -> None:
    data = content(9 * BLOCK + 100)
    tree = hash_file([data], 4 * BLOCK)
    assert [tree.piece_range(i) for i in range(3)] == [
        (0, 4 * BLOCK), (4 * BLOCK, 8 * BLOCK), (8 * BLOCK, 9 * BLOCK + 100),
    ]  # fmt: skip
    for i in range(3):
        start, end = tree.piece_range(i)
        assert tree.verify_piece(i, data[start:end])
        assert not tree.verify_piece(i, data[start : end - 1])
        assert not tree.verify_piece(i, bytes(end - start))
        assert not tree.verify_piece((i + 1) % 3, data[start:end])
    with pytest.raises(IndexError):
        tree.piece_range(3)


def test_a_proof_needs_the_right_piece() -> None:
    data = content(8 * BLOCK)
    tree = hash_file([data], 4 * BLOCK)
    with pytest.raises(ShardlineError):
        tree.prove_block(0, data[4 * BLOCK :])
    with pytest.raises(ShardlineError):
        tree.prove_block(8, data[4 * BLOCK :])


@pytest.mark.parametrize("case", ["short", "long", "flipped", "swapped", "size"])
def test_a_false_layer_is_refused(case: str) -> None:
    tree = hash_file([content(9 * BLOCK)], 4 * BLOCK)
    layer, size = list(tree.layer), tree.size
    if case == "short":
        layer.pop()
    elif case == "long":
        layer.append(bytes(32))
    elif case == "flipped":
        layer[0] = bytes(32)
    elif case == "swapped":
        layer[0], layer[1] = layer[1], layer[0]
    else:
        size += 4 * BLOCK
    with pytest.raises(ShardlineError):
        tree_of_layer(size, 4 * BLOCK, tree.root, layer)


@pytest.mark.parametrize("piece_length", [0, 1, BLOCK - 1, 3 * BLOCK, -BLOCK])
def test_piece_lengths_are_powers_of_two(piece_length: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        hash_file([], piece_length)


def test_a_large_file_is_hashed_in_little_memory() -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(256):
            yield bytes(256 << 10)

    tracemalloc.start()
    tree = hash_file(chunks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.size == 64 << 20
    assert peak < 8 << 20
