"""Taps: the ways to take the residual behind the last layer of a part out of an unmodified llama.cpp.

Owns, for each way, what must be set on a context before and after it is made, and where the rows are after a decode.
The sampler hook is the usual one; measurements of all: docs/upstream/layer-boundary.md. Refuses to hand out rows that
are not there: a missing tensor, another row count. Shown by tests/model/test_llama_tap.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_bool, c_uint32
from typing import Any, Protocol

from shardline.errors import ShardlineError
from shardline.model.llama_library import LlamaLibrary

Rows = memoryview
"""float32 rows as bytes. They are the library's memory: valid until the next call with the same context."""


class Tap(Protocol):
    """One per context; kept alive as long as the context."""

    outputs: bool
    """Whether rows must be marked as outputs: where they are not, this way would see fewer of them."""

    def prepare(self, params: Any) -> None:
        """Set what the context is made with (`llama_context_params`)."""

    def attach(self, context: int) -> None:
        """The context is made. `architecture_unsupported` where the residual cannot be had this way."""

    def rows(self, count: int) -> Rows:
        """The rows of the last decode, which had `count`. `engine_error` where it left another number."""

    def close(self) -> None:
        """The context is gone."""


class SamplerTap:
    """A sampler on a sequence that no batch has. The library lets samplers add to a graph that it builds: here the
    residual is marked as an output, so that its memory is not used again. Nothing runs while a graph is reused."""

    outputs = True

    def __init__(self, library: LlamaLibrary, tensor: str, row_bytes: int, sequence: int, *, on_host: bool) -> None:
        c, structs = library.c, library.structs
        self._library = library
        self._residual = _Residual(library, tensor, row_bytes, on_host)
        # The library keeps pointers to all of these.
        self._interface = structs.llama_sampler_i(
            name=structs.llama_sampler_i_name(lambda sampler: b"shardline-tap"),
            apply=structs.llama_sampler_i_apply(lambda sampler, candidates: None),
            backend_init=structs.llama_sampler_i_backend_init(lambda sampler, buffer_type, outputs: True),
            backend_apply=structs.llama_sampler_i_backend_apply(self._on_graph),
        )
        self._chain = c.llama_sampler_chain_init(structs.llama_sampler_chain_params(no_perf=True))
        c.llama_sampler_chain_add(self._chain, c.llama_sampler_init(ctypes.addressof(self._interface), None))
        self._config = structs.llama_sampler_seq_config(seq_id=sequence, sampler=self._chain)

    def _on_graph(self, _sampler: object, _tensors: int, graph: int, _data: object) -> None:
        """Called while a graph is built. What is raised here is lost, so nothing is."""
        self._residual.found(self._library.c.ggml_graph_get_tensor(graph, self._residual.name))

    def prepare(self, params: Any) -> None:
        params.samplers = ctypes.pointer(self._config)
        params.n_samplers = 1

    def attach(self, context: int) -> None:
        self._residual.context = context
        self._residual.check()

    def rows(self, count: int) -> Rows:
        return self._residual.rows(count)

    def close(self) -> None:
        if self._chain:
            self._library.c.llama_sampler_free(self._chain)
            self._chain = None


class _Residual:
    """The tensor in the graph that was built last."""

    def __init__(self, library: LlamaLibrary, tensor: str, row_bytes: int, on_host: bool) -> None:
        self._c = library.c
        self.name = tensor.encode()
        self._row_bytes = row_bytes
        self._on_host = on_host
        self.context = 0
        self._tensor: int | None = None
        self._nbytes = 0

    def found(self, tensor: int | None) -> None:
        self._tensor = tensor
        self._nbytes = 0
        if tensor:
            self._c.ggml_set_output(tensor)
            self._nbytes = self._c.ggml_nbytes(tensor)

    def check(self) -> None:
        """The library builds graphs when a context is made: the tensor was in them, or never is."""
        if not self._tensor:
            raise _no_residual(f"its graph has no tensor {self.name.decode()}")

    def rows(self, count: int) -> Rows:
        size = count * self._row_bytes
        if not self._tensor or self._nbytes != size:
            raise ShardlineError("engine_error", f"{self._nbytes} bytes of residual for {count} rows, expected {size}")
        self._c.llama_synchronize(self.context)
        if self._on_host:
            return view(self._c.ggml_get_data(self._tensor), size)
        rows = bytearray(size)
        self._c.ggml_backend_tensor_get(self._tensor, ctypes.addressof(_bytes(size).from_buffer(rows)), 0, size)
        return memoryview(rows)


class CallbackTap:
    """The scheduler asks before and after every node of the graph. Universal, and the dearest: some 30 calls a layer.

    What follows the residual (the final norm, the head) is not computed.
    """

    outputs = True

    def __init__(self, library: LlamaLibrary, tensor: str, row_bytes: int) -> None:
        self._c = library.c
        self._name = tensor.encode()
        self._row_bytes = row_bytes
        self._rows = bytearray()
        self._callback = library.structs.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, tensor: int, ask: bool, _user: int | None) -> bool:
        found: bool = self._c.ggml_get_name(tensor) == self._name
        if ask or not found:
            return found or not ask
        size = self._c.ggml_nbytes(tensor)
        self._rows = bytearray(size)
        self._c.ggml_backend_tensor_get(tensor, ctypes.addressof(_bytes(size).from_buffer(self._rows)), 0, size)
        return False

    def prepare(self, params: Any) -> None:
        params.cb_eval = self._callback

    def attach(self, context: int) -> None:
        pass

    def rows(self, count: int) -> Rows:
        size = count * self._row_bytes
        rows, self._rows = self._rows, bytearray()
        if len(rows) != size:
            raise ShardlineError("engine_error", f"{len(rows)} bytes of residual for {count} rows, expected {size}")
        return memoryview(rows)

    def close(self) -> None:
        pass


class BufferTap:
    """A buffer of the library's own, in batch order, filled beside the outputs: no row needs to be one."""

    outputs = False

    def __init__(self, library: LlamaLibrary, row_bytes: int, switch: Callable[[int], None], get: Callable[[int], int]):
        self._row_bytes = row_bytes
        self._c = library.c
        self._switch = switch
        self._get = get
        self._context = 0

    def prepare(self, params: Any) -> None:
        pass

    def attach(self, context: int) -> None:
        self._context = context
        self._switch(context)

    def rows(self, count: int) -> Rows:
        self._c.llama_synchronize(self._context)
        address = self._get(self._context)
        if not address:
            raise ShardlineError("engine_error", "the library has no buffer of residuals")
        return view(address, count * self._row_bytes)

    def close(self) -> None:
        pass


def layer_input_tap(library: LlamaLibrary, row_bytes: int, layer: int) -> BufferTap:
    """The input of layer `layer` (the layer behind the last: only where the architecture's graph sets it; elsewhere
    the library ends the process)."""
    c = library.c
    return BufferTap(
        library,
        row_bytes,
        lambda context: c.llama_set_embeddings_layer_inp(context, c_uint32(layer), c_bool(True)),
        lambda context: c.llama_get_embeddings_layer_inp(context, c_uint32(layer)),
    )


def nextn_tap(library: LlamaLibrary, row_bytes: int) -> BufferTap:
    """What the library keeps for a head that predicts further tokens: the residual itself in some architectures."""
    c = library.c
    return BufferTap(
        library,
        row_bytes,
        lambda context: c.llama_set_embeddings_nextn(context, c_bool(True), c_bool(False)),
        c.llama_get_embeddings_nextn,
    )


def view(address: int, size: int) -> memoryview:
    """The library's memory as bytes."""
    return memoryview(_bytes(size).from_address(address)).cast("B")


def _bytes(size: int) -> Any:
    return ctypes.c_uint8 * size


def _no_residual(why: str) -> ShardlineError:
    return ShardlineError("architecture_unsupported", f"the residual behind the last layer cannot be taken: {why}")
