"""From one row of logits to one token: the sampler that every engine's tail uses.

Owns the order and the formulas of `wire.messages.Sampling`, the random draws and the token history they need. Refuses
to know engines, texts and stop strings. numpy only. Shown by tests/model/test_sampling.py.

    bias -> repeat_penalty -> presence, frequency -> bans, grammar -> greedy, or temperature -> top_k -> top_p -> min_p

Logprobs are those of the model: log-softmax of the untouched logits, as vLLM (`raw_logprobs`) and llama-server (its
`n_probs`) report them by default, so that a client's temperature or bias does not colour what it measures.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardline.errors import ShardlineError
from shardline.model.grammar import Constraint, Mask
from shardline.wire.messages import BIAS_FORCES, Sampling

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GREEDY_BELOW = 1e-3
"""Temperatures up to this are argmax: two logits 0.01 apart would already differ by a factor of 22,000."""
LOGPROB_FLOOR = -9999.0
"""Reported for a token that the model itself excluded: JSON has no infinity."""
_REACH = (2.0, 4.0, 6.0, 8.0, 11.0, 15.0, 24.0)
"""Distances below the peak at which candidates are looked for, nearest first."""
_BLOCK = 512


class Choice(NamedTuple):
    """One sampled token. `top`: (id, logprob), most likely first, equal ones by lower id."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


def check(sampling: Sampling, vocab_size: int) -> None:
    """Refuse values that no formula here is defined for; `invalid_value` with `param`.

    Bounds that are a matter of the API (a temperature of at most 2) are the Gateway's; these are the arithmetic's.
    """
    finite = math.isfinite
    rules: list[tuple[str, bool, str]] = [
        ("temperature", finite(sampling.temperature) and sampling.temperature >= 0, "a finite number of at least 0"),
        ("top_k", sampling.top_k >= 0, "at least 0"),
        ("top_p", 0 <= sampling.top_p <= 1, "between 0 and 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "between 0 and 1"),
        ("repeat_penalty", finite(sampling.repeat_penalty) and sampling.repeat_penalty > 0, "above 0"),
        ("presence_penalty", finite(sampling.presence_penalty), "a finite number"),
        ("frequency_penalty", finite(sampling.frequency_penalty), "a finite number"),
        ("logprobs", sampling.logprobs is None or 0 <= sampling.logprobs <= vocab_size, "at most the vocabulary"),
        ("min_tokens", sampling.min_tokens >= 0, "at least 0"),
        ("logit_bias", all(map(finite, sampling.logit_bias.values())), "finite numbers"),
        ("logit_bias", all(0 <= i < vocab_size for i in sampling.logit_bias), "ids of the vocabulary"),
        ("stop_ids", all(0 <= i < vocab_size for i in sampling.stop_ids), "ids of the vocabulary"),
    ]
    for name, holds, wanted in rules:
        if not holds:
            raise ShardlineError("invalid_value", f"{name} must be {wanted}", param=name)


class _Counts:
    """How often each token occurred, with the distinct ids at hand: a penalty touches those only."""

    def __init__(self, vocab_size: int) -> None:
        self._counts = np.zeros(vocab_size, dtype=np.int32)
        self._ids: Ids = np.zeros(0, dtype=np.int64)

    def add(self, tokens: npt.NDArray[np.int32], step: int = 1) -> None:
        np.add.at(self._counts, tokens, step)
        self._ids = np.union1d(self._ids, tokens) if step > 0 else np.flatnonzero(self._counts)

    @property
    def ids(self) -> Ids:
        return self._ids

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Of `ids`, in their order."""
        return self._counts[self._ids]


class Sampler:
    """The sampling state of one session. `observe` every token that enters the context, then `sample`.

    What is drawn for generated token k depends on the seed and on k alone (a counter-based generator), so a rollback
    or a batch neighbour never shifts the draws: same seed and same logits, same text.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        vocab_size: int,
        prompt_tokens: int,
        end_ids: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """`end_ids`: end-of-generation ids of the model. `constraint`: of its grammar. Raises `invalid_value`."""
        check(sampling, vocab_size)
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._prompt_tokens = prompt_tokens
        self._length = 0
        self._constraint = constraint
        self.stop_ids = frozenset(sampling.stop_ids)
        seed = os.urandom(16) if sampling.seed is None else b"%d" % sampling.seed
        self._key = hashlib.blake2b(seed, digest_size=32, person=b"shardline draws").digest()
        repeats = sampling.repeat_penalty != 1.0
        repeats_generated = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._seen = _Counts(vocab_size) if repeats else None
        self._generated = _Counts(vocab_size) if repeats_generated else None
        self._history: list[int] | None = [] if repeats or repeats_generated else None
        bias = sampling.logit_bias
        self._bias_ids = np.fromiter((i for i, b in bias.items() if abs(b) < BIAS_FORCES), dtype=np.int64)
        self._bias = np.fromiter((b for b in bias.values() if abs(b) < BIAS_FORCES), dtype=np.float32)
        self._forced = np.array(sorted(i for i, b in bias.items() if b >= BIAS_FORCES), dtype=np.int64)
        banned = {i for i, b in bias.items() if b <= -BIAS_FORCES}
        ends = {i for i in end_ids if 0 <= i < vocab_size}
        if sampling.ignore_eos:
            banned |= ends
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._banned = np.array(sorted(banned), dtype=np.int64)
        self._banned_early = np.array(sorted(banned | ends | set(sampling.stop_ids)), dtype=np.int64)
        self._bans = frozenset(banned)
        self._bans_early = self._bans | ends | set(sampling.stop_ids)
        self._biased = bool(bias)
        self._adjusts = bool(bias) or bool(banned) or self._history is not None

    @property
    def generated(self) -> int:
        """Observed tokens behind the prompt: also the number of the token that is sampled next."""
        return max(0, self._length - self._prompt_tokens)

    def observe(self, tokens: npt.NDArray[np.int32]) -> None:
        """Take note of the next tokens of the context, prompt and generated alike; each exactly once."""
        if self._history is not None:
            self._history.extend(tokens.tolist())
            self._count(tokens, 1)
        if self._constraint is not None and self._length + len(tokens) > self._prompt_tokens:
            ours = tokens[max(0, self._prompt_tokens - self._length) :]
            self._constraint.observe(self.generated, ours.tolist())
        self._length += len(tokens)

    def rollback(self, length: int) -> None:
        """Forget everything at and above position `length`."""
        if self._history is not None and length < self._length:
            dropped = np.array(self._history[length:], dtype=np.int32)
            del self._history[length:]
            self._length = length
            self._count(dropped, -1)
        self._length = min(self._length, length)
        if self._constraint is not None:
            self._constraint.rollback(self.generated)

    def _count(self, tokens: npt.NDArray[np.int32], step: int) -> None:
        if self._seen is not None:
            self._seen.add(tokens, step)
        if self._generated is not None:
            self._generated.add(tokens[max(0, self._prompt_tokens - self._length) :], step)

    def sample(self, logits: F32) -> Choice:
        """Choose the next token from `logits` (float32, [vocab_size], left as they are).

        Minus infinity marks a token that the model excludes. Raises `numerical_error` for NaN, plus infinity or no
        finite logit at all, `no_token_left` where bans and grammar leave nothing to choose, `engine_error` where the
        width is not the vocabulary's. A grammar that is complete, and has nothing more, ends against all bans.
        """
        if logits.shape != (self._vocab_size,):
            raise ShardlineError(
                "engine_error", f"the engine returned logits of {logits.size}, the vocabulary has {self._vocab_size}"
            )
        # argmax returns the first NaN where there is one, so one look at its value judges the whole row.
        best = int(logits.argmax())
        peak = float(logits[best])
        if not math.isfinite(peak):
            raise ShardlineError("numerical_error", "the logits of the last layer are not finite")
        chosen = self._choose(logits, best)
        if self._constraint is not None:
            # At once: the next mask is made while the token goes round the ring.
            self._constraint.observe(self.generated, (chosen,))
        if self._sampling.logprobs is None:
            return Choice(chosen, None, None)
        return _with_logprobs(logits, peak, chosen, self._sampling.logprobs)

    def _choose(self, logits: F32, best: int) -> int:
        scores = logits
        greedy = self._sampling.temperature <= GREEDY_BELOW or self._sampling.top_k == 1
        mask = None if self._constraint is None else self._constraint.mask()
        adjusts = self._adjusts or mask is not None or self.generated < self._sampling.min_tokens
        if adjusts and not (greedy and self._unbanned(best, mask)):
            scores = self._adjusted(logits, mask)
            best = int(scores.argmax())
            if scores[best] == -math.inf and mask is not None and mask.complete and len(self._ends):
                return int(self._ends[logits[self._ends].argmax()])
            self._check_adjusted(float(scores[best]), mask)
        return best if greedy else self._draw(scores, float(scores[best]))

    def _unbanned(self, best: int, mask: Mask | None) -> bool:
        """Whether nothing but bans and a grammar applies, and these allow `best`: it stays the best then."""
        if self._biased or self._history is not None or (mask is not None and mask.penalty[best] != 0):
            return False
        return best not in (self._bans_early if self.generated < self._sampling.min_tokens else self._bans)

    def _check_adjusted(self, peak: float, mask: Mask | None) -> None:
        if peak == -math.inf:
            what = "by the request" if mask is None else "by the request, among those that its grammar allows here"
            raise ShardlineError("no_token_left", f"every token is banned {what}, or has no chance in the model")
        if not math.isfinite(peak):
            raise ShardlineError("numerical_error", "the penalties drive the logits past the range of float32")

    def _adjusted(self, logits: F32, mask: Mask | None) -> F32:
        """Bias, penalties, bans and the grammar on a copy.

        repeat_penalty r: positive logits / r, others * r, once for each token of prompt and output (Keskar et al. 2019,
        https://arxiv.org/abs/1909.05858, 4.1; as transformers and vLLM). presence p and frequency f: minus
        p * [count > 0] + f * count over the output only (OpenAI's API reference, "Frequency and presence penalties").
        """
        s = self._sampling
        scores = logits.copy()
        scores[self._bias_ids] += self._bias
        with np.errstate(over="ignore"):
            if self._seen is not None:
                ids = self._seen.ids
                values = scores[ids]
                scores[ids] = np.where(values > 0, values / s.repeat_penalty, values * s.repeat_penalty)
            if self._generated is not None:
                scores[self._generated.ids] -= s.presence_penalty + s.frequency_penalty * self._generated.counts
        if len(self._forced):
            kept = scores[self._forced]
            scores.fill(-np.inf)
            scores[self._forced] = kept
        scores[self._banned_early if self.generated < s.min_tokens else self._banned] = -np.inf
        if mask is not None:
            scores += mask.penalty
        return scores

    def _draw(self, scores: F32, peak: float) -> int:
        """Sample from softmax(scores / temperature) after top_k, top_p and min_p, in transformers' order.

        top_k (Fan et al. 2018): the k most likely. top_p (Holtzman et al. 2020): of these, the fewest whose
        probabilities sum to at least p; one at least, so 0 is argmax. min_p (Nguyen et al. 2024): of these, those at
        least m times as likely as the most likely. Everything is relative to the peak: exp never overflows.
        """
        s = self._sampling
        scaled = scores - np.float32(peak)
        scaled /= np.float32(s.temperature)
        top_k = s.top_k if s.top_k < self._vocab_size else 0
        u = self._uniform()
        if not top_k and s.top_p >= 1 and s.min_p <= 0:
            return _draw_from_all(np.exp(scaled), u)
        ids, weights = _survivors(scaled, top_k, s.top_p, s.min_p)
        return int(ids[_invert(np.cumsum(weights), u)])

    def _uniform(self) -> float:
        """Number `generated` of the session's draws, in [0, 1): 53 bits of a keyed BLAKE2b of the counter."""
        counter = self.generated.to_bytes(8, "little")
        digest = hashlib.blake2b(counter, key=self._key, digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _descending(values: F32, mass: Callable[[Ids], float], wanted: float) -> Ids:
    """Ids of the largest `values` (at most 0, the largest is 0) whose `mass` is at least `wanted`, in `_ordered` order.

    A full sort of a vocabulary takes milliseconds, a comparison over it takes microseconds, and what sampling wants
    lies nearly always close to the peak.
    """
    for reach in _REACH:
        ids = np.flatnonzero(values >= -reach)
        if mass(ids) >= wanted:
            return _ordered(values, ids)
    return _ordered(values, np.flatnonzero(values > -np.inf))


def _ordered(values: F32, ids: Ids) -> Ids:
    """`ids` with the largest of `values` first, equal ones by lower id."""
    order: Ids = np.argsort(-values[ids], kind="stable")
    return ids[order]


def _largest(values: F32, count: int) -> Ids:
    """The `count` largest of `values` (peak at 0), in `_ordered` order; fewer where the rest is -inf."""
    ids: Ids | None = None
    for reach in _REACH:
        near = values >= -reach
        if np.count_nonzero(near) >= count:
            ids = np.flatnonzero(near)
            break
    if ids is None:
        ids = np.flatnonzero(values > -np.inf)
    if len(ids) > 4 * count + 1024:
        # A flat row: find the value at the border first, then sort only what does not lie below it.
        candidates = values[ids]
        border = len(ids) - count
        ids = ids[candidates >= np.partition(candidates, border)[border]]
    return _ordered(values, ids)[:count]


def _survivors(scaled: F32, top_k: int, top_p: float, min_p: float) -> tuple[Ids, npt.NDArray[np.float64]]:
    """What top_k, top_p and min_p leave, most likely first, with weights relative to the peak."""
    if top_k:
        ids = _largest(scaled, top_k)
        weights = np.exp(scaled[ids].astype(np.float64))
        total = float(weights.sum())
    elif top_p < 1:
        everything = np.exp(scaled)
        total = float(everything.sum(dtype=np.float64))
        ids = _descending(scaled, lambda ids: float(everything[ids].sum(dtype=np.float64)), top_p * total)
        weights = everything[ids].astype(np.float64)
    else:
        ids = _ordered(scaled, np.flatnonzero(scaled >= math.log(min_p)))
        return ids, np.exp(scaled[ids].astype(np.float64))
    kept = len(ids)
    if top_p < 1:
        kept = min(kept, int(np.searchsorted(np.cumsum(weights), top_p * total)) + 1)
    if min_p > 0:
        kept = min(kept, max(1, int(np.count_nonzero(weights >= min_p))))
    return ids[:kept], weights[:kept]


def _invert(cumulative: npt.NDArray[np.float64], u: float) -> int:
    """Index drawn by `u` in [0, 1); rounding at the upper end never leaves the array."""
    index = int(np.searchsorted(cumulative, u * float(cumulative[-1]), side="right"))
    return min(index, len(cumulative) - 1)


def _draw_from_all(weights: F32, u: float) -> int:
    """Draw an index in proportion to `weights`: first a block, then within it. One long cumulative sum over a
    vocabulary would take a millisecond."""
    whole = weights.size // _BLOCK * _BLOCK
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1).astype(np.float64)
    blocks = np.cumsum(np.append(sums, weights[whole:].sum(dtype=np.float64)))
    # Strictly below the sum, so that the block found has weight of its own.
    target = min(u * float(blocks[-1]), math.nextafter(float(blocks[-1]), 0.0))
    block = int(np.searchsorted(blocks, target, side="right"))
    start = block * _BLOCK
    before = float(blocks[block - 1]) if block else 0.0
    inside = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    index = int(np.searchsorted(inside, target - before, side="right"))
    # Where rounding points behind the block's last weight, take the last that has any.
    return start + min(index, int(np.flatnonzero(weights[start : start + _BLOCK])[-1]))


def _with_logprobs(logits: F32, peak: float, chosen: int, count: int) -> Choice:
    shifted = logits - np.float32(peak)
    norm = math.log(float(np.exp(shifted).sum(dtype=np.float64)))
    top = [(int(i), _logprob(shifted, int(i), norm)) for i in (_largest(shifted, count) if count else ())]
    return Choice(chosen, _logprob(shifted, chosen, norm), tuple(top))


def _logprob(shifted: F32, token: int, norm: float) -> float:
    return max(LOGPROB_FLOOR, float(shifted[token]) - norm)
