"""The table of architectures: one row each, for what no header says and what must be known before loading.

Owns names (GGUF and Hugging Face), what the PyTorch engine does with each, rollback, and what crosses a Seam. An
architecture without a row may be tried: the Shard's self-test decides. Facts of further engines (residual tensor,
legal cuts, minimum slice) become columns here. Shown by tests/formats/test_architectures.py; printed for people in
docs/architectures.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardline.errors import ShardlineError

Torch = Literal["supported", "refused", "untried"]
Rollback = Literal["exact", "within_window", "never"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is known of one architecture."""

    name: str
    gguf: tuple[str, ...] = ()
    """Values of `general.architecture`."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` in a config.json, the text model's own among them."""
    torch: Torch = "untried"
    """supported: proven by the engine's tests. untried: may be tried. refused: for the reason given. Of GGUF files the
    engine further needs metadata that it knows how to translate; it says so when it loads one."""
    reason: str | None = None
    """Why it is refused, as a clause that follows a colon."""
    rollback: Rollback = "exact"
    """within_window: exact as long as no sliding window has moved on. never: a state that cannot be taken back."""
    layout: Literal["hidden", "streams"] = "hidden"
    """hidden: one row of `hidden_size`. streams: several residual streams; the engine names them."""
    scales_rows_in_decoder: bool = False
    """The decoder multiplies what it is given, embedded or not: right at the head, wrong behind it, unless undone."""

    def can_roll_back(self, held: int, window: int | None) -> bool:
        """Whether a slot that holds `held` tokens can go back exactly; `window` is the model's sliding window."""
        if self.rollback == "within_window":
            return window is None or held < window
        return self.rollback == "exact"


_RECURRENT = "it keeps a recurrent state, which the PyTorch engine does not hold for now"
_STREAMS = "its layers exchange more than one row per token, which the PyTorch engine does not hand on for now"
_SHARED_KV = "its layers share keys and values across any cut"


def _recurrent(name: str, gguf: str, model_types: str) -> Architecture:
    return Architecture(name, _names(gguf), _names(model_types), "refused", _RECURRENT, "never")


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ROWS: tuple[Architecture, ...] = (
    # Proven on the PyTorch engine.
    Architecture("llama", ("llama",), ("llama",), torch="supported"),
    Architecture("mistral", (), ("mistral",), torch="supported", rollback="within_window"),
    Architecture("qwen2", ("qwen2",), ("qwen2",), torch="supported", rollback="within_window"),
    Architecture("qwen3", ("qwen3",), ("qwen3",), torch="supported", rollback="within_window"),
    Architecture("qwen3moe", ("qwen3moe",), ("qwen3_moe",), torch="supported", rollback="within_window"),
    Architecture("gemma3", ("gemma3",), ("gemma3", "gemma3_text"), torch="supported", rollback="within_window"),
    Architecture("phi3", ("phi3",), ("phi3",), torch="supported", rollback="within_window"),
    Architecture("gpt-oss", ("gpt-oss",), ("gpt_oss",), torch="supported", rollback="within_window"),
    Architecture("deepseek3", ("deepseek2",), ("deepseek_v3",), torch="supported"),
    # May be tried, with something to know.
    Architecture("deepseek2", (), ("deepseek_v2",)),
    Architecture("gemma", ("gemma",), ("gemma",)),
    Architecture("gemma2", ("gemma2",), ("gemma2",), rollback="within_window"),
    Architecture("mistral3", ("mistral3",), ("ministral3",), rollback="within_window"),
    Architecture("mixtral", (), ("mixtral",), rollback="within_window"),
    Architecture("granite", ("granite",), ("granite",), scales_rows_in_decoder=True),
    Architecture("granitemoe", ("granitemoe",), ("granitemoe",), scales_rows_in_decoder=True),
    # Refused: what a cut would need is not handed on, or cannot be taken back.
    _recurrent("qwen3.5", "qwen35 qwen35moe", "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text"),
    _recurrent("qwen3next", "qwen3next", "qwen3_next"),
    _recurrent("mamba", "mamba mamba2", "mamba mamba2 falcon_mamba"),
    _recurrent("jamba", "jamba", "jamba"),
    _recurrent("lfm2", "lfm2 lfm2moe", "lfm2 lfm2_moe"),
    _recurrent("falcon-h1", "falcon-h1", "falcon_h1"),
    _recurrent("granitehybrid", "granitehybrid", "granitemoehybrid"),
    _recurrent("nemotron-h", "nemotron_h nemotron_h_moe", "nemotron_h"),
    _recurrent("kimi-linear", "kimi-linear", "kimi_linear"),
    _recurrent("minimax", "minimax-01", "minimax"),
    _recurrent("olmo-hybrid", "", "olmo_hybrid"),
    _recurrent("recurrent-gemma", "", "recurrent_gemma"),
    _recurrent("bamba", "", "bamba"),
    _recurrent("zamba", "", "zamba zamba2"),
    _recurrent("rwkv", "rwkv6 rwkv7", "rwkv"),
    Architecture(
        "gemma3n", ("gemma3n",), ("gemma3n", "gemma3n_text"), torch="refused", reason=_SHARED_KV, layout="streams"
    ),
    Architecture("deepseek4", ("deepseek4",), ("deepseek_v4",), torch="refused", reason=_STREAMS, layout="streams"),
)

_BY_GGUF = {name: row for row in ROWS for name in row.gguf}
_BY_MODEL_TYPE = {name: row for row in ROWS for name in row.model_types}


def of_gguf(architecture: str) -> Architecture:
    """The row of a GGUF file's `general.architecture`; for an unknown one a row that says so ("untried")."""
    return _BY_GGUF.get(architecture) or Architecture(architecture, gguf=(architecture,))


def of_model_type(model_type: str) -> Architecture:
    """The row of a config.json's `model_type`; for an unknown one a row that says so ("untried")."""
    return _BY_MODEL_TYPE.get(model_type) or Architecture(model_type, model_types=(model_type,))


def check_torch(row: Architecture) -> None:
    """`architecture_unsupported`, with the reason, where the PyTorch engine refuses the architecture by name."""
    if row.torch == "refused":
        raise ShardlineError(
            "architecture_unsupported",
            f"the PyTorch engine does not run {row.name}: {row.reason}",
            architecture=row.name,
        )
