"""A tiny llama with tokens for filling in the middle, as a GGUF file that both engines read."""

from __future__ import annotations

from pathlib import Path

from tests.support.gguf_writer import Tensor, Typed, gguf_bytes
from tests.support.tiny_gguf import F32, tensor_shapes, tensor_values
from tests.support.tiny_models import BY_NAME, metadata

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def write_infilling_gguf(path: Path, **more: object) -> tuple[int, int, int]:
    """Write the file, with the keys `more` below its architecture; the ids of the three marks."""
    keys = metadata(BY_NAME["llama"])
    del keys["llama.attention.layer_norm_epsilon"]
    pieces = keys["tokenizer.ggml.tokens"] + list(MARKS)
    first = len(pieces) - len(MARKS)
    keys |= {
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.token_type": Typed("i32", [*keys["tokenizer.ggml.token_type"].value, 3, 3, 3]),
        **{f"llama.{name}": value for name, value in more.items()},
    }
    # What the library would take and no checkpoint of such a model has.
    plain = {name: shape for name, shape in tensor_shapes(gguf_bytes(keys)).items() if name.endswith(".weight")}
    shapes = {name: shape for name, shape in plain.items() if "rope" not in name}
    values = {name: tensor_values(name, shape).astype("<f4").tobytes() for name, shape in shapes.items()}
    path.write_bytes(gguf_bytes(keys, [Tensor(name, shape, F32, values[name]) for name, shape in shapes.items()]))
    return first, first + 1, first + 2
