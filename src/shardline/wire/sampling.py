"""How the tail makes a token from a row of logits, as it stands in control messages, and what an answer may be.

Owns the values; the order and the formulas are model/sampling.py's, grammars are model/grammar.py's. Pure.
Shown by tests/wire/test_messages.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

BIAS_FORCES = 100.0
"""OpenAI's `logit_bias`: from this on a token is the only choice, from minus this it is none, whatever the logits."""


GRAMMAR_BYTES = 128 << 10
"""Largest `Grammar`, `before` included: whatever JSON makes of it passes as one control message."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer may be; the tail keeps it to that, or refuses the session."""

    kind: Literal["json_schema", "regex", "lark", "grammar"]
    """`lark`: as llguidance reads it. `grammar`: that, or llama.cpp's GBNF, which has `::=` in it."""
    text: str
    field: str
    """Of the client's request, for errors."""
    before: str = ""
    """Rules in Lark that define `before`: what stands in front (a model's thinking). Empty: nothing does."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tail makes a token from a row of logits; see model/sampling.py for the order and the formulas."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    """None: none. 0: of the chosen token only. n: of the n most likely as well."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: list[int] = []
    grammar: Grammar | None = None
    """A tail that keeps to it says so (`Opened.grammar`); one that does not know of this field says nothing."""
