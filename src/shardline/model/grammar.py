"""What an answer may be: grammars and schemas of requests, as masks over the vocabulary, for every engine alike.

Owns the one use of llguidance: the vocabulary as its trie, compiled grammars (bounded in size and work, kept for the
next request), and the constraint of one session, whose next mask is made on a thread of its own while the step runs.
Refuses to sample (sampling.py) and to know requests. Without llguidance every grammar is refused, never ignored.
Shown by tests/model/test_grammar.py.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.wire.messages import GRAMMAR_BYTES, Grammar, TextBundle

T = TypeVar("T")

GBNF_BYTES = 16 << 10
"""Of a grammar in GBNF: it is turned into Lark in plain Python, whose time grows with the square of its length."""
_MADE_LATER_TOKENS = 65_536
COMPILED_KEPT = 32
MASK_S = 2.0
"""How long a mask is waited for, and with it the whole batch; llguidance's own bounds end its work before that."""
_LIMITS = {
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 10_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
"""Of llguidance: a state takes up to 2 KB, a grammar of this size compiles in a quarter of a second, and an object with
2,000 optional members has 8,000 items in its first row."""
_STACK_BYTES = 512 << 20
"""Of the thread that compiles: it goes as deep as rules name each other, and a stack that ends takes the process. So
much address space, of which a grammar of the largest size uses a part."""
_THREADS = 2
_REASON_CHARACTERS = 600
_PIECE_BYTES = 200
"""Of a token; llguidance's trie has room for 255. A longer one may never come where there is a grammar."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between two tokens of JSON: a small model that may go on with blank space does so until its limit."""


class Mask(NamedTuple):
    """What may come next. `penalty`: float32, [vocab_size], 0 where a token may come and minus infinity where not."""

    penalty: npt.NDArray[np.float32]
    complete: bool
    """What has come is whole: it may end here."""


class Grammars:
    """Compiles the grammars that requests bring, for the tail of one model. `check` may be called by any thread."""

    def __init__(self, text: bytes | None, vocab_size: int) -> None:
        """`text`: MessagePack of the model's `TextBundle`; None: it has none.

        The trie of a small vocabulary is made with the first grammar: it takes some 400 bytes a token, which a Node
        that never sees a grammar need not hold. While it is made, nothing else of this process runs: 0.13 s for 50,000
        tokens, 0.9 s for 262,000. So that of a large one is made at once, before anybody waits.
        """
        self._text = text
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._making = threading.Lock()
        self._unavailable = ""
        self._library: Any = None
        self._trie: Any = None
        if vocab_size > _MADE_LATER_TOKENS:
            self._make()

    def check(self, grammar: Grammar) -> None:
        """Compile, and remember. Raises `grammar_invalid` with llguidance's reason, or `unsupported_parameter`."""
        self._matcher(grammar)

    def constraint(self, grammar: Grammar) -> Constraint:
        """For one session, from its first generated token on. Raises what `check` does."""
        return Constraint(self._matcher(grammar).deep_copy(), grammar.field, self._vocab_size, self._threads)

    def _make(self) -> None:
        """The trie, or why there is none."""
        if self._text is None:
            self._unavailable = "the model has no text"
            return
        try:
            import llguidance
        except ImportError:
            self._unavailable = "its Nodes run without llguidance, which keeps answers to a grammar"
            return
        text = msgspec.msgpack.decode(self._text, type=TextBundle)
        ends = [token for token in text.eog if token < self._vocab_size]
        if not ends:
            self._unavailable = "the model has no token that ends an answer"
            return
        words = llguidance.TokenizerWrapper(_Words(text, self._vocab_size, ends[0]))
        try:
            self._trie = llguidance.LLTokenizer(words, n_vocab=self._vocab_size, eos_token=ends)
        except BaseException as error:
            if not isinstance(error, Exception):
                _raise_unless_panic(error)
            self._unavailable = "llguidance cannot read its vocabulary"
        self._library = llguidance

    def _matcher(self, grammar: Grammar) -> Any:
        with self._making:
            if self._trie is None and not self._unavailable:
                self._make()
        if self._unavailable:
            message = f"'{grammar.field}' is not supported for this model: {self._unavailable}"
            raise ShardlineError("unsupported_parameter", message, param=grammar.field)
        key = (grammar.kind, grammar.text, grammar.before)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher
        matcher = _on_deep_stack(lambda: self._compile(grammar))
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > COMPILED_KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> Any:
        size = len(grammar.text.encode()) + len(grammar.before.encode())
        if size > GRAMMAR_BYTES:
            raise _invalid(grammar.field, f"it has {size} bytes, at most {GRAMMAR_BYTES} are taken")
        limits = self._library.LLParserLimits(**_LIMITS)
        matcher = self._library.LLMatcher(self._trie, self._source(grammar), log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not first.is_error():
            first.compute_bitmask()  # what is too much work already for the first token is told now
        if first.is_error():
            raise _invalid(grammar.field, first.get_error())
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """In llguidance's own form. Where only one text can come, any tokens that spell it may: else it would ask for
        the one way in which a tokenizer does, and the model knows best how it goes on."""
        if grammar.kind == "json_schema":
            ours: dict[str, Any] = {"json_schema": _schema(grammar)}
        elif grammar.kind == "regex":
            made = json.loads(self._library.LLMatcher.grammar_from_regex(grammar.text))
            ours = {"lark_grammar": made["grammars"][0]["lark_grammar"]}
        else:
            ours = {"lark_grammar": grammar.text if grammar.kind == "lark" else self._lark(grammar)}
        rules = f"start: before @behind\n{grammar.before}\n" if grammar.before else "start: @behind\n"
        front = {"lark_grammar": '%llguidance {"no_forcing": true}\n' + rules}
        return msgspec.json.encode({"grammars": [front, {"name": "behind", **ours}]}).decode()

    def _lark(self, grammar: Grammar) -> str:
        """Lark as it is; llama.cpp's GBNF, which writes `::=`, turned into it."""
        if "::=" not in grammar.text:
            return grammar.text
        if len(grammar.text.encode()) > GBNF_BYTES:
            raise _invalid(grammar.field, f"in GBNF it may have {GBNF_BYTES} bytes; write it in Lark")
        try:
            return str(self._library.gbnf_to_lark.any_to_lark(grammar.text))
        except (Exception, RecursionError) as error:  # a converter in plain Python: whatever it meets is in the grammar
            raise _invalid(grammar.field, f"it is not readable as GBNF: {error}") from None


def _schema(grammar: Grammar) -> msgspec.Raw | dict[str, msgspec.Raw]:
    """Numbers and the order of members stay as they were written."""
    try:
        raw = msgspec.json.decode(grammar.text, type=msgspec.Raw)
        if not bytes(raw).lstrip().startswith(b"{"):
            return raw
        # Ours comes last: a request does not choose how its schema is compiled.
        ours = msgspec.Raw(msgspec.json.encode({"whitespace_pattern": _WHITESPACE}))
        return {**msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), "x-guidance": ours}
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise _invalid(grammar.field, "the schema is not JSON, or nested too deeply") from None


def _without_panic(work: Callable[[], T]) -> T:
    """What `work` returns. A panic of the library, which is no `Exception`, ends this session only."""
    try:
        return work()
    except BaseException as error:
        _raise_unless_panic(error)
        raise ShardlineError("engine_error", f"llguidance failed: {str(error)[:200]}") from error


def _raise_unless_panic(error: BaseException) -> None:
    if isinstance(error, Exception) or type(error).__name__ != "PanicException":
        raise error


def _on_deep_stack(work: Callable[[], T]) -> T:
    """What `work` returns or raises, on a thread of its own with much stack."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(_without_panic(work))
        except BaseException as error:  # told to whoever waits, below
            done.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar compiler", daemon=True)
            thread.start()
        except RuntimeError as error:
            raise ShardlineError("engine_out_of_memory", "no thread can be started to compile a grammar") from error
        finally:
            threading.stack_size(before)
    return done.result()


_STACK_SIZE = threading.Lock()
"""The size is one for all threads that begin."""


class _Words:
    """A vocabulary as llguidance reads it. It is never asked to tokenise."""

    def __init__(self, text: TextBundle, vocab_size: int, end: int) -> None:
        pieces = [piece if len(piece) <= _PIECE_BYTES else b"" for piece in text.pieces[:vocab_size]]
        self.tokens = pieces + [b""] * (vocab_size - len(pieces))
        self.special_token_ids = [token for token in text.special if token < vocab_size]
        self.eos_token_id = end
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return []


class Constraint:
    """How far one session is in its grammar. One thread calls it; masks are made on another, one at a time.

    `observe` every generated token, then `mask`; `rollback` goes back. A fault of the grammar is raised by `mask`.
    """

    def __init__(self, matcher: Any, field: str, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher = matcher
        self._field = field
        self._vocab_size = vocab_size
        self._threads = threads
        self._taken: list[int] = []
        self._work: Future[Mask] = threads.submit(_without_panic, self._mask)

    def observe(self, index: int, tokens: Sequence[int]) -> None:
        """Generated tokens from number `index` on. Those that it has already taken change nothing."""
        known = self._taken[index : index + len(tokens)]
        same = next((i for i, (a, b) in enumerate(zip(known, tokens, strict=False)) if a != b), len(known))
        new = list(tokens[same:])
        if new:
            self.rollback(index + same)
            self._taken += new
            self._go_on(lambda: self._matcher.consume_tokens(new))

    def rollback(self, count: int) -> None:
        """Only the first `count` generated tokens stay."""
        dropped = len(self._taken) - count
        if dropped > 0:
            del self._taken[count:]
            self._go_on(lambda: self._matcher.rollback(dropped))

    def mask(self) -> Mask:
        """For the token that comes next. Raises `grammar_invalid` where the grammar turned out to be too much work, or
        does not allow what has come."""
        try:
            return self._work.result(MASK_S)
        except TimeoutError:
            raise ShardlineError("deadline", f"no mask was made in {MASK_S:g} s", limit="step") from None

    def _go_on(self, move: Callable[[], object]) -> None:
        before = self._work

        def work() -> Mask:
            before.exception(MASK_S)  # one after another; nearly always done long ago
            move()
            return self._mask()

        self._work = self._threads.submit(_without_panic, work)

    def _mask(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise _invalid(self._field, self._matcher.get_error())
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.uint32)
        # 1 - 1 is the pattern of 0.0; 0 - 1, cut to sign and exponent, is that of minus infinity.
        allowed -= 1
        allowed &= _MINUS_INFINITY
        return Mask(allowed.view(np.float32), self._matcher.is_accepting())


_MINUS_INFINITY = np.uint32(0xFF800000)


def _invalid(field: str, reason: str) -> ShardlineError:
    """llguidance's words, without the picture of the line that it draws below."""
    words = " ".join(line.strip() for line in reason.splitlines() if line.strip())
    return ShardlineError("grammar_invalid", f"'{field}': {words[:_REASON_CHARACTERS]}", param=field)
