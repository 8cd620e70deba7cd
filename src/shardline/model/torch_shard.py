"""A loaded Shard as a function of tensors: token ids and what crossed a Seam in, rows or logits out, one cache a call.

Owns the two ways through the model (decoder alone; with the output matrix behind it) and what is observed once after
loading: that nothing happens to rows outside of the layers, which a cut could not reproduce, and what the caches hold.
Knows no bytes, slots or sessions (torch_backend.py). Shown by tests/model/test_torch_split.py, test_torch_refusals.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shardline.errors import ShardlineError
from shardline.model.torch_build import Skeleton, unsupported
from shardline.model.torch_cache import SlotCache, forms_of, new_cache
from shardline.model.torch_layers import LayerForm, is_positional
from shardline.model.torch_seam import ShardEnds, ShardInput

_OBSERVED_ROWS = 3


class TorchShard:
    """Layers [first, last) of a cut model with weights. All tensors have a batch dimension of 1 in front."""

    def __init__(self, skeleton: Skeleton, first: int, last: int) -> None:
        self._skeleton = skeleton
        self._decoder = skeleton.decoder
        self._model = skeleton.model
        self.is_head = first == 0
        self.is_tail = last == skeleton.n_layers
        self.dtype = skeleton.dtype
        self.hidden_size = int(skeleton.config.hidden_size)
        self.vocab_size = int(skeleton.config.vocab_size)
        self._check_signature()
        self.ends = ShardEnds(skeleton, first, last)

    def _check_signature(self) -> None:
        wanted = [(self._decoder, "inputs_embeds"), (self._decoder, "cache"), (self._model, "logits_to_keep")]
        for module, name in wanted:
            if name not in inspect.signature(module.forward).parameters:
                raise unsupported(self._skeleton.config, f"{type(module).__name__} takes no {name}")

    def new_cache(self) -> SlotCache:
        return new_cache(self._decoder.config)

    def hidden(self, given: ShardInput, cache: SlotCache) -> tuple[torch.Tensor, ...]:
        """The tensors of the layout behind the last layer, [1, rows, …]; on the tail one, behind the final norm."""
        with self._step(given, cache) as arguments:
            result = self._decoder(**arguments)
            return self.ends.outputs(result.last_hidden_state)

    def logits(self, given: ShardInput, cache: SlotCache) -> torch.Tensor:
        """On the tail: float32 logits behind the last row, [vocab_size]."""
        with self._step(given, cache) as arguments:
            result = self._model(**arguments, logits_to_keep=1)
            logits: torch.Tensor = result.logits[0, -1].float()
            return logits

    @contextmanager
    def _step(self, given: ShardInput, cache: SlotCache) -> Iterator[dict[str, Any]]:
        """One forward call, without gradients: what to call the model with; its tokens count when it has ended well."""
        try:
            with torch.inference_mode():
                yield {**self.ends.arguments(given), "cache": cache, "use_cache": True}
            cache.note(given.tokens.shape[1])
        finally:
            self.ends.forget()

    def observe(self) -> tuple[LayerForm, ...]:
        """Run random rows through the Shard, watch its layers, and return what each of them keeps in a cache.

        Raises `architecture_unsupported` where the model does something to the rows in front of, between or behind
        its layers, so that a Shard of some of them would not compute what the whole model does.
        """
        cache = self.new_cache()
        try:
            rows = self.ends.random(self._skeleton, _OBSERVED_ROWS, _OBSERVED_ROWS)
            passed, result = self._watch(rows, cache)
            self._check_passage(rows, passed, result)
            self._check_cache(cache, _OBSERVED_ROWS)
            self._check_outputs(cache)
            return forms_of(cache)
        except (ShardlineError, MemoryError):
            raise
        except Exception as error:  # whatever a model that cannot be cut stumbles over
            if is_out_of_memory(error):
                raise
            raise self._unsupported(f"its layers do not run alone ({type(error).__name__}: {error})"[:400]) from error

    def _watch(self, given: ShardInput, cache: SlotCache) -> tuple[list[tuple[Any, Any]], torch.Tensor]:
        passed: list[tuple[Any, Any]] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            before = args[0] if args else kwargs.get("hidden_states")
            passed.append((before, output[0] if isinstance(output, tuple) else output))

        hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in self._skeleton.layers]
        try:
            return passed, self.hidden(given, cache)[0]
        finally:
            for hook in hooks:
                hook.remove()

    def _check_passage(self, given: ShardInput, passed: list[tuple[Any, Any]], result: torch.Tensor) -> None:
        if len(passed) != len(self._skeleton.layers):
            raise self._unsupported(f"{len(passed)} of its {len(self._skeleton.layers)} layers ran")
        whole = self.is_head and self.is_tail
        if not whole and not _same_bits(passed[0][0], self._entering(given)):
            raise self._unsupported("it changes the embedded rows in front of its first layer")
        for (_, before), (after, _) in pairwise(passed):
            if not whole and not _same_bits(before, after):
                raise self._unsupported("it changes the rows between its layers")
        if not self.is_tail and not _same_bits(passed[-1][1], result):
            raise self._unsupported("it changes the rows behind its last layer, beyond the norm")

    def _entering(self, given: ShardInput) -> torch.Tensor:
        if given.rows:
            return given.rows[0]
        embedding = self._decoder.get_submodule(self._skeleton.embedding_name)
        with torch.inference_mode():
            return self.ends.embedded(given.tokens, embedding)

    def _check_cache(self, cache: SlotCache, tokens: int) -> None:
        if cache.get_seq_length() != tokens:
            raise self._unsupported("its caches do not count tokens")
        for index, layer in enumerate(cache.layers):
            if not is_positional(layer):
                continue
            if layer.get_seq_length() != tokens or layer.keys.dim() != 4 or layer.values.dim() != 4:
                raise self._unsupported(f"its layer {index} does not keep keys and values by position")

    def _check_outputs(self, cache: SlotCache) -> None:
        held = _OBSERVED_ROWS + 1
        given = self.ends.random(self._skeleton, 1, held)
        given = ShardInput(given.tokens) if self.is_head else given
        outputs = self.hidden(given, cache)
        self._check_cache(cache, held)
        expected = [tensor.shape for tensor in self.ends.layout_out.tensors] or [(self.hidden_size,)]
        if [tuple(t.shape) for t in outputs] != [(1, 1, *shape) for shape in expected] or outputs[
            0
        ].dtype != self.dtype:
            raise self._unsupported(f"its rows are {outputs[0].dtype} {tuple(outputs[0].shape)}")
        if self.is_tail:
            last = self.ends.random(self._skeleton, 1, held + 1)
            last = ShardInput(last.tokens) if self.is_head else last
            if self.logits(last, cache).shape != (self.vocab_size,):
                raise self._unsupported("its logits do not fit its vocabulary")
            self._check_cache(cache, held + 1)

    def _unsupported(self, why: str) -> ShardlineError:
        return unsupported(self._skeleton.config, why)


def _same_bits(one: Any, two: Any) -> bool:
    """Equal bit for bit, so that NaN equals itself and -0.0 is not 0.0."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch reports it as a RuntimeError with the allocator's words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
