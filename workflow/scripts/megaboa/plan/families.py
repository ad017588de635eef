"""The model types of `transformers` that Megatron-Bridge converts, known without importing either.

A test compares this list with the Bridge that is installed.
"""

from __future__ import annotations

import difflib

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


def problem(model_type: str, model: str) -> str | None:
    """Why a model can't be trained from its Hugging Face config, and what can be done."""
    if model_type in CONVERTIBLE:
        return None
    near = difflib.get_close_matches(model_type, CONVERTIBLE, n=3) or ["llama", "qwen3", "..."]
    return (
        f"Megatron-Bridge {BRIDGE} has no converter for {model_type} (it has {', '.join(near)}): "
        f"name a recipe (models.{model}.recipe), which is trained without Hugging Face stages"
    )
