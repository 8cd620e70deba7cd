"""Plans of models on machines: what fits, on how few, and what is said where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.formats.outline import Outline, outline_of_build, outline_of_gguf
from shardline.formats.plan import Assumptions, Machine, fewest, need_of, plan_on, read_bytes
from tests.support.gguf_models import small_model

MODELS = Path(__file__).parents[2] / "docs" / "audits" / "models"
GB = 10**9
GIVEN = Assumptions(kv_tokens=8192)


def build(name: str, gigabytes: float, engine: str = "llama", dense: float | None = None) -> Outline:
    config = json.loads((MODELS / f"{name}.json").read_text())
    return outline_of_build(config, engine, int(gigabytes * GB), dense_bits=dense)  # type: ignore[arg-type]


def machines(*gigabytes: float, bandwidth: float = 50e9) -> list[Machine]:
    return [Machine(int(size * GB), bandwidth) for size in gigabytes]


def test_parts_cover_the_model_and_fit() -> None:
    outline = build("glm-5.2", 239)
    plan = plan_on(outline, machines(128, 128, 128), GIVEN)
    assert [placed.node for placed in plan.placed] == [0, 1, 2]
    assert plan.placed[0].first == 0
    assert plan.placed[-1].last == 78
    assert all(a.last == b.first for a, b in zip(plan.placed, plan.placed[1:], strict=False))
    assert all(outline.cuts.part_reason(p.first, p.last) is None for p in plan.placed)
    for placed in plan.placed:
        assert placed.free >= 0
        assert placed.reserve + placed.need.total + placed.free == 128 * GB
    assert [row_bytes for _, row_bytes in plan.seams] == [4 * 6144 + 4] * 2


def test_fewest_is_what_a_plan_needs() -> None:
    outline = build("glm-5.2", 239)
    for size, count in ((128, 3), (64, 5), (48, 7)):
        assert fewest(outline, *machines(size), GIVEN) == count
        assert plan_on(outline, machines(*[size] * count), GIVEN).fits
        assert not plan_on(outline, machines(*[size] * (count - 1)), GIVEN).fits


def test_a_group_that_no_machine_can_hold() -> None:
    """Four layers that share an indexer weigh more than the machine has, while single ones would fit."""
    outline = build("glm-5.2", 475)
    assert fewest(outline, *machines(24), GIVEN) is None
    plan = plan_on(outline, machines(*[24] * 60), GIVEN)
    assert not plan.fits
    assert plan.lacking_bytes == 0
    assert plan.tokens_per_s is None


def test_one_machine_is_enough() -> None:
    outline = build("ornith-9b", 9.5)
    plan = plan_on(outline, machines(8, 16, 16), GIVEN)
    assert [(p.node, p.first, p.last) for p in plan.placed] == [(1, 0, 32)]
    assert plan.seams == ()
    assert plan.step_s == pytest.approx(read_bytes(outline, 0, 32) / 50e9)


def test_unlike_machines_are_filled_alike() -> None:
    outline = build("ornith-397b-a17b", 219.2)
    plan = plan_on(outline, machines(192, 96), GIVEN)
    large, small = plan.placed
    assert 1.6 < (large.last - large.first) / (small.last - small.first) < 2.6


def test_what_is_lacking_is_said() -> None:
    outline = build("ornith-9b", 9.5)
    plan = plan_on(outline, machines(2, 2), GIVEN)
    assert not plan.fits
    whole = need_of(outline, 0, 32, GIVEN)
    assert plan.lacking_bytes == whole.total + whole.buffers + whole.process - int(2 * 2 * GB * 7 / 8)


def test_hops_cost_time() -> None:
    outline = build("ornith-9b", 9.5)
    near = plan_on(outline, machines(8, 8), Assumptions(8192, rtt_s=0.0))
    far = plan_on(outline, machines(8, 8), Assumptions(8192, rtt_s=0.05))
    assert near.step_s is not None
    assert far.step_s == pytest.approx(near.step_s + 2 * 0.025)


@pytest.mark.parametrize(
    ("name", "size", "dense", "read"),
    [
        ("deepseek-v4-flash", 86.8, 8.5, 9.0),
        ("glm-5.2", 176, None, 9.5),
        ("glm-5.2", 239, None, 13.0),
        ("glm-5.2", 375, None, 20.3),
        ("ornith-397b-a17b", 219.2, None, 9.03),
        ("ornith-397b-a17b", 421.5, None, 17.4),
    ],
)
def test_a_step_reads_chosen_experts_only(name: str, size: float, dense: float | None, read: float) -> None:
    """The figures of docs/audits, within 2 %."""
    outline = build(name, size, dense=dense)
    assert read_bytes(outline, 0, outline.n_layers) / GB == pytest.approx(read, rel=0.02)


def test_sessions_keep_states_each() -> None:
    outline = build("ornith-9b", 9.5)
    one = need_of(outline, 0, 32, Assumptions(8192))
    four = need_of(outline, 0, 32, Assumptions(8192, sessions=4))
    assert four.kv - one.kv == pytest.approx(3 * 52.7e6, rel=0.01)


def test_a_gguf_file_weighs_what_its_tensors_weigh(tmp_path: Path) -> None:
    model = small_model(tmp_path, "smollm3", 8)
    outline = outline_of_gguf(model, "llama")
    assert outline.size_bytes == sum(info.nbytes for info in model.tensors.values())
    assert "groups of 4" in (outline.cuts.part_reason(0, 3) or "")
    assert outline.cuts.part_reason(0, 4) is None
    assert outline.cuts.part_reason(4, 8) is None
