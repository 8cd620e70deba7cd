"""The plan of a Shard's own GGUF file: its header, and what its data are made of, piece by piece.

Owns which tensors the file of Shard [first, last) has, under which names, and where the head's embedding matrix lies:
behind the last tensor, where stock tools do not look (they refuse tensors that they do not use). Quantised bytes are
copied as they are. It writes nothing: artifact/shard_files.py does. The same model gives the same bytes. Pure. Shown by
tests/formats/test_shard_gguf.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from shardline.errors import ShardlineError
from shardline.formats.architectures import LlamaRules
from shardline.formats.cuts import Cuts, cuts_of
from shardline.formats.ggml_types import BLOCK_TYPES, TYPE_IDS
from shardline.formats.gguf import DEFAULT_ALIGNMENT, TensorInfo
from shardline.formats.gguf_files import SHARD_LAYERS, GGUFModel
from shardline.formats.gguf_writer import Stored, TensorRow, array_of, encode_header, f32, padding, text, u32, u64
from shardline.formats.layers import is_of_other_modality, place_of
from shardline.formats.shard_keys import TINY_VOCABULARY, input_scale, part_keys

RECIPE = 2
"""Of the bytes below: another number where they change for the same model and range."""
PAGE = 4096
"""The embedding matrix begins on a page, so that it can be mapped alone."""

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
POSITIONS = "position_embd.weight"

_ROPE_FREQS = "rope_freqs.weight"
_Q_NORM = "attn_q_norm.weight"
_FINAL_NORMS = ("output_norm.", "token_embd_norm.")
_F16, _F32 = TYPE_IDS["F16"], TYPE_IDS["F32"]
_SMALL_TYPES = ("Q1_0", "Q4_0", "F16")


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes [offset, offset + nbytes) of file number `file` of the model; times `factor`, if given, as float32."""

    file: int
    offset: int
    nbytes: int
    factor: float | None = None


@dataclass(frozen=True, slots=True)
class Zeros:
    nbytes: int


Piece = Copy | Zeros


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A file: `header`, then the pieces, one behind the other."""

    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file, and where its bytes come from (None: zeros)."""

    row: TensorRow
    source: TensorInfo | None = None
    factor: float | None = None

    def piece(self) -> Piece:
        if self.source is None:
            return Zeros(self.row.nbytes)
        return Copy(self.source.file, self.source.offset, self.source.nbytes, self.factor)


def plan_shard(model: GGUFModel, first: int, last: int, *, content_id: str) -> ShardPlan:
    """The file of Shard [first, last) of `model`.

    Errors: `layers_invalid` for a range that is no part of this model, or all of it (its file is the model's own);
    `architecture_unsupported`; `model_file_invalid` where tensors are missing or of an unexpected shape.
    """
    cuts = cuts_of(model.header)
    rules = cuts.check_part(first, last)
    if (first, last) == (0, cuts.n_layers):
        raise ShardlineError(
            "layers_invalid",
            "all layers are the model's own file, which needs no other",
            advice="Use the model's own file, or give fewer layers.",
        )
    keys = part_keys(model.header, cuts, rules, first, last)
    entries = list(_entries(model, cuts, rules, first, last))
    matrix = _matrix(model, cuts, EMBEDDING)
    vocabulary = u32(matrix.shape[1])
    if last == cuts.n_layers:
        keys[f"{cuts.shape.architecture}.vocab_size"] = vocabulary
    scale = input_scale(model.header, cuts, rules, first)
    keys |= {
        "shardline.recipe": u32(RECIPE),
        "shardline.source.content_id": text(content_id),
        SHARD_LAYERS: array_of("u32", (first, last, cuts.n_layers)),
        "shardline.source.vocab_size": vocabulary,
        "shardline.input.divisor": f32(scale.graph),
    }
    return _laid_out(keys, entries, matrix if first == 0 else None, scale.embedding)


def plan_vocabulary(model: GGUFModel) -> ShardPlan:
    """A file with the model's metadata, tokenizer and all, and no tensors: what `vocab_only` loading reads."""
    header = model.header
    keys = {
        key: Stored(header.kinds[key], value)
        for key, value in header.kv.items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    return ShardPlan(encode_header(keys, ()), ())


def _laid_out(
    keys: dict[str, Stored], entries: list[Entry], embedding: TensorInfo | None, embedding_scale: float
) -> ShardPlan:
    ordered = _ordered(entries)
    rows = [entry.row for entry in ordered]
    pieces = [piece for entry in ordered for piece in _padded(entry.piece())]
    keys = keys | {"shardline.padding": text("")}
    if embedding is not None:
        keys |= {
            "shardline.embedding.offset": u64(0),
            "shardline.embedding.type": u32(embedding.type_id),
            "shardline.embedding.rows": u32(embedding.shape[1]),
            "shardline.embedding.width": u32(embedding.shape[0]),
            "shardline.embedding.scale": f32(embedding_scale),
        }
    start = len(encode_header(keys, rows))
    if isinstance(pieces[0], Copy) and pieces[0].offset % DEFAULT_ALIGNMENT == 0:
        # Data that lie in pages as they do in the source can be shared by file systems that share blocks.
        keys["shardline.padding"] = text("\0" * ((pieces[0].offset - start) % PAGE))
        start += (pieces[0].offset - start) % PAGE
    if embedding is not None:
        end = start + sum(piece.nbytes for piece in pieces)
        if gap := padding(end, PAGE):
            pieces.append(Zeros(gap))
        # The offset has a fixed width, so the header is as long as with 0.
        keys["shardline.embedding.offset"] = u64(end + gap)
        pieces.append(Copy(embedding.file, embedding.offset, embedding.nbytes))
    return ShardPlan(encode_header(keys, rows), _joined(pieces))


def _ordered(entries: list[Entry]) -> list[Entry]:
    """The tensors in the order of the source, but what lies there in the longest run first, and zeros last."""
    copied = sorted((e for e in entries if e.source is not None), key=_place)
    runs: list[list[Entry]] = []
    for entry in copied:
        if runs and _follows(runs[-1][-1].piece(), entry.piece()):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    longest = max(runs, key=lambda run: sum(entry.row.nbytes for entry in run))
    others = [entry for run in runs if run is not longest for entry in run]
    return [*longest, *others, *(e for e in entries if e.source is None)]


def _place(entry: Entry) -> tuple[int, int]:
    return (entry.source.file, entry.source.offset) if entry.source is not None else (0, 0)


def _follows(piece: Piece, other: Piece) -> bool:
    """Whether `other` lies behind `piece` in the source as it will in the part: only the padding between them."""
    if not isinstance(piece, Copy) or not isinstance(other, Copy) or (piece.factor or other.factor) is not None:
        return False
    return piece.file == other.file and other.offset == piece.offset + piece.nbytes + padding(piece.nbytes)


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbours in the source, with the padding between them, as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        before = joined[-2] if len(joined) > 1 else None
        if isinstance(last, Copy) and _follows(last, piece):
            joined[-1] = Copy(last.file, last.offset, last.nbytes + piece.nbytes)
        elif isinstance(last, Zeros) and isinstance(before, Copy) and _follows(before, piece):
            joined[-2:] = [Copy(before.file, before.offset, before.nbytes + last.nbytes + piece.nbytes)]
        else:
            joined.append(piece)
    return tuple(joined)


def _padded(piece: Piece) -> Iterator[Piece]:
    yield piece
    if gap := padding(piece.nbytes):
        yield Zeros(gap)


def _entries(model: GGUFModel, cuts: Cuts, rules: LlamaRules, first: int, last: int) -> Iterator[Entry]:
    """The tensors of the part, in no order."""
    yield from _vocabulary_entries(model, cuts, rules, last)
    empty = set(range(first, last))
    for info in model.tensors.values():
        place = place_of(info.name)
        if isinstance(place, int):
            if first <= place < last:
                empty.discard(place)
                yield _layer_entry(model, cuts, rules, info, first)
        elif info.name in (EMBEDDING, OUTPUT):
            continue
        elif info.name == POSITIONS and first > 0:
            # The graph adds them to whatever it is given; only the head shall.
            yield _zeros(info.name, info.shape, _F16)
        elif info.name == "output.bias" and last < cuts.n_layers:
            yield _zeros(info.name, (TINY_VOCABULARY,), _F32)
        elif not is_of_other_modality(info.name) and _is_wanted(cuts, rules, info.name, first, last):
            yield Entry(_row(info), info)
    if empty:
        raise ShardlineError("model_file_invalid", f"the model has no tensor of layer {min(empty)}", reason="damaged")


def _vocabulary_entries(model: GGUFModel, cuts: Cuts, rules: LlamaRules, last: int) -> Iterator[Entry]:
    """`token_embd.weight` and, where every file must have it, `output.weight`.

    Rows are looked up by whoever feeds the part, so the embedding is zeros everywhere, except in a tail whose output
    matrix may stand under its name: llama.cpp then uses it as tied, and stores it once.
    """
    width = cuts.shape.hidden_size
    if last < cuts.n_layers:
        yield _zeros(EMBEDDING, (width, TINY_VOCABULARY), _F16)
        if rules.output_required:
            yield _zeros(OUTPUT, (width, TINY_VOCABULARY), _F16)
        return
    embedding = _matrix(model, cuts, EMBEDDING)
    output = _matrix(model, cuts, OUTPUT) if OUTPUT in model.tensors else embedding
    if not rules.output_required:
        yield Entry(TensorRow(EMBEDDING, output.type_id, output.shape), output)
        return
    yield _zeros(EMBEDDING, embedding.shape, _smallest_type(width))
    yield Entry(TensorRow(OUTPUT, output.type_id, output.shape), output)


def _matrix(model: GGUFModel, cuts: Cuts, name: str) -> TensorInfo:
    info = model.tensors.get(name)
    if info is None:
        raise ShardlineError("model_file_invalid", f"the model has no tensor {name}", reason="damaged")
    if len(info.shape) != 2 or info.shape[0] != cuts.shape.hidden_size or info.shape[1] >= 1 << 32:
        raise ShardlineError(
            "model_file_invalid",
            f"tensor {name} has the shape {info.shape}, the rows of the model have {cuts.shape.hidden_size}",
            reason="damaged",
        )
    return info


def _smallest_type(width: int) -> int:
    """The type that takes the fewest bytes for rows of `width`, among those that llama.cpp can look rows up in."""
    return next(TYPE_IDS[name] for name in _SMALL_TYPES if width % BLOCK_TYPES[TYPE_IDS[name]].elements == 0)


def _layer_entry(model: GGUFModel, cuts: Cuts, rules: LlamaRules, info: TensorInfo, first: int) -> Entry:
    _, number, rest = info.name.split(".", 2)
    row = TensorRow(f"blk.{int(number) - first}.{rest}", info.type_id, info.shape)
    if rules.count_cure == "fold_q_norm" and cuts.is_special() and rest == _Q_NORM:
        if info.type_id != _F32:
            raise ShardlineError(
                "architecture_unsupported",
                f"tensor {info.name} is {info.type}: the attention scale of this model goes into it only as F32",
                architecture=cuts.shape.architecture,
            )
        return Entry(row, info, _q_norm_factor(model, cuts))
    return Entry(row, info)


def _q_norm_factor(model: GGUFModel, cuts: Cuts) -> float:
    """Attention scale of the whole model over that of a part, which follows from the width of a head alone."""
    shape = cuts.shape
    heads = model.header.integer(f"{shape.architecture}.attention.head_count")
    key_width = shape.key_width or shape.hidden_size // max(1, heads)
    if not heads or not shape.hidden_size // heads:
        raise ShardlineError("model_file_invalid", f"the model has {heads} attention heads", reason="damaged")
    factor = math.sqrt(key_width / (shape.hidden_size // heads))
    result: float = struct.unpack("<f", struct.pack("<f", factor))[0]
    return result


def _is_wanted(cuts: Cuts, rules: LlamaRules, name: str, first: int, last: int) -> bool:
    """Whether a tensor that belongs to no layer goes into the part."""
    if name == _ROPE_FREQS and rules.rope_freqs_full and cuts.kinds.windowed is not None:
        return not all(cuts.kinds.windowed[first:last])
    place = place_of(name)
    if place == "output" or name.startswith(_FINAL_NORMS):
        # The final norm is small, and no file is loaded without it.
        return last == cuts.n_layers or name.startswith(_FINAL_NORMS)
    return place == "shared" or first == 0


def _row(info: TensorInfo) -> TensorRow:
    return TensorRow(info.name, info.type_id, info.shape)


def _zeros(name: str, shape: tuple[int, ...], type_id: int) -> Entry:
    return Entry(TensorRow(name, type_id, shape))
