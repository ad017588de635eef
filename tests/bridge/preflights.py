"""Preflight of some runs in a process of its own, as the CPU backend must come before Megatron.

`python preflights.py FOLDER`: FOLDER holds cases.json, {name: changes to the run}. For each case the rules that it
breaks, and what Bridge itself says (validation, then a dry run), are printed as JSON.
"""

import copy
import json
import sys
from pathlib import Path

from megaboa import records
from megaboa.bridge.process import playing_rank_0_of, prepare
from megaboa.bridge.quiet import quietly
from megaboa.files import read_json, write_json
from megaboa.paths import RunFolder
from megaboa.records import ModelSource

DENSE = {
    **{"model_type": "qwen3", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 8},
    **{"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 480, "max_position_embeddings": 64},
}
MOE = {
    **DENSE,
    **{"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    **{"decoder_sparse_step": 1, "norm_topk_prob": True},
}
LATENT = {
    **{"model_type": "deepseek_v3", "hidden_size": 48, "intermediate_size": 96, "moe_intermediate_size": 16},
    **{"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_attention_heads": 6, "num_key_value_heads": 6},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"vocab_size": 480, "max_position_embeddings": 64, "num_nextn_predict_layers": 0},
}
LITE = {**LATENT, "q_lora_rank": None, "model_type": "deepseek_v2", "n_group": 1}
BIASED = {**DENSE, "model_type": "llama", "attention_bias": True}  # Bridge has no place for some of its biases
GROUPED = {  # Bridge knows its experts by the names that they have in kernels of GPUs
    **{name: value for name, value in MOE.items() if name not in ("decoder_sparse_step", "num_experts")},
    **{"model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0},
}
ERNIE = {  # Bridge asks for Transformer Engine's layers, whatever is at hand
    **{name: value for name, value in MOE.items() if name not in ("decoder_sparse_step", "num_experts", "head_dim")},
    **{"model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    **{"moe_layer_start_index": 0, "moe_layer_end_index": 5, "moe_layer_interval": 1, "tie_word_embeddings": False},
}
MINIMAX = {  # Bridge calls Transformer Engine's layers, of which None is here
    **{name: value for name, value in MOE.items() if name not in ("decoder_sparse_step", "num_experts")},
    **{"model_type": "minimax_m2", "intermediate_size": 16, "num_local_experts": 4},
}
MODELS = {
    "minimax": (MINIMAX, "MiniMaxM2ForCausalLM"),
    "ernie": (ERNIE, "Ernie4_5_MoeForCausalLM"),
    "grouped": (GROUPED, "Glm4MoeForCausalLM"),
    "biased": (BIASED, "LlamaForCausalLM"),
    "lite": (LITE, "DeepseekV2ForCausalLM"),
    "dense": (DENSE, "Qwen3ForCausalLM"),
    "moe": (MOE, "Qwen3MoeForCausalLM"),
    "latent": (LATENT, "DeepseekV3ForCausalLM"),
    "headed": ({**LATENT, "num_nextn_predict_layers": 1}, "DeepseekV3ForCausalLM"),
    "grouped, headed": ({**GROUPED, "num_nextn_predict_layers": 1}, "Glm4MoeForCausalLM"),
}
TRAINING = {
    "train_iters": 6,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "seq_length": 64,
    "precision": "bf16_mixed",
}
RUN = {
    **{"data": {}, "training": TRAINING, "optimizer": {}, "schedule": {"warmup_iters": 2}, "parallel": {"tp": 1}},
    **{"world_size": 4, "device": "cuda", "overrides": {}},
}
LAUNCH = {"checkpoint": {"save_interval": None}, "nodes": 1, "gpus_per_node": 4, "overrides": {}}
PROFILE = {"tool": "none", "steps": [2, 4], "ranks": [0]}


def write_runs(folder, cases):
    """An experiment's folder with these runs."""
    from transformers import AutoConfig

    for name, (config, architecture) in MODELS.items():
        AutoConfig.for_model(**config, architectures=[architecture]).save_pretrained(folder / name)
        place, facts = str(folder / name), {"digest": "1", "params": 1, "dtype": "float32", "device": "cpu"}
        source = ModelSource(name=name, path=place, tokenizer=place, vocab_size=config["vocab_size"], **facts)
        records.write(folder / "models" / name / "source.json", source)
    for name, case in cases.items():
        run = copy.deepcopy(RUN)
        model = case.pop("model", "dense")
        launch = {**LAUNCH, **case.pop("launch", {})}
        recipe = {"name": "own", "recipe": model, "args": case.pop("args", {}), "tokenizer": None}
        if source := case.pop("of", None):
            recipe |= {"name": source, "hf": "owner/name", "revision": None, "init": "scratch"}
        init = case.pop("init", "scratch")
        run["model"] = recipe if model not in MODELS else {"name": model, "init": init, "config": MODELS[model][0]}
        for section, values in case.items():
            run[section] = {**run[section], **values} if isinstance(values, dict) else values
        path = folder / "runs" / name
        write_json(path / "run.json", run)
        write_json(path / "launch.json", {**launch, "gpus_per_node": run["world_size"]})
        write_json(path / "profile.json", PROFILE)


def both(folder):
    """What the rules say of a run, and what Bridge says without them."""
    from megatron.bridge.training.config import runtime_config_update
    from megatron.bridge.training.utils.flop_utils import num_floating_point_operations

    from megaboa.bridge import configuration, dryrun, preflight, recipe_models
    from megaboa.bridge.config_facts import facts_of
    from megaboa.check import flops, parameters, table
    from megaboa.check.stages import stages

    answer = {"rules": [], "bridge": None, "parameters": None}
    with playing_rank_0_of(folder.run.world_size), preflight.as_on_a_gpu():
        try:
            inputs = configuration.Inputs.before_payloads(folder)
            config = configuration.build(folder.run, inputs)
            if folder.run.own_recipe:
                recipe_models.refuse_misspelt(config, folder.run.own_recipe)
            facts = facts_of(config, folder.run, folder.launch, folder.profile)
            answer["loss"] = facts.kernels.loss_kernel
            found = table.check(facts)
            answer["rules"] = [one.rule for one in found if one.level == "error"]
            answer["warnings"] = [one.rule for one in found if one.level == "warning"]
            config.checkpoint.save = "checkpoints"
            runtime_config_update(config)
            answer["data"] = preflight._without_data(config, folder)
            given, config.model.vocab_size = (
                config.model.vocab_size,
                facts.model.vocab_size or facts.model.tokenizer_vocab,
            )
            answer["flops"] = [num_floating_point_operations(config, facts.training.gbs), flops.of_step(facts)]
            config.model.vocab_size = given
            answer["parameters"] = [records.plain(one) for one in dryrun.parameters(config, folder.run.world_size)]
            by_stage = {stage.number: parameters.of_stage(facts, stage) for stage in stages(facts)}
            answer["estimated"] = [[by_stage[s].dense, by_stage[s].expert] for s in range(facts.layout.pp)]
            if inputs.source:
                answer["export"] = records.plain(dryrun.export(config, inputs.source, folder.run.device))
        except (Exception, SystemExit) as error:
            answer["bridge"] = preflight._objection(error, folder.run)
    if answer["bridge"] and not answer["rules"]:
        checked, _ = preflight.check_run(RunFolder(folder.path), {})
        answer["preflight"] = records.plain(checked)
    return answer


def main(folder):
    prepare("cpu")
    cases = read_json(folder / "cases.json")
    write_runs(folder, cases)
    return {name: both(RunFolder(folder / "runs" / name)) for name in cases}


if __name__ == "__main__":
    with quietly():
        answers = main(Path(sys.argv[1]))
    print(json.dumps(answers))
