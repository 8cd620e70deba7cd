"""Which layer a tensor belongs to, by its name, and which tensors a Shard needs.

Owns the naming rules of GGUF and of Hugging Face checkpoints. A name that no rule knows is "shared": every Shard takes
it, none loses it. Offsets are never assumed to follow layers (real files store 0, 1, 10, 11 … 2, 20): byte ranges are
joined tensor by tensor. Shown by tests/formats/test_layers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

from shardline.errors import ShardlineError

Place = int | Literal["embedding", "output", "shared"]

_ROOT = r"(?:(?:model|language_model|text_model|transformer|backbone|gpt_neox|decoder)\.)*"
_LAYER = re.compile(rf"(?:blk|{_ROOT}(?:layers|h|blocks))\.(0|[1-9][0-9]{{0,4}})\.")
_EMBEDDING = re.compile(
    r"(?:token_embd|token_embd_norm|position_embd|token_types)\."
    rf"|{_ROOT}(?:embed_tokens|wte|wpe|embed_in|embed_positions|word_embeddings|word_embeddings_layernorm|embeddings)\."
)
_OUTPUT = re.compile(
    r"(?:output|output_norm)\."
    rf"|{_ROOT}(?:lm_head|embed_out|norm|final_layernorm|final_layer_norm|ln_f|norm_f|output_layer)\."
)
_TOKEN_MATRIX = re.compile(rf"token_embd\.|{_ROOT}(?:embed_tokens|wte|embed_in|word_embeddings|embeddings)\.")
_OUTPUT_MATRIX = re.compile(rf"output\.|{_ROOT}(?:lm_head|embed_out|output_layer)\.")
_OTHER_MODALITY = re.compile(
    r"(?:model\.)?(?:v|mm|a|vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower|"
    r"embed_vision|embed_audio)\."
)

_KNOWN_SHARED = re.compile(rf"rope_freqs\.|rope_factors_(?:long|short)\.|{_ROOT}rotary_emb\.")


KV_MATRICES = (".attn_k.weight", ".attn_v.weight", ".attn_kv_a_mqa.weight")
"""Matrices of a GGUF file whose output is kept for each token."""
_ROUTED_EXPERT = re.compile(r"_exps\.|\.experts\.")


class SizedTensor(Protocol):
    """What the readers of both containers give for a tensor."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> int: ...


class ByteRange(NamedTuple):
    """Bytes [start, end) of file number `file` of the model."""

    file: int
    start: int
    end: int


def place_of(name: str) -> Place:
    """Layer number, "embedding" (head), "output" (tail), or "shared" (every Shard, as all that is unknown)."""
    found = _LAYER.match(name)
    if found is not None:
        return int(found[1])
    if _EMBEDDING.match(name):
        return "embedding"
    if _OUTPUT.match(name):
        return "output"
    return "shared"


def is_tied(names: Iterable[str]) -> bool:
    """Whether the model has no output matrix of its own, so that the tail uses the head's embedding."""
    return not any(_OUTPUT_MATRIX.match(name) for name in names)


def is_token_matrix(name: str) -> bool:
    """Whether this is the embedding matrix itself, which a tied tail uses as its output matrix."""
    return _TOKEN_MATRIX.match(name) is not None


def is_of_other_modality(name: str) -> bool:
    """Vision and audio parts: a text route computes without them."""
    return _OTHER_MODALITY.match(name) is not None


def is_routed_expert(name: str) -> bool:
    """Whether it is of experts among which each token chooses; shared ones are not."""
    return _ROUTED_EXPERT.search(name) is not None


def unrecognised(names: Iterable[str]) -> list[str]:
    """Names that no rule knows: they go to every Shard, and are worth a warning."""
    return [
        name
        for name in names
        if place_of(name) == "shared" and not _KNOWN_SHARED.match(name) and not is_of_other_modality(name)
    ]


def check_range(first: int, last: int, n_layers: int) -> None:
    """Refuse a layer range that is not inside the model (`layers_invalid`)."""
    if not 0 <= first < last <= n_layers:
        raise ShardlineError(
            "layers_invalid",
            f"layers {first}:{last} are not a range inside a model of {n_layers} layers (0:{n_layers})",
        )


def shard_tensors(names: Iterable[str], first: int, last: int, *, n_layers: int, tied: bool) -> list[str]:
    """The tensors that Shard [first, last) needs, in the order given.

    Left out: parts of other modalities, and layers from `n_layers` on (multi-token prediction, which a route does not
    use). Errors: `layers_invalid`; `model_file_invalid` where a layer of the range has no tensor at all.
    """
    check_range(first, last, n_layers)
    taken = []
    empty = set(range(first, last))
    for name in names:
        place = place_of(name)
        if isinstance(place, int):
            needed = first <= place < last
            empty.discard(place)
        elif place == "embedding":
            needed = first == 0 or (tied and last == n_layers and is_token_matrix(name))
        elif place == "output":
            needed = last == n_layers
        else:
            needed = not is_of_other_modality(name)
        if needed:
            taken.append(name)
    if empty:
        raise ShardlineError("model_file_invalid", f"the model has no tensor of layer {min(empty)}", reason="damaged")
    return taken


def byte_ranges(tensors: Iterable[SizedTensor], *, alignment: int = 1) -> list[ByteRange]:
    """Where the tensors lie, sorted; neighbours are joined over the padding that `alignment` asks for, and over nothing
    else."""
    joined: list[ByteRange] = []
    for tensor in sorted(tensors, key=lambda t: (t.file, t.offset)):
        end = tensor.offset + tensor.nbytes
        if joined:
            last = joined[-1]
            if last.file == tensor.file and tensor.offset <= -(-last.end // alignment) * alignment:
                joined[-1] = last._replace(end=max(last.end, end))
                continue
        joined.append(ByteRange(tensor.file, tensor.offset, end))
    return joined
