"""The llama.cpp engine on a patched library: layers [first, last) of the model's own file, no Shard file made.

Owns what differs from llama_shard.py: the window on the model, token ids beside the rows that come in, and rows of all
residual streams out, by the function that docs/upstream/layer-boundary.md proposes. For trying that out, and for models
that the stock library cannot split. Shown by tests/upstream/test_window_engine.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

from shardline.errors import ShardlineError
from shardline.formats.cuts import cuts_for_window
from shardline.formats.gguf_files import part_paths, read_model
from shardline.formats.layer_kinds import LayerKinds
from shardline.formats.memory import weight_bytes
from shardline.formats.seam import seam_of_gguf
from shardline.formats.shape import shape_of_gguf
from shardline.model.backend import ShardSpec
from shardline.model.llama_backend import LlamaBackend
from shardline.model.llama_context import LlamaModel, Progress
from shardline.model.llama_embedding import EmbeddingMatrix
from shardline.model.llama_library import LlamaLibrary
from shardline.model.llama_shard import Making
from shardline.model.llama_source import Options, Source, context_length, setting
from shardline.model.llama_tap import BufferTap, Tap
from shardline.model.llama_text import LlamaText, check_text
from shardline.model.llama_window_library import window_library
from shardline.wire.steps import SeamLayout

_NO_SUCH_LAYER = -1


def load(spec: ShardSpec, *, progress: Progress | None = None) -> LlamaBackend:
    """Load layers [first, last) of the GGUF model `spec.model`. Option `library`: the patched library, if it is not
    where `make upstream` leaves it; the others are the llama engine's, but for its files and taps.

    Raises what the llama engine raises; `engine_unavailable` also where the library is not built.
    """
    given = dict(spec.options)
    path = given.pop("library", None)
    for name in ("shard_file", "vocabulary_file", "tap"):
        if given.get(name) is not None:
            raise setting(name, f"the llama-window engine reads the model's own file, and takes no {name}")
    options = Options.of(given)
    if spec.dtype not in (None, "float32"):
        raise setting("dtype", f"dtype {spec.dtype!r:.40}; the residual of the llama-window engine is float32")
    source = _source(spec)
    check_text(source.header)
    with ExitStack() as held:
        loaded = window_library(path or "")
        window = (source.first, source.last)
        model = LlamaModel(loaded, source.path, gpu_layers=options.gpu_layers, window=window, progress=progress)
        held.callback(model.close)
        making = WindowMaking(spec, options, source, loaded, model, context_length(spec, source.shape))
        shard = making.shard(held)
        return LlamaBackend(shard, held.pop_all())


def _source(spec: ShardSpec) -> Source:
    model = read_model(spec.model)
    shape = shape_of_gguf(model.header)
    cuts_for_window(model.header).check_part(spec.first, spec.last)
    return Source(part_paths(spec.model)[0], model.header, shape, spec.first, spec.last, shape.n_layers)


class WindowMaking(Making):
    """The same steps, with the file of the whole model."""

    engine: ClassVar[str] = "llama-window"
    tokens_beside: ClassVar[bool] = True

    def _width(self) -> int:
        """Of the state that goes in: all residual streams."""
        width: int = self.library.c.llama_model_n_embd_inp(self.model.pointer)
        row_bytes = self._layout(self.source.first).row_bytes
        if row_bytes not in (0, 4 * width):
            raise _other_rows(f"rows of {width} go in", row_bytes)
        return width

    def _embedding(self) -> EmbeddingMatrix | None:
        return None

    def _layout(self, position: int) -> SeamLayout:
        header, shape = self.source.header, self.source.shape
        return seam_of_gguf(header, shape, LayerKinds()).layout(position, shape.n_layers, "F32")

    def _tap(self) -> Tap:
        last, row_bytes = self.source.last, self._layout(self.source.last).row_bytes
        width: int = self.library.c.llama_model_n_embd_layer_inp(self.model.pointer, last)
        if row_bytes != 4 * width:  # else memory behind the library's rows would be read
            raise _other_rows(f"rows of {width} come out", row_bytes)
        return window_tap(self.library, row_bytes, last)

    def _text(self, held: ExitStack) -> LlamaText | None:
        return self._own_text() if self.source.is_head or self.source.is_tail else None

    def _vocab_size(self, embedding: EmbeddingMatrix | None) -> int:
        return int(self.library.c.llama_vocab_n_tokens(self.model.vocabulary))

    def _layers(self) -> range:
        return range(self.source.first, self.source.last)

    def _weight_bytes(self, embedding: EmbeddingMatrix | None) -> int:
        """The library's own figure is the file's."""
        tensors, source = read_model(self.spec.model).tensors, self.source
        return weight_bytes(tensors, source.n_layers).of_shard(source.first, source.last)


def _other_rows(what: str, row_bytes: int) -> ShardlineError:
    return ShardlineError("architecture_unsupported", f"{what}, and {row_bytes} bytes cross the Seam")


def window_tap(library: LlamaLibrary, row_bytes: int, layer: int) -> BufferTap:
    """The input of layer `layer`, which is where the window ends: all rows in the order of the batch."""
    c = library.c

    def switch(context: int) -> None:
        code = c.llama_set_embeddings_layer_inp(context, layer, True)
        if code:
            reason = "there is no such layer" if code == _NO_SUCH_LAYER else "the library's graph does not give it"
            raise ShardlineError("architecture_unsupported", f"the state behind layer {layer - 1}: {reason}")

    return BufferTap(library, row_bytes, switch, lambda context: c.llama_get_embeddings_layer_inp(context, layer))
