"""Text bundles and token ids: what the Gateway knows of a model's text, and where it asks.

Owns the copies of text bundles in memory and on disk, and the one call by which a prompt becomes token ids. It has
no tokenizer: the head Node's engine is the authority, so that there is one for each Model Artifact. It takes no
bundle whose SHA-256 is not its name. Shown by tests/gateway/test_text.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

import msgspec
import structlog

from shardline.errors import ShardlineError
from shardline.gateway.detokenize import Vocabulary
from shardline.gateway.openai_requests import too_long, window_of
from shardline.settings import Settings
from shardline.transport.failures import HttpFailure, OwnLack, TimedOut
from shardline.transport.http_client import HttpClient
from shardline.wire.messages import ModelInfo, Peer, TextBundle, TokenizeAnswer, TokenizeRequest

log = structlog.get_logger(__name__)

BUNDLE_BYTES = 64 << 20
"""Largest text bundle: four times that of the largest vocabulary in use."""
_ALIVE_S = 1.0
TOKENISING = 2
"""Texts that are with one head Node at a time."""
HEADS = 256
KEPT = 8
"""Vocabularies in memory; the one unused for longest goes first."""
_STARTING = frozenset({"engine_lost", "shard_unready"})
"""What a Node says whose engine is not up."""
_STARTING_S = 2
_GONE_S = 5
"""Retry-After: by then the Tracker has found out."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class TextStore:
    """One for each Gateway; enter it before use. Loads of one bundle are shared by all who wait for it."""

    def __init__(self, cache_dir: Path, client: HttpClient, settings: Settings) -> None:
        self._cache_dir = cache_dir
        self._client = client
        self._settings = settings
        self._tokenising: dict[str, asyncio.Semaphore] = {}
        self._kept: OrderedDict[str, Vocabulary] = OrderedDict()
        self._loads: dict[str, asyncio.Future[Vocabulary]] = {}
        self._loaders: set[asyncio.Task[None]] = set()
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> TextStore:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loader in self._loaders:
            loader.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    async def vocabulary(self, model: ModelInfo) -> Vocabulary:
        """The text of `model`'s tokens. Raises `text_unavailable` where no Node serves its bundle."""
        if model.composite:
            what = f"the model '{model.model[:100]}' is served by another server, and only that one knows its token ids"
            advice = "Ask that server for them. Here it takes texts and chats, by completions."
            raise ShardlineError("invalid_value", what, param="model", advice=advice)
        digest = model.text_digest
        if digest is None or not _DIGEST.fullmatch(digest):
            raise ShardlineError("text_unavailable", "no Node serves the text of the model yet")
        kept = self._kept.get(digest)
        if kept is not None:
            self._kept.move_to_end(digest)
            return kept
        load = self._loads.get(digest)
        if load is None:
            load = self._loads[digest] = asyncio.get_running_loop().create_future()
            # All who wait may have gone when it fails.
            load.add_done_callback(_looked_at)
            loader = self._tasks.create_task(self._load(digest, model, load))
            self._loaders.add(loader)
            loader.add_done_callback(self._loaders.discard)
        # Who leaves does not take the load from the others.
        return await asyncio.shield(load)

    async def tokenize(
        self, model: ModelInfo, vocabulary: Vocabulary, text: str, *, add_special: bool, param: str
    ) -> list[int]:
        """Token ids of `text` from one of the model's head Nodes.

        `add_special`: with the tokens that the model wants around a prompt. `param`: the field that the text came in.
        A text that is too long in any case is refused here: no tokenizer makes fewer tokens of it than its bytes by
        the longest token.
        """
        window = window_of(model)
        fewest = -(-len(text.encode()) // vocabulary.longest_piece)
        if fewest > window:
            raise too_long(fewest, window, param=param, at_least=True)
        request = TokenizeRequest(text=text, add_special=add_special, content_id=model.content_id)
        asked = _Asked(model)
        try:
            # All heads together have the one limit of a control message: a silent one keeps nobody longer.
            async with asyncio.timeout(self._settings.control_s):
                for peer in model.head_nodes:
                    asked.peers.append(peer)
                    tokens = await self._ask_head(peer, request, vocabulary, asked)
                    if tokens is not None:
                        return _single_bos(tokens, vocabulary.bundle.bos)
        except TimeoutError:
            asked.silent(f"no answer within the limit control ({self._settings.control_s:g} s)")
        raise asked.refusal("tokenises")

    async def _ask_head(
        self, peer: Peer, request: TokenizeRequest, vocabulary: Vocabulary, asked: _Asked
    ) -> list[int] | None:
        """What one head Node makes of the text; None, and a reason, where it does not answer."""
        # A head tokenises between its engine's steps: a burst of long texts must not hold up who decodes there.
        places = self._tokenising.setdefault(peer.node, asyncio.Semaphore(TOKENISING))
        if len(self._tokenising) > HEADS:
            self._tokenising = {peer.node: places}
        try:
            async with places:
                answer = await self._client.json(
                    "POST",
                    f"{peer.url}/v1/tokenize",
                    TokenizeAnswer,
                    body=request,
                    timeout_s=self._settings.control_s / 2,
                    max_body=self._settings.api_body_bytes,
                )
            return _known(answer.tokens, vocabulary)
        except OwnLack as failure:
            raise failure.error() from None
        except (HttpFailure, ShardlineError) as error:
            if isinstance(error, ShardlineError) and error.code == "body_too_large":
                raise
            log.warning("tokenize_failed", node=peer.node, reason=str(error))
            asked.failed(peer, error)
            return None

    async def _load(self, digest: str, model: ModelInfo, load: asyncio.Future[Vocabulary]) -> None:
        try:
            vocabulary = await self._from_disk(digest) or await self._from_nodes(digest, model)
            self._kept[digest] = vocabulary
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            load.set_result(vocabulary)
        except asyncio.CancelledError:
            load.set_exception(ShardlineError("draining", "the Gateway is stopping"))
            raise
        except Exception as error:
            # Told to all who wait for it; the next request tries again.
            load.set_exception(error)
        finally:
            del self._loads[digest]

    async def _from_disk(self, digest: str) -> Vocabulary | None:
        path = self._cache_dir / digest
        raw = await asyncio.to_thread(_read, path)
        if raw is None:
            return None
        try:
            return await asyncio.to_thread(_checked, raw, digest)
        except ShardlineError as error:
            log.warning("text_bundle_damaged", digest=digest, reason=error.message)
            with contextlib.suppress(OSError):  # a folder that cannot be written: the bundle is fetched each time
                await asyncio.to_thread(path.unlink, missing_ok=True)
            return None

    async def _from_nodes(self, digest: str, model: ModelInfo) -> Vocabulary:
        asked = _Asked(model)
        for peer in model.text_nodes:
            asked.peers.append(peer)
            try:
                # A silent Node is found out by something small, before it is given the time of something large.
                await self._client.request("GET", f"{peer.url}/healthz", timeout_s=_ALIVE_S, limit="probe")
                response = await self._client.request(
                    "GET",
                    f"{peer.url}/v1/text/{digest}",
                    timeout_s=self._settings.text_s,
                    limit="text",
                    max_body=BUNDLE_BYTES,
                )
                if response.status != 200:
                    raise ShardlineError("text_unavailable", f"status {response.status}")
                vocabulary = await asyncio.to_thread(_checked, response.body, digest)
            except OwnLack as failure:
                raise failure.error() from None
            except (HttpFailure, ShardlineError) as error:
                log.warning("text_bundle_failed", node=peer.node, reason=str(error))
                asked.failed(peer, error)
                continue
            try:
                await asyncio.to_thread(_write, self._cache_dir / digest, response.body)
            except OSError as error:
                log.warning("text_bundle_not_kept", digest=digest, reason=error.strerror)
            return vocabulary
        raise asked.refusal("serves the text bundle")


class _Asked:
    """The Nodes that were asked for one thing, and why none gave it."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._reasons: list[str] = []
        self._codes: set[str] = set()
        self._gone: list[Peer] = []
        self.peers: list[Peer] = []

    def failed(self, peer: Peer, error: HttpFailure | ShardlineError) -> None:
        if isinstance(error, HttpFailure):
            if not isinstance(error, TimedOut):  # else it may only be slow
                self._gone.append(peer)
            self._reasons.append(f"{peer.node} ({error.brief})")
        else:
            self._codes.add(error.code)
            self._reasons.append(f"{peer.node} ({error.message})")

    def silent(self, why: str) -> None:
        """The time is over before the Node that was asked last has answered."""
        self._reasons.append(f"{self.peers[-1].node} ({why})")

    def refusal(self, what: str) -> ShardlineError:
        """What is true for the client: the Nodes are gone, or start again, or do not do what they should."""
        log.warning("text_unavailable", lacking=what, reasons=self._reasons)
        if self._gone and len(self._gone) == len(self.peers):
            return self._lost()
        if self._codes & _STARTING:
            message = f"no head Node of the model {what} now: one starts its engine again"
            return ShardlineError("shard_unready", message, retry_after=_STARTING_S)
        return ShardlineError(
            "text_unavailable",
            f"no head Node of the model {what} now: {len(self.peers)} asked",
            advice="Send again in a few seconds. If it stays so, look at the log of the head Node.",
            retry_after=_GONE_S,
        )

    def _lost(self) -> ShardlineError:
        """The Tracker does not know it yet: it waits for heartbeats, and hears from no session."""
        name = self._model.model[:100]
        ends = [peer.layers[1] for peer in self._gone if peer.layers is not None]
        layers = f" for layers 0:{min(ends)}" if ends else ""
        return ShardlineError(
            "model_unavailable",
            f"the model '{name}' is not whole: no Node answers{layers}: {', '.join(self._reasons[:3])}",
            param="model",
            node=self._gone[0].node,
            missing=[[0, min(ends)]] if ends else [],
            retry_after=_GONE_S,
        )


def _checked(raw: bytes, digest: str) -> Vocabulary:
    if hashlib.sha256(raw).hexdigest() != digest:
        raise ShardlineError("text_unavailable", "its text bundle is not the one that was announced")
    try:
        bundle = msgspec.msgpack.decode(raw, type=TextBundle)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ShardlineError("text_unavailable", "its text bundle is not readable") from None
    size = len(bundle.pieces)
    ids = [*bundle.special, *bundle.eog, *(token for token in (bundle.bos, bundle.eos) if token is not None)]
    if not size or any(not 0 <= token < size for token in ids):
        raise ShardlineError("text_unavailable", "its text bundle names tokens that it does not have")
    return Vocabulary(bundle, digest)


def _known(tokens: list[int], vocabulary: Vocabulary) -> list[int]:
    for token in tokens:
        if not 0 <= token < vocabulary.size:
            raise ShardlineError("engine_error", f"token id {token} is not in the vocabulary")
    return tokens


def _single_bos(tokens: list[int], bos: int | None) -> list[int]:
    """A prompt that begins with BOS as text, and to which the tokenizer adds one, has one."""
    if bos is not None and tokens[:2] == [bos, bos]:
        return tokens[1:]
    return tokens


def _read(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > BUNDLE_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _write(path: Path, raw: bytes) -> None:
    """Whole or not at all, also beside another Gateway that writes the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".text-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _looked_at(load: asyncio.Future[Vocabulary]) -> None:
    if not load.cancelled():
        load.exception()
