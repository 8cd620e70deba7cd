"""The llama-window engine: layers of one GGUF file on the patched library, equal to the bit with the whole model.

Needs the library that `make upstream` builds; skipped elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.formats.cuts import WINDOWED
from shardline.model.backend import ShardSpec
from shardline.model.llama_backend import LlamaBackend
from shardline.model.llama_shard import load as load_stock
from shardline.model.llama_window import WindowMaking, load
from shardline.wire.steps import LayoutTensor, SeamLayout
from tests.support.llama_route import CONTENT_ID, entry, through
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BY_NAME, LAYERS, VOCABULARY, WIDTH
from tests.support.window import STREAMS, deepseek4, patched_library

pytestmark = [pytest.mark.llama, pytest.mark.timeout(120)]

TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(3, VOCABULARY, 180))
CALLS = ((0, 64), (64, 64), (128, 50), (178, 1), (179, 1))
SIZES = {"content_id": CONTENT_ID, "kv_tokens": 256, "rows": 64, "sessions": 2}
EVERY_CUT = [*((cut,) for cut in range(1, LAYERS)), (2, 5), (3, 6)]
PLAIN = sorted(WINDOWED - {"deepseek4"})


@pytest.fixture(scope="module")
def library() -> Path:
    return patched_library()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("window")


def model_file(folder: Path, architecture: str) -> Path:
    path = folder / f"{architecture}.gguf"
    if not path.exists():
        tiny = deepseek4() if architecture == "deepseek4" else BY_NAME[architecture]
        write_tiny_gguf(tiny, path)
    return path


class Chain:
    """Windows of one file, through which rows go as on a wire."""

    def __init__(self, path: Path, library: Path, cuts: Sequence[int] = (), **options: Any) -> None:
        given = {**SIZES, "library": str(library), **options}
        self.shards: list[LlamaBackend] = []
        for first, last in pairwise((0, *cuts, LAYERS)):
            self.shards.append(load(ShardSpec(str(path), first, last, threads=1, options=given)))

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self.shards:
            shard.unload()

    def open(self, *slots: int) -> None:
        for shard in self.shards:
            for slot in slots:
                shard.open(slot)

    def run(self, entries: Sequence[Any]) -> np.ndarray:
        return np.stack([np.array(output.logits) for output in through(self.shards, entries)])

    def logits(self) -> list[np.ndarray]:
        self.open(0)
        return [self.run([entry(TOKENS[at : at + count], at)]) for at, count in CALLS]


@pytest.fixture(scope="module")
def expected(folder: Path, library: Path) -> Iterator[dict[str, list[np.ndarray]]]:
    """What the whole model gives, by architecture, on the same library."""
    found: dict[str, list[np.ndarray]] = {}
    for architecture in sorted(WINDOWED):
        with Chain(model_file(folder, architecture), library) as chain:
            found[architecture] = chain.logits()
    yield found


@pytest.mark.parametrize("cuts", EVERY_CUT, ids=str)
def test_deepseek4_is_exact_at_every_cut(
    folder: Path, library: Path, expected: dict[str, list[np.ndarray]], cuts: tuple[int, ...]
) -> None:
    """180 tokens: beyond the window of 8, and beyond the 16 tokens whose compressed rows are all chosen."""
    with Chain(model_file(folder, "deepseek4"), library, cuts) as chain:
        for got, whole in zip(chain.logits(), expected["deepseek4"], strict=True):
            assert np.array_equal(got, whole)


@pytest.mark.parametrize("architecture", PLAIN)
def test_the_other_architectures_are_exact_at_some_cuts(
    folder: Path, library: Path, expected: dict[str, list[np.ndarray]], architecture: str
) -> None:
    for cuts in ((1,), (LAYERS - 1,), (3, 6)):
        with Chain(model_file(folder, architecture), library, cuts) as chain:
            for got, whole in zip(chain.logits(), expected[architecture], strict=True):
                assert np.array_equal(got, whole)


def test_the_patched_library_computes_what_the_stock_one_does(
    folder: Path, expected: dict[str, list[np.ndarray]]
) -> None:
    shard = load_stock(ShardSpec(str(model_file(folder, "deepseek4")), 0, LAYERS, threads=1, options=dict(SIZES)))
    shard.open(0)
    for (at, count), whole in zip(CALLS, expected["deepseek4"], strict=True):
        (output,) = through([shard], [entry(TOKENS[at : at + count], at)])
        assert np.array_equal(np.array(output.logits), whole[0])
    shard.unload()


def test_two_sessions_in_one_call_do_not_mix(folder: Path, library: Path) -> None:
    """Rows come out in the order of the batch, though the library may compute sessions one after another."""
    with (
        Chain(model_file(folder, "deepseek4"), library, (4,)) as chain,
        Chain(model_file(folder, "deepseek4"), library) as whole,
    ):
        for route in (chain, whole):
            route.open(0, 1)
        for at, count in ((0, 20), (20, 1), (21, 1)):
            entries = [
                entry(TOKENS[at : at + count], at, slot=1),
                entry(TOKENS[100 + at : 100 + at + count], at, slot=0),
            ]
            assert np.array_equal(chain.run(entries), whole.run(entries))


def test_what_crosses_the_seam_is_four_streams(folder: Path, library: Path) -> None:
    with Chain(model_file(folder, "deepseek4"), library, (4,)) as chain:
        head, tail = (shard.describe() for shard in chain.shards)
        assert head.layout_out == tail.layout_in
        (tensor,) = tail.layout_in.tensors
        assert (tensor.name, tuple(tensor.shape), tensor.dtype) == ("streams", (STREAMS, WIDTH), "F32")
        assert head.engine.engine_class.startswith("llama-window/")
        assert 0 < head.weight_bytes < model_file(folder, "deepseek4").stat().st_size


def test_a_state_of_another_width_than_the_seams_is_refused(
    folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = SeamLayout([LayoutTensor("hidden", "F32", (WIDTH,))])
    monkeypatch.setattr(WindowMaking, "_layout", lambda self, position: narrow)
    options = {**SIZES, "library": str(library)}
    for first, last in ((0, 4), (4, LAYERS)):
        with pytest.raises(ShardlineError, match=f"{4 * WIDTH} bytes cross the Seam") as caught:
            load(ShardSpec(str(model_file(folder, "deepseek4")), first, last, threads=1, options=options))
        assert caught.value.code == "architecture_unsupported"


def test_a_saved_slot_goes_on_where_it_was(folder: Path, library: Path) -> None:
    with Chain(model_file(folder, "llama"), library, (3,)) as chain:
        chain.open(0, 1)
        chain.run([entry(TOKENS[:40], 0)])
        for shard in chain.shards:
            shard.restore(1, shard.save(0))
        one = chain.run([entry(TOKENS[40:41], 40)])
        assert np.array_equal(one, chain.run([entry(TOKENS[40:41], 40, slot=1)]))
        head, tail = chain.shards
        with pytest.raises(ShardlineError, match="another Shard") as caught:
            tail.restore(1, head.save(0))
        assert caught.value.code == "snapshot_invalid"


def test_rows_of_another_size_and_token_ids_outside_are_refused(folder: Path, library: Path) -> None:
    with Chain(model_file(folder, "deepseek4"), library, (4,)) as chain:
        tail = chain.shards[1]
        tail.open(0)
        plain, streams = bytes(4 * WIDTH), bytes(4 * WIDTH * STREAMS)
        for fault in (entry([5], 0, [plain]), entry([VOCABULARY], 0, [streams]), entry([5], 0)):
            (output,) = tail.run([fault])
            assert isinstance(output, ShardlineError) and output.code == "engine_error"
        (output,) = tail.run([entry([5], 0, [streams])])
        assert not isinstance(output, Exception) and output.logits is not None


def test_what_cannot_be_a_window_is_refused(folder: Path, library: Path) -> None:
    given = {**SIZES, "library": str(library)}
    path = str(model_file(folder, "llama"))
    for first, last, options, code in (
        (3, 3, given, "layers_invalid"),
        (0, LAYERS + 1, given, "layers_invalid"),
        (0, 3, {**given, "shard_file": "x"}, "setting_invalid"),
        (0, 3, {**given, "tap": "sampler"}, "setting_invalid"),
    ):
        with pytest.raises(ShardlineError) as caught:
            load(ShardSpec(path, first, last, threads=1, options=options))
        assert caught.value.code == code
