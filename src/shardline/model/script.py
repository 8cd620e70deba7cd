"""The script of the scripted engine: a small JSON file that says what a pretended model answers, and how it fails.

Owns the file's fields, their checks and the vocabulary made of them. Refuses to compute (scripted.py). Unknown fields
are errors. Shown by tests/model/test_scripted.py.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from shardline.errors import ShardlineError
from shardline.wire.messages import TextBundle
from shardline.wire.steps import SeamLayout

SPECIALS = (b"<|end|>", b"<|system|>", b"<|user|>", b"<|assistant|>", b"<|tool|>", b"<|begin|>")
WRONG = b"<wrong-rows>"
"""The token that comes out when the rows did not all pass every layer once, in order: no special token, so that it
stands in the text."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SCRIPT_LIMIT = 16 << 20

FaultPhase = Literal["load", "open", "prefill", "decode"]
FaultKind = Literal[
    "error", "oom", "nan", "inf", "garbage", "hang", "exit", "bad_token", "wrong_width", "slow", "refuse_test"
]


class ScriptFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something goes wrong on a Shard. All conditions that are given must hold."""

    kind: FaultKind
    phase: FaultPhase
    layer: int | None = None
    """On the Shard that has this layer."""
    node: int | None = None
    """On the Shard whose first layer this is. Neither given: on all."""
    step: int | None = None
    """At the session's step of this number (from 0) in the phase; None: at each."""
    contains: str | None = None
    """In sessions whose tokens so far have this text only (prefill and decode)."""
    flag: str | None = None
    """Only while a file of this name stands beside the script; it is removed as the fault strikes: once, across
    processes and restarts."""
    ms: float = 0.0
    """`slow`: how much longer it takes."""
    signal: int | None = None
    """`exit`: by this signal, else with exit code 1."""


class AnswerRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    contains: str
    """The first rule whose text is in the prompt decides; else the script's `answer`."""
    pieces: list[str]


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of the file. Pieces are text, or `b64:…` for bytes that are not."""

    model: str
    n_layers: int = 6
    answer: list[str]
    """Token pieces that a session returns in order."""
    answers: list[AnswerRule] = []
    eos: bool = True
    """End of generation behind the last piece; false: the pieces begin again, for ever."""
    vocab: list[str] = []
    """Pieces that the tokenizer knows beside single bytes and the answers' pieces."""
    vocab_size: int | None = None
    """Filled up with unused tokens to this size."""
    context_length: int = 4096
    layout: tuple[tuple[str, str, tuple[int, ...]], ...] = (("hidden", "F32", (8,)),)
    """Seam layout: name, safetensors dtype, shape of a row."""
    decode_ms: float = 0.0
    """Of each decode batch, on each Shard."""
    prefill_ms_per_row: float = 0.0
    load_ms: float = 0.0
    kv_bytes_per_token: int = 64
    """A layer."""
    kv_capacity: int | None = None
    """Tokens that the caches of a Shard hold in all; past it a session is out of memory."""
    weight_bytes_per_layer: int = 1 << 20
    rollback: bool = True
    chat_template: str | None = CHAT_TEMPLATE
    add_bos: bool = False
    sharpness: float = 40.0
    """Logit of the answer's token; all others lie in [0, 1). Lower it to see sampling choose others."""
    faults: list[ScriptFault] = []


class Vocabulary:
    """Token ids of a script: 256 single bytes, the special tokens, `<wrong-rows>`, then pieces as they occur."""

    def __init__(self, script: Script) -> None:
        wanted = [piece_bytes(p) for p in [*script.vocab, *script.answer]]
        wanted += [piece_bytes(p) for rule in script.answers for p in rule.pieces]
        pieces = [bytes([i]) for i in range(256)] + [*SPECIALS, WRONG]
        known = set(pieces)
        for piece in wanted:
            if piece not in known:
                known.add(piece)
                pieces.append(piece)
        if script.vocab_size is not None:
            if script.vocab_size < len(pieces):
                raise _bad(f"vocab_size {script.vocab_size} is less than the {len(pieces)} pieces")
            pieces += [b"<unused-%d>" % i for i in range(len(pieces), script.vocab_size)]
        self.pieces = pieces
        self.ids = {piece: i for i, piece in enumerate(pieces)}
        self.special = frozenset(self.ids[s] for s in SPECIALS)
        self.end = self.ids[SPECIALS[0]]
        self.begin = self.ids[SPECIALS[-1]]
        self.wrong = self.ids[WRONG]
        self._plain = {p: i for p, i in self.ids.items() if i not in self.special}
        self._longest = max(map(len, pieces))

    def __len__(self) -> int:
        return len(self.pieces)

    def text(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Greedy: the longest piece that fits, a single byte in the worst case, so that every text has tokens and
        they give it back."""
        table = self.ids if parse_special else self._plain
        data = text.encode("utf-8", errors="surrogatepass")
        ids = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = table.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
        return ids


def piece_bytes(piece: str) -> bytes:
    if not piece.startswith("b64:"):
        return piece.encode()
    try:
        return base64.b64decode(piece[4:], validate=True)
    except binascii.Error:
        raise _bad(f"piece {piece!r:.40} is not base64") from None


def _bad(why: str) -> ShardlineError:
    return ShardlineError("model_file_invalid", f"script: {why}")


def read_script(path: Path) -> tuple[Script, str]:
    """The script at `path` and the SHA-256 (hex) of its bytes. Raises `model_file_invalid`."""
    try:
        if path.stat().st_size > _SCRIPT_LIMIT:
            raise _bad(f"the file is larger than {_SCRIPT_LIMIT} bytes")
        raw = path.read_bytes()
    except OSError as error:
        raise _bad(f"{path.name} cannot be read: {error.strerror}") from None
    try:
        script = msgspec.json.decode(raw, type=Script)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _bad(f"{path.name}: {error}") from None
    _check(script)
    return script, hashlib.sha256(raw).hexdigest()


def _check(script: Script) -> None:
    if not 1 <= script.n_layers <= 4096:
        raise _bad(f"n_layers is {script.n_layers}")
    if not script.answer or any(not piece_bytes(p) for p in script.answer):
        raise _bad("answer must be pieces that are not empty")
    if any(not r.pieces or any(not piece_bytes(p) for p in r.pieces) for r in script.answers):
        raise _bad("each of answers must have pieces that are not empty")
    if script.context_length < 2 or min(script.decode_ms, script.prefill_ms_per_row, script.load_ms) < 0:
        raise _bad("context_length is at least 2, and no time is negative")
    seam_layout(script)


def seam_layout(script: Script) -> SeamLayout:
    try:
        layout = SeamLayout.from_json(script.layout)
    except ValueError as error:
        raise _bad(f"layout: {error}") from None
    if not layout.tensors:
        raise _bad("layout must name a tensor")
    return layout


def text_bundle(script: Script, vocabulary: Vocabulary) -> bytes:
    bundle = TextBundle(
        pieces=vocabulary.pieces,
        special=sorted(vocabulary.special),
        eog=[vocabulary.end],
        bos=vocabulary.begin,
        eos=vocabulary.end,
        add_bos=script.add_bos,
        chat_template=script.chat_template,
        context_length=script.context_length,
    )
    return msgspec.msgpack.encode(bundle)
