"""The scripted engine: no model, but honest about positions, rows and caches; answers, delays and faults from a file.

Every layer chains a hash over (row in, position) of all that it saw; a hidden row carries the hash of the last layer
passed, spread over the Seam layout. The tail knows from the token ids what must arrive: where a row was lost, swapped,
repeated, zeroed, or passed other layers, `<wrong-rows>` comes out. script.py owns the file's fields:

    {"model": "demo", "answer": ["Hello", ",", " world"], "decode_ms": 5,
     "faults": [{"kind": "exit", "phase": "decode", "layer": 5, "step": 3, "flag": "kill"}]}

Shown by tests/model/test_scripted.py.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.model.backend import BackendEntry, BackendOutput, Buffer, ShardDescription, ShardSpec
from shardline.model.pooling import Embeddings
from shardline.model.script import ScriptFault, Vocabulary, piece_bytes, read_script, seam_layout, text_bundle
from shardline.model.scripted_rows import NUMPY, LayerChain, RowCode
from shardline.wire.messages import EngineInfo, StepTimes
from shardline.wire.steps import TOKENS_ONLY, SeamLayout

BUILD = "1"
_NAN = {"F64": 0x7FF8 << 48, "F32": 0x7FC0 << 16, "F16": 0x7E00, "BF16": 0x7FC0}
_INF = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
_NOISE_IDS = 4096


class _Cache:
    """Of one slot."""

    def __init__(self, chain: LayerChain, whole: LayerChain | None) -> None:
        self.chain = chain
        self.whole = whole
        """On a tail behind a Seam: all layers, fed from token ids, to know what must arrive."""
        self.tokens: list[int] = []
        self.prompt_end: int | None = None
        """Where the first output was wanted; generation is counted from here."""
        self.steps = {"prefill": 0, "decode": 0}


class _SavedSlot(msgspec.Struct, array_like=True):
    content_id: str
    first: int
    last: int
    tokens: list[int]
    prompt_end: int | None
    chain: list[list[bytes]]
    whole: list[list[bytes]] | None


class ScriptedBackend:
    """Implements `Backend`, and `PacedBackend` for the inline engine."""

    def __init__(
        self,
        spec: ShardSpec,
        *,
        sleep: Callable[[float], None],
        leave: Callable[[ScriptFault], NoReturn],
    ) -> None:
        """`sleep`: keeps the pace of a call for which the caller did not ask and wait itself. `leave`: what an `exit`
        fault does."""
        self.script, digest = read_script(Path(spec.model))
        self._directory = Path(spec.model).parent
        n = self.script.n_layers
        if not 0 <= spec.first < spec.last <= n:
            raise ShardlineError("layers_invalid", f"layers {spec.first}:{spec.last} of a model of {n}")
        self.vocabulary = Vocabulary(self.script)
        self._spec = spec
        self._layout = seam_layout(self.script)
        if spec.dtype is not None and spec.dtype.upper() != self.script.layout[0][1]:
            raise ShardlineError("setting_invalid", "the script's layout says which dtype it has", param="dtype")
        self._code = RowCode(self._layout)
        self._caches: dict[int, _Cache] = {}
        self._sleep = sleep
        self._leave = leave
        self._opens = 0
        self._struck: dict[int, ScriptFault] | None = None
        """Faults of the batch that was paced and is to run next, by slot."""
        self._open_struck: ScriptFault | None = None
        self._open_paced = False
        self._text = text_bundle(self.script, self.vocabulary) if spec.first == 0 or spec.last == n else None
        given = spec.options.get("content_id")
        self._content_id = given if isinstance(given, str) else f"mac1-{digest}"
        self._load_fault = self._find("load", None, 0)
        self._fail(self._load_fault)

    def describe(self) -> ShardDescription:
        script, spec = self.script, self._spec
        layers = spec.last - spec.first
        return ShardDescription(
            model_name=script.model,
            content_id=self._content_id,
            first=spec.first,
            last=spec.last,
            n_layers=script.n_layers,
            engine=EngineInfo(
                backend="scripted",
                engine_class=f"scripted-{BUILD}",
                build=BUILD,
                dtype=script.layout[0][1],
                quantisation="none",
                device="cpu",
                threads=1,
            ),
            layout_in=self._layout if spec.first > 0 else TOKENS_ONLY,
            layout_out=self._layout if spec.last < script.n_layers else TOKENS_ONLY,
            kv_bytes_per_token=script.kv_bytes_per_token * layers,
            weight_bytes=script.weight_bytes_per_layer * layers,
            context_length=min(script.context_length, spec.context_length or script.context_length),
            vocab_size=len(self.vocabulary),
            rollback=script.rollback,
            text_digest=hashlib.sha256(self._text).hexdigest() if self._text is not None else None,
            kv_capacity_tokens=script.kv_capacity,
            embeddings=Embeddings(self._code.width) if spec.last == script.n_layers else None,
        )

    # ---- faults and pace ---------------------------------------------------------------------------------------

    def _find(self, phase: str, tokens: Callable[[], bytes] | None, step: int) -> ScriptFault | None:
        """The first fault of the script that strikes here and now. A flag is used up by it."""
        spec = self._spec
        for fault in self.script.faults:
            if (
                fault.phase == phase
                and fault.kind != "refuse_test"
                and (fault.layer is None or spec.first <= fault.layer < spec.last)
                and fault.node in (None, spec.first)
                and fault.step in (None, step)
                and (fault.contains is None or (tokens is not None and fault.contains.encode() in tokens()))
                and (fault.flag is None or self._take_flag(fault.flag))
            ):
                return fault
        return None

    def _take_flag(self, name: str) -> bool:
        try:
            (self._directory / Path(name).name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _fail(self, fault: ScriptFault | None) -> None:
        """Faults that leave no result."""
        if fault is None:
            return
        if fault.kind == "error":
            raise ShardlineError("engine_error", "the script says so")
        if fault.kind == "oom":
            raise MemoryError("the script says so")
        if fault.kind == "exit":
            self._leave(fault)

    def load_pace_s(self) -> float:
        return self.script.load_ms / 1e3 + _extra_s(self._load_fault)

    def open_pace_s(self, slot: int) -> float:
        self._open_struck = self._find("open", None, self._opens)
        self._open_paced = True
        self._opens += 1
        return _extra_s(self._open_struck)

    def pace_s(self, entries: Sequence[BackendEntry]) -> float:
        self._struck = {}
        pace = 0.0
        prefill_rows = 0
        for entry in entries:
            cache = self._caches.get(entry.slot)
            if cache is None:
                continue
            phase = _phase(cache, entry)
            fault = self._find(phase, lambda c=cache, e=entry: self._text_with(c, e), cache.steps[phase])  # type: ignore[misc]
            cache.steps[phase] += 1
            if fault is not None:
                self._struck[entry.slot] = fault
            pace = max(pace, _extra_s(fault))
            prefill_rows += entry.rows if phase == "prefill" else 0
        busy_ms = self.script.prefill_ms_per_row * prefill_rows if prefill_rows else self.script.decode_ms
        return busy_ms / 1e3 + pace

    def _text_with(self, cache: _Cache, entry: BackendEntry) -> bytes:
        return self.vocabulary.text([*cache.tokens, *_ids(entry)])

    # ---- slots -------------------------------------------------------------------------------------------------

    def open(self, slot: int) -> None:
        self._begin_open(slot)
        self._caches[slot] = self._new_cache()

    def _begin_open(self, slot: int) -> None:
        """Take the time of an open, and what strikes there."""
        if not self._open_paced:
            self._sleep(self.open_pace_s(slot))
        self._open_paced = False
        self._fail(self._open_struck)

    def fork(self, source: int, target: int, tokens: int) -> None:
        self._begin_open(target)
        if not self.script.rollback:
            raise ShardlineError("rollback_unsupported", "the script's model cannot go back")
        cache, kept = self._new_cache(), self._caches[source]
        cache.chain.take(kept.chain, tokens)
        if cache.whole is not None and kept.whole is not None:
            cache.whole.take(kept.whole, tokens)
        cache.tokens = kept.tokens[:tokens]
        self._caches[target] = cache

    def _new_cache(self) -> _Cache:
        size, n = self._code.digest_bytes, self.script.n_layers
        checks = self._spec.last == n and self._spec.first > 0
        chain = LayerChain(self._spec.first, self._spec.last, size)
        return _Cache(chain, LayerChain(0, n, size) if checks else None)

    def close(self, slot: int) -> None:
        self._caches.pop(slot, None)

    def kv_tokens(self, slot: int) -> int:
        return len(self._caches[slot].chain)

    def rollback(self, slot: int, position: int) -> None:
        if not self.script.rollback:
            raise ShardlineError("rollback_unsupported", "the script's model cannot go back")
        cache = self._caches[slot]
        cache.chain.rollback(position)
        if cache.whole is not None:
            cache.whole.rollback(position)
        del cache.tokens[position:]
        if cache.prompt_end is not None and position < cache.prompt_end:
            cache.prompt_end = None

    def save(self, slot: int) -> bytes:
        cache = self._caches[slot]
        whole = cache.whole.state() if cache.whole is not None else None
        return msgspec.msgpack.encode(
            _SavedSlot(
                self._content_id,
                self._spec.first,
                self._spec.last,
                cache.tokens,
                cache.prompt_end,
                cache.chain.state(),
                whole,
            )
        )

    def restore(self, slot: int, state: bytes) -> None:
        try:
            saved = msgspec.msgpack.decode(state, type=_SavedSlot)
        except msgspec.MsgspecError as error:
            raise ShardlineError("engine_error", f"the saved state is not readable: {error}") from None
        if (saved.content_id, saved.first, saved.last) != (self._content_id, self._spec.first, self._spec.last):
            raise ShardlineError("engine_error", "the saved state is of another Shard")
        cache = self._new_cache()
        cache.chain.restore(saved.chain)
        if cache.whole is not None:
            cache.whole.restore(saved.whole or [])
        cache.tokens, cache.prompt_end = saved.tokens, saved.prompt_end
        self._caches[slot] = cache

    # ---- computing ---------------------------------------------------------------------------------------------

    def run(self, entries: Sequence[BackendEntry]) -> list[BackendOutput | Exception]:
        if self._struck is None:
            self._sleep(self.pace_s(entries))
        struck, self._struck = self._struck or {}, None
        for fault in struck.values():
            if fault.kind == "exit":
                self._leave(fault)
        outputs: list[BackendOutput | Exception] = []
        for entry in entries:
            try:
                outputs.append(self._entry(entry, struck.get(entry.slot)))
            except (ShardlineError, MemoryError) as error:
                outputs.append(error)
        return outputs

    def _entry(self, entry: BackendEntry, fault: ScriptFault | None) -> BackendOutput:
        self._fail(fault)
        cache = self._caches[entry.slot]
        capacity = self.script.kv_capacity
        if capacity is not None and sum(len(c.chain) for c in self._caches.values()) + entry.rows > capacity:
            raise MemoryError(f"the caches hold {capacity} tokens at most")
        out = self._forward(cache, _ids(entry), entry.hidden)
        end = len(cache.chain)
        if entry.want_output and cache.prompt_end is None:
            cache.prompt_end = end
        if self._spec.last < self.script.n_layers:
            return BackendOutput(hidden=_damaged(self._code.rows(out), self._layout, fault))
        right = cache.whole is None or cache.whole.state()[-1][-1] == out[-1]
        if entry.embed_rows:
            return BackendOutput(embedded=self._embedded(out[-entry.embed_rows :], right, fault))
        if not entry.want_output:
            return BackendOutput()
        token = self._next_token(cache) if right else self.vocabulary.wrong
        return BackendOutput(logits=_damaged_logits(self._logits(token, out[-1]), fault))

    def _embedded(self, digests: list[bytes], right: bool, fault: ScriptFault | None) -> npt.NDArray[np.float32]:
        if not right:
            raise ShardlineError("engine_error", "the rows that arrived are not those of the prompt")
        values = self._code.values(digests)
        return values if fault is None else _damaged_logits(values.reshape(-1), fault).reshape(len(digests), -1)

    def _forward(self, cache: _Cache, tokens: list[int], hidden: Sequence[Buffer]) -> list[bytes]:
        chain = cache.chain
        start = len(chain)
        if self._spec.first == 0:
            rows = [chain.embed(token, start + i) for i, token in enumerate(tokens)]
        else:
            rows = self._code.digests(hidden, len(tokens))
        if cache.whole is not None:
            for i, token in enumerate(tokens):
                cache.whole.step(chain.embed(token, start + i))
        cache.tokens.extend(tokens)
        return [chain.step(row) for row in rows]

    def _next_token(self, cache: _Cache) -> int:
        prompt_end = cache.prompt_end or 0
        prompt = self.vocabulary.text(cache.tokens[:prompt_end])
        rules = (rule.pieces for rule in self.script.answers if rule.contains.encode() in prompt)
        pieces = [self.vocabulary.ids[piece_bytes(p)] for p in next(rules, self.script.answer)]
        index = len(cache.tokens) - prompt_end
        if index >= len(pieces) and self.script.eos:
            return self.vocabulary.end
        return pieces[index % len(pieces)]

    def _logits(self, token: int, digest: bytes) -> npt.NDArray[np.float32]:
        logits = np.zeros(len(self.vocabulary), dtype=np.float32)
        noisy = min(_NOISE_IDS, len(logits))
        logits[:noisy] = np.frombuffer(hashlib.shake_128(digest).digest(noisy), dtype=np.uint8) / np.float32(256)
        logits[token] = self.script.sharpness
        return logits

    def self_test(self) -> StepTimes:
        """Three rows through the layers of this Shard, against the same through all layers; no fault strikes here."""
        spec = self._spec
        if any(f.kind == "refuse_test" and f.node in (None, spec.first) for f in self.script.faults):
            raise ShardlineError("engine_error", "self-test: the rows that came out are not the expected ones")
        size = self._code.digest_bytes
        through, here = LayerChain(0, spec.last, size), LayerChain(spec.first, spec.last, size)
        for position, token in enumerate((1, 2, 3)):
            row = through.embed(token, position)
            wanted = through.step(row)
            arriving = row if spec.first == 0 else through.state()[spec.first - 1][-1]
            (carried,) = self._code.digests(self._code.rows([arriving]), 1)
            if here.step(carried) != wanted:
                raise ShardlineError("engine_error", "self-test: the rows that came out are not the expected ones")
        always = [f for f in self.script.faults if f.kind == "slow" and f.phase == "decode" and f.node == spec.first]
        slow_ms = sum(f.ms for f in always if f.step is None and f.contains is None and f.flag is None)
        return StepTimes(decode_ms=self.script.decode_ms + slow_ms, prefill_ms_per_row=self.script.prefill_ms_per_row)

    # ---- text --------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        ids = self.vocabulary.tokenize(text, parse_special=parse_special)
        return [self.vocabulary.begin, *ids] if add_special and self.script.add_bos else ids

    def text_bundle(self) -> bytes | None:
        return self._text


def _ids(entry: BackendEntry) -> list[int]:
    ids: list[int] = np.frombuffer(entry.tokens, dtype="<i4").tolist()
    return ids


def _phase(cache: _Cache, entry: BackendEntry) -> str:
    """A Shard is not told the lane: one row behind the first output, or behind other rows, is taken for decode."""
    if cache.prompt_end is not None:
        return "decode"
    return "decode" if entry.rows == 1 and entry.position > 0 and not entry.want_output else "prefill"


def _extra_s(fault: ScriptFault | None) -> float:
    if fault is None:
        return 0.0
    if fault.kind == "hang":
        return math.inf
    return fault.ms / 1e3 if fault.kind == "slow" else 0.0


def _damaged(hidden: tuple[bytes, ...], layout: SeamLayout, fault: ScriptFault | None) -> tuple[bytes, ...]:
    """What a fault makes of the rows that go out."""
    if fault is None:
        return hidden
    first, dtype = bytearray(hidden[0]), layout.tensors[0].dtype
    if fault.kind == "wrong_width":
        del first[-1]
    elif fault.kind in ("nan", "inf") and dtype in _NAN:
        size = np.dtype(NUMPY[dtype]).itemsize
        first[-size:] = (_NAN if fault.kind == "nan" else _INF)[dtype].to_bytes(size, "little")
    elif fault.kind == "garbage":
        values = np.frombuffer(bytes(first), dtype=NUMPY[dtype])
        first[:] = values[::-1].tobytes() if not np.array_equal(values, values[::-1]) else bytes(len(first))
    return bytes(first), *hidden[1:]


def _damaged_logits(logits: npt.NDArray[np.float32], fault: ScriptFault | None) -> npt.NDArray[np.float32]:
    kind = fault.kind if fault is not None else None
    if kind in ("nan", "inf"):
        logits[0] = np.nan if kind == "nan" else np.inf
    elif kind == "garbage":
        logits = np.ascontiguousarray(logits[::-1])
    elif kind == "wrong_width":
        logits = logits[:-1]
    elif kind == "bad_token":
        logits = np.append(logits, np.float32(1e4))
    return logits


def _leave_process(fault: ScriptFault) -> NoReturn:
    if fault.signal is not None:
        os.kill(os.getpid(), fault.signal)
        _sleep_in_process(5.0)  # the signal is on its way
    os._exit(1)


def _sleep_in_process(seconds: float) -> None:
    """A hanging engine hangs: only its threads go on."""
    while seconds == math.inf:
        time.sleep(3600.0)
    if seconds > 0:
        time.sleep(seconds)


def _leave_inline(fault: ScriptFault) -> NoReturn:
    raise ShardlineError("engine_lost", "the scripted engine ended itself")


def load(spec: ShardSpec, *, progress: Callable[[int, int], None] = lambda done, total: None) -> ScriptedBackend:
    """For the worker process: keeps its pace by sleeping, and an `exit` ends the process."""
    backend = ScriptedBackend(spec, sleep=_sleep_in_process, leave=_leave_process)
    layers = spec.last - spec.first
    progress(0, layers)
    _sleep_in_process(backend.load_pace_s())
    progress(layers, layers)
    return backend


def load_inline(spec: ShardSpec) -> ScriptedBackend:
    """For `InlineEngine`: never sleeps, and an `exit` loses the engine."""
    return ScriptedBackend(spec, sleep=lambda _: None, leave=_leave_inline)


def self_test(backend: Any) -> StepTimes:
    if not isinstance(backend, ScriptedBackend):
        raise ShardlineError("engine_error", "not a scripted engine")
    return backend.self_test()
