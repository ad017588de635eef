"""Activations of feed-forward layers that a Hugging Face config names and Bridge's converter loses.

Families are named by `model_type`. A test compares the tables with the installed Bridge and transformers.
"""

from __future__ import annotations

from megaboa.check.rope import REMEDY, Lost
from megaboa.records import Tree

# Families whose converter has one activation, whatever the config says.
FIXED = {
    **dict.fromkeys(("ernie4_5_moe", "exaone4", "exaone_moe", "mistral", "qwen3_5", "qwen3_5_moe"), "silu"),
    **dict.fromkeys(("gemma", "gemma2", "gemma4", "gemma4_text"), "gelu_pytorch_tanh"),
    **dict.fromkeys(("nemotron", "nemotron_h"), "relu2"),
}
UNREAD = frozenset(("gpt_oss",))  # by transformers, too
KEYS = {"nemotron_h": "mlp_hidden_act"} | dict.fromkeys(
    ("gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text"), "hidden_activation"
)
# Names that Bridge and transformers have for the same function, and other names of transformers for these.
KNOWN = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "silu", "tanh")
MEANT = {
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh"), "gelu_pytorch_tanh"),
    **{"gelu_python": "gelu", "swish": "silu"},
}


def named(config: Tree) -> str | None:
    """The activation that a config names; None: its family's own."""
    return _text(config).get(_key(config))


def lost(config: Tree) -> Lost | None:
    """The activation, if Bridge's converter would train another one or refuse it."""
    family, name = str(config.get("model_type")), named(config)
    if name is None or family in UNREAD:
        return None
    keys = (*(("text_config",) if config.get("text_config") else ()), _key(config))
    if name not in KNOWN:
        remedy = f"write {MEANT[name]}, the same function" if name in MEANT else f"they have {', '.join(KNOWN)}"
        return Lost(keys, f"Bridge's converters have no {name!r}: {remedy}")
    if (fixed := FIXED.get(family, name)) != name:
        return Lost(keys, f"{name!r} is lost: Bridge's converter of {family} always has {fixed}. {REMEDY}")
    return None


def _text(config: Tree) -> Tree:
    return config.get("text_config") or config


def _key(config: Tree) -> str:
    return KEYS.get(str(config.get("model_type")), "hidden_act")
