"""Models to describe, bundles of them, and bundles that somebody tampered with."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from shardline.artifact.bundle import MANIFEST_NAME, SIGNATURE_NAME, TORRENT_NAME, Bundle
from shardline.artifact.creation import Description, create_bundle
from shardline.artifact.signing import new_key, sign
from tests.support.gguf_models import metadata, small_model, tensors
from tests.support.gguf_writer import Tensor, Typed, gguf_bytes

CREATED = Description(created="2026-01-31T12:00:00Z")
BIG = Tensor("blk.2.ffn_up.weight", (32, 8192), data=bytes(range(256)) * 4096)
"""1 MiB, so that a file has several pieces of 256 KiB."""


@cache
def publisher() -> EllipticCurvePrivateKey:
    """The key that signs in tests."""
    return new_key()


def big_gguf(folder: Path, *, tied: bool = True) -> Path:
    """A model of 8 layers in one file of a bit over 1 MiB."""
    return small_model(folder, tied=tied, extra=[BIG]).paths[0]


def split_gguf(folder: Path, parts: int = 3) -> list[Path]:
    """The same model in several files."""
    whole = tensors(8, [BIG])
    paths = []
    for number in range(parts):
        split = {
            "split.no": Typed("u16", number),
            "split.count": Typed("u16", parts),
            "split.tensors.count": Typed("i32", len(whole)),
        }
        keys = metadata("llama", 8) if number == 0 else {}
        path = folder / f"tiny-{number + 1:05d}-of-{parts:05d}.gguf"
        path.write_bytes(gguf_bytes({**keys, **split}, whole[number::parts]))
        paths.append(path)
    return paths


def safetensors_bytes(tensors: Mapping[str, tuple[list[int], bytes]]) -> bytes:
    """A file of F32 tensors: shape and content by name."""
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, content) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(content)]}
        end += len(content)
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + b"".join(content for _, content in tensors.values())


def safetensors_folder(folder: Path, layers: int = 4) -> Path:
    """A model of two files with an index, tokenizer, template and licence."""
    folder.mkdir()
    weights = {"model.embed_tokens.weight": ([16, 8], 4), "model.norm.weight": ([8], 5)} | {
        f"model.layers.{layer}.mlp.weight": ([8, 8], 6 + layer) for layer in range(layers)
    }
    made = {name: (shape, bytes([seed]) * (4 * _product(shape))) for name, (shape, seed) in weights.items()}
    files = {f"model-{i + 1:05d}-of-00002.safetensors": dict(list(made.items())[i::2]) for i in range(2)}
    for name, part in files.items():
        (folder / name).write_bytes(safetensors_bytes(part))
    index = {"weight_map": {tensor: name for name, part in files.items() for tensor in part}}
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 8, "vocab_size": 16}
    small = {
        "model.safetensors.index.json": json.dumps(index),
        "config.json": json.dumps(config),
        "tokenizer.json": "{}",
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"}),
        "LICENSE": "free",
        "training.log": "not part of an artifact",
    }
    for name, text in small.items():
        (folder / name).write_text(text)
    return folder


def _product(shape: list[int]) -> int:
    result = 1
    for dim in shape:
        result *= dim
    return result


def signed_bundle(model: Path, output: Path, description: Description = CREATED) -> Bundle:
    return create_bundle(model, output, description, key=publisher())


def sign_again(folder: Path, key: EllipticCurvePrivateKey | None = None) -> None:
    """Sign whatever now lies in a bundle, as a publisher who means it would."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != SIGNATURE_NAME]
    digests = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    (folder / SIGNATURE_NAME).write_bytes(sign(key or publisher(), folder.name, digests))


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], None], *, signed: bool = True) -> None:
    """Edit the manifest of a bundle and write it canonically again; `signed`: by its publisher."""
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    if signed:
        sign_again(folder)


def replace_torrent(folder: Path, raw: bytes) -> None:
    """Another torrent, with the digest in the manifest changed to fit, and signed."""
    (folder / TORRENT_NAME).write_bytes(raw)

    def fit(manifest: dict[str, Any]) -> None:
        manifest["transport"]["bittorrent"]["torrent_sha256"] = hashlib.sha256(raw).hexdigest()

    change_manifest(folder, fit)
