"""Our rules beside Bridge's own objections: what we call illegal it refuses, what we just accept it builds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megaboa.config.models.resources import Launch
from megaboa.files import write_json

pytestmark = pytest.mark.slow

READS = "tests/bridge/recipe_of_folder.py"
FAILS = "tests/bridge/recipe_that_fails.py"

# Broken by exactly this rule, and refused by Bridge's validation or by the dry run.
ILLEGAL = {
    "ranks_fill_the_layout": {"parallel": {"tp": 3}, "training": {"global_batch_size": 12}},
    "one_copy_of_the_model_at_least": {"parallel": {"tp": 6}, "training": {"global_batch_size": 12}},
    "ranks_fill_the_expert_layout": {"model": "moe", "parallel": {"ep": 4, "pp": 2}},
    "batch_fills_the_ranks": {"training": {"global_batch_size": 18}},
    "evaluation_batch_fills_the_ranks": {"overrides": {"validation.eval_global_batch_size": 6}},
    "optimizer_instances_share_the_ranks": {"overrides": {"ddp.num_distributed_optimizer_instances": 3}},
    "sizes_are_set": {"model": "vanilla_gpt_pretrain_config"},
    "key_value_groups_divide": {"parallel": {"tp": 2}, "overrides": {"model.num_query_groups": 3}},
    "vocabulary_divides": {"parallel": {"tp": 2}, "overrides": {"model.vocab_size": 481, "model.num_query_groups": 6}},
    "sequence_divides_over_context": {"parallel": {"cp": 2}, "training": {"seq_length": 62}},
    "interleaving_needs_a_pipeline": {"parallel": {"vpp": 2}},
    "layers_fill_the_stages": {"parallel": {"pp": 4}},
    "uneven_stages_leave_even_ones": {
        "parallel": {"pp": 4},
        "overrides": {"model.num_layers_in_first_pipeline_stage": 1},
    },
    "layers_are_shared_out_in_one_way": {
        "parallel": {"pp": 2},
        "overrides": {
            "model.num_layers_in_first_pipeline_stage": 3,
            "model.account_for_embedding_in_pipeline_split": True,
        },
    },
    "pipeline_layout_holds_the_model": {
        "parallel": {"pp": 2},
        "overrides": {"model.pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]},
    },
    "expert_parallelism_needs_experts": {"parallel": {"ep": 2}},
    "experts_divide": {"model": "moe", "parallel": {"ep": 2}, "overrides": {"model.num_moe_experts": 3}},
    "fsdp_checkpoints_are_dtensors": {
        "parallel": {"fsdp": "megatron"},
        "overrides": {"checkpoint.ckpt_format": "torch_dist"},
    },
    "graph_scope_fits_the_implementation": {
        "overrides": {"model.cuda_graph_impl": "local", "model.cuda_graph_modules": ["attn"]}
    },
    "graphed_parts_are_there": {
        "overrides": {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": ["moe_router"]}
    },
    "full_recomputation_needs_a_full_graph": {
        "overrides": {
            "model.cuda_graph_impl": "transformer_engine",
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        }
    },
    "full_graph_has_no_nan_check": {"overrides": {"model.cuda_graph_impl": "full_iteration"}},
    "recomputation_is_complete": {"overrides": {"model.recompute_granularity": "full"}},
    "recomputed_parts_are_there": {
        "overrides": {"model.recompute_granularity": "selective", "model.recompute_modules": ["mla_up_proj"]}
    },
    "offloading_has_no_pipeline": {
        "parallel": {"pp": 2},
        "overrides": {"model.cpu_offloading": True, "model.cpu_offloading_num_layers": 1},
    },
    "expert_overlap_can_work": {
        "model": "moe",
        "overrides": {
            "comm_overlap.overlap_moe_expert_parallel_comm": True,
            "comm_overlap.tp_comm_overlap": False,
        },
    },
    "flex_dispatcher_has_a_backend": {
        "model": "moe",
        "overrides": {"model.moe_flex_dispatcher_backend": "ncclep"},
    },
}
# Illegal too, but found by nobody else before the first step, or the start of all ranks.
OURS_ALONE = {
    "fsdp_has_several_connections": {
        "parallel": {"fsdp": "megatron"},
        "launch": {"start": Launch(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).model_dump(mode="json")},
    },
    "experts_with_tensor_parallelism_need_sequence_parallelism": {
        "model": "moe",
        "parallel": {"tp": 2},
        "overrides": {"model.num_query_groups": 6},
    },
    "rotary_positions_turn_pairs": {"overrides": {"model.kv_channels": 15}},
    "sequence_divides_over_tensor_ranks": {
        "parallel": {"tp": 2, "sp": True},
        "training": {"seq_length": 63},
        "overrides": {"model.num_query_groups": 6},
    },
    "interleaved_stages_have_micro_batches": {"parallel": {"pp": 2, "vpp": 3}, "training": {"global_batch_size": 6}},
    "low_precision_is_aligned": {
        "training": {"precision": "bf16_with_fp8_current_scaling_mixed", "seq_length": 60, "global_batch_size": 16}
    },
    "copies_on_nodes_can_be_resumed": {"launch": {"checkpoint": {"save_interval": 10, "local": {"every": 20}}}},
    "batch_has_one_size": {"overrides": {"train.rampup_batch_size": [4, 4, 8]}},
    "weight_decay_keeps_to_its_style": {"overrides": {"scheduler.end_weight_decay": 0.2}},
    "warmup_ends_before_the_decay": {"schedule": {"warmup_iters": 6}},
    "recomputed_predictions_are_one_by_one": {
        "model": "latent",
        "overrides": {
            "model.mtp_num_layers": 1,
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 2,
        },
    },
    "recomputed_feed_forward_has_no_bias": {
        "overrides": {
            "model.recompute_granularity": "selective",
            "model.recompute_modules": ["mlp"],
            "model.add_bias_linear": True,
        }
    },
}
OFFLOADED = {"model.fine_grained_activation_offloading": True}
DEFERRED = {"model.defer_embedding_wgrad_compute": True}
# No rule of ours; Bridge names Transformer Engine, or a switch that is off without it, and means a setting of the run.
BRIDGES_ALONE = {
    "offloading without its layers": {
        "overrides": {**OFFLOADED, "model.offload_modules": ["core_attn"], "model.transformer_impl": "local"}
    },
    "offloading without the op fuser": {"overrides": {**OFFLOADED, "model.offload_modules": ["fused_group_mlp"]}},
    "a field that Bridge doesn't have": {"overrides": {"model.hiden_dropout": 0.1}},
    "a recipe of another model": {"model": "recipes/gpt_tiny.py", "of": "moe"},
    "a recipe that changes the model": {"model": READS, "of": "dense", "args": {"changes": {"rotary_base": 5000.0}}},
    "a recipe that scales positions": {"model": READS, "of": "dense", "args": {"changes": {"rope_scaling": True}}},
    "arguments that a recipe lacks": {"model": READS, "of": "dense", "args": {"chanches": {}}},
    "a recipe that fails": {"model": READS, "of": "dense", "args": {"changes": ["rotary_base"]}},
    "a field of a recipe that Bridge doesn't have": {"model": FAILS, "args": {"where": "spelling"}},
    "text of a recipe where a number must be": {
        "model": READS,
        "of": "dense",
        "args": {"changes": {"hidden_dropout": "some"}},
    },
    "a recipe that exits": {"model": FAILS, "args": {"where": "configure"}},
    "a recipe whose model fails": {"model": FAILS, "args": {"where": "provide"}},
    "a recipe without its function": {"model": "tests/gpu_count.py"},
    "a recipe that Bridge doesn't have": {"model": "llama3_8b_pretrain_confg"},
    "an override that contradicts the weights": {"init": "pretrained", "overrides": {"model.num_layers": 4}},
    "deferred gradients, not fused": {
        "parallel": {"pp": 2},
        "overrides": {**DEFERRED, "model.gradient_accumulation_fusion": False},
    },
}
# The same words, of switches that the run leaves on.
FOR_THE_IMAGE = {
    "layers of Transformer Engine": {"model": "minimax"},
    "deferred gradients": {"parallel": {"pp": 2}, "overrides": DEFERRED},
    "recomputed activations of experts": {
        "model": "moe",
        "overrides": {
            "model.recompute_granularity": "selective",
            "model.recompute_modules": ["moe_act"],
            "model.moe_grouped_gemm": True,
        },
    },
}
LEGAL = {
    "plain": {},
    "tensor": {"parallel": {"tp": 2, "sp": True}, "overrides": {"model.num_query_groups": 6}},
    "pipeline": {"parallel": {"pp": 2, "vpp": 3}},
    "uneven": {"parallel": {"pp": 4}, "overrides": {"model.num_layers_in_first_pipeline_stage": 3}},
    "counted": {
        "parallel": {"pp": 4},
        "overrides": {
            "model.account_for_embedding_in_pipeline_split": True,
            "model.account_for_loss_in_pipeline_split": True,
        },
    },
    "context": {"parallel": {"cp": 4}},
    "experts": {"model": "moe", "parallel": {"ep": 4}},
    "experts in a pipeline": {"model": "moe", "parallel": {"ep": 2, "pp": 2}},
    "latent attention": {"model": "latent"},
    "latent attention, experts, tensors": {"model": "latent", "parallel": {"ep": 2, "tp": 2, "sp": True}},
    "latent attention in a pipeline": {"model": "latent", "parallel": {"pp": 4}},
    "latent attention, queries not compressed": {"model": "lite", "parallel": {"ep": 2, "pp": 2}},
    "a recipe that asks for the model's folder": {"model": READS, "of": "lite"},
    "a recipe with data of its own": {"model": READS, "of": "dense", "args": {"data": ["/nowhere/a", "s3://b/c"]}},
    "experts, interleaved": {"model": "moe", "parallel": {"pp": 2, "vpp": 3, "ep": 2}},
    "experts, cut": {
        "model": "moe",
        "parallel": {"tp": 2, "sp": True, "ep": 2, "etp": 2},
        "overrides": {"model.num_query_groups": 6},
    },
    "uneven, interleaved": {
        "parallel": {"pp": 2, "vpp": 2},
        "overrides": {"model.num_layers_in_first_pipeline_stage": 2},
    },
    "latent attention, interleaved": {"model": "latent", "parallel": {"pp": 2, "vpp": 2}},
    "latent attention, uneven": {
        "model": "latent",
        "parallel": {"pp": 2},
        "overrides": {"model.num_layers_in_first_pipeline_stage": 3},
    },
    "FSDP with experts": {"model": "moe", "parallel": {"fsdp": "megatron", "ep": 2}},
    "multi-token prediction": {"model": "headed"},
    "multi-token prediction, turned off": {"model": "headed", "overrides": {"model.mtp_num_layers": None}},
    "experts of ERNIE": {"model": "ernie"},
    "multi-token prediction, stages": {"model": "headed", "parallel": {"pp": 2}},
    "multi-token prediction of GLM": {"model": "grouped, headed"},
    "more heads than the config has": {"model": "latent", "overrides": {"model.mtp_num_layers": 1}},
    "FSDP": {"parallel": {"fsdp": "megatron"}},
    "FP8": {"training": {"precision": "bf16_with_fp8_current_scaling_mixed"}},
    "graphs": {"overrides": {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": ["attn"]}},
    "sequence parallelism, turned off": {"parallel": {"sp": True}},
    "a layout in Bridge's short form": {
        "parallel": {"pp": 2},
        "overrides": {"model.pipeline_model_parallel_layout": "Ett|ttttL"},
    },
    "a recipe": {"model": "recipes/gpt_tiny.py"},
    "a recipe whose sizes are set": {
        "model": "vanilla_gpt_pretrain_config",
        "overrides": {"model.num_layers": 2, "model.hidden_size": 64, "model.num_attention_heads": 4},
    },
    "a recipe with our loss": {"model": "recipes/gpt2.py", "args": {"size": "small", "kernels": ["loss"]}},
    "the same with Megatron's": {"model": "recipes/gpt2.py", "args": {"size": "small"}},
    "more rows than the config has": {"overrides": {"model.vocab_size": 600}},
    "as many rows as the tokenizer has tokens": {"overrides": {"tokenizer.use_tokenizer_vocab_size": True}},
    "biases": {"model": "biased"},
    "experts of GLM": {"model": "grouped"},
    "more layers than the config has": {"overrides": {"model.num_layers": 8}},
}

GRAPH = {
    "model.cuda_graph_impl": "full_iteration",
    "model.cuda_graph_modules": [],
    "rerun_state_machine.check_for_nan_in_loss": False,
}
HALF = {"seq_length": 64, "precision": "bf16_mixed"}
# What cuDNN may not replay is known from the config as it is before its validation.
GRAPHED = {
    "a graph of 64 positions": {"training": HALF, "overrides": GRAPH},
    "one with other attention": {"training": HALF, "overrides": {**GRAPH, "model.attention_backend": "unfused"}},
    "one in fp32": {"training": {**HALF, "precision": "fp32"}, "overrides": GRAPH},
    "one of whole blocks": {"training": {**HALF, "seq_length": 128}, "overrides": GRAPH},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    cases = {**ILLEGAL, **OURS_ALONE, **BRIDGES_ALONE, **FOR_THE_IMAGE, **LEGAL, **GRAPHED}
    write_json(folder / "cases.json", cases)
    script = Path(__file__).with_name("preflights.py")
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ILLEGAL)
def test_what_a_rule_refuses_bridge_refuses(answers, name):
    assert answers[name]["rules"] == [name]
    assert answers[name]["bridge"]


@pytest.mark.parametrize("name", OURS_ALONE)
def test_what_bridge_would_find_only_when_ranks_train(answers, name):
    assert answers[name]["rules"] == [name]
    assert answers[name]["bridge"] is None


@pytest.mark.parametrize("name", BRIDGES_ALONE)
def test_what_bridge_alone_refuses_is_refused(answers, name):
    found = answers[name]["preflight"]
    assert (found["state"], found["reasons"]) == ("FAIL", [answers[name]["bridge"]])


@pytest.mark.parametrize("name", FOR_THE_IMAGE)
def test_what_bridge_refuses_for_want_of_the_image_passes(answers, name):
    found = answers[name]["preflight"]
    assert found["state"] == "PASS" and found["stopped_at"].endswith(f"checked up to: {answers[name]['bridge']}")


@pytest.mark.parametrize("name", LEGAL)
def test_what_the_rules_accept_bridge_builds(answers, name):
    assert answers[name]["rules"] == []
    assert answers[name]["bridge"] is None
    assert answers[name]["parameters"]


@pytest.mark.parametrize("name", GRAPHED)
def test_a_graph_is_warned_of_where_cudnn_may_not_replay_it(answers, name):
    warned = "full_graph_has_whole_blocks_of_attention" in answers[name]["warnings"]
    assert warned is (name == "a graph of 64 positions")
    assert answers[name]["rules"] == []


def test_a_dry_run_counts_parameters_of_every_kind_of_stage(answers):
    stages = {one["stage"]: one for one in answers["pipeline"]["parameters"]}
    assert stages[0]["dense"] - 480 * 48 == stages[1]["dense"] - 480 * 48 - 48  # embedding; output layer and last norm
    shared = {one["stage"]: one["expert"] for one in answers["experts"]["parameters"]}
    assert shared == {0: 6 * 3 * 48 * 16}  # one of four experts in each of six layers


def test_a_recipe_of_another_model_is_told_where_they_differ(answers):
    (said,) = answers["a recipe of another model"]["preflight"]["reasons"]
    assert said.startswith("ValueError: models.moe.recipe: recipes/gpt_tiny.py makes another model than ")
    assert "/moe/config.json says: model.num_layers is 2 in the recipe and 6 there (num_hidden_layers); " in said
    assert said.endswith("set the fields by overrides, or remove the folder from models.moe")
    (said,) = answers["a recipe that changes the model"]["preflight"]["reasons"]
    assert "says: model.rotary_base is 5000.0 in the recipe and 10000.0 there (rope_theta). Name the recipe" in said
    (said,) = answers["a recipe that scales positions"]["preflight"]["reasons"]
    assert "says: model.rope_scaling is True in the recipe and False there; model.rope_scaling_factor is 1.0 in" in said


def test_an_override_is_refused_by_its_key(answers):
    assert answers["a field that Bridge doesn't have"]["preflight"]["reasons"] == [
        "overrides.model.hiden_dropout: 0.1: Bridge has no such field; did you mean overrides.model.hidden_dropout?"
    ]


def test_what_is_wrong_with_a_recipe_or_an_override_is_told(answers):
    told = {name: " ".join(answers[name]["preflight"]["reasons"]) for name in BRIDGES_ALONE}
    lacks = f"models.dense.args: {READS} has no argument 'chanches'; did you mean 'changes'?"
    assert lacks in told["arguments that a recipe lacks"]
    unknown = (
        "ValueError: models.own.recipe: Bridge has no recipe 'llama3_8b_pretrain_confg'; it has llama3_8b_pretrain_"
    )
    assert told["a recipe that Bridge doesn't have"].startswith(unknown)
    assert "has no function named configure" in told["a recipe without its function"]
    line = next(n for n, text in enumerate(Path(READS).read_text().splitlines(), 1) if ".items()" in text)
    assert (
        f"AttributeError: 'list' object has no attribute 'items' (at {READS}:{line} in configure)"
        in told["a recipe that fails"]
    )
    assert "SystemExit: 3 (at tests/bridge/recipe_that_fails.py:" in told["a recipe that exits"]
    model = told["a recipe whose model fails"]
    assert model.startswith("RuntimeError: no model (at tests/bridge/recipe_that_fails.py:")
    assert model.endswith(" in provide; because of KeyError: 'model')")
    misspelt = told["a field of a recipe that Bridge doesn't have"]
    assert f"{FAILS} sets optimizer.wieght_decay, and " in misspelt and "did you mean weight_decay?" in misspelt
    number = told["text of a recipe where a number must be"]
    assert number.startswith("ValueError: model.hidden_dropout: 'some' must be a number")
    weights = told["an override that contradicts the weights"]
    assert "overrides.model.num_layers: is 4, and 6 in the model whose weights are used" in weights
    assert "init: scratch" in weights


def test_data_that_a_recipe_names_and_that_is_not_here_is_a_warning(answers):
    [said] = answers["a recipe with data of its own"]["data"]
    assert said == "the recipe's config.dataset: there is no /nowhere/a.bin (and 1 more): ranks must find it"
    assert answers["plain"]["data"] == answers["a recipe"]["data"] == []


def test_the_loss_that_a_recipe_asks_for_is_known(answers):
    """Also to the run after it, which is built by the same process and asks for none."""
    assert answers["a recipe with our loss"]["loss"] == "ours"
    assert answers["the same with Megatron's"]["loss"] == "native"


@pytest.mark.parametrize("name", LEGAL)
def test_parameters_are_estimated_as_megatron_makes_them(answers, name):
    # Without Transformer Engine, tensor ranks share what latent attention compresses too.
    error = 0.1 if name == "latent attention, experts, tensors" else 0
    for made in answers[name]["parameters"]:
        dense, expert = answers[name]["estimated"][made["stage"]]
        assert dense == pytest.approx(made["dense"], rel=error)
        assert expert == pytest.approx(made["expert"])


UNLIKE_THE_CONFIG = {
    "biases": "missing: model.layers.0.self_attn.k_proj.bias",
    "tensor": "changed: model.layers.0.self_attn.k_proj.weight (F32[48, 48], not F32[24, 48])",
    "experts, cut": "changed: model.layers.0.self_attn.k_proj.weight (F32[48, 48], not F32[24, 48])",
    "more layers than the config has": "not in the model: decoder.layers.6.input_layernorm.weight",
    "more heads than the config has": "not in the model: mtp.layers.0.eh_proj.weight",
    "more rows than the config has": "changed: lm_head.weight (F32[600, 48], not F32[480, 48])",
    "as many rows as the tokenizer has tokens": "changed: lm_head.weight (F32[32, 48], not F32[480, 48])",
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_an_export_would_have_is_known_before_training(answers, name):
    """In every layout. A recipe's own model is never exported."""
    found = answers[name].get("export")
    if name in ("a recipe", "a recipe whose sizes are set", "a recipe with our loss", "the same with Megatron's"):
        assert found is None
    elif name in UNLIKE_THE_CONFIG:
        assert found["state"] == "FAIL" and UNLIKE_THE_CONFIG[name] in found["detail"]
    else:
        assert found["state"] == "PASS"


@pytest.mark.parametrize("name", LEGAL)
def test_operations_are_counted_as_bridge_counts_them(answers, name):
    bridge, ours = answers[name]["flops"]
    assert ours == pytest.approx(bridge, rel=1e-12)
