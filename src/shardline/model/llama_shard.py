"""Loading a Shard for the llama.cpp engine: from a `ShardSpec` to a backend that is ready to compute.

Owns the order in which model, context, tap, embedding rows and text are made (and freed, also when one of them fails),
and what is told of the Shard. What is asked and what the files say is in llama_source.py, computing in
llama_backend.py. Shown by tests/model/test_llama_shard.py.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from shardline.errors import ShardlineError
from shardline.formats import architectures
from shardline.formats.gguf import read_header
from shardline.formats.vocabulary import has_vocabulary
from shardline.model.backend import ShardDescription, ShardSpec
from shardline.model.llama_backend import LlamaBackend, LoadedShard
from shardline.model.llama_context import (
    KV_TYPES,
    TAP_SEQUENCE,
    ContextPlan,
    LlamaContext,
    LlamaModel,
    Progress,
    usable_cores,
)
from shardline.model.llama_embedding import EmbeddingMatrix
from shardline.model.llama_library import ROPE_MULTI, LlamaLibrary, library
from shardline.model.llama_rows import RowArrays
from shardline.model.llama_source import KV_TOKENS, Options, Source, context_length, invalid, read_source, setting
from shardline.model.llama_tap import CallbackTap, SamplerTap, Tap, layer_input_tap, nextn_tap
from shardline.model.llama_text import LlamaText, check_text
from shardline.model.pooling import POOLING_KEY, embeddings_of_gguf
from shardline.wire.messages import EngineInfo
from shardline.wire.steps import TOKENS_ONLY, LayoutTensor, SeamLayout

SESSIONS = 64
_THREADED_LAYER_BYTES = 6 << 20
SESSIONS_RECURRENT = 8
"""Each has a state of its own from the start, whether it is used or not."""
_OUTPUTS = 32
"""Rows behind the final norm that a tail takes out of one call. The library computes logits of each beside it, in
memory that is reserved from the start."""


def load(spec: ShardSpec, *, progress: Progress | None = None) -> LlamaBackend:
    """Load the Shard of `spec`: a whole GGUF model, or the Shard file that `spec.options` names.

    Raises `engine_unavailable`, `model_file_invalid`, `architecture_unsupported`, `layers_invalid`, `setting_invalid`,
    `engine_out_of_memory`.
    """
    options = Options.of(spec.options)
    if spec.dtype not in (None, "float32"):
        raise setting("dtype", f"dtype {spec.dtype!r:.40}; the residual of the llama engine is float32")
    source = read_source(spec, options)
    check_text(source.header)
    with ExitStack() as held:
        loaded = library()
        model = LlamaModel(loaded, source.path, gpu_layers=options.gpu_layers, progress=progress)
        held.callback(model.close)
        making = Making(spec, options, source, loaded, model, context_length(spec, source.shape))
        shard = making.shard(held)
        # Nothing failed: from here the backend holds them.
        return LlamaBackend(shard, held.pop_all())


@dataclass(frozen=True, slots=True)
class Making:
    """A Shard whose model is loaded, and the steps that follow."""

    engine: ClassVar[str] = "llama"
    """Begins the engine class: Shards of one route are of one."""
    tokens_beside: ClassVar[bool] = False
    """Token ids go in with rows."""

    spec: ShardSpec
    options: Options
    source: Source
    library: LlamaLibrary
    model: LlamaModel
    context_length: int

    def shard(self, held: ExitStack) -> LoadedShard:
        """Make the rest; what must be freed goes into `held`."""
        c, source, pointer = self.library.c, self.source, self.model.pointer
        width = self._width()
        embedding = self._embedding()
        plan, tap = self._plan(), None if source.is_tail else self._tap()
        context = LlamaContext(self.library, self.model, plan, tap)
        held.callback(context.close)
        description = self._describe(context, plan, embedding, text := self._text(held))
        return LoadedShard(
            library=self.library,
            context=context,
            arrays=RowArrays(
                rows=plan.rows,
                width=0 if source.is_head and embedding is None else width,
                sequences=plan.sessions,
                multi=c.llama_model_rope_type(pointer) in ROPE_MULTI and not self.tokens_beside,
                outputs=tap is not None and tap.outputs,
                beside=self.tokens_beside and not source.is_head,
            ),
            rows=plan.rows,
            outputs=plan.most_outputs,
            sessions=plan.sessions,
            description=description,
            tap=tap,
            embedding=embedding,
            divisor=source.header.number("shardline.input.divisor", 1.0),
            equal_rows=self.model.recurrent,
            one_sequence=self._rules.one_sequence,
            window=0 if plan.swa_full else c.llama_model_n_swa(pointer),
            recurrent=self.model.recurrent,
            text=text,
            identity=_identity(description),
            tokens_beside=self.tokens_beside,
        )

    def _width(self) -> int:
        """Of the rows that go in."""
        source = self.source
        width: int = self.library.c.llama_model_n_embd_inp(self.model.pointer)
        if not source.whole and width != source.shape.hidden_size:
            raise ShardlineError(
                "architecture_unsupported",
                f"rows of {width} go into {source.shape.architecture}, of {source.shape.hidden_size} come out",
            )
        return width

    def _plan(self) -> ContextPlan:
        options = self.options
        return ContextPlan(
            # The library takes no call that is larger than the buffer: it ends the process.
            kv_tokens=max(options.rows, options.kv_tokens or min(self.context_length, KV_TOKENS)),
            sessions=self._sessions(),
            rows=options.rows,
            outputs=min(_OUTPUTS, options.rows) if self.source.is_tail else options.rows,
            threads=self.spec.threads or self._decode_threads(),
            prefill_threads=self.spec.threads or usable_cores(),
            kv_type=options.kv_type,
            swa_full=options.swa_full,
            unpooled=f"{self.source.shape.architecture}.{POOLING_KEY}" in self.source.header.kv,
        )

    @property
    def _rules(self) -> architectures.LlamaRules:
        """Of an architecture that nobody knows: that of most."""
        return architectures.of_gguf(self.source.shape.architecture).llama or architectures.LlamaRules()

    def _sessions(self) -> int:
        asked = self.options.sessions
        if self._rules.single_session:
            if asked not in (None, 1):
                raise setting("sessions", f"llama.cpp computes {self.source.shape.architecture} for one session only")
            return 1
        return asked or (SESSIONS_RECURRENT if self.model.recurrent else SESSIONS)

    def _decode_threads(self) -> int:
        """Threads meet some dozen times a layer, and those that wait sleep (worker_process.py): where a layer is so
        small that waking up takes longer than computing the other half, one thread is faster than two."""
        layers = sum(t.nbytes for t in self.source.header.tensors.values() if t.name.startswith("blk."))
        return 1 if layers < _THREADED_LAYER_BYTES * self.source.shape.n_layers else usable_cores()

    def _embedding(self) -> EmbeddingMatrix | None:
        """The matrix behind the tensors of a head's file."""
        if self.source.whole or not self.source.is_head:
            return None
        header, width = self.source.header, self.source.shape.hidden_size
        if header.integer("shardline.embedding.width") != width:
            raise invalid(self.source.path, f"its embedding rows do not have {width} values")
        return EmbeddingMatrix(
            self.library,
            self.source.path,
            offset=header.integer("shardline.embedding.offset"),
            type_id=header.integer("shardline.embedding.type"),
            rows=header.integer("shardline.embedding.rows"),
            width=width,
            scale=header.number("shardline.embedding.scale", 1.0),
        )

    def _tap(self) -> Tap:
        """The way that the options name, where the table says that this architecture has it."""
        source, kind = self.source, self.options.tap
        rules = architectures.llama_rules(architectures.of_gguf(source.shape.architecture))
        row_bytes, layers = 4 * source.shape.hidden_size, source.last - source.first
        if kind in ("layer_end", "nextn") and kind not in rules.taps:
            raise setting("tap", f"{source.shape.architecture} has no tap {kind}")
        if kind == "layer_end":
            return layer_input_tap(self.library, row_bytes, layers)
        if kind == "nextn":
            return nextn_tap(self.library, row_bytes)
        tensor = rules.residual.format(last=layers - 1)
        if kind == "callback":
            return CallbackTap(self.library, tensor, row_bytes)
        on_host = self.options.gpu_layers == 0 or not any(d.accelerator for d in self.library.devices())
        return SamplerTap(self.library, tensor, row_bytes, TAP_SEQUENCE, on_host=on_host)

    def _text(self, held: ExitStack) -> LlamaText | None:
        """Of heads and tails, where the model has a vocabulary."""
        source, path = self.source, self.options.vocabulary_file
        if source.whole:
            return self._own_text()
        if path is None or not (source.is_head or source.is_tail):
            return None
        header = read_header(path)
        if check_text(header) is None:
            return None
        vocabulary = LlamaModel(self.library, path, vocab_only=True)
        held.callback(vocabulary.close)
        return LlamaText(self.library, vocabulary.vocabulary, header, self.context_length)

    def _own_text(self) -> LlamaText | None:
        """Of the model that is loaded."""
        if not has_vocabulary(self.source.header):
            return None
        return LlamaText(self.library, self.model.vocabulary, self.source.header, self.context_length)

    def _layout(self, position: int) -> SeamLayout:
        """What crosses in front of layer `position` of the model."""
        if not 0 < position < self.source.n_layers:
            return TOKENS_ONLY
        return SeamLayout([LayoutTensor("hidden", "F32", (self.source.shape.hidden_size,))])

    def _layers(self) -> range:
        """Those that the Shard has, by their numbers in its file."""
        return range(self.source.shape.n_layers)

    def _weight_bytes(self, embedding: EmbeddingMatrix | None) -> int:
        size: int = self.library.c.llama_model_size(self.model.pointer)
        return size + (embedding.nbytes if embedding is not None else 0)

    def _describe(
        self, context: LlamaContext, plan: ContextPlan, embedding: EmbeddingMatrix | None, text: LlamaText | None
    ) -> ShardDescription:
        c, source, pointer = self.library.c, self.source, self.model.pointer
        return ShardDescription(
            model_name=source.header.text("general.name", source.path.stem),
            content_id=self.options.content_id,
            first=source.first,
            last=source.last,
            n_layers=source.n_layers,
            engine=self._engine_info(context, plan),
            layout_in=self._layout(source.first),
            layout_out=self._layout(source.last),
            kv_bytes_per_token=self._kv_bytes(),
            weight_bytes=self._weight_bytes(embedding),
            context_length=self.context_length,
            vocab_size=self._vocab_size(embedding),
            rollback=not self.model.recurrent and (plan.swa_full or not c.llama_model_n_swa(pointer)),
            text_digest=text.digest if text is not None else None,
            kv_capacity_tokens=context.kv_tokens,
            slots=plan.sessions,
            embeddings=embeddings_of_gguf(source.header, source.shape.hidden_size, c.llama_model_n_embd_out(pointer))
            if source.is_tail
            else None,
        )

    def _vocab_size(self, embedding: EmbeddingMatrix | None) -> int:
        """As many as there are logits, or rows to look up; in the middle, where token ids pass by, as the file says."""
        if self.source.is_tail:
            return int(self.library.c.llama_vocab_n_tokens(self.model.vocabulary))
        return embedding.rows if embedding is not None else self.source.header.integer("shardline.source.vocab_size")

    def _kv_bytes(self) -> int:
        shape, traits = self.source.shape, self.library.type_traits(KV_TYPES[self.options.kv_type])
        elements = sum(shape.cache_elements(layer) or 0 for layer in self._layers())
        return int(elements * traits.type_size // traits.blck_size)

    def _engine_info(self, context: LlamaContext, plan: ContextPlan) -> EngineInfo:
        """`engine_class` has everything that makes numbers differ and that a route must agree on."""
        source, loaded = self.source, self.library
        parts = [self.engine, loaded.commit[:7], source.quantisation, f"kv-{plan.kv_type}"]
        if any(name.endswith("rope_factors_long.weight") for name in source.header.tensors):
            # Which of the two sets of factors llama.cpp takes depends on the size of the whole KV buffer.
            key = f"{source.shape.architecture}.rope.scaling.original_context_length"
            trained = source.header.integer(key, source.shape.context_length or 0)
            parts.append("rope-long" if context.kv_tokens > trained else "rope-short")
        accelerators = [device.description for device in loaded.devices() if device.accelerator]
        return EngineInfo(
            backend="llama",
            engine_class="/".join(parts),
            build=loaded.build,
            dtype="float32",
            quantisation=source.quantisation,
            device=", ".join(accelerators) or "cpu",
            threads=plan.threads,
            commit=loaded.commit,
            kv_type=plan.kv_type,
            context_tokens=context.kv_tokens,
        )


def _identity(description: ShardDescription) -> bytes:
    """What a saved slot belongs to: the same layers of the same model in the same engine class."""
    d = description
    parts = (d.content_id, d.engine.engine_class, str(d.first), str(d.last), str(d.n_layers))
    return hashlib.sha256("\n".join(parts).encode()).digest()
