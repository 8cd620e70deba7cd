"""The metadata of a Shard's own GGUF file: the model's, cut to its layers, and told what llama.cpp would else guess.

Owns which keys stay, which are sliced, and which are written because llama.cpp would derive them from the number of a
layer or of all layers. Tensors are in shard_gguf.py. Pure. Shown by tests/formats/test_shard_keys.py and
test_shard_gguf.py.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from shardline.errors import ShardlineError
from shardline.formats.architectures import LlamaRules
from shardline.formats.cuts import Cuts, has_sections
from shardline.formats.gguf import Array, GGUFHeader
from shardline.formats.gguf_writer import Stored, array_of, f32, stored_keys, text, u32
from shardline.formats.layer_kinds import ArchitectureKeys

TINY_VOCABULARY = 32
"""Token ids that a part without the output matrix pretends to have: less than 100 KiB of zeros in most models."""

GENERAL = frozenset(
    {"general.architecture", "general.type", "general.name", "general.file_type", "general.quantization_version"}
)
PER_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.indexer.types",
    "attention.recurrent_layers",
    "attention.rope_pattern",
    "attention.sliding_window_pattern",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Keys that may have one entry a layer, and those of `PER_LAYER_PLAIN`, which have no prefix."""
PER_LAYER_PLAIN = ("xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps")

_DROPPED = ("nextn_predict_layers", "deepstack_mapping", "vocab_size")
_LARGEST_FLOAT32 = 3.4028234e38
_SIGMOID, _SOFTMAX = 2, 1
_SIGMOID_LAYERS, _SIGMOID_VOCABULARY = (47, 48), 154_880
"""What llama.cpp takes for a GLM by its size, and gives sigmoid gates if the file does not say which."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """Factors around the first layer of a part, float32."""

    embedding: float = 1.0
    """The head multiplies the embedding rows that it looks up with this."""
    graph: float = 1.0
    """llama.cpp multiplies the rows that it is given with this: whoever hands them in divides by it before."""


def input_scale(header: GGUFHeader, cuts: Cuts, rules: LlamaRules, first: int) -> InputScale:
    """How rows are scaled on their way into the part that begins with layer `first`."""
    root = _float32(math.sqrt(cuts.shape.hidden_size))
    if rules.embedding == "key":
        keys = ArchitectureKeys(header, cuts.shape)
        scale = keys.number("embedding_scale", rules.embedding_default or 0.0)
        if abs(scale) > _LARGEST_FLOAT32:
            name = keys.name("embedding_scale")
            raise ShardlineError("model_file_invalid", f"key {name} is {scale}, too large", reason="damaged")
        return InputScale(embedding=_float32(scale) or 1.0)
    if rules.embedding == "sqrt_width":
        return InputScale(embedding=root)
    if rules.embedding == "sqrt_width_always":
        return InputScale(graph=root if first else 1.0)
    return InputScale()


def part_keys(header: GGUFHeader, cuts: Cuts, rules: LlamaRules, first: int, last: int) -> dict[str, Stored]:
    """All keys of the file of Shard [first, last), but for the project's own; `vocab_size` is the tiny one."""
    keys = ArchitectureKeys(header, cuts.shape)
    part = _Part(keys, cuts, rules, first, last)
    part.keep()
    part.slice_arrays()
    part.count()
    part.tell_kinds()
    part.tell_heads()
    part.tell_scales()
    part.tell_sections()
    part.tell_what_counts_decide()
    return part.result


class _Part:
    """The metadata under construction; each method is one reason to change it."""

    def __init__(self, keys: ArchitectureKeys, cuts: Cuts, rules: LlamaRules, first: int, last: int) -> None:
        self.keys = keys
        self.cuts = cuts
        self.rules = rules
        self.first = first
        self.last = last
        self.result: dict[str, Stored] = {}

    def keep(self) -> None:
        """Only what llama.cpp reads of a model without a vocabulary: the file's header must stay small."""
        prefix = self.keys.name("")
        dropped = {self.keys.name(key) for key in _DROPPED}
        for key, stored in stored_keys(self.keys.header).items():
            kept = key in GENERAL or key in PER_LAYER_PLAIN or key.startswith(prefix)
            if kept and key not in dropped:
                self.result[key] = stored
        self.result["tokenizer.ggml.model"] = text("none")

    def write(self, key: str, stored: Stored) -> None:
        self.result[self.keys.name(key)] = stored

    def slice_arrays(self) -> None:
        blocks, n_layers = self.keys.blocks, self.cuts.n_layers
        for key in (*(self.keys.name(key) for key in PER_LAYER), *PER_LAYER_PLAIN):
            stored = self.result.get(key)
            if stored is None or not isinstance(stored.value, Array):
                continue
            array = stored.value
            if array.count not in (n_layers, blocks) or array.kind == "string":
                raise ShardlineError(
                    "model_file_invalid",
                    f"key {key} has {array.count} entries for {blocks} layers",
                    reason="damaged",
                )
            width = len(array.raw) // array.count
            raw = array.raw[self.first * width : self.last * width]
            self.result[key] = Stored("array", Array(array.kind, self.last - self.first, raw))

    def count(self) -> None:
        self.write("block_count", u32(self.last - self.first))
        lead = self.keys.integer("leading_dense_block_count", 0)
        if self.keys.name("leading_dense_block_count") in self.result:
            self.write("leading_dense_block_count", u32(min(max(lead - self.first, 0), self.last - self.first)))
        if self.keys.name("n_deepstack_layers") in self.result:
            self.write("n_deepstack_layers", u32(0))
        self.write("vocab_size", u32(TINY_VOCABULARY))

    def tell_kinds(self) -> None:
        """Patterns of the model that llama.cpp would count from the first layer of the part."""
        kinds = self.cuts.kinds
        if kinds.windowed is not None:
            self._flags("attention.sliding_window_pattern", kinds.windowed)
        if kinds.recurrent is not None and self.rules.recurrent == "interval":
            self._flags("attention.recurrent_layers", kinds.recurrent)
        if kinds.indexed is not None:
            self._flags("attention.indexer.types", kinds.indexed)

    def _flags(self, key: str, flags: tuple[bool, ...]) -> None:
        stored = self.result.get(self.keys.name(key))
        if stored is None or not isinstance(stored.value, Array):
            self.write(key, array_of("bool", flags[self.first : self.last]))

    def tell_heads(self) -> None:
        """Widths that follow from the first layer's number of heads, where that number differs among layers."""
        heads = self.keys.per_layer("attention.head_count")
        if heads is None or heads[0] == 0:
            return
        width = self.cuts.shape.hidden_size // int(heads[0])
        key_width = self.keys.integer("attention.key_length", width)
        for key, value in (
            ("attention.key_length", key_width),
            ("attention.value_length", width),
            ("rope.dimension_count", key_width),
        ):
            if self.keys.name(key) not in self.result:
                self.write(key, u32(value))

    def tell_scales(self) -> None:
        if self.rules.embedding == "key":
            self.write("embedding_scale", f32(1.0))
        if self.rules.residual_depth is not None and self.keys.name("residual_scale") not in self.result:
            # In float32 from end to end, as llama.cpp computes it.
            root = _float32(math.sqrt(self.cuts.n_layers))
            self.write("residual_scale", f32(_float32(self.rules.residual_depth) / root))

    def tell_sections(self) -> None:
        """Positions in several parts of which all are equal: the graph then takes rows, and computes the same."""
        if self.rules.sections != "write" or has_sections(self.keys):
            return
        shape = self.cuts.shape
        half = self.keys.integer("rope.dimension_count", shape.key_width or 0) // 2
        if half < 2:
            raise ShardlineError(
                "model_file_invalid",
                f"key {self.keys.name('rope.dimension_count')} leaves nothing to rotate",
                reason="damaged",
            )
        self.write("rope.dimension_sections", array_of("i32", (half - half // 2, half // 2, 0, 0)))

    def tell_what_counts_decide(self) -> None:
        """What llama.cpp would conclude from the number of layers of the whole model."""
        if self.rules.count_cure == "no_q_lora" and self.cuts.is_special():
            self.write("attention.q_lora_rank", u32(0))
        if self.rules.gating_default and not self.keys.integer("expert_gating_func", 0):
            shape = self.cuts.shape
            sigmoid = shape.n_layers in _SIGMOID_LAYERS and shape.vocab_size == _SIGMOID_VOCABULARY
            self.write("expert_gating_func", u32(_SIGMOID if sigmoid else _SOFTMAX))


def _float32(value: float) -> float:
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result
