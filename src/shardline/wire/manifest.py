"""The manifest of a Model Artifact, version 1: its files, digests and tensor table, as canonical JSON.

Owns the schema and every rule that can be judged from the document alone: paths, sizes, rows inside their files. It
trusts nobody: whoever calls `decode_manifest` has checked the signature over the bytes, or knows that there is none
(artifact/bundle.py). `content_id` is compared there too. Pure. Shown by tests/wire/test_manifest.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from shardline.errors import ShardlineError
from shardline.wire import canonical

SCHEMA: Final = "shardline/model-artifact/v1"
MANIFEST_BYTES_LIMIT = 16 << 20
FILES_LIMIT = 10_000
SMALL_FILES_LIMIT = 1_000
TENSORS_LIMIT = 200_000
WEBSEEDS_LIMIT = 100
DIMS_LIMIT = 8
PIECE_LENGTH_LIMITS = (16 << 10, 16 << 20)
PATH_BYTES_LIMIT = 1024
NAME_BYTES_LIMIT = 255
LAYERS_LIMIT = 4096
COLUMNS = ("name", "file", "offset", "length", "type", "shape", "layer")
EXTENSION = "x-"
"""Top-level keys that begin so may be added by anybody, are covered by the signature, and mean nothing here."""
EXTENSION_BYTES_LIMIT = 64 << 10

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Size = Annotated[int, msgspec.Meta(ge=1, le=canonical.INTEGER_LIMIT)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=canonical.INTEGER_LIMIT)]
_Index = Annotated[int, msgspec.Meta(ge=0, lt=FILES_LIMIT)]
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=LAYERS_LIMIT)]
_Dims = Annotated[tuple[Offset, ...], msgspec.Meta(max_length=DIMS_LIMIT)]

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_TYPE = re.compile(r"[A-Z][A-Z0-9_]{0,30}")
_WEBSEED = re.compile(r"https?://[A-Za-z0-9.\-\[\]:]{1,255}(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]*)*/")
_DEVICES = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
_FORBIDDEN = frozenset('\\/:*?"<>|%')


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What all parts of the manifest are: without room for keys that nobody knows, absent where empty."""


class Origin(_Part, frozen=True, kw_only=True):
    """Where the files came from. For people; nothing is fetched from there."""

    url: Text
    revision: Text | None = None


class Container(_Part, frozen=True, kw_only=True):
    """How the files hold tensors."""

    container: Literal["gguf", "safetensors"]
    gguf_version: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    alignment: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None


class Quantization(_Part, frozen=True, kw_only=True):
    """Tensors counted by type, and the number that GGUF has for the mix."""

    tensor_types: dict[str, Size]
    file_type: Offset | None = None


class TextDigest(_Part, frozen=True, kw_only=True):
    """A tokenizer or a chat template: its digest (docs/artifacts.md says of which bytes), and where it stands."""

    sha256: Sha256
    source: Text
    """`gguf`, or the path of a small file."""
    model: Text | None = None
    """What kind of tokenizer the files say it is."""


class Model(_Part, frozen=True, kw_only=True):
    """What the model is, as its own files state it."""

    architecture: Text
    n_layers: Annotated[int, msgspec.Meta(ge=1, le=LAYERS_LIMIT)]
    hidden_size: Size
    tied_embeddings: bool
    quantization: Quantization
    vocab_size: Size | None = None
    context_length: Size | None = None
    tokenizer: TextDigest | None = None
    chat_template: TextDigest | None = None


class FileEntry(_Part, frozen=True, kw_only=True):
    """A file that holds tensors. These are what a torrent has and what Nodes fetch parts of."""

    path: str
    """Relative, with `/`; inside the folder of the model."""
    size: Size
    sha256: Sha256
    pieces_root: Sha256 = msgspec.field(name="bt2_pieces_root")
    """Root of the BEP 52 tree in hex; it does not depend on the piece length."""
    data_offset: Size
    """Where tensor data begin: the bytes before are the header."""

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.pieces_root)


class SmallFile(_Part, frozen=True, kw_only=True):
    """A file that travels whole, inside the bundle."""

    path: str
    size: Offset
    sha256: Sha256


class TensorRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor, in the order of `COLUMNS`: the bytes [offset, offset + nbytes) of file number `file`."""

    name: str
    file: _Index
    offset: Offset
    """From the start of the file."""
    nbytes: Offset
    type: str
    """As the container names it: Q4_1, BF16 …"""
    shape: _Dims
    """In the container's order: GGUF innermost first, safetensors outermost first."""
    layer: _Layer | Literal["embedding", "output", "shared"]


class BitTorrent(_Part, frozen=True, kw_only=True):
    """The torrent of this manifest."""

    meta_version: Literal[2]
    piece_length: Annotated[int, msgspec.Meta(ge=PIECE_LENGTH_LIMITS[0], le=PIECE_LENGTH_LIMITS[1])]
    info_hash_v2: Sha256
    torrent_sha256: Sha256
    """Of the file `model.torrent`, which holds the piece hashes."""


class Transport(_Part, frozen=True, kw_only=True):
    """Ways to get the files. Whoever has them may add others: they are no part of the identity."""

    bittorrent: BitTorrent
    webseeds: tuple[Text, ...] = ()
    """URLs of folders, ending in `/`; a file is at URL + `Manifest.torrent_path`."""


class Manifest(_Part, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The whole document. Valid from birth where `decode_manifest` or `checked` made it."""

    schema: Literal["shardline/model-artifact/v1"]
    content_id: Annotated[str, msgspec.Meta(pattern="^mac1-[0-9a-f]{64}$")]
    name: str
    """Also the name of the torrent, and of the folder in it where there are several files."""
    created: str
    """RFC 3339, in UTC and whole seconds."""
    format: Container
    model: Model
    files: Annotated[tuple[FileEntry, ...], msgspec.Meta(min_length=1, max_length=FILES_LIMIT)]
    """In split order."""
    tensor_columns: tuple[str, ...]
    """`COLUMNS`."""
    tensors: Annotated[tuple[TensorRow, ...], msgspec.Meta(min_length=1, max_length=TENSORS_LIMIT)]
    transport: Transport
    small_files: Annotated[tuple[SmallFile, ...], msgspec.Meta(max_length=SMALL_FILES_LIMIT)] = ()
    version: Text | None = None
    license: Text | None = None
    """SPDX expression."""
    source: Annotated[tuple[Origin, ...], msgspec.Meta(max_length=100)] = ()

    @property
    def piece_length(self) -> int:
        """Bytes of a piece of all files."""
        return self.transport.bittorrent.piece_length

    def torrent_path(self, entry: FileEntry) -> str:
        """Where clients of the torrent put a file: below a folder `name`, unless it is alone and called so itself."""
        alone = len(self.files) == 1 and entry.path == self.name
        return entry.path if alone else f"{self.name}/{entry.path}"

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes, which are what is signed."""
    raw = canonical.encode(manifest)
    if len(raw) > MANIFEST_BYTES_LIMIT:
        raise _bad(f"it would have {len(raw)} bytes, the limit is {MANIFEST_BYTES_LIMIT}")
    return raw


def decode_manifest(raw: bytes) -> Manifest:
    """A checked manifest; `artifact_invalid` says what is wrong with it. Nothing is believed before this returns."""
    if len(raw) > MANIFEST_BYTES_LIMIT:
        raise _bad(f"it has {len(raw)} bytes, the limit is {MANIFEST_BYTES_LIMIT}")
    try:
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        more = _extensions(members)
        # Decoded as what it shall be: bytes that are something else end it before they become large lists.
        manifest = msgspec.json.decode(raw, type=Manifest)
        if canonical.write(_members(manifest) | more) != raw:
            raise _bad("it is not in canonical form (RFC 8785), a key stands twice, or an empty value is written out")
    except canonical.NotCanonical as error:
        raise _bad(str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _bad(canonical.words_of(error)) from None
    return checked(manifest)


def _extensions(members: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The keys that others added; an unknown one without their prefix is refused."""
    known = {field.encode_name for field in msgspec.structs.fields(Manifest)}
    added = {key: bytes(value) for key, value in members.items() if key not in known}
    if sum(map(len, added.values())) > EXTENSION_BYTES_LIMIT:
        raise _bad(f"the keys {EXTENSION}… have more than {EXTENSION_BYTES_LIMIT} bytes")
    for key in added:
        if not key.startswith(EXTENSION) or not key.isascii():
            raise _bad(f"it has the unknown key {key!r:.100}")
    return {key: canonical.decode(value) for key, value in added.items()}


def _members(manifest: Manifest) -> dict[str, Any]:
    """What stands in the document: all but empty values that need not be there."""
    members = {}
    for field in msgspec.structs.fields(Manifest):
        value = getattr(manifest, field.name)
        if field.required or value != field.default:
            members[field.encode_name] = value
    return members


def checked(manifest: Manifest) -> Manifest:
    """The manifest itself, once its parts are found to fit together (`artifact_invalid` else)."""
    if manifest.tensor_columns != COLUMNS:
        raise _bad(f"tensor_columns is not {list(COLUMNS)}")
    if not _TIME.fullmatch(manifest.created):
        raise _bad("created is not a time such as 2026-01-31T00:00:00Z")
    _check_segment(manifest.name, "name")
    _check_paths([entry.path for entry in manifest.files] + [entry.path for entry in manifest.small_files])
    _check_files(manifest.files)
    piece_length = manifest.piece_length
    if piece_length & (piece_length - 1):
        raise _bad(f"piece_length {piece_length} is not a power of two")
    for url in manifest.transport.webseeds:
        if not _WEBSEED.fullmatch(url):
            raise _bad(f"the web seed {url!r:.100} is not a plain http or https URL that ends in /")
    if len(manifest.transport.webseeds) > WEBSEEDS_LIMIT:
        raise _bad(f"{len(manifest.transport.webseeds)} web seeds, the limit is {WEBSEEDS_LIMIT}")
    _check_tensors(manifest)
    if other := [kind for kind in manifest.model.quantization.tensor_types if not _TYPE.fullmatch(kind)]:
        raise _bad(f"{other[0]!r:.60} is no tensor type")
    for text in _texts(manifest):
        _check_text(text)
    return manifest


def manifest_digest(raw: bytes) -> str:
    """SHA-256 of the bytes in hex: names this very document, publisher's words included."""
    return hashlib.sha256(raw).hexdigest()


def check_path(path: str) -> None:
    """Refuse a path that could lead out of a folder, or that some system cannot store (`artifact_invalid`)."""
    if len(path.encode("utf-8", "replace")) > PATH_BYTES_LIMIT:
        raise _bad(f"the path {path!r:.60} has more than {PATH_BYTES_LIMIT} bytes")
    for segment in path.split("/"):
        _check_segment(segment, f"path {path!r:.100}")


def _check_segment(segment: str, what: str) -> None:
    """A name of a file or folder on every system: no separators, drives, devices, hidden names or odd ends."""
    reason = None
    if not 1 <= len(segment.encode("utf-8", "replace")) <= NAME_BYTES_LIMIT:
        reason = f"is not 1 to {NAME_BYTES_LIMIT} bytes"
    elif not segment.isprintable() or not _FORBIDDEN.isdisjoint(segment):
        reason = "has a character that a file name cannot have everywhere"
    elif segment[0] in ". " or segment[-1] in ". ":
        reason = "begins or ends with a dot or a space"
    elif _DEVICES.fullmatch(segment.casefold()):
        reason = "is the name of a device"
    if reason is not None:
        raise _bad(f"{what}: {segment!r:.100} {reason}")


def _check_paths(paths: Sequence[str]) -> None:
    """All are safe, none is another's, or another's folder, on a system that does not tell case apart."""
    seen: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        check_path(path)
        folded = path.casefold()
        if folded in seen:
            raise _bad(f"the path {path!r:.100} stands twice")
        seen.add(folded)
        parts = folded.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
    if both := seen & folders:
        raise _bad(f"the path {min(both)!r:.100} is a file and a folder")


def _check_files(files: Sequence[FileEntry]) -> None:
    roots: dict[str, str] = {}
    for entry in files:
        if entry.data_offset > entry.size:
            raise _bad(f"the header of {entry.path} ends at {entry.data_offset}, behind its {entry.size} bytes")
        twin = roots.setdefault(entry.pieces_root, entry.path)
        if twin != entry.path:
            raise _bad(f"{twin} and {entry.path} have equal content: a torrent with both could stall for ever")


def _check_tensors(manifest: Manifest) -> None:
    """Each row lies inside the data of its file, and no two on the same bytes."""
    names: set[str] = set()
    ends = [entry.data_offset for entry in manifest.files]
    for row in sorted(manifest.tensors, key=lambda r: (r.file, r.offset, r.nbytes)):
        if row.name in names:
            raise _bad(f"tensor {row.name!r:.100} stands twice")
        names.add(row.name)
        if not 1 <= len(row.name) <= 512 or not _TYPE.fullmatch(row.type):
            raise _bad(f"tensor {row.name!r:.100} of type {row.type!r:.40} has no proper name or type")
        if row.file >= len(manifest.files):
            raise _bad(f"tensor {row.name!r:.100} lies in file {row.file} of {len(manifest.files)}")
        if row.offset < ends[row.file]:
            raise _bad(f"tensor {row.name!r:.100} lies on bytes of the header or of another tensor")
        ends[row.file] = row.offset + row.nbytes
        if ends[row.file] > manifest.files[row.file].size:
            raise _bad(f"tensor {row.name!r:.100} ends behind the end of {manifest.files[row.file].path}")


def _check_text(text: str) -> None:
    if not text.isprintable():
        raise _bad(f"the text {text!r:.100} has characters that cannot be shown")
    try:
        canonical.check_text(text)
    except canonical.NotCanonical as error:
        raise _bad(str(error)) from None


def _texts(manifest: Manifest) -> Iterable[str]:
    """Whatever may be shown to a person, on a terminal: all strings that are not of a form of their own."""
    model = manifest.model
    yield manifest.name
    yield from (entry.path for entry in manifest.files)
    yield from (entry.path for entry in manifest.small_files)
    yield from (row.name for row in manifest.tensors)
    yield from (text for text in (manifest.version, manifest.license, model.architecture) if text is not None)
    for origin in manifest.source:
        yield from (text for text in (origin.url, origin.revision) if text is not None)
    for digest in (model.tokenizer, model.chat_template):
        if digest is not None:
            yield from (text for text in (digest.source, digest.model) if text is not None)


def _bad(message: str) -> ShardlineError:
    return ShardlineError("artifact_invalid", f"invalid manifest: {message}")
