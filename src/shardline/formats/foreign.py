"""What a file is that was given as a model but is none: a web page, a git-lfs pointer, an archive …

Owns the guess from the first bytes and the advice that goes with it; reads no file. A user who has saved a login
page as `model.gguf` learns that here, instead of "bad magic". Shown by tests/formats/test_gguf_hostile.py.
"""

from __future__ import annotations

_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGML", b"GGMF", b"GGJT", b"GGLA")
_PREFIXES: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself: run 'git lfs pull', or download the file"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint: unpack it, or take the GGUF or safetensors version"),
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive: unpack it first"),
    (b"\xfd7zXZ", "an xz archive: unpack it first"),
    (b"\x80\x02", "a Python pickle: take the GGUF or safetensors version of the model"),
    (b"%PDF", "a PDF document"),
    (b"\x93NUMPY", "a NumPy array"),
)
SNIFF_BYTES = 512


def describe_foreign(head: bytes, file_size: int) -> str:
    """Say in words what a file of `file_size` bytes that begins with `head` looks like, and what to do about it."""
    if file_size == 0:
        return "an empty file: the download has not begun, or it failed"
    if file_size < 4:
        return f"a file of {file_size} bytes: the download failed"
    if head[:4] in _OLD_MAGICS:
        return "a file in the old GGML format, which is not supported: convert the model to GGUF"
    for prefix, words in _PREFIXES:
        if head.startswith(prefix):
            return words
    text = head[:SNIFF_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<")):
        return "a web page (a login or error page?): download the file itself, then check its size"
    if text.startswith((b"{", b"[")):
        return "JSON text (an error answer of a server?): download the file itself"
    if len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < file_size:
        return "a safetensors file: give the folder that holds it and its config.json"
    if head[:4] == b"GGUF":
        return "a GGUF file"
    if not any(head):
        return "zeros: a download that was reserved on disk but not filled"
    return f"nothing that is known here: it begins with the bytes {head[:4].hex(' ')}"
