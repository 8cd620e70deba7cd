"""What the model files themselves say: the facts, the files and the tensor table that a manifest states of them.

Owns that one reading, by the bounded readers of formats/, which both making a manifest and checking one go by: a
manifest is true where reading the files again gives the same. It hashes no tensor data. Digests of tokenizer and chat
template are explained in docs/artifacts.md. Shown by tests/artifact/test_creation.py and test_verification.py.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardline.formats.gguf import GGUFHeader
from shardline.formats.gguf import TensorInfo as GGUFTensor
from shardline.formats.gguf_files import GGUFModel, read_model
from shardline.formats.gguf_writer import encode_header, stored_keys
from shardline.formats.layers import is_tied, place_of
from shardline.formats.safetensors import SafetensorsFolder, read_folder, read_header, read_object
from shardline.formats.safetensors import TensorInfo as SafeTensor
from shardline.formats.shape import ModelShape, shape_of_config, shape_of_gguf
from shardline.wire.manifest import Container, Model, Quantization, TensorRow, TextDigest

TOKENIZER_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_BYTES_LIMIT = 64 << 20
_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class Contents:
    """A model as its files state it."""

    folder: Path
    """Paths of the manifest are below it."""
    container: Literal["gguf", "safetensors"]
    paths: tuple[str, ...]
    """Files with tensors, in split order, relative to `folder`."""
    data_offsets: tuple[int, ...]
    format: Container
    model: Model
    tensors: tuple[TensorRow, ...]
    license: str | None
    """What the files say; often nothing."""


def read_contents(model: Path) -> Contents:
    """Read the headers of a GGUF model (any part of it) or of a safetensors folder; `model_file_invalid`."""
    return contents_of_folder(read_folder(model)) if model.is_dir() else contents_of_gguf(read_model(model))


def contents_of_gguf(model: GGUFModel) -> Contents:
    header = model.header
    rows = gguf_rows(model.tensors.values())
    return Contents(
        folder=model.paths[0].parent,
        container="gguf",
        paths=tuple(path.name for path in model.paths),
        data_offsets=tuple(part.data_offset for part in model.headers),
        format=Container(container="gguf", gguf_version=header.version, alignment=header.alignment),
        model=gguf_facts(header, rows),
        tensors=rows,
        license=header.text("general.license", "") or None,
    )


def contents_of_folder(found: SafetensorsFolder) -> Contents:
    rows = safetensors_rows(found.tensors.values())
    return Contents(
        folder=found.folder,
        container="safetensors",
        paths=found.files,
        data_offsets=tuple(read_header(found.folder / name).data_offset for name in found.files),
        format=Container(container="safetensors"),
        model=folder_facts(found.folder, found.config, rows),
        tensors=rows,
        license=None,
    )


def gguf_rows(tensors: Iterable[GGUFTensor]) -> tuple[TensorRow, ...]:
    """The rows of a manifest for these tensors, in the order of files and bytes."""
    rows = (TensorRow(t.name, t.file, t.offset, t.nbytes, t.type, t.shape, place_of(t.name)) for t in tensors)
    return tuple(sorted(rows, key=_row_order))


def safetensors_rows(tensors: Iterable[SafeTensor]) -> tuple[TensorRow, ...]:
    """As `gguf_rows`."""
    rows = (TensorRow(t.name, t.file, t.offset, t.nbytes, t.dtype, t.shape, place_of(t.name)) for t in tensors)
    return tuple(sorted(rows, key=_row_order))


def gguf_facts(header: GGUFHeader, rows: Sequence[TensorRow]) -> Model:
    """What the first part of a GGUF model says of the whole, whose tensors are `rows`."""
    file_type = header.integer("general.file_type") if "general.file_type" in header.kv else None
    template = header.kv.get(_TEMPLATE_KEY)
    return _facts(
        shape_of_gguf(header),
        rows,
        file_type,
        gguf_tokenizer(header),
        TextDigest(sha256=_sha256(template), source="gguf") if isinstance(template, bytes) else None,
    )


def folder_facts(folder: Path, config: Mapping[str, Any], rows: Sequence[TensorRow]) -> Model:
    """What the small files in `folder`, `config` (of config.json) among them, say of a safetensors model."""
    return _facts(shape_of_config(config), rows, None, _folder_tokenizer(folder), _folder_template(folder))


def gguf_tokenizer(header: GGUFHeader) -> TextDigest | None:
    """SHA-256 of the GGUF file (version 3) that has no tensors and, in ASCII order, the keys `tokenizer.*` of this one
    but for its chat templates."""
    stored = stored_keys(header)
    names = sorted(name for name in stored if name.startswith("tokenizer.") and not name.startswith(_TEMPLATE_KEY))
    if not names:
        return None
    raw = encode_header({name: stored[name] for name in names}, ())
    return TextDigest(sha256=_sha256(raw), source="gguf", model=header.text("tokenizer.ggml.model", "") or None)


def _row_order(row: TensorRow) -> tuple[int, int, int, str]:
    return row.file, row.offset, row.nbytes, row.name


def _facts(
    shape: ModelShape,
    rows: Sequence[TensorRow],
    file_type: int | None,
    tokenizer: TextDigest | None,
    template: TextDigest | None,
) -> Model:
    return Model(
        architecture=shape.architecture,
        n_layers=shape.n_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size or None,
        context_length=shape.context_length or None,
        tied_embeddings=is_tied(row.name for row in rows),
        quantization=Quantization(tensor_types=dict(Counter(row.type for row in rows)), file_type=file_type),
        tokenizer=tokenizer,
        chat_template=template,
    )


def _folder_tokenizer(folder: Path) -> TextDigest | None:
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            with (folder / name).open("rb") as file:
                return TextDigest(sha256=hashlib.file_digest(file, "sha256").hexdigest(), source=name)
    return None


def _folder_template(folder: Path) -> TextDigest | None:
    if (folder / TEMPLATE_FILE).is_file():
        return TextDigest(sha256=_sha256((folder / TEMPLATE_FILE).read_bytes()), source=TEMPLATE_FILE)
    for name in ("chat_template.json", "tokenizer_config.json"):
        stated: Mapping[str, Any] = read_object(folder / name, CONFIG_BYTES_LIMIT) if (folder / name).is_file() else {}
        template = stated.get("chat_template")
        if isinstance(template, str):
            return TextDigest(sha256=_sha256(template.encode()), source=name)
    return None


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
