"""What Bridge's converters carry over of a Hugging Face config's rotary positions (RoPE). They drop the rest silently.

transformers 5 has these settings in `rope_parameters`, earlier versions in `rope_scaling` and `rope_theta`. Families
are named by `model_type`. A test compares the angles of transformers' models with those of the installed Bridge's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megaboa.records import Tree

PLAIN = ("default", "mrope")
# Families whose converter carries a type of scaling over.
SCALED = {
    "linear": frozenset(("gemma3", "gemma3_text", "llama")),
    "llama3": frozenset(("exaone4", "exaone_moe", "llama")),
    "yarn": frozenset(
        (
            *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "glm4_moe_lite", "gpt_oss", "hy_v3", "llama", "olmoe"),
            *("qwen2", "qwen3", "qwen3_moe"),
        )
    ),
}
LATENT = frozenset(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"))
READS_ANY_FACTOR = frozenset(("exaone_moe", "gemma3", "gemma3_text"))  # whatever the type is
SCALED_BY_ONE = ("linear", "llama3", "dynamic")  # with factor 1 they are `default`
OWN = frozenset(("deepseek_v4", "gemma4", "gemma4_text", "nemotron_h"))  # positions of another kind, or none

# Families whose layers turn a part of each head, with the part where a config doesn't say. Others turn whole heads.
PARTLY_TURNED = {"glm4_moe": 0.5, "glm4_moe_lite": 1.0, "minimax_m2": 1.0, "nemotron": 0.5, "qwen3_next": 0.25}
# Families whose converter reads the part where transformers does, and those whose converter reads it nowhere.
PART_IS_READ = frozenset(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"))
PART_IS_UNREAD = LATENT | {"exaone_moe", "falcon_h1", "gemma3", "gemma3_text", "llama", "mistral"}
PART = "partial_rotary_factor"

# Keys that converters don't read, with the values that Megatron has.
OF_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
OF_LATENT_YARN = {"truncate": True}
OF_GPT_OSS = {
    **{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
ERNIE_THETA = 500000.0
REMEDY = "Change it in a copy of the config, if the weights may be used that way, or name a recipe instead"
REMOVE = "Remove it in a copy of the config"
YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # transformers', for missing keys


@dataclass(frozen=True)
class Lost:
    """A setting of a config that the Megatron model would not have: its keys, and the problem."""

    keys: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{'.'.join(self.keys)}: {self.message}"


@dataclass(frozen=True)
class _Part:
    """The settings of a type of layer, or of all layers: completed as transformers does it, and where they stand."""

    rope: Tree
    places: dict[str, tuple[str, ...]]
    inside: tuple[str, ...]
    text: Tree  # the decoder's whole config

    @property
    def kind(self) -> str:
        return str(self.rope["rope_type"])

    @property
    def is_scaled(self) -> bool:
        return not (self.kind in PLAIN or (self.kind in SCALED_BY_ONE and self.rope.get("factor") == 1))

    def lost(self, key: str, message: str, remedy: str = REMEDY) -> Lost:
        return Lost(self.places.get(key, (*self.inside, key)), f"{message}. {remedy}")


def lost(config: Tree) -> Lost | None:
    """The first setting of a config's rotary positions that Bridge's converter loses."""
    family = str(config.get("model_type"))
    if family in OWN:
        return None
    found = (_lost(family, part) or _part_of_heads(family, part) for part in _parts(config))
    return next(filter(None, found), None)


def longest_plain(config: Tree) -> int | None:
    """The longest sequence for which transformers leaves `dynamic` positions as they are, as Megatron always does."""
    is_dynamic = any(part.kind == "dynamic" for part in _parts(config))
    return (config.get("text_config") or config).get("max_position_embeddings") if is_dynamic else None


def _parts(config: Tree) -> Iterator[_Part]:
    above = ("text_config",) if config.get("text_config") else ()
    text = config.get("text_config") or config
    name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    given = text.get(name) if isinstance(text.get(name), dict) else {}
    outside = {key: text[key] for key in ("rope_theta", PART, "rotary_dim") if text.get(key) is not None}
    if not given and config.get("model_type") == "gpt_oss":  # transformers' default is what Bridge has
        given = OF_GPT_OSS
    length = text.get("max_position_embeddings")
    defaults = {"original_max_position_embeddings": length} if length else {}
    nested = {(*above, name, key): part for key, part in given.items() if isinstance(part, dict)}
    for inside, part in (nested or {(*above, name): given}).items():
        places = {key: (*above, key) for key in outside} | {key: (*inside, key) for key in part}
        if "type" in part and "rope_type" not in part:
            places["rope_type"] = places["type"]
        rope = {**defaults, **outside, "rope_type": part.get("type", "default"), **part}
        yield _Part(rope, places, inside, text)


def _lost(family: str, part: _Part) -> Lost | None:
    if family == "gpt_oss":
        return _unread(family, part, OF_GPT_OSS) or _attention(family, part)
    if family == "ernie4_5_moe" and (found := _unread(family, part, {"rope_theta": ERNIE_THETA})):
        return found
    kind, is_sliding = part.kind, part.inside[-1] == "sliding_attention"
    if not part.is_scaled:
        factor = part.rope.get("factor")
        if family not in READS_ANY_FACTOR or is_sliding or factor in (None, 1):
            return None
        return part.lost(
            "factor", f"{factor!r} would scale Megatron's positions, and {kind} ones have no scale", REMOVE
        )
    if kind == "dynamic" and family not in READS_ANY_FACTOR:
        return None  # the rule sequence_keeps_its_positions judges
    carried = [name for name in SCALED if family in SCALED[name] and not is_sliding]
    if kind not in carried:
        known = ", ".join(["default", *carried])
        return part.lost("rope_type", f"{kind!r} is lost: Bridge's converter of {family} knows only {known}")
    unread = OF_LLAMA3 if kind == "llama3" else OF_LATENT_YARN if kind == "yarn" and family in LATENT else {}
    return _unread(family, part, unread) or (_attention(family, part) if kind == "yarn" else None)


def _part_of_heads(family: str, part: _Part) -> Lost | None:
    """The part of a head that is turned."""
    if family in PART_IS_READ:
        return None
    wanted, found = _turned_by_transformers(family, part), _turned_by_megatron(family, part)
    if wanted == found:
        return None
    key, remedy = PART, REMEDY if found == 1 else REMOVE
    if family == "minimax_m2" and part.text.get("rotary_dim"):
        key, remedy = "rotary_dim", f"Write {PART}: {found} next to it, in a copy of the config"
    elif family in PARTLY_TURNED and family not in PART_IS_UNREAD:
        remedy = f"Write it next to {part.inside[-1]}, too, in a copy of the config"
    turned = f"makes transformers turn {wanted} of each head, and Megatron {found}"
    return part.lost(key, f"{part.rope[key]!r} {turned}", remedy)


def _turned_by_transformers(family: str, part: _Part) -> float:
    """Scaled positions: the part outside of the settings, if there is one; others: the one inside, in some families."""
    if part.kind in PLAIN and family not in PARTLY_TURNED:
        return 1.0
    outside = None if part.kind in PLAIN else part.text.get(PART)
    return part.rope.get(PART, PARTLY_TURNED.get(family, 1.0)) if outside is None else outside


def _turned_by_megatron(family: str, part: _Part) -> float:
    """Most converters know only the part outside of the settings, and of scaled positions none."""
    if family == "minimax_m2" and part.text.get("rotary_dim"):
        return part.text["rotary_dim"] / part.text.get("head_dim", 128)
    if family in PART_IS_UNREAD or (part.is_scaled and part.kind in SCALED):
        return 1.0
    outside = part.text.get(PART)
    return PARTLY_TURNED.get(family, 1.0) if outside is None else outside


def _unread(family: str, part: _Part, unread: Tree) -> Lost | None:
    """The first key with another value than the one that Megatron has in any case."""
    rope = {**YARN_DEFAULTS, **part.rope}
    different = (key for key, value in unread.items() if key in rope and rope[key] != value)
    return next((part.lost(key, _always(family, rope[key], unread[key])) for key in different), None)


def _attention(family: str, part: _Part) -> Lost | None:
    """YaRN's scale of attention: transformers takes `attention_factor`, or both of `mscale` and `mscale_all_dim`."""
    rope = part.rope
    factor, one, other, wanted = map(rope.get, ("factor", "mscale", "mscale_all_dim", "attention_factor"))
    if not isinstance(factor, int | float):  # transformers refuses the config
        return None
    key = "attention_factor" if wanted is not None else "mscale" if one is not None else "mscale_all_dim"
    if wanted is None:
        wanted = _scale(factor, one) / _scale(factor, other) if one and other else _scale(factor, 1)
    if family in LATENT:  # megatron-core's defaults
        one, other = 1 if one is None else one, 0 if other is None else other
    found = _scale(factor, 1) if one is None or other is None else _scale(factor, one) / _scale(factor, other)
    if math.isclose(wanted, found, rel_tol=1e-6):
        return None
    return part.lost(key, _always(family, rope[key], found, "attention scaled by "))


def _scale(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1 if factor > 1 else 1.0


def _always(family: str, given: object, value: object, what: str = "") -> str:
    always = f"{value:.7g}" if isinstance(value, float) else repr(value)
    return f"{given!r} is lost: Bridge's converter of {family} doesn't read it, and Megatron has {what}{always}"
