"""The table of architectures: one row each, for what no header says and what must be known before loading.

Owns names (GGUF and Hugging Face), what the PyTorch engine does with each, rollback, what crosses a Seam, and how
llama.cpp's part of a model may be cut (`LlamaRules`, applied by layer_kinds.py, cuts.py and shard_gguf.py). What has no
row may be tried on PyTorch, and whole on llama.cpp. Shown by tests/formats/test_architectures.py; printed for people in
docs/architectures.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardline.errors import ShardlineError

Torch = Literal["supported", "refused", "untried"]
Rollback = Literal["exact", "within_window", "never"]
Proof = Literal["exact", "close", "unproven", "refused"]
Tap = Literal["nextn", "layer_end"]


@dataclass(frozen=True, slots=True)
class Window:
    """Which layers of an architecture have a sliding window, where the file has no array that says it."""

    period: int | None = None
    """One layer of `period` sees everything, the others a window; None: the file must have the array."""
    dense_first: bool = False
    """The layer that sees everything is the first of its period, not the last."""
    optional: bool = False
    """There are windows only if key `attention.sliding_window` says so."""


@dataclass(frozen=True, slots=True)
class LlamaRules:
    """How a model may be cut for llama.cpp, and what its parts must be told that the whole does not need.

    llama.cpp numbers the layers of a part from 0, and its graphs read some facts from the number of a layer or of all
    layers: each field is one such fact. Keys are without the prefix of the architecture.
    """

    proof: Proof = "exact"
    """exact: cut at several places, and every number equal to the uncut model's. close: equal but for float rounding.
    unproven: the rules are known, nobody compared the numbers. refused: for the reason given."""
    reason: str | None = None
    residual: str = "l_out-{last}"
    """Name of the graph's tensor that is the output of layer `last`, before any norm."""
    taps: tuple[Tap, ...] = ()
    """Other ways out than that tensor, by a buffer of the library's own. layer_end: the input of the layer behind the
    last. nextn: what is kept for a head that predicts further tokens."""
    align: int = 1
    """Layers come in groups of so many, told by their number: cut between groups only."""
    align_windowed: bool = False
    """… in models with a window only."""
    align_key: str | None = None
    """A key with one more such number."""
    window: Window | None = None
    """Each part must have a layer with a window, in models that have them."""
    unwindowed_layer: bool = False
    """… and one without a window."""
    window_required: bool = False
    """Without windows, llama.cpp numbers the layers in a way that no part can follow."""
    recurrent: Literal["interval", "no_kv_heads", "no_kv_heads_no_ffn"] | None = None
    """How a recurrent layer is told from one with attention. Each part must have both kinds."""
    indexers: bool = False
    """Layers without an indexer of their own use that of an earlier one: a part begins with a layer that has one."""
    sparse_layer: bool = False
    """Each part must have a layer behind the leading dense ones. Only these have an indexer, in a model with any."""
    indexer_values: bool = False
    """The cache of an indexer holds values beside its keys."""
    min_layers: int = 1
    one_sequence: bool = False
    """Rows of several sequences in one call are computed wrongly or end the process, whole or cut: each has its own."""
    single_session: bool = False
    """Sparse attention finds its blocks by the place of a cell: in a context for several sessions the library computes
    dense attention instead, which the model was not trained for, whole or cut."""
    output_required: bool = False
    """`output.weight` must be in each file, even where its result is not used."""
    embedding: Literal["key", "sqrt_width", "sqrt_width_always"] | None = None
    """What embedded tokens are multiplied with: key `embedding_scale` (by the graph, whatever its input is); the square
    root of the width, if the input is tokens; the same, whatever the input is."""
    embedding_default: float | None = None
    """Where key `embedding_scale` is absent."""
    residual_depth: float | None = None
    """Key `residual_scale`, where absent, is this divided by the square root of the number of layers."""
    sections: Literal["write", "need"] | None = None
    """The graph takes rows only if key `rope.dimension_sections` is there; write: it can be added without harm."""
    rope_freqs_full: bool = False
    """`rope_freqs.weight` belongs to layers without a window, and to no part without such a layer."""
    counts: tuple[tuple[int, int | None], ...] = ()
    """Numbers of layers (of a model with that vocabulary) that make the graph another one."""
    count_cure: Literal["fold_q_norm", "no_q_lora"] | None = None
    """How parts of a model of such a number are told; None: not at all."""
    gating_default: bool = False
    """Key `expert_gating_func`, where absent, follows from the number of layers."""
    zero_keys: tuple[str, ...] = ()
    """Refused where one of these keys is not 0, for `zero_reason`."""
    zero_reason: str = ""


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
    llama: LlamaRules | None = None
    """None: nothing is known, so llama.cpp runs it whole or not at all."""
    blocked: str | None = None
    """No engine runs it, whole or cut, for this reason; a clause that follows a colon."""
    page: str | None = None
    """Where its support is written up: a file of docs/."""

    @property
    def advice(self) -> str:
        """What somebody can do whose model was refused."""
        where = f"docs/{self.page}" if self.page is not None else "docs/architectures.md"
        if self.blocked is not None:
            return f"Choose another model: see {where}."
        return f"Serve all layers on one Node, or choose another model: see {where}."

    def can_roll_back(self, held: int, window: int | None) -> bool:
        """Whether a slot that holds `held` tokens can go back exactly; `window` is the model's sliding window."""
        if self.rollback == "within_window":
            return window is None or held < window
        return self.rollback == "exact"


_RECURRENT = "it keeps a recurrent state, which the PyTorch engine does not hold for now"
_NO_ENGINE = (
    "no released version of transformers or llama.cpp has it, and its layers share compressed keys, values and "
    "selections over most cuts"
)
_SHARED_KV = "its layers share keys and values across any cut"


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


def _recurrent(name: str, gguf: str, model_types: str, llama: LlamaRules | None = None) -> Architecture:
    return Architecture(name, _names(gguf), _names(model_types), "refused", _RECURRENT, "never", llama=llama)


def _untried(name: str, llama: LlamaRules, model_types: str = "", *, rollback: Rollback = "exact") -> Architecture:
    """A row that only llama.cpp has something to say about."""
    return Architecture(name, (name,), _names(model_types), rollback=rollback, llama=llama)


def _whole_only(name: str, reason: str, model_types: str = "", *, rollback: Rollback = "exact") -> Architecture:
    return _untried(name, LlamaRules("refused", reason), model_types, rollback=rollback)


_PLAIN = LlamaRules()
_OUTPUT = LlamaRules(output_required=True)
_SCALED = LlamaRules(embedding="key")
_INTERVAL = LlamaRules(recurrent="interval")
_MIXED = LlamaRules(recurrent="no_kv_heads")
_GEMMA = LlamaRules("close", embedding="sqrt_width_always")
_DEEPSEEK = LlamaRules(counts=((26, None), (27, None), (48, 128_256)), count_cure="no_q_lora", gating_default=True)

_TOKEN_IDS = "layers behind the first need token ids, which llama.cpp does not take beside rows"
_NORMED_INPUT = "its graph normalises whatever it is given, rows too"
_MANY_STREAMS = "its layers exchange more than one row per token"
_NUMBERED = "its layers compute from their number and the number of all"

ROWS: tuple[Architecture, ...] = (
    # Proven on the PyTorch engine.
    Architecture("llama", ("llama",), ("llama",), torch="supported", llama=_PLAIN),
    Architecture("mistral", (), ("mistral",), torch="supported", rollback="within_window"),
    Architecture("qwen2", ("qwen2",), ("qwen2",), torch="supported", rollback="within_window", llama=_PLAIN),
    Architecture("qwen3", ("qwen3",), ("qwen3",), torch="supported", rollback="within_window", llama=_PLAIN),
    Architecture("qwen3moe", ("qwen3moe",), ("qwen3_moe",), torch="supported", rollback="within_window", llama=_PLAIN),
    Architecture(
        "gemma3",
        ("gemma3",),
        ("gemma3", "gemma3_text"),
        torch="supported",
        rollback="within_window",
        llama=LlamaRules(
            window=Window(6, optional=True), embedding="sqrt_width", counts=((62, None),), count_cure="fold_q_norm"
        ),
    ),
    Architecture("phi3", ("phi3",), ("phi3",), torch="supported", rollback="within_window", llama=_PLAIN),
    Architecture(
        "gpt-oss",
        ("gpt-oss",),
        ("gpt_oss",),
        torch="supported",
        rollback="within_window",
        llama=LlamaRules(taps=("nextn",), window=Window(2), output_required=True),
    ),
    Architecture("deepseek3", ("deepseek2",), ("deepseek_v3",), torch="supported", llama=_DEEPSEEK),
    # May be tried, with something to know.
    Architecture("deepseek2", (), ("deepseek_v2",)),
    Architecture("gemma", ("gemma",), ("gemma",), llama=_GEMMA),
    Architecture(
        "gemma2",
        ("gemma2",),
        ("gemma2",),
        rollback="within_window",
        llama=LlamaRules("close", embedding="sqrt_width_always", window=Window(2), counts=((46, None),)),
    ),
    Architecture("mistral3", ("mistral3",), ("ministral3",), rollback="within_window", llama=_PLAIN),
    Architecture("mixtral", (), ("mixtral",), rollback="within_window"),
    Architecture("granite", ("granite",), ("granite",), scales_rows_in_decoder=True, llama=_SCALED),
    Architecture("granitemoe", ("granitemoe",), ("granitemoe",), scales_rows_in_decoder=True, llama=_SCALED),
    # Refused by PyTorch: what a cut would need is not handed on, or cannot be taken back.
    Architecture(
        "qwen3.5",
        ("qwen35", "qwen35moe"),
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        torch="supported",
        rollback="never",
        llama=_INTERVAL,
        page="audits/ornith.md",
    ),
    _recurrent("qwen3next", "qwen3next", "qwen3_next", _INTERVAL),
    _recurrent("mamba", "mamba mamba2", "mamba mamba2 falcon_mamba", _PLAIN),
    _recurrent("jamba", "jamba", "jamba", _MIXED),
    _recurrent("lfm2", "lfm2 lfm2moe", "lfm2 lfm2_moe", _MIXED),
    _recurrent("falcon-h1", "falcon-h1", "falcon_h1", _PLAIN),
    _recurrent(
        "granitehybrid",
        "granitehybrid",
        "granitemoehybrid",
        LlamaRules(recurrent="no_kv_heads", embedding="key"),
    ),
    _recurrent(
        "nemotron-h",
        "nemotron_h nemotron_h_moe",
        "nemotron_h",
        LlamaRules(residual="nemotron_h_block_out-{last}", taps=("layer_end",), recurrent="no_kv_heads_no_ffn"),
    ),
    _recurrent("kimi-linear", "kimi-linear", "kimi_linear", LlamaRules(recurrent="no_kv_heads", output_required=True)),
    _recurrent("bailingmoe3", "bailingmoe3", "", _MIXED),
    _recurrent("minimax", "minimax-01", "minimax", LlamaRules("refused", _NUMBERED)),
    _recurrent("olmo-hybrid", "", "olmo_hybrid"),
    _recurrent("recurrent-gemma", "", "recurrent_gemma"),
    _recurrent("bamba", "", "bamba"),
    _recurrent("zamba", "", "zamba zamba2"),
    _recurrent("rwkv", "rwkv6 rwkv6qwen2 rwkv7 arwkv7", "rwkv", LlamaRules("refused", _NORMED_INPUT)),
    Architecture(
        "gemma3n",
        ("gemma3n",),
        ("gemma3n", "gemma3n_text"),
        torch="refused",
        reason=_SHARED_KV,
        layout="streams",
        llama=LlamaRules("refused", _SHARED_KV),
    ),
    Architecture(
        "deepseek4",
        ("deepseek4",),
        ("deepseek_v4",),
        torch="supported",
        rollback="never",
        layout="streams",
        llama=LlamaRules("refused", _MANY_STREAMS),
        page="audits/deepseek-v4-flash.md",
    ),
    Architecture(
        "deepseek4.1",
        ("deepseek41",),
        ("deepseek_v41",),
        torch="refused",
        reason=_NO_ENGINE,
        rollback="never",
        layout="streams",
        blocked=_NO_ENGINE,
        page="audits/deepseek-v4-flash.md",
    ),
    # Proven on llama.cpp.
    _untried(
        "llama4",
        LlamaRules(align=4, align_key="interleave_moe_layer_step", window=Window(4), window_required=True),
        rollback="within_window",
    ),
    _untried("qwen2moe", _OUTPUT, "qwen2_moe"),
    _untried(
        "gemma4",
        LlamaRules(
            window=Window(),
            embedding="sqrt_width",
            rope_freqs_full=True,
            min_layers=2,
            zero_keys=("embedding_length_per_layer_input", "attention.shared_kv_layers"),
            zero_reason="its layers look up rows by token id, and share keys and values across any cut",
        ),
        rollback="within_window",
    ),
    _untried("mistral4", _DEEPSEEK),
    _untried("deepseek32", _PLAIN),
    _untried("glm4moe", LlamaRules(sections="write"), "glm4_moe"),
    Architecture(
        "glm-dsa",
        ("glm-dsa",),
        ("glm_moe_dsa",),
        torch="supported",
        llama=LlamaRules(indexers=True),
        page="audits/glm-5.2.md",
    ),
    _untried("minimax-m2", _OUTPUT, "minimax_m2"),
    _untried(
        "minimax-m3",
        LlamaRules(sparse_layer=True, indexer_values=True, single_session=True, output_required=True),
    ),
    _untried("olmo2", LlamaRules(window=Window(4, optional=True), output_required=True), rollback="within_window"),
    _untried("command-r", _PLAIN, "cohere"),
    _untried("cohere2", LlamaRules(window=Window(4)), "cohere2", rollback="within_window"),
    _untried("cohere2moe", LlamaRules(window=Window(4, dense_first=True)), rollback="within_window"),
    _untried("gptneox", _OUTPUT, "gpt_neox"),
    _untried("smollm3", LlamaRules(align=4), "smollm3"),
    _untried(
        "afmoe",
        LlamaRules("close", align=4, window=Window(4, optional=True), embedding="sqrt_width_always"),
        rollback="within_window",
    ),
    _untried("ernie4_5", _PLAIN, "ernie4_5"),
    _untried("ernie4_5-moe", LlamaRules(align_key="interleave_moe_layer_step"), "ernie4_5_moe"),
    _untried("exaone4", LlamaRules(counts=((64, None),)), "exaone4", rollback="within_window"),
    _untried("exaone-moe", LlamaRules(window=Window(4), output_required=True), rollback="within_window"),
    _untried(
        "step35",
        LlamaRules(residual="h_nextn", taps=("nextn",), window=Window(), output_required=True),
        rollback="within_window",
    ),
    _untried(
        "mimo2",
        LlamaRules(taps=("nextn", "layer_end"), window=Window(), output_required=True),
        rollback="within_window",
    ),
    _untried("hy_v3", _PLAIN),
    _untried("hunyuan-moe", _PLAIN, "hunyuan_v1_moe"),
    _untried("hunyuan-dense", _PLAIN, "hunyuan_v1_dense"),
    _untried("hunyuan_vl", _PLAIN),
    _untried("dots1", _OUTPUT, "dots1"),
    _untried("bailingmoe2", _OUTPUT),
    _untried("seed_oss", _PLAIN, "seed_oss"),
    _untried("granite_swa", LlamaRules(window=Window(), embedding="key"), rollback="within_window"),
    _untried("minicpm", LlamaRules(embedding="key", embedding_default=12.0, residual_depth=1.4)),
    _untried("grok", LlamaRules(embedding="key", embedding_default=78.38367176906169)),
    _untried(
        "smallthinker",
        LlamaRules(
            align=4, align_windowed=True, counts=((4, None),), window=Window(4, dense_first=True, optional=True)
        ),
        rollback="within_window",
    ),
    _untried("mellum", LlamaRules(window=Window(4, optional=True), output_required=True), rollback="within_window"),
    _untried("laguna", LlamaRules(window=Window(4, dense_first=True, optional=True)), rollback="within_window"),
    _untried("plamo3", LlamaRules(window=Window(8, optional=True)), rollback="within_window"),
    _untried("spark2_5", LlamaRules(window=Window()), rollback="within_window"),
    _untried("maple", LlamaRules(window=Window(), output_required=True), rollback="within_window"),
    _untried("dots3note", LlamaRules(window=Window(), unwindowed_layer=True), rollback="within_window"),
    _untried(
        "plamo2",
        LlamaRules(residual="ffn_residual-{last}", recurrent="no_kv_heads", one_sequence=True),
        rollback="never",
    ),
    _untried("glm4", LlamaRules(sections="need"), "glm4"),
    _untried(
        "nanbeige",
        LlamaRules(zero_keys=("num_loops",), zero_reason="its layers run several times over"),
    ),
    *(
        _untried(name, _PLAIN)
        for name in _names(
            "arcee arctic bitnet chatglm deci deepseek deepseek2-ocr exaone falcon gpt2 grovemoe jais2 maincoder mpt "
            "olmo openelm paddleocr pangu-embedded qwen2vl qwen3vl qwen3vlmoe refact starcoder starcoder2"
        )
    ),
    *(
        _untried(name, _OUTPUT)
        for name in _names(
            "apertus bailingmoe codeshell dbrx internlm2 jais nemotron olmoe orion phi2 phimoe plamo qwen stablelm "
            "xverse"
        )
    ),
    # Refused by llama.cpp, but for the whole model.
    _whole_only("kimi-k3", _MANY_STREAMS, rollback="never"),
    Architecture(
        "glm5-next",
        ("glm5-next",),
        ("glm5_next", "glm5_next_text"),
        torch="refused",
        reason=_MANY_STREAMS,
        rollback="never",
        layout="streams",
        llama=LlamaRules("refused", _MANY_STREAMS),
        page="audits/glm-5.2.md",
    ),
    _whole_only("hy_v4", _MANY_STREAMS),
    _whole_only("qwen4exp", _TOKEN_IDS, rollback="never"),
    _whole_only("cogvlm", "its graph takes rows for images"),
    _whole_only("graniteswitch", _TOKEN_IDS),
    _whole_only("talkie", _NORMED_INPUT),
    _whole_only("muse-glimmer", _NORMED_INPUT, rollback="within_window"),
    _whole_only("bloom", _NORMED_INPUT, "bloom"),
    _whole_only("hrm_text", "its layers run several times over"),
    _whole_only("baichuan", _NUMBERED),
    _whole_only("minicpm3", _NUMBERED),
)

_BY_GGUF = {name: row for row in ROWS for name in row.gguf}
_BY_MODEL_TYPE = {name: row for row in ROWS for name in row.model_types}


def of_gguf(architecture: str) -> Architecture:
    """The row of a GGUF file's `general.architecture`; for an unknown one a row that says so ("untried")."""
    return _BY_GGUF.get(architecture) or Architecture(architecture, gguf=(architecture,))


def of_model_type(model_type: str) -> Architecture:
    """The row of a config.json's `model_type`; for an unknown one a row that says so ("untried")."""
    return _BY_MODEL_TYPE.get(model_type) or Architecture(model_type, model_types=(model_type,))


def check_blocked(row: Architecture) -> None:
    """`architecture_unsupported`, with the reason and its page, where no engine runs the architecture."""
    if row.blocked is not None:
        raise ShardlineError(
            "architecture_unsupported",
            f"{row.name} is not supported: {row.blocked}",
            advice=row.advice,
            architecture=row.name,
        )


def check_torch(row: Architecture) -> None:
    """`architecture_unsupported`, with the reason, where the PyTorch engine refuses the architecture by name."""
    check_blocked(row)
    if row.torch == "refused":
        raise ShardlineError(
            "architecture_unsupported",
            f"the PyTorch engine does not run {row.name}: {row.reason}",
            advice=f"Choose another model: see docs/{row.page}." if row.page is not None else None,
            architecture=row.name,
        )


def llama_rules(row: Architecture) -> LlamaRules:
    """How a model of this architecture is cut for llama.cpp; `architecture_unsupported` where only the whole runs."""
    check_blocked(row)
    rules = row.llama
    if rules is not None and rules.proof != "refused":
        return rules
    why = "nobody has compared its parts with the whole" if rules is None else rules.reason
    raise ShardlineError(
        "architecture_unsupported",
        f"llama.cpp runs {row.name} only whole: {why}",
        advice=row.advice,
        architecture=row.name,
    )
