"""How a model fits on machines of given memory, before anything is loaded: layers, bytes, Seams, a bound of the speed.

Owns the arithmetic of one plan: what a Node needs beside weights, which Nodes are enough, what a decode step must read
and send. All of it is computed from an outline (outline.py) and stated assumptions; a running cluster is placed by the
Tracker, one Node after the other. Pure. Shown by tests/formats/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardline.formats.outline import Outline
from shardline.formats.session_state import state_bytes

PROCESS_BYTES = 512 << 20
"""A Node and its worker with their libraries, before any weights: measured 0.4 GB with PyTorch, 0.1 with llama.cpp."""
RESERVE_SHARE = 1 / 8
"""Of a machine's memory: the system, other programs, and what allocators lose."""
ROWS = 512
"""Rows of the largest prefill chunk."""
_ACTIVATIONS = 12
"""Rows of the residual's width that are held at a time while a layer computes, all its inner widths together."""
_FLOAT_BYTES = 4

Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Machine:
    """A Node as it is planned for."""

    memory_bytes: int
    bandwidth: float
    """Bytes a second that its memory gives to the engine."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a plan rests on beside the model and the machines."""

    kv_tokens: int
    """Of all sessions together."""
    sessions: int = 1
    """Fixed states are kept for each."""
    rtt_s: float = 0.001
    """Round trip between two Nodes."""
    reserve_share: float = RESERVE_SHARE


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one part takes on its Node."""

    weights: int
    kv: int
    buffers: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.buffers + self.process


@dataclass(frozen=True, slots=True)
class Placed:
    """Layers [first, last) on the machine number `node` of those given."""

    node: int
    first: int
    last: int
    need: Need
    reserve: int
    free: int
    read_bytes: int
    """What one decode step reads of its weights."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A model on machines. `placed` is empty where it does not fit."""

    placed: tuple[Placed, ...]
    seams: tuple[tuple[int, int | None], ...]
    """Position of each cut, and the bytes that cross it for a token; None where the source does not say it."""
    step_s: float | None
    """Shortest time of one decode step of one session: reading weights, and the way round the ring."""
    lacking_bytes: int
    """What all machines together have too little; 0 where the model fits, or would if it could be cut otherwise."""

    @property
    def fits(self) -> bool:
        return bool(self.placed)

    @property
    def tokens_per_s(self) -> float | None:
        return 1 / self.step_s if self.step_s else None


def need_of(outline: Outline, first: int, last: int, given: Assumptions) -> Need:
    """Bytes of layers [first, last) on a Node of their own; `layers_invalid` outside the model."""
    kv = 0
    if outline.states is not None:
        # Rows for all tokens once, fixed states and what windows hold for each session.
        each = given.kv_tokens // given.sessions
        states, width = outline.states, outline.kv_element_bytes
        kv = given.sessions * state_bytes(states, first, last, tokens=each, element_bytes=width)
    streams = outline.seam.streams if outline.seam is not None else 1
    row = (_ACTIVATIONS + 2 * streams) * outline.shape.hidden_size
    buffers = ROWS * row * _FLOAT_BYTES
    if last == outline.n_layers:
        buffers += (outline.shape.vocab_size or 0) * _FLOAT_BYTES * given.sessions
    return Need(outline.weights.of_shard(first, last), kv, buffers)


def read_bytes(outline: Outline, first: int, last: int) -> int:
    """Weights that one decode step of one session reads: chosen experts only, single rows of the embedding."""
    idle = sum(round(size * (1 - outline.used)) for size in outline.experts[first:last])
    read = sum(outline.weights.layers[first:last]) - idle + outline.weights.shared
    if last == outline.n_layers:
        read += outline.weights.output + outline.weights.tied
    return read


def plan_on(outline: Outline, machines: Sequence[Machine], given: Assumptions) -> Plan:
    """The layers of each machine, in the order given: on as few as are enough, filled as evenly as can be.

    Errors: `architecture_unsupported` where the engine does not run the model, whole or cut.
    """
    if outline.cuts.rules is None and not outline.cuts.runs_whole and outline.cuts.refusal is not None:
        raise outline.cuts.refusal
    usable = [_usable(machine, given) for machine in machines]
    best = _best(outline, usable, given)
    if best is None:
        whole = need_of(outline, 0, outline.n_layers, given)
        everything = whole.total + (len(machines) - 1) * (whole.buffers + whole.process)
        return Plan((), (), None, max(0, everything - sum(usable)))
    placed = tuple(_placed(outline, machines[node], node, part, given) for node, part in best)
    seams = tuple((p.last, _crossing(outline, p.last)) for p in placed[:-1])
    reading = sum(p.read_bytes / machines[p.node].bandwidth for p in placed)
    # A step goes round the ring, one way each: the last Node hands the token to the first.
    travel = len(placed) * given.rtt_s / 2 if len(placed) > 1 else 0.0
    return Plan(placed, seams, reading + travel, 0)


def fewest(outline: Outline, machine: Machine, given: Assumptions) -> int | None:
    """How many machines like this one are enough; None where even the shortest part of the model is too large."""
    usable = _usable(machine, given)
    reached = {0: 0}
    for first, last in _legal(outline):
        if first in reached and need_of(outline, first, last, given).total <= usable:
            count = reached[first] + 1
            reached[last] = min(reached.get(last, count), count)
    return reached.get(outline.n_layers)


def _usable(machine: Machine, given: Assumptions) -> int:
    return int(machine.memory_bytes * (1 - given.reserve_share))


def _legal(outline: Outline) -> Iterator[Part]:
    """All parts that the engine can serve, the whole model among them, in ascending order."""
    cuts = outline.cuts
    edges = (0, *cuts.positions(), outline.n_layers)
    for index, first in enumerate(edges):
        for last in edges[index + 1 :]:
            if cuts.part_reason(first, last) is None:
                yield first, last


def _best(outline: Outline, usable: Sequence[int], given: Assumptions) -> list[tuple[int, Part]] | None:
    """The way from layer 0 to the last over machines in their order, each used once or left out."""
    needs = {part: need_of(outline, *part, given).total for part in _legal(outline)}
    onward: dict[int, list[int]] = {}
    for first, last in needs:
        onward.setdefault(first, []).append(last)
    # Position -> (machines used, fullest of them, what each has).
    reached: dict[int, tuple[int, float, tuple[tuple[int, Part], ...]]] = {0: (0, 0.0, ())}
    for node, room in enumerate(usable):
        step = dict(reached)
        for first, (used, fullest, way) in reached.items():
            for last in onward.get(first, ()):
                filled = needs[first, last] / room if room else 2.0
                if filled > 1:
                    continue
                rank = (used + 1, max(fullest, filled))
                if last not in step or rank < step[last][:2]:
                    step[last] = (*rank, (*way, (node, (first, last))))
        reached = step
    found = reached.get(outline.n_layers)
    return list(found[2]) if found is not None else None


def _placed(outline: Outline, machine: Machine, node: int, part: Part, given: Assumptions) -> Placed:
    need = need_of(outline, *part, given)
    reserve = machine.memory_bytes - _usable(machine, given)
    free = machine.memory_bytes - reserve - need.total
    return Placed(node, *part, need, reserve, free, read_bytes(outline, *part))


def _crossing(outline: Outline, position: int) -> int | None:
    if outline.seam is None:
        return None
    return outline.seam.row_bytes(position, outline.n_layers, outline.seam_dtype)
