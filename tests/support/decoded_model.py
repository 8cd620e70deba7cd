"""SmolLM2 with every tensor in float32: llama.cpp then computes in float32 too, and sums differ in the last bits only.

From the quantised file it rounds what goes into a matrix product to 8 bits: one last bit that differs then moves
logits by tenths.
"""

from __future__ import annotations

from pathlib import Path

import gguf

from shardline.formats.gguf import read_header


def write_decoded(source: Path, path: Path) -> Path:
    """Write the model at `source` to `path`, as one file."""
    header, reader = read_header(source), gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, header.text("general.architecture"))
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0])
        elif field.types[-1] == gguf.GGUFValueType.STRING:
            writer.add_array(key, header.strings(key))
        else:
            writer.add_array(key, list(header.numbers(key)))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
