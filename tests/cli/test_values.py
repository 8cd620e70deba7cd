"""Ranges and sizes as they are written on the command line."""

from __future__ import annotations

import io
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.cli.values import JoinLine, LayerRange, LayerRanges, Memory, check_cover, split_evenly
from shardline.errors import ShardlineError


def test_a_range_is_half_open() -> None:
    assert LayerRange().convert("0:15", None, None) == (0, 15)
    assert LayerRanges().convert("0:10, 10:30", None, None) == [(0, 10), (10, 30)]


@pytest.mark.parametrize("text", ["", "15", "0-15", "15:15", "16:15", "-1:3", "a:b", "0:15:1", "0:999999", "0:1.5"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        LayerRange().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 << 30), ("4gib", 4 << 30), ("4 GB", 4 * 10**9), ("512M", 512 * 10**6), ("1.5Ki", 1536), ("123B", 123)],
)
def test_sizes(text: str, size: int) -> None:
    assert Memory().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "4 gigs", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Memory().convert(text, None, None)


@pytest.mark.parametrize("text", ["100", "4", "1.5"])
def test_a_size_has_a_unit(text: str) -> None:
    with pytest.raises(click.BadParameter, match=f"{text}GiB or {text}MiB"):
        Memory().convert(text, None, None)


@given(st.integers(1, 200), st.data())
def test_an_even_split_covers_every_layer_once(n_layers: int, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, n_layers))
    ranges = split_evenly(n_layers, nodes)
    assert [layer for first, last in ranges for layer in range(first, last)] == list(range(n_layers))
    sizes = [last - first for first, last in ranges]
    assert len(sizes) == nodes and max(sizes) - min(sizes) <= 1
    check_cover(ranges, n_layers)


@pytest.mark.parametrize("nodes", [0, 5])
def test_a_split_among_too_many_or_none_is_refused(nodes: int) -> None:
    with pytest.raises(ShardlineError, match=f"{nodes} Nodes cannot share 4") as refused:
        split_evenly(4, nodes)
    assert refused.value.advice == "Give --nodes 1 to 4."


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 2), (3, 4)], "no Node has the layers 2:3"),
        ([(1, 4)], "no Node has the layers 0:1"),
        ([(0, 3)], "no Node has the layers 3:4"),
        ([(0, 5)], "reaches past the 4 layers"),
        ([], "no Node has the layers 0:4"),
    ],
)
def test_ranges_with_a_hole_are_refused(ranges: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(ShardlineError, match=words) as refused:
        check_cover(ranges, 4)
    assert "cover 0:4, such as 0:2,2:4;" in refused.value.advice


def test_ranges_may_overlap() -> None:
    check_cover([(0, 4), (0, 2), (2, 4)], 4)


LINE = "https://10.0.0.1:7070/#token.pin"


def test_a_line_from_where_nobody_else_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert JoinLine().convert(LINE, None, None) == LINE
    (tmp_path / "line").write_text(f" {LINE}\nmore\n")
    assert JoinLine().convert(f"@{tmp_path}/line", None, None) == LINE
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{LINE}\n"))
    assert JoinLine().convert("-", None, None) == LINE
    with pytest.raises(click.BadParameter, match="cannot be read"):
        JoinLine().convert(f"@{tmp_path}/nothing", None, None)
