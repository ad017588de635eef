"""Angles of rotary positions: those of transformers' models, and those of the models that Bridge makes of the configs.

Prints by family and settings whether they are the same (in cosine and sine, with the scale of attention), and what
check/rope.py says is lost. A process of its own, as the CPU backend must come before Megatron.
"""

import contextlib
import copy
import json
from pathlib import Path

from megaboa.bridge.process import prepare
from megaboa.bridge.quiet import quietly
from megaboa.check import rope

LENGTH = 512
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024},
}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **SPARSE,
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
EXPERTS, TWO = {**SPARSE, "num_experts": 4}, {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR_LAYERS = {"head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4}
FAMILIES = {
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "exaone_moe": {**EXPERTS, **TWO, "sliding_window": 128, "mlp_layer_types": ["dense", "sparse"]},
    "falcon_h1": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": TWO,
    "glm4_moe": {**SPARSE, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**LATENT, "n_group": 1, "topk_group": 1},
    "gpt_oss": {**SPARSE, **TWO, "num_local_experts": 4},
    "hy_v3": {**EXPERTS, "first_k_dense_replace": 1},
    "llama": {},
    "minimax_m2": {**SPARSE, "num_local_experts": 4},
    "mistral": {},
    "nemotron": {},
    "olmoe": EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR_LAYERS},
    "qwen3_5_text": LINEAR_LAYERS,
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR_LAYERS},
}
PUBLISHED = {  # YaRN's settings
    name: config["rope_scaling"]
    for name, config in json.loads((Path(__file__).parents[1] / "fixtures" / "hf_configs.json").read_text()).items()
    if "yarn" in {*config.get("rope_scaling", {}).values()} and config["model_type"] not in rope.OWN
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SETTINGS = {
    "none": None,
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn, not rounded": {**YARN, "truncate": False},
    "yarn, other scale": {**YARN, "attention_factor": 1.0},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3, short": {**LLAMA3, "original_max_position_embeddings": 128},
    "linear by one": {"rope_type": "linear", "factor": 1.0},
    "yarn by one": {**YARN, "factor": 1.0},
    "a factor left over": {"rope_type": "default", "factor": 4.0},
    "half": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "all": {"rope_type": "default", "partial_rotary_factor": 1.0},
    "two parts": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "two parts, dynamic": {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.25},
    **{f"published, {name}": block for name, block in PUBLISHED.items()},
}
OUTSIDE = {  # of the settings
    "two parts": {"partial_rotary_factor": 0.5},
    "two parts, dynamic": {"partial_rotary_factor": 0.5},
    "half outside": {"partial_rotary_factor": 0.5},
    "rotary_dim": {"rotary_dim": 8},
    "rotary_dim and half": {"rotary_dim": 8, "partial_rotary_factor": 0.5},
}
SETTINGS = dict.fromkeys(OUTSIDE) | SETTINGS


def main():
    prepare("cpu")
    import torch
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    from megaboa.bridge import convert
    from megaboa.bridge.source import class_of

    found = {}
    for family, sizes in FAMILIES.items():
        for name, part in SETTINGS.items():
            given = {"model_type": family, **SIZES, **sizes, **OUTSIDE.get(name, {})}
            if part is not None:
                theta = {"rope_theta": 5e5 if family == "ernie4_5_moe" else 1e4}
                settings = {**theta, **copy.deepcopy(part)}
                if family == "gemma3_text":
                    settings = {"full_attention": settings, "sliding_attention": {"rope_type": "default"}}
                given["rope_parameters"] = settings
            lost = rope.lost(given)
            config = AutoConfig.for_model(**copy.deepcopy(given))
            with torch.device("meta"):
                model = class_of(config).from_config(config)
            config.architectures = [type(model).__name__]
            module = next(one for label, one in model.named_modules() if label.endswith("rotary_emb"))
            theirs = of_transformers(type(module)(config), family)
            try:
                provider = convert.provider_of(AutoBridge.from_hf_config(config), load_weights=False)
            except TypeError:  # Bridge's error for Mistral with YaRN
                mine = None
            else:
                mine = of_megatron(provider, family in rope.LATENT)
            same = mine is not None and all(map(close, theirs, mine))
            found[f"{family}: {name}"] = {"same": same, "lost": lost and str(lost)}
    return found


def close(one, other):
    return one.shape == other.shape and (one - other).abs().max().item() < 1e-3


def of_transformers(module, family):
    """Cosine and sine of each pair of numbers at each position."""
    import torch

    arguments = ("full_attention",) if family == "gemma3_text" else ()
    parts = module(torch.zeros(1, LENGTH, 1), torch.arange(LENGTH)[None], *arguments)
    if isinstance(parts, torch.Tensor):  # DeepSeek-V2's complex numbers
        return parts[0].real, parts[0].imag
    return [half(part[0], family) for part in parts]


def half(part, family):
    """Each pair once; GPT-OSS has no second copy."""
    return part if family == "gpt_oss" else part[:, : part.shape[-1] // 2]


def of_megatron(provider, latent):
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding

    if latent or provider.position_embedding_type == "yarn":
        named = "" if latent else "yarn_"
        fields = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        module = yarn_rotary_pos_embedding.YarnRotaryEmbedding(
            provider.qk_pos_emb_head_dim if latent else provider.kv_channels,
            rotary_percent=provider.rotary_percent,
            rotary_base=provider.rotary_base,
            scaling_factor=getattr(provider, f"{named}rotary_scaling_factor"),
            correction_range_round_to_int=True if latent else provider.yarn_correction_range_round_to_int,
            use_cpu_initialization=True,
            **{field: getattr(provider, f"{named}{field}") for field in fields},
        )
        angles, scale = module.get_emb(LENGTH)
        angles = angles[:, 0, 0, : angles.shape[-1] // 2]
        return scale * angles.cos(), scale * angles.sin()
    two = isinstance(provider.rotary_base, tuple)  # Gemma 3: of sliding layers, and of the others
    module = rotary_pos_embedding.RotaryEmbedding(
        provider.kv_channels or provider.hidden_size // provider.num_attention_heads,
        rotary_percent=1.0 if two else provider.rotary_percent,
        seq_len_interpolation_factor=provider.seq_len_interpolation_factor,
        rotary_base=provider.rotary_base[1] if two else provider.rotary_base,
        rope_scaling=getattr(provider, "rope_scaling", False),
        rope_scaling_factor=getattr(provider, "rope_scaling_factor", 1.0),
        use_cpu_initialization=True,
    )
    if two:
        module.inv_freq /= provider.rope_scaling_factor
    return module.get_cos_sin(LENGTH)


if __name__ == "__main__":
    with quietly():
        outcome = main()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(outcome))
