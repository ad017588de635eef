"""Facts about model families, without torch, transformers, Megatron-Bridge or a network: the ones that Bridge converts
(a test compares the list with the installed Bridge), and a model's number of parameters from its Hugging Face config.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megaboa import model_kinds
from megaboa.records import Tree

BRIDGE = "0.6.2"
CONVERTIBLE = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1"),
        *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text"),
        *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "hy_v3", "llama", "minimax_m2", "mistral"),
        *("nemotron", "nemotron_h", "olmoe", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    )
)

SHIPPED = {"t5": "recipes/t5.py", "bert": "recipes/bert.py"}  # kinds for which Bridge has no family

# With norms of queries and keys; the configs of other families have a key for that.
QK_NORM = frozenset(
    (
        *("exaone4", "exaone_moe", "gemma3", "gemma3_text", "hy_v3", "minimax_m2", "olmoe", "qwen3", "qwen3_moe"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    )
)

# What their layers have that others lack, or the reverse, as Bridge's converters set it up.
UNGATED = frozenset(("nemotron", "nemotron_h"))  # feed-forward layers
BIASED = frozenset(("gpt_oss",))  # all linear layers
UNBIASED = frozenset(("deepseek_v2", "falcon_h1", "nemotron"))  # whatever `mlp_bias` says
QKV_BIASED = frozenset(("qwen2",))
QKV_UNBIASED = frozenset(
    ("gemma4_text", "gpt_oss", "qwen3", "qwen3_moe", "qwen3_next")
)  # whatever `attention_bias` says
LAYER_NORM = frozenset(("nemotron",))  # with a bias, instead of RMSNorm

# Families whose converter in Bridge fuses the activation of the feed-forward layers.
FUSED_ACTIVATION = frozenset(("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama"))

# What the converters of models with experts choose. All of them group the experts' products.
ROUTED_IN_FP32 = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "ernie4_5_moe", "exaone_moe", "gemma4", "gemma4_text"),
        *("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "nemotron_h", "olmoe", "qwen3_next"),
    )
)
OVERLAPPED_SHARED_EXPERT = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v4", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
        "nemotron_h",
    )
)
DISPATCHED_BY_HYBRIDEP = frozenset(("deepseek_v4", "glm_moe_dsa"))

# Families whose converter chooses another kernel for the loss than Megatron's, or none.
LOSS_OF_TE = frozenset(("deepseek_v2", "deepseek_v3", "deepseek_v4"))
UNFUSED_LOSS = frozenset(("falcon_h1", "glm4_moe_lite"))

# Families whose classes aren't causal language models.
SEEING = frozenset(("qwen2_5_vl",))

# Suffixes of classes that read more than text, in families of decoders.
CONDITIONED = "ForConditionalGeneration"

Config = Tree


class UnknownFamilyError(ValueError):
    """The parameters of a model of this family can't be counted here."""


def problem(config: Config, model: str, recipe: bool = False) -> str | None:
    """Why a model can't be trained from its Hugging Face config, and what to do. `recipe`: whether it also has a
    recipe."""
    model_type = str(config.get("model_type"))
    if why := model_kinds.refusal(kind := model_kinds.of_family(model_type)):
        return f"{model_type}: {why}"
    # A family may have models with and without a vision tower: gemma3, gemma4, qwen3_5.
    seeing = next((one for one in map(str, config.get("architectures") or ()) if one.endswith(CONDITIONED)), None)
    if seeing and kind.name == model_kinds.GPT:
        return f"{model_type}: {seeing}: {model_kinds.refusal(model_kinds.BY_NAME['other-vlm'])}"
    if model_type in CONVERTIBLE or model_type in SEEING:
        return None
    if kind.name in SHIPPED and not recipe:
        return (
            f"{model_type}: Megatron-Bridge {BRIDGE} has no converter for {kind.text}: it is pretrained as a recipe "
            f"(models.{model}.recipe: {SHIPPED[kind.name]}), without Hugging Face stages"
        )
    near = difflib.get_close_matches(model_type, CONVERTIBLE, n=3) or ["llama", "qwen3", "..."]
    return (
        f"Megatron-Bridge {BRIDGE} has no converter for {model_type} (it has {', '.join(near)}): "
        + (f"remove models.{model}.hf or config" if recipe else f"name a recipe (models.{model}.recipe)")
        + ": a recipe alone is trained without Hugging Face stages"
    )


def count_parameters(hf_config: Config) -> int:
    """The trainable parameters of the causal language model that a Hugging Face config describes."""
    family = hf_config.get("model_type")
    if family not in _LAYERS:
        known = ", ".join(_LAYERS)
        raise UnknownFamilyError(
            f"the parameters of a {family!r} model can't be counted (known: {known}): set models.<name>.params"
        )
    c = with_defaults(hf_config)
    hidden = c["hidden_size"]
    norms = 2 * hidden
    layers = sum(_LAYERS[family](c, layer) + norms for layer in range(c["num_hidden_layers"]))
    embeddings = c["vocab_size"] * hidden * (1 if c.get("tie_word_embeddings", False) else 2)
    return embeddings + layers + hidden


def has_qk_norm(hf_config: Config) -> bool:
    return bool(hf_config.get("use_qk_norm") or hf_config.get("model_type") in QK_NORM)


def has_bias(hf_config: Config) -> bool:
    """Whether all linear layers have biases in Megatron."""
    family = hf_config.get("model_type")
    return family in BIASED or (bool(hf_config.get("mlp_bias")) and family not in UNBIASED)


def has_qkv_bias(hf_config: Config) -> bool:
    """Whether queries, keys and values have biases in Megatron."""
    family = hf_config.get("model_type")
    return family in QKV_BIASED or (bool(hf_config.get("attention_bias")) and family not in QKV_UNBIASED)


def is_wholly_rotary(hf_config: Config) -> bool:
    """Whether positions are known to turn whole heads. Other families have defaults that aren't known here."""
    parts = (hf_config, hf_config.get("rope_parameters") or {})
    return hf_config.get("model_type") in _LAYERS and all("partial_rotary_factor" not in one for one in parts)


OTHER_NAMES = {"num_experts": "num_local_experts"}  # as transformers 5 saves it for qwen3_moe


def with_defaults(hf_config: Config) -> Config:
    """The config completed with transformers' defaults; unchanged for a family that isn't known here."""
    defaults = _DEFAULTS.get(str(hf_config.get("model_type")), {})
    other = {name: hf_config[also] for name, also in OTHER_NAMES.items() if name in defaults and also in hf_config}
    return {**defaults, **other, **hf_config}


# transformers' defaults for missing keys, as far as they affect the count.
_DEFAULTS: dict[str, Config] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "mixtral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "decoder_sparse_step": 1,
    },
    "deepseek_v3": {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


def _linear(inputs: int, outputs: int, bias: bool = False) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _attention(c: Config, qkv_bias: bool = False, out_bias: bool = False, qk_norm: bool = False) -> int:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    groups = c.get("num_key_value_heads") or heads
    head = c.get("head_dim") or hidden // heads
    return (
        _linear(hidden, heads * head, qkv_bias)
        + 2 * _linear(hidden, groups * head, qkv_bias)
        + _linear(heads * head, hidden, out_bias)
        + (2 * head if qk_norm else 0)
    )


def _gated_mlp(c: Config, width: int, bias: bool = False) -> int:
    hidden = c["hidden_size"]
    return 2 * _linear(hidden, width, bias) + _linear(width, hidden, bias)


def _llama_layer(c: Config, _: int) -> int:
    bias = c.get("attention_bias", False)
    return _attention(c, bias, bias) + _gated_mlp(c, c["intermediate_size"], c.get("mlp_bias", False))


def _mistral_layer(c: Config, _: int) -> int:
    return _attention(c) + _gated_mlp(c, c["intermediate_size"])


def _mixtral_layer(c: Config, _: int) -> int:
    experts = c["num_local_experts"]
    return _attention(c) + _linear(c["hidden_size"], experts) + experts * _gated_mlp(c, c["intermediate_size"])


def _qwen2_layer(c: Config, _: int) -> int:
    return _attention(c, qkv_bias=True) + _gated_mlp(c, c["intermediate_size"])


def _qwen3_layer(c: Config, _: int) -> int:
    bias = c.get("attention_bias", False)
    return _attention(c, bias, bias, qk_norm=True) + _gated_mlp(c, c["intermediate_size"])


def _qwen3_moe_layer(c: Config, layer: int) -> int:
    bias = c.get("attention_bias", False)
    experts = c["num_experts"]
    attention = _attention(c, bias, bias, qk_norm=True)
    sparse = (
        experts > 0 and (layer + 1) % c["decoder_sparse_step"] == 0 and layer not in (c.get("mlp_only_layers") or [])
    )
    if not sparse:
        return attention + _gated_mlp(c, c["intermediate_size"])
    return attention + _linear(c["hidden_size"], experts) + experts * _gated_mlp(c, c["moe_intermediate_size"])


def _deepseek_v3_layer(c: Config, layer: int) -> int:
    hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c.get("attention_bias", False)
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    rank, kv_rank = c["q_lora_rank"], c["kv_lora_rank"]
    attention = (
        (_linear(hidden, rank, bias) + rank + _linear(rank, query) if rank else _linear(hidden, query))
        + _linear(hidden, kv_rank + c["qk_rope_head_dim"], bias)
        + kv_rank
        + _linear(kv_rank, heads * (c["qk_nope_head_dim"] + c["v_head_dim"]))
        + _linear(heads * c["v_head_dim"], hidden, bias)
    )
    if layer < c["first_k_dense_replace"]:
        return attention + _gated_mlp(c, c["intermediate_size"])
    width, experts = c["moe_intermediate_size"], c["n_routed_experts"]
    routed = _linear(hidden, experts) + experts * _gated_mlp(c, width)
    return attention + routed + _gated_mlp(c, width * c["n_shared_experts"])


_LAYERS: dict[str, Callable[[Config, int], int]] = {
    "llama": _llama_layer,
    "mistral": _mistral_layer,
    "mixtral": _mixtral_layer,
    "qwen2": _qwen2_layer,
    "qwen3": _qwen3_layer,
    "qwen3_moe": _qwen3_moe_layer,
    "deepseek_v3": _deepseek_v3_layer,
}
