"""Where a model may be cut for an engine: legal positions, the reason for each other one, and the best even cut.

Owns applying an architecture's rules (architectures.py) to one header or config.json. Decides nothing about machines:
bytes come in as numbers. Pure. Shown by tests/formats/test_cut_positions.py and test_cuts_of_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import Any

from shardline.errors import ShardlineError
from shardline.formats.architectures import (
    Architecture,
    LlamaRules,
    check_blocked,
    check_torch,
    llama_rules,
    of_gguf,
    of_model_type,
)
from shardline.formats.gguf import GGUFHeader
from shardline.formats.layer_kinds import ArchitectureKeys, Flags, LayerKinds, layer_kinds, layer_kinds_of_config
from shardline.formats.layers import check_range
from shardline.formats.memory import WeightBytes
from shardline.formats.shape import CONTEXT_LIMIT, ModelShape, shape_of_gguf
from shardline.formats.soundness import check_for_llama

LAYERS_LIMIT = 512
"""Of llama.cpp: it loads no model with more."""

LAYER_BYTES = 2 << 20
"""What a layer costs beside reading its weights (attention, norms, starting some thirty small operations), as the bytes
that are read in that time. Measured on a model of 135M parameters; large layers hardly notice it."""

Part = tuple[int, int]
"""Layers [first, last)."""

ONE_SESSION = "it serves one session at a time: llama.cpp computes its sparse attention for no more"
"""The warning that holds of the whole model too."""

WINDOWED = frozenset({"llama", "qwen3", "qwen3moe", "gemma3", "deepseek2", "deepseek4"})
"""Architectures that the patch of upstream/llama.cpp loads in part: `llm_arch_supports_window` there."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of one model. Build it with `cuts_of`."""

    shape: ModelShape
    rules: LlamaRules | None
    """None where the model runs whole or not at all."""
    refusal: ShardlineError | None
    """Why it does."""
    kinds: LayerKinds
    runs_whole: bool = True
    """False: the engine does not run the model at all, for the reason of `refusal`."""
    context_switch: int | None = None
    """Where llama.cpp rotates otherwise in a context of more tokens than this: all parts must be on one side of it."""

    @property
    def n_layers(self) -> int:
        return self.shape.n_layers

    def check_part(self, first: int, last: int) -> LlamaRules:
        """The rules by which [first, last) is made; `layers_invalid` or `architecture_unsupported`, with the reason,
        where it cannot be a part."""
        check_range(first, last, self.n_layers)
        if self.rules is None:
            raise self._refusal()
        reason = self.part_reason(first, last)
        if reason is not None:
            raise ShardlineError(
                "layers_invalid",
                f"layers {first}:{last} of this model cannot be a part of their own: {reason}",
                advice="`shardline cuts MODEL` lists the layers at which it can be cut.",
            )
        return self.rules

    def part_reason(self, first: int, last: int) -> str | None:
        """Why [first, last) cannot be a part; None where it can, as the whole model can if the engine runs it."""
        if (first, last) == (0, self.n_layers) and self.runs_whole:
            return None
        if self.rules is None:
            return self._refusal().message
        if last - first < self.rules.min_layers:
            return f"a part has at least {self.rules.min_layers} layers"
        if is_special(self.rules, last - first, self._vocabulary(last)) and not self.is_special():
            return f"llama.cpp takes {last - first} layers of this architecture for another model"
        edges = [self._edge_reason(edge) for edge in (first, last) if 0 < edge < self.n_layers]
        return next((reason for reason in (*edges, self._lack(first, last)) if reason is not None), None)

    def position_reason(self, position: int) -> str | None:
        """Why no cut can be between layers `position - 1` and `position`; None where one can."""
        if not 0 < position < self.n_layers:
            return "there is no layer on one side"
        if self.rules is None:
            return self._refusal().message
        if min(position, self.n_layers - position) < self.rules.min_layers:
            return f"a part has at least {self.rules.min_layers} layers"
        lacks = (self._lack(0, position), self._lack(position, self.n_layers))
        reason = next((reason for reason in (self._edge_reason(position), *lacks) if reason is not None), None)
        return reason or self._dead_end(position)

    def positions(self) -> tuple[int, ...]:
        """All legal positions, without 0 and the end; not every two of them bound a part: see `illegal_parts`."""
        return tuple(p for p in range(1, self.n_layers) if self.position_reason(p) is None)

    def illegal_parts(self) -> list[Part]:
        """Parts between legal positions (or the ends) that cannot be, mostly because they are too short."""
        edges = (0, *self.positions(), self.n_layers)
        return [part for part in combinations(edges, 2) if self.part_reason(*part) is not None]

    def illegal(self) -> list[tuple[Part, str]]:
        """Runs of illegal positions [from, to) that have one reason."""
        runs: list[tuple[Part, str]] = []
        for position in range(1, self.n_layers):
            reason = self.position_reason(position)
            if reason is None:
                continue
            if runs and runs[-1][0][1] == position and runs[-1][1] == reason:
                runs[-1] = ((runs[-1][0][0], position + 1), reason)
            else:
                runs.append(((position, position + 1), reason))
        return runs

    def warnings(self) -> list[str]:
        """What a person should know before cutting this model."""
        if self.rules is None:
            return []
        found = []
        if self.rules.proof == "unproven":
            found.append(
                "nobody has compared the parts of this architecture with the whole: try it before you rely on it"
            )
        if self.rules.proof == "close" or (self.is_special() and self.rules.count_cure == "fold_q_norm"):
            found.append("a cut changes the last bits of the numbers, up to about 1e-4 of their size")
        if self.rules.single_session:
            found.append(ONE_SESSION)
        if self.context_switch is not None:
            found.append(
                f"it computes otherwise with a context of more than {self.context_switch} tokens: "
                "give all Nodes more than that, or none"
            )
        return found

    def is_special(self) -> bool:
        """Whether the uncut model is one that llama.cpp knows by its number of layers."""
        return self.rules is not None and is_special(self.rules, self.n_layers, self.shape.vocab_size)

    def _vocabulary(self, last: int) -> int | None:
        """What a part says of its vocabulary: only the tail has the real one."""
        return self.shape.vocab_size if last == self.n_layers else None

    def _edge_reason(self, position: int) -> str | None:
        """Why nothing may begin or end at a layer, whatever is on either side."""
        if position % self.kinds.group:
            return f"layers come in groups of {self.kinds.group} that are told by their number"
        if self.kinds.indexed is not None and not self.kinds.indexed[position]:
            return "the layer behind it uses the indexer of a layer before it"
        headed = self.kinds.headed
        if headed is not None and headed[position] != headed[0]:
            return (
                "llama.cpp takes the width of a head from the first layer of a part, and the layer behind it has none"
            )
        return None

    def _dead_end(self, position: int) -> str | None:
        """Why no part can end, or none begin, at a position at which layers come apart well enough."""
        before = [(first, position) for first in range(position)]
        behind = [(position, last) for last in range(self.n_layers, position, -1)]
        for parts in (before, behind):
            if all(self.part_reason(*part) is not None for part in parts):
                return self.part_reason(*parts[0])
        return None

    def _lack(self, first: int, last: int) -> str | None:
        """What a part lacks that llama.cpp needs in every file."""
        needed: tuple[tuple[Flags | None, str], ...] = (
            (self.kinds.windowed, "a layer with a sliding window"),
            (self.kinds.recurrent, "a recurrent layer"),
            (self.kinds.attending, "a layer with attention"),
            (self.kinds.sparse, "a layer with experts"),
        )
        if self.rules is not None and self.rules.unwindowed_layer and self.kinds.windowed is not None:
            everything = tuple(not flag for flag in self.kinds.windowed)
            needed = (*needed, (everything, "a layer without a sliding window"))
        for flags, what in needed:
            if flags is not None and any(flags) and not any(flags[first:last]):
                return f"a part needs {what}, and layers {first}:{last} have none"
        return None

    def _refusal(self) -> ShardlineError:
        return self.refusal or ShardlineError("architecture_unsupported", "the model runs only whole")


def is_special(rules: LlamaRules, n_layers: int, vocabulary: int | None) -> bool:
    """Whether llama.cpp takes so many layers (with this vocabulary, if it is known) for a particular model."""
    return any(count == n_layers and size in (None, vocabulary) for count, size in rules.counts)


def cuts_of(header: GGUFHeader) -> Cuts:
    """The cuts of the model with this header (of its first file) for llama.cpp.

    Errors: `model_file_invalid`; `architecture_unsupported` where no engine runs the architecture, whole or cut.
    """
    shape = shape_of_gguf(header)
    row = of_gguf(shape.architecture)
    check_blocked(row)
    check_for_llama(header)
    try:
        rules = llama_rules(row)
        kinds = layer_kinds(header, shape, rules)
        _check_header(header, shape, rules, kinds)
    except ShardlineError as error:
        if error.code != "architecture_unsupported":
            raise
        return Cuts(shape, None, error, LayerKinds())
    return Cuts(shape, rules, None, kinds, context_switch=_context_switch(header, shape))


def cuts_of_config(config: Mapping[str, Any], shape: ModelShape) -> Cuts:
    """The cuts for llama.cpp of the GGUF file that the model with this config.json would be converted to, as far as
    the configuration says them. Errors: as those of `cuts_of`."""
    row = of_model_type(shape.architecture)
    check_blocked(row)
    try:
        rules = llama_rules(row)
        if not row.gguf:
            raise _unknown(row)
    except ShardlineError as error:
        return Cuts(shape, None, error, LayerKinds())
    return Cuts(shape, rules, None, layer_kinds_of_config(config, shape, rules))


def _unknown(row: Architecture) -> ShardlineError:
    return ShardlineError(
        "architecture_unsupported",
        f"llama.cpp runs {row.name} only whole: it is not known as which architecture it is converted",
        advice=row.advice,
        architecture=row.name,
    )


def cuts_for_torch(row: Architecture, shape: ModelShape) -> Cuts:
    """The cuts for the PyTorch engine: anywhere, unless it refuses the architecture; what it finds on loading, it says
    then. Errors: `architecture_unsupported` where no engine runs the architecture."""
    check_blocked(row)
    try:
        check_torch(row)
    except ShardlineError as error:
        return Cuts(shape, None, error, LayerKinds(), runs_whole=False)
    return Cuts(shape, LlamaRules("exact" if row.torch == "supported" else "unproven"), None, LayerKinds())


def cuts_for_window(header: GGUFHeader) -> Cuts:
    """The cuts for llama.cpp with upstream/'s patch: anywhere, in the architectures whose graphs it changes, since
    layers keep their numbers. Errors: as those of `cuts_of`."""
    shape = shape_of_gguf(header)
    row = of_gguf(shape.architecture)
    check_blocked(row)
    check_for_llama(header)
    if shape.architecture in WINDOWED:
        return Cuts(shape, LlamaRules(), None, LayerKinds(), context_switch=_context_switch(header, shape))
    error = ShardlineError(
        "architecture_unsupported",
        f"the patch of llama.cpp loads {shape.architecture} only whole: it has {', '.join(sorted(WINDOWED))}",
        advice="Take --engine llama, or serve all layers on one Node.",
        architecture=shape.architecture,
    )
    return Cuts(shape, None, error, LayerKinds())


def _context_switch(header: GGUFHeader, shape: ModelShape) -> int | None:
    """The context up to which the short rotation factors hold, in a model that has long ones."""
    if not any(name.startswith("rope_factors_long.") for name in header.tensors):
        return None
    keys = ArchitectureKeys(header, shape)
    return keys.integer("rope.scaling.original_context_length", shape.context_length or 0, CONTEXT_LIMIT)


def _check_header(header: GGUFHeader, shape: ModelShape, rules: LlamaRules, kinds: LayerKinds) -> None:
    """Refuse what the architecture allows and this model does not."""
    keys = ArchitectureKeys(header, shape)
    reason = None
    if shape.n_layers > LAYERS_LIMIT:
        reason = f"it has {shape.n_layers} layers, and {LAYERS_LIMIT} is the limit"
    elif any(keys.integer(key, 0) for key in rules.zero_keys):
        reason = rules.zero_reason
    elif rules.window_required and kinds.windowed is None:
        reason = "without sliding windows its layers are told by the number of all"
    elif rules.counts and rules.count_cure is None and is_special(rules, shape.n_layers, shape.vocab_size):
        reason = f"llama.cpp knows it by its {shape.n_layers} layers, and computes otherwise with fewer"
    elif rules.sections == "need" and not has_sections(keys):
        reason = "its graph takes no rows unless the file has rope.dimension_sections: convert it again"
    if reason is not None:
        raise ShardlineError(
            "architecture_unsupported",
            f"llama.cpp runs this {shape.architecture} model only whole: {reason}",
            advice="Serve all layers on one Node, or choose another model: see docs/architectures.md.",
            architecture=shape.architecture,
        )


def has_sections(keys: ArchitectureKeys) -> bool:
    """Whether positions have several parts (M-RoPE): the first two sections are there."""
    name = keys.name("rope.dimension_sections")
    if name not in keys.header.kv:
        return False
    numbers = keys.header.numbers(name)
    return len(numbers) >= 2 and numbers[0] > 0 and numbers[1] > 0


def even_cut(cuts: Cuts, weights: WeightBytes, parts: int) -> list[Part]:
    """The cut into `parts` parts whose largest is as small as can be, and among those the most even one.

    Measured by the time of a decode step, in bytes: those that it reads (not the head's embedding matrix, of which
    single rows are looked up), and LAYER_BYTES for each layer.

    Errors: `layers_invalid` where there is none, with the largest number of parts that there is;
    `architecture_unsupported` where the model is not cut at all.
    """
    if cuts.rules is None and (parts > 1 or not cuts.runs_whole):
        raise cuts._refusal()
    ends = [0, *accumulate(weights.layers)]
    behind = weights.shared + weights.output + weights.tied
    edges = [0, *(cuts.positions() if parts > 1 else ()), cuts.n_layers]
    read = {
        (a, b): ends[b] - ends[a] + LAYER_BYTES * (b - a) + (behind if b == cuts.n_layers else weights.shared)
        for i, a in enumerate(edges)
        for b in edges[i + 1 :]
        if cuts.part_reason(a, b) is None
    }
    largest = _best(edges, read, parts, max)
    if largest is None:
        most = _most_parts(edges, read)
        raise ShardlineError(
            "layers_invalid",
            f"this model of {cuts.n_layers} layers cannot be cut into {parts} parts: {most} is the most",
            param="nodes",
            advice=f"Give at most {most} Nodes.",
        )
    limit = max(read[part] for part in largest)
    within = {part: size**2 for part, size in read.items() if size <= limit}
    return _best(edges, within, parts, lambda before, part: before + part) or largest


def _best(
    edges: Sequence[int], cost: Mapping[Part, int], parts: int, join: Callable[[int, int], int]
) -> list[Part] | None:
    """The cheapest way from the first edge to the last in `parts` steps; None where there is no way."""
    onward: dict[int, list[tuple[int, int]]] = {}
    for (a, b), size in cost.items():
        onward.setdefault(a, []).append((b, size))
    reached: dict[int, tuple[int, tuple[int, ...]]] = {edges[0]: (0, (edges[0],))}
    for _ in range(parts):
        step: dict[int, tuple[int, tuple[int, ...]]] = {}
        for a, (total, way) in reached.items():
            for b, size in onward.get(a, ()):
                joined = join(total, size)
                if b not in step or joined < step[b][0]:
                    step[b] = (joined, (*way, b))
        reached = step
    found = reached.get(edges[-1])
    return list(pairwise(found[1])) if found is not None else None


def _most_parts(edges: Sequence[int], legal: Mapping[Part, int]) -> int:
    """The largest number of parts that any cut has; the whole model is one."""
    most = {edges[0]: 0}
    for a, b in sorted(legal):
        if a in most:
            most[b] = max(most.get(b, 0), most[a] + 1)
    return most.get(edges[-1], 1)
