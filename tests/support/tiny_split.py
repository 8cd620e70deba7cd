"""One tiny model, unsplit and in parts, compared number by number: what the coverage table and its test are made of.

The unsplit model runs in the bare library (tests/support/unsplit.py). Its parts are cut by the product's own planner,
written by its own cutter, and run by its own backend, fed as a route would feed them.

As a program (`python -m tests.support.tiny_split`) it reads a model's name a line and answers with a line of JSON; each
model runs in a process of its own, since the library ends the process where it finds something wrong.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardline.artifact.shard_files import ShardFiles
from shardline.errors import ShardlineError
from shardline.formats import architectures
from shardline.formats.cuts import Cuts, Part, cuts_of
from shardline.formats.gguf_files import GGUFModel, read_model
from shardline.formats.shard_gguf import plan_shard
from shardline.model.backend import BackendEntry, ShardSpec
from shardline.model.llama_backend import LlamaBackend
from shardline.model.llama_shard import load
from tests.support.tiny_controls import CONTROLS
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import BY_NAME, EQUAL_ROWS, VOCABULARY, TinyModel
from tests.support.unsplit import CONTEXT, ROWS, Call, Unsplit, script

CONTENT_ID = "mac1-" + "0" * 64
LIMIT_S = 60


@dataclass
class Record:
    """What came of one model. Differences are the largest absolute ones over all calls and rows."""

    name: str
    architecture: str
    proof: str = ""
    """What the product's table promises: exact, close, unproven."""
    refused: dict[int, str] = field(default_factory=dict)
    """Positions that the product refuses, with its reason."""
    cut_anyway: list[int] = field(default_factory=list)
    """Positions among these at which the product makes both parts all the same."""
    cuts: list[tuple[int, ...]] = field(default_factory=list)
    taps: list[str] = field(default_factory=list)
    """Other ways to take the rows out that the last of these cuts was tried with."""
    whole: float | None = None
    """Logits of the whole model in the product's backend."""
    residual: float = 0.0
    residual_size: float = 0.0
    logits: float = 0.0
    logits_size: float = 0.0
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Expected:
    """One call of the unsplit model: rows behind each layer (where its graph names them), last logits of each."""

    residuals: dict[int, np.ndarray]
    logits: np.ndarray


def compare(model: TinyModel, folder: Path) -> Record:
    """Run everything that `model` asks for, in this process."""
    record = Record(model.name, model.architecture)
    path = write_tiny_gguf(model, folder / "tiny.gguf")
    source = read_model(path)
    cuts = cuts_of(source.header)
    if cuts.rules is None:
        raise ShardlineError("architecture_unsupported", str(cuts.refusal))
    record.proof = cuts.rules.proof
    record.warnings = cuts.warnings()
    record.refused = {p: reason for p in range(1, cuts.n_layers) if (reason := cuts.position_reason(p)) is not None}
    calls = script(VOCABULARY, model.sequences, ragged=model.architecture not in EQUAL_ROWS)
    expected = unsplit(path, calls, cuts, model.sequences)
    with _Loaded(source, (0, cuts.n_layers), None, model.sequences) as whole:
        record.whole = max(_run_chain([whole], call, e)[1] for call, e in zip(calls, expected, strict=True))
    record.cut_anyway = [p for p in record.refused if cuts_at(source, p)]
    files = ShardFiles(folder / "shards")
    for cut in model.chains:
        _compare_chain(record, _Chain(source, files, cut, model.sequences, "sampler"), calls, expected)
        record.cuts.append(cut)
    for tap in ("callback", *cuts.rules.taps):
        _compare_chain(record, _Chain(source, files, model.chains[-1], model.sequences, tap), calls, expected)
        record.taps.append(tap)
    record.residual_size = max(float(np.abs(rows).max()) for e in expected for rows in e.residuals.values() or [[0]])
    record.logits_size = max(float(np.abs(e.logits).max()) for e in expected)
    return record


def cuts_at(source: GGUFModel, position: int) -> bool:
    """Whether the product plans both parts of a cut in two."""
    try:
        plan_shard(source, 0, position, content_id=CONTENT_ID)
        plan_shard(source, position, cuts_of(source.header).n_layers, content_id=CONTENT_ID)
    except ShardlineError:
        return False
    return True


def unsplit(path: Path, calls: Sequence[Call], cuts: Cuts, sequences: int) -> list[Expected]:
    """What the bare library computes, once with all rows as outputs (for the rows inside), once as a tail would."""
    taps = {f"{residual_name(cuts, layer)}": layer for layer in range(cuts.n_layers)}
    with Unsplit(path, sequences, taps) as inside, Unsplit(path, sequences) as tail:
        found = []
        for call in calls:
            seen = inside.run(call).inside
            residuals = {taps[name] + 1: rows for name, rows in seen.items()}
            found.append(Expected(residuals, tail.run(call, all_outputs=False).logits))
        return found


def residual_name(cuts: Cuts, layer: int) -> str:
    """The tensor behind a layer in the graph of the whole model. Where the product's name for the last layer of a part
    is not that of layers inside, the rows are called by the name of the next layer's input."""
    if cuts.rules is not None and "{last}" in cuts.rules.residual:
        return cuts.rules.residual.format(last=layer)
    return f"attn_norm_in-{layer + 1}"


@dataclass(frozen=True)
class _Chain:
    """Parts of a model between the positions of `cut`, with one way to take rows out of them."""

    source: GGUFModel
    files: ShardFiles
    cut: tuple[int, ...]
    sequences: int
    tap: str


def _compare_chain(record: Record, chain: _Chain, calls: Sequence[Call], expected: Sequence[Expected]) -> None:
    parts = pairwise((0, *chain.cut, cuts_of(chain.source.header).n_layers))
    with ExitStack() as stack:
        loaded = []
        for part in parts:
            shard_file = chain.files.shard(chain.source, CONTENT_ID, *part)
            loaded.append(stack.enter_context(_Loaded(chain.source, part, shard_file, chain.sequences, chain.tap)))
        for call, wanted in zip(calls, expected, strict=True):
            residual, logits = _run_chain(loaded, call, wanted)
            record.residual, record.logits = max(record.residual, residual), max(record.logits, logits)


class _Loaded:
    """A Shard in the product's backend, with a slot open for each sequence."""

    def __init__(
        self, source: GGUFModel, part: Part, shard_file: Path | None, sequences: int, tap: str = "sampler"
    ) -> None:
        options: dict[str, Any] = {
            "content_id": CONTENT_ID,
            "shard_file": shard_file,
            "kv_tokens": CONTEXT,
            "sessions": sequences,
            "rows": ROWS,
            "tap": tap,
        }
        self.backend = load(ShardSpec(str(source.paths[0]), *part, threads=1, options=options))
        for slot in range(sequences):
            self.backend.open(slot)

    def __enter__(self) -> LlamaBackend:
        return self.backend

    def __exit__(self, *_: object) -> None:
        self.backend.unload()


def _run_chain(parts: Sequence[LlamaBackend], call: Call, expected: Expected) -> tuple[float, float]:
    """The largest difference of the rows between parts, and that of the logits."""
    hidden: list[tuple[Any, ...]] = [()] * len(call)
    residual = 0.0
    for part in parts:
        entries = [
            BackendEntry(
                slot=rows.sequence,
                position=rows.position,
                rows=len(rows.tokens),
                tokens=np.array(rows.tokens, "<i4").tobytes(),
                hidden=given,
                want_output=True,
            )
            for rows, given in zip(call, hidden, strict=True)
        ]
        outputs = []
        for output in part.run(entries):
            if isinstance(output, Exception):
                raise output
            outputs.append(output)
        if not part.describe().is_tail:
            hidden = [tuple(bytes(rows) for rows in output.hidden) for output in outputs]
            found = np.concatenate([np.frombuffer(rows[0], np.float32) for rows in hidden])
            residual = max(residual, difference(found, expected.residuals[part.describe().last].ravel()))
    logits = np.stack([np.asarray(output.logits) for output in outputs])
    return residual, difference(logits, expected.logits)


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest absolute difference; infinite where anything is not finite."""
    if not (np.isfinite(found).all() and np.isfinite(wanted).all()):
        return float("inf")
    return float(np.abs(found - wanted).max())


def read_record(line: bytes | str) -> Record:
    record = Record(**json.loads(line))
    # JSON has neither tuples nor numbers as keys.
    record.cuts = [tuple(cut) for cut in record.cuts]
    record.refused = {int(position): reason for position, reason in record.refused.items()}
    return record


def in_own_process(model: TinyModel, rules: Mapping[str, Any] | None = None) -> Record:
    """`compare` in a fork of this process; an abort or a hang becomes the record's error. `rules`: what to change in
    the row of the architecture, there and nowhere else."""
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory(prefix="shardline-tiny-") as folder, tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 2)
            os.dup2(said.fileno(), 1)
            signal.alarm(LIMIT_S)
            try:
                if rules is not None:
                    _change_row(model.architecture, rules)
                result = asdict(compare(model, Path(folder)))
            except BaseException as error:
                result = asdict(Record(model.name, model.architecture, error=f"{type(error).__name__}: {error}"))
            os.write(writer, json.dumps(result).encode())
            os._exit(0)
        os.close(writer)
        answer = b"".join(iter(lambda: os.read(reader, 1 << 16), b""))
        os.close(reader)
        _, status = os.waitpid(child, 0)
        if answer:
            return read_record(answer)
        said.seek(0)
        words = said.read().decode(errors="replace").strip().splitlines()
        return Record(
            model.name, model.architecture, error=f"ended by {_cause(status)}: {words[-1] if words else 'no words'}"
        )


def _change_row(architecture: str, rules: Mapping[str, Any]) -> None:
    row = architectures.of_gguf(architecture)
    known = row.llama or architectures.LlamaRules()
    changed = replace(row, llama=replace(known, proof="exact", reason=None, **rules))
    architectures._BY_GGUF[architecture] = changed


def _cause(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def serve(names: Iterator[str]) -> None:
    for line in names:
        name = line.strip()
        if name in CONTROLS:
            record = in_own_process(CONTROLS[name].model, CONTROLS[name].rules)
        else:
            record = in_own_process(BY_NAME[name])
        print(json.dumps(asdict(record)), flush=True)


if __name__ == "__main__":
    os.environ["GGML_NO_BACKTRACE"] = "1"
    serve(iter(sys.stdin))
