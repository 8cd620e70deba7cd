"""A model of more than a billion parameters, made on the spot: the shape of a small Llama, random 4-bit weights.

For speed alone: what it says is noise. Its scales are small, so that no value runs away over the layers.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardline.cli.demo_model import demo_model
from shardline.formats.gguf import GGUFHeader
from shardline.formats.gguf_files import read_model
from shardline.formats.gguf_writer import (
    Stored,
    TensorRow,
    encode_header,
    f32,
    padding,
    stored_keys,
    text,
    u32,
)

F32, Q4_0 = 0, 2
_BLOCK = np.dtype([("scale", "<f2"), ("quants", "u1", 16)])
_CHUNK_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama."""

    layers: int = 22
    hidden: int = 2048
    feed_forward: int = 5632
    heads: int = 32
    kv_heads: int = 4
    context: int = 4096

    def rows(self, vocab: int) -> list[TensorRow]:
        """The tensor table; the head is the embedding matrix."""
        kv = self.hidden // self.heads * self.kv_heads
        found = [TensorRow("token_embd.weight", Q4_0, (self.hidden, vocab))]
        for layer in range(self.layers):
            for name, kind, shape in (
                ("attn_norm", F32, (self.hidden,)),
                ("attn_q", Q4_0, (self.hidden, self.hidden)),
                ("attn_k", Q4_0, (self.hidden, kv)),
                ("attn_v", Q4_0, (self.hidden, kv)),
                ("attn_output", Q4_0, (self.hidden, self.hidden)),
                ("ffn_norm", F32, (self.hidden,)),
                ("ffn_gate", Q4_0, (self.hidden, self.feed_forward)),
                ("ffn_up", Q4_0, (self.hidden, self.feed_forward)),
                ("ffn_down", Q4_0, (self.feed_forward, self.hidden)),
            ):
                found.append(TensorRow(f"blk.{layer}.{name}.weight", kind, shape))
        return [*found, TensorRow("output_norm.weight", F32, (self.hidden,))]

    def keys(self, vocabulary: GGUFHeader) -> dict[str, Stored]:
        """Metadata, with the tokenizer of another model."""
        numbers = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.dimension_count": self.hidden // self.heads,
        }
        return {
            "general.architecture": text("llama"),
            "general.name": text(f"Random Llama of {self.layers} layers"),
            "general.file_type": u32(2),
            **{f"llama.{name}": u32(value) for name, value in numbers.items()},
            "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
            "llama.rope.freq_base": f32(10000.0),
            **{k: v for k, v in stored_keys(vocabulary).items() if k.startswith("tokenizer.")},
        }


def write_random_model(path: Path, shape: Shape = Shape(), *, seed: int = 0) -> Path:
    """The same file for the same arguments."""
    vocabulary = read_model(demo_model()).header
    rows = shape.rows(read_model(demo_model()).tensors["token_embd.weight"].shape[1])
    chance = np.random.default_rng(seed)
    blocks = np.empty(_CHUNK_BLOCKS, _BLOCK)
    blocks["scale"] = np.float16(1 / (5 * math.sqrt(shape.hidden)))
    blocks["quants"] = chance.integers(0, 256, (_CHUNK_BLOCKS, 16), np.uint8)
    pattern = blocks.tobytes()
    with path.open("wb") as file:
        file.write(encode_header(shape.keys(vocabulary), rows))
        for row in rows:
            if row.type_id == F32:
                file.write(np.ones(row.shape, np.float32).tobytes())
            else:
                left, start = row.nbytes, 18 * int(chance.integers(0, _CHUNK_BLOCKS))
                while left:
                    piece = pattern[start : start + left]
                    file.write(piece)
                    left, start = left - len(piece), 0
            file.write(bytes(padding(row.nbytes)))
    return path


if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]))
