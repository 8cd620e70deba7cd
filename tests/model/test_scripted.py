"""The scripted engine is honest: right rows give the script's text, any other rows do not."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.errors import ShardlineError
from shardline.model.backend import Backend, BackendEntry, BackendOutput, ShardSpec
from shardline.model.script import WRONG, Script, Vocabulary
from shardline.model.scripted import ScriptedBackend, load_inline, self_test
from shardline.model.scripted_rows import RowCode
from shardline.wire.messages import TextBundle
from shardline.wire.steps import SeamLayout

SpecMaker = Callable[..., ShardSpec]
MakeEntry = Callable[..., BackendEntry]
F32 = npt.NDArray[np.float32]

LAYOUTS = [
    [["hidden", "F32", [8]]],
    [["hidden", "F32", [576]]],
    [["streams", "F32", [4, 8]], ["aux", "F16", [8]]],
    [["hidden", "BF16", [64]]],
    [["a", "F64", [3]], ["b", "I64", [2]], ["c", "I32", [2]], ["d", "U8", [5]]],
    [["hidden", "F16", [1]]],
]


class Route:
    """Shards in a row, driven step by step, with a place to tamper with what crosses each Seam."""

    def __init__(self, spec: SpecMaker, cuts: list[int], **fields: object) -> None:
        n = fields.get("n_layers", 6)
        assert isinstance(n, int)
        edges = [0, *cuts, n]
        self.shards = [load_inline(spec(a, b, **fields)) for a, b in itertools.pairwise(edges)]
        self.tail = self.shards[-1]
        self.tamper: Callable[[int, tuple[bytes, ...]], tuple[bytes, ...]] = lambda seam, rows: rows

    def open(self, slot: int = 0) -> None:
        for shard in self.shards:
            shard.open(slot)

    def step(self, tokens: list[int], slot: int = 0, want_output: bool = True) -> F32 | None:
        hidden: tuple[bytes, ...] = ()
        raw = struct.pack(f"<{len(tokens)}i", *tokens)
        logits = None
        for i, shard in enumerate(self.shards):
            e = BackendEntry(slot, shard.kv_tokens(slot), len(tokens), raw, hidden, want_output)
            (out,) = shard.run([e])
            assert isinstance(out, BackendOutput), out
            hidden = self.tamper(i, tuple(bytes(b) for b in out.hidden))
            logits = out.logits
        return logits

    def generate(self, prompt: list[int], limit: int = 20, slot: int = 0) -> list[int]:
        out: list[int] = []
        tokens = prompt
        while len(out) < limit:
            logits = self.step(tokens, slot)
            assert logits is not None
            out.append(int(logits.argmax()))
            if out[-1] == self.tail.vocabulary.end:
                break
            tokens = [out[-1]]
        return out

    def text(self, prompt: str = "abc", limit: int = 20, slot: int = 0) -> bytes:
        self.open(slot)
        ids = self.generate(self.tail.tokenize(prompt, add_special=False, parse_special=True), limit, slot)
        return self.tail.vocabulary.text(i for i in ids if i != self.tail.vocabulary.end)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cuts", [[], [1], [3], [5], [2, 4], [1, 2, 3, 4, 5]])
def test_every_cut_and_layout_gives_the_scripts_answer(spec: SpecMaker, layout: object, cuts: list[int]) -> None:
    assert Route(spec, cuts, layout=layout).text() == b"alpha beta gamma"


def test_every_cut_gives_the_same_logits(spec: SpecMaker) -> None:
    routes = [Route(spec, cuts) for cuts in ([], [3], [1, 2, 5])]
    for route in routes:
        route.open()
    for tokens in ([1, 2, 3], [9], [258], [4]):
        rows = [route.step(tokens) for route in routes]
        assert rows[0] is not None
        assert all(r is not None and r.tobytes() == rows[0].tobytes() for r in rows)


def test_chunks_and_neighbours_do_not_change_the_answer(spec: SpecMaker) -> None:
    route = Route(spec, [2, 4])
    for slot in (0, 7):
        route.open(slot)
    route.step([1, 2], 0, want_output=False)
    route.step([5, 6, 7], 7, want_output=False)
    route.step([3, 4], 0, want_output=False)
    first = route.generate([5], slot=0)
    assert first == route.generate([8], slot=7)
    assert route.tail.vocabulary.text(first[:-1]) == b"alpha beta gamma"


def zeroed(rows: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(bytes(len(b)) for b in rows)


def swapped(rows: tuple[bytes, ...]) -> tuple[bytes, ...]:
    half = len(rows[0]) // 2
    return (rows[0][half:] + rows[0][:half], *rows[1:])


def one_bit(rows: tuple[bytes, ...]) -> tuple[bytes, ...]:
    last = bytearray(rows[-1])
    last[-1] ^= 1
    return (*rows[:-1], bytes(last))


def first_bit(rows: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (bytes([rows[0][0] ^ 1]) + rows[0][1:], *rows[1:])


@pytest.mark.parametrize("damage", [zeroed, swapped, one_bit, first_bit])
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_damaged_rows_give_a_wrong_token_from_then_on(
    spec: SpecMaker, layout: object, damage: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]
) -> None:
    """Two rows of prefill, so that swapping is swapping rows."""
    route = Route(spec, [3], layout=layout)
    route.open()
    route.tamper = lambda seam, rows: damage(rows) if seam == 0 else rows
    route.step([1, 2], want_output=False)
    route.tamper = lambda seam, rows: rows
    assert route.tail.vocabulary.text(route.generate([3], 2)) == WRONG * 2


def test_a_lost_a_repeated_and_a_foreign_row_are_seen(spec: SpecMaker, entry: MakeEntry) -> None:
    for case in ("repeated", "lost", "foreign"):
        route = Route(spec, [3])
        route.open(0)
        route.open(1)
        head, tail = route.shards
        outputs = []
        for slot, token in ((0, 1), (0, 2), (1, 3), (1, 4)):
            position = head.kv_tokens(slot)
            (out,) = head.run([entry(position, [token], slot=slot)])
            assert isinstance(out, BackendOutput)
            outputs.append(out.hidden)
        rows = {"repeated": [0, 0, 1], "lost": [1], "foreign": [0, 3]}[case]
        for position, i in enumerate(rows):
            (out,) = tail.run([entry(position, [(1, 2, 3, 4)[i]], outputs[i])])
        assert isinstance(out, BackendOutput)
        assert out.logits is not None
        assert out.logits.argmax() == tail.vocabulary.wrong, case


def test_rows_of_other_layers_are_seen(spec: SpecMaker) -> None:
    """A route that skips a layer, and one that passes a layer twice."""
    right = Route(spec, [2, 4])
    for edges in ([(0, 2), (3, 6)], [(0, 3), (2, 6)]):
        wrong = Route(spec, [])
        wrong.shards = [load_inline(spec(a, b)) for a, b in edges]
        wrong.tail = wrong.shards[-1]
        assert wrong.text(limit=1) == WRONG
    assert right.text() == b"alpha beta gamma"


def test_rollback_restores_exactly_and_refuses_where_the_script_says_so(spec: SpecMaker) -> None:
    route = Route(spec, [3])
    route.open()
    route.step([1, 2, 3])
    before = route.step([258])
    for shard in route.shards:
        shard.rollback(0, 3)
    route.step([77])
    for shard in route.shards:
        shard.rollback(0, 3)
        assert shard.kv_tokens(0) == 3
    after = route.step([258])
    assert before is not None
    assert after is not None
    assert np.array_equal(before, after)
    fixed = load_inline(spec(rollback=False))
    fixed.open(0)
    assert not fixed.describe().rollback
    with pytest.raises(ShardlineError) as caught:
        fixed.rollback(0, 0)
    assert caught.value.code == "rollback_unsupported"


def test_save_and_restore_carry_on_where_they_were(spec: SpecMaker) -> None:
    route = Route(spec, [3])
    route.open(0)
    route.step([1, 2, 3])
    for shard in route.shards:
        state = shard.save(0)
        shard.restore(4, state)
        assert shard.kv_tokens(4) == 3
        with pytest.raises(ShardlineError):
            shard.restore(5, state[:-3])
    first, second = route.step([259], 0), route.step([259], 4)
    assert first is not None
    assert second is not None
    assert first.tobytes() == second.tobytes()
    other = load_inline(spec(0, 2))
    with pytest.raises(ShardlineError, match="another Shard"):
        other.restore(0, route.shards[0].save(0))


def test_kv_is_counted_in_the_cache_and_bounded_by_the_script(spec: SpecMaker, entry: MakeEntry) -> None:
    backend = load_inline(spec(kv_capacity=5))
    for slot in (0, 1):
        backend.open(slot)
    outs = backend.run([entry(0, [1, 2, 3]), entry(0, [1, 2, 3], slot=1)])
    assert isinstance(outs[0], BackendOutput)
    assert isinstance(outs[1], MemoryError)
    assert (backend.kv_tokens(0), backend.kv_tokens(1)) == (3, 0)
    backend.close(0)
    backend.close(0)
    (out,) = backend.run([entry(0, [1, 2, 3], slot=1)])
    assert isinstance(out, BackendOutput)
    assert backend.describe().kv_capacity_tokens == 5


def test_answers_by_prompt_end_of_generation_and_cycles(spec: SpecMaker) -> None:
    rules = [{"contains": "weather", "pieces": ["sun", "ny"]}, {"contains": "we", "pieces": ["us"]}]
    assert Route(spec, [3], answers=rules).text("the weather?") == b"sunny"
    assert Route(spec, [3], answers=rules).text("we two") == b"us"
    assert Route(spec, [3], answers=rules).text("hello") == b"alpha beta gamma"
    assert Route(spec, [3], eos=False).text("hello", limit=5) == b"alpha beta gammaalpha beta"
    assert Route(spec, [3], answer=["a", "<|end|>", "b"]).text("hello") == b"a"
    assert Route(spec, [3], answer=["b64:5q0=", "b64:qg=="]).text() == "\u6b6a".encode()


def test_sharpness_lets_sampling_choose_others(spec: SpecMaker) -> None:
    flat = Route(spec, [], sharpness=0.5)
    flat.open()
    logits = flat.step([1, 2, 3])
    assert logits is not None
    assert np.count_nonzero(logits > 0.5) > 50
    assert logits.max() < 1


@given(st.text(max_size=60), st.booleans())
def test_any_text_tokenizes_and_comes_back(text: str, parse_special: bool) -> None:
    words = Vocabulary(Script(model="m", answer=["alpha", " beta"], vocab=["the", " the", "\u6b6a", "alp"]))
    for whole in (text, f"{text}<|end|> the alphabeta {text}"):
        ids = words.tokenize(whole, parse_special=parse_special)
        assert words.text(ids) == whole.encode()
        assert (words.end in ids) == (parse_special and "<|end|>" in whole)


def test_the_longest_piece_wins() -> None:
    words = Vocabulary(Script(model="m", answer=["a", "ab", "abcd"]))
    assert words.text([words.tokenize("abcde", parse_special=True)[0]]) == b"abcd"
    assert [words.pieces[i] for i in words.tokenize("abce", parse_special=True)] == [b"ab", b"c", b"e"]


def test_description_and_text_bundle(spec: SpecMaker) -> None:
    head, middle, tail = (load_inline(spec(*span, vocab_size=300)).describe() for span in ((0, 2), (2, 4), (4, 6)))
    assert (head.is_head, head.is_tail, tail.is_tail) == (True, False, True)
    assert not head.layout_in.tensors
    assert head.layout_out == middle.layout_in == middle.layout_out == tail.layout_in
    assert not tail.layout_out.tensors
    assert middle.text_digest is None
    assert head.text_digest == tail.text_digest
    assert head.content_id == tail.content_id
    assert head.content_id.startswith("mac1-")
    raw = load_inline(spec(0, 2, vocab_size=300)).text_bundle()
    assert raw is not None
    assert hashlib.sha256(raw).hexdigest() == head.text_digest
    bundle = msgspec.msgpack.decode(raw, type=TextBundle)
    assert len(bundle.pieces) == head.vocab_size == 300
    assert [bundle.pieces[i] for i in bundle.eog] == [b"<|end|>"]
    assert bundle.eog[0] in bundle.special


def test_the_content_id_can_be_given(spec: SpecMaker) -> None:
    plain = spec()
    given_id = ShardSpec(plain.model, 0, 6, options={"content_id": "mac1-abc"})
    assert load_inline(given_id).describe().content_id == "mac1-abc"


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layers": 0},
        {"answer": []},
        {"answer": [""]},
        {"answer": ["b64:!"]},
        {"answers": [{"contains": "x", "pieces": []}]},
        {"unknown": 1},
        {"decode_ms": -1},
        {"layout": []},
        {"layout": [["x", "F99", [8]]]},
        {"layout": [["x", "F32", [0]]]},
        {"layout": [["tokens", "F32", [8]]]},
        {"vocab_size": 100},
        {"faults": [{"kind": "explode", "phase": "decode"}]},
        {"faults": [{"kind": "error", "phase": "lunch"}]},
        {"model": 3},
    ],
)
def test_a_bad_script_is_refused_with_a_reason(spec: SpecMaker, fields: dict[str, object]) -> None:
    with pytest.raises(ShardlineError, match="script: ") as caught:
        load_inline(spec(**fields))
    assert caught.value.code == "model_file_invalid"


def test_files_that_are_no_script(tmp_path: Path) -> None:
    for content in (b"", b"GGUF\x03\x00", b"[]", b"\xff\xfe", b"[" * 100_000, json.dumps({"model": "x"}).encode()):
        path = tmp_path / "x.json"
        path.write_bytes(content)
        with pytest.raises(ShardlineError) as caught:
            load_inline(ShardSpec(str(path), 0, 6))
        assert caught.value.code == "model_file_invalid"
    with pytest.raises(ShardlineError, match="cannot be read"):
        load_inline(ShardSpec(str(tmp_path / "none.json"), 0, 6))


@pytest.mark.parametrize("span", [(0, 7), (-1, 3), (3, 3), (4, 2), (6, 6)])
def test_layer_ranges_outside_the_model(spec: SpecMaker, span: tuple[int, int]) -> None:
    with pytest.raises(ShardlineError) as caught:
        load_inline(spec(*span))
    assert caught.value.code == "layers_invalid"


# ---- faults ------------------------------------------------------------------------------------------------------


def strike(spec: SpecMaker, entry: MakeEntry, fault: dict[str, object], span: tuple[int, int] = (0, 3)) -> object:
    """What comes out of the fourth decode step of a Shard with this fault in it."""
    backend = load_inline(spec(*span, faults=[{"phase": "decode", "step": 3, **fault}]))
    backend.open(0)
    reference = Route(spec, [3])
    reference.open()
    rows: list[tuple[bytes, ...]] = []
    reference.tamper = lambda seam, hidden: rows.append(hidden) or hidden if seam == 0 else hidden  # type: ignore[func-returns-value]
    out: object = None
    for position, ids in enumerate([[5], [1], [2], [3], [4]]):
        reference.step(ids)
        hidden = () if span[0] == 0 else rows[-1]
        e = entry(position, ids, hidden)
        (out,) = backend.run([e])
        if position < 4:
            assert isinstance(out, BackendOutput)
            if span[0] == 0:
                assert out.hidden == rows[-1]
    return out


def test_faults_of_hidden_rows(spec: SpecMaker, entry: MakeEntry) -> None:
    right = strike(spec, entry, {"kind": "error", "node": 3})
    assert isinstance(right, BackendOutput)
    for kind in ("nan", "inf"):
        out = strike(spec, entry, {"kind": kind, "layer": 2})
        assert isinstance(out, BackendOutput)
        values = np.frombuffer(out.hidden[0], dtype="<f4")
        assert np.isnan(values[-1]) if kind == "nan" else np.isinf(values[-1])
        assert np.isfinite(values[:-1]).all()
    out = strike(spec, entry, {"kind": "garbage", "layer": 2})
    assert isinstance(out, BackendOutput)
    assert np.isfinite(np.frombuffer(out.hidden[0], dtype="<f4")).all()
    assert out.hidden != right.hidden
    out = strike(spec, entry, {"kind": "wrong_width", "layer": 2})
    assert isinstance(out, BackendOutput)
    assert len(out.hidden[0]) == 31


def test_faults_of_logits(spec: SpecMaker, entry: MakeEntry) -> None:
    widths = {}
    for kind in ("nan", "inf", "wrong_width", "bad_token", "garbage"):
        out = strike(spec, entry, {"kind": kind, "layer": 3}, (3, 6))
        assert isinstance(out, BackendOutput)
        assert out.logits is not None
        widths[kind] = len(out.logits) - len(load_inline(spec()).vocabulary)
        if kind in ("nan", "inf"):
            assert not np.isfinite(out.logits).all()
        if kind == "bad_token":
            assert out.logits.argmax() == len(out.logits) - 1
    assert widths == {"nan": 0, "inf": 0, "wrong_width": -1, "bad_token": 1, "garbage": 0}


def test_faults_that_leave_no_result_and_where_they_strike(spec: SpecMaker, entry: MakeEntry) -> None:
    assert isinstance(strike(spec, entry, {"kind": "oom", "node": 0}), MemoryError)
    error = strike(spec, entry, {"kind": "error", "layer": 0})
    assert isinstance(error, ShardlineError)
    assert isinstance(strike(spec, entry, {"kind": "error", "layer": 3}), BackendOutput)
    assert isinstance(strike(spec, entry, {"kind": "error", "contains": "\x01\x02"}), ShardlineError)
    assert isinstance(strike(spec, entry, {"kind": "error", "contains": "other"}), BackendOutput)


def test_a_flag_makes_a_fault_strike_once(spec: SpecMaker, entry: MakeEntry) -> None:
    made = spec(faults=[{"kind": "error", "phase": "prefill", "flag": "now"}])
    backend = load_inline(made)
    flag = Path(made.model).parent / "now"
    for slot, struck in ((0, False), (1, True), (2, False)):
        if struck:
            flag.touch()
        backend.open(slot)
        e = entry(0, [1, 2], slot=slot)
        (out,) = backend.run([e])
        assert isinstance(out, ShardlineError) == struck
    assert not flag.exists()


def test_pace_of_batches_opens_and_loading(spec: SpecMaker, entry: MakeEntry) -> None:
    faults = [
        {"kind": "slow", "phase": "decode", "ms": 30, "step": 0},
        {"kind": "hang", "phase": "decode", "step": 1},
        {"kind": "slow", "phase": "open", "ms": 7, "step": 1},
    ]
    backend = load_inline(spec(decode_ms=5, prefill_ms_per_row=2, load_ms=40, faults=faults))
    assert backend.load_pace_s() == pytest.approx(0.04)
    assert [backend.open_pace_s(i) for i in range(3)] == pytest.approx([0, 0.007, 0])
    backend.open(0)
    backend.open(1)

    def pace(*entries: object) -> float:
        seconds = backend.pace_s(entries)  # type: ignore[arg-type]
        backend.run(entries)  # type: ignore[arg-type]
        return seconds

    assert pace(entry(0, [1, 2, 3]), entry(0, [1, 2], slot=1)) == pytest.approx(0.01)
    assert pace(entry(3, [1])) == pytest.approx(0.035)
    assert pace(entry(4, [1]), entry(2, [1], slot=1)) == float("inf")
    assert pace(entry(5, [1])) == pytest.approx(0.005)


def test_open_and_load_can_fail(spec: SpecMaker) -> None:
    backend = load_inline(spec(faults=[{"kind": "oom", "phase": "open", "step": 1}]))
    backend.open(0)
    with pytest.raises(MemoryError):
        backend.open(1)
    backend.open(1)
    with pytest.raises(ShardlineError):
        load_inline(spec(3, 6, faults=[{"kind": "error", "phase": "load", "node": 3}]))
    load_inline(spec(0, 3, faults=[{"kind": "error", "phase": "load", "node": 3}]))


def test_the_self_test_passes_on_every_range_and_can_be_made_to_fail(spec: SpecMaker) -> None:
    for span in ((0, 6), (0, 3), (2, 4), (3, 6)):
        times = self_test(load_inline(spec(*span, decode_ms=3, prefill_ms_per_row=1)))
        assert (times.decode_ms, times.prefill_ms_per_row) == (3, 1)
    slow = [{"kind": "slow", "phase": "decode", "node": 3, "ms": 20}]
    assert self_test(load_inline(spec(3, 6, decode_ms=3, faults=slow))).decode_ms == 23
    with pytest.raises(ShardlineError, match="self-test"):
        self_test(load_inline(spec(3, 6, faults=[{"kind": "refuse_test", "phase": "load", "node": 3}])))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_and_digests_are_each_others_inverse(layout: list[list[object]]) -> None:
    code = RowCode(SeamLayout.from_json(layout))
    digests = [bytes((i * 37 + j) % 256 for j in range(code.digest_bytes)) for i in range(5)]
    rows = code.rows(digests)
    assert [len(r) for r in rows] == [5 * t.row_bytes for t in code.layout.tensors]
    assert code.digests(rows, 5) == digests


def test_it_implements_the_backend_protocol(spec: SpecMaker) -> None:
    backend: Backend = load_inline(spec())
    assert isinstance(backend, ScriptedBackend)
