"""Tiny models of every architecture that can be cut: their parts against the whole, to the bit, through the product.

What is compared and how: tests/support/tiny_split.py. The page made of it: docs/coverage-llama.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")

from shardline.errors import ShardlineError
from shardline.formats.architectures import ROWS, of_gguf
from shardline.formats.cuts import Cuts, cuts_of
from shardline.formats.gguf import parse_header
from shardline.formats.gguf_files import GGUFModel
from shardline.formats.shard_gguf import plan_shard
from shardline.model.llama_library import library
from tests.support.coverage_page import page, without_numbers
from tests.support.gguf_writer import gguf_bytes
from tests.support.tiny_controls import CONTROLS
from tests.support.tiny_models import BY_NAME, MLA, MOE, REFUSED, RUNNABLE, TinyModel, metadata
from tests.support.tiny_runs import TinyRuns
from tests.support.tiny_split import CONTENT_ID

pytestmark = [pytest.mark.llama, pytest.mark.timeout(300)]

PAGE = Path(__file__).parents[2] / "docs" / "coverage-llama.md"
CLOSE = 1e-3
"""Of the largest number, where the table says close: rounding, and what layers with random weights make of it."""
SEEN = 2e-5
"""A control's difference is larger than any rounding."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[TinyRuns]:
    """Begun at once for all tests of this file that were asked for."""
    ours = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in ours if "name" in getattr(item, "fixturenames", ())]
    if any(item.name == "test_page" for item in ours):
        names = [*BY_NAME, *CONTROLS]
    with TinyRuns(dict.fromkeys(names)) as runs:
        yield runs


def tiny_cuts(model: TinyModel) -> Cuts:
    data = gguf_bytes(metadata(model))
    return cuts_of(parse_header(data, len(data)))


@pytest.mark.parametrize("name", BY_NAME)
def test_parts_are_the_whole(runs: TinyRuns, name: str) -> None:
    record = runs.record(name)
    assert record.error is None
    assert record.cuts == list(BY_NAME[name].chains)
    assert "callback" in record.taps
    assert record.whole == 0.0, "the whole model in the product, against the bare library"
    if any("last bits" in warning for warning in record.warnings):
        assert record.residual <= CLOSE * record.residual_size
        assert record.logits <= CLOSE * record.logits_size
    else:
        assert record.proof == "exact"
        assert (record.residual, record.logits) == (0.0, 0.0)


@pytest.mark.parametrize("name", BY_NAME)
def test_other_positions_are_refused(runs: TinyRuns, name: str) -> None:
    record = runs.record(name)
    assert tuple(record.refused) == BY_NAME[name].refused
    assert record.cut_anyway == []


@pytest.mark.parametrize("name", CONTROLS)
def test_past_the_table_it_goes_wrong(runs: TinyRuns, name: str) -> None:
    record = runs.record(name)
    if record.error is None:
        assert record.residual > SEEN * record.residual_size or record.logits > SEEN * record.logits_size
    else:
        told = ("llama.cpp does not load", "damaged GGUF file")
        assert record.error.startswith("ended by SIG") or any(words in record.error for words in told)
        assert "SIGALRM" not in record.error


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused_by_name(architecture: str) -> None:
    data = gguf_bytes(metadata(TinyModel(architecture, architecture)))
    header = parse_header(data, len(data))
    with pytest.raises(ShardlineError, match=f"{of_gguf(architecture).name} only whole") as caught:
        plan_shard(GGUFModel((Path("model.gguf"),), (header,), header.tensors), 0, 4, content_id=CONTENT_ID)
    assert caught.value.code == "architecture_unsupported"
    assert cuts_of(header).positions() == ()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (TinyModel("", "glm4"), "rope.dimension_sections"),
        (TinyModel("", "exaone4", layers=64), "64 layers"),
        (TinyModel("", "gemma2", {"attention.sliding_window": 4}, layers=46), "46 layers"),
        (TinyModel("", "nanbeige", {"num_loops": 2}), "several times"),
        (TinyModel("", "llama4", MOE | {"attention.sliding_window": 0, "interleave_moe_layer_step": 1}), "windows"),
        (
            TinyModel("", "gemma4", dict(BY_NAME["gemma4"].keys) | {"embedding_length_per_layer_input": 16}),
            "token id",
        ),
    ],
    ids=lambda value: value.architecture if isinstance(value, TinyModel) else None,
)
def test_refused_for_what_the_file_says(model: TinyModel, reason: str) -> None:
    refusal = tiny_cuts(model).refusal
    assert refusal is not None
    assert reason in refusal.message


def test_no_part_that_is_taken_for_another_model() -> None:
    cuts = tiny_cuts(TinyModel("", "deepseek2", MOE | MLA, layers=61))
    assert cuts.part_reason(0, 26) is not None
    assert cuts.part_reason(10, 37) is not None
    assert cuts.part_reason(0, 30) is None


def test_every_row_of_the_table_was_compared() -> None:
    compared = {model.architecture for model in RUNNABLE} | set(REFUSED)
    stated = {name for row in ROWS if row.llama is not None for name in row.gguf}
    assert stated == compared


def test_page(runs: TinyRuns) -> None:
    """Run scripts/coverage.py where this fails."""
    records = {name: runs.record(name) for name in (*BY_NAME, *CONTROLS)}
    made = page(records, library().build)
    assert without_numbers(PAGE.read_text(encoding="utf-8")) == without_numbers(made)
