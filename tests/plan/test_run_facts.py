"""From an experiment to findings: where each is shown, and what is left out where that was asked for."""

import json

import pytest

from megaboa.check import fit, refusals, table
from megaboa.check.fact_sources import FIELDS, OVERWRITTEN
from megaboa.config import ConfigError
from megaboa.plan import specifications
from megaboa.plan.quantities import Quantities
from megaboa.plan.run_facts import alone, facts_of
from megaboa.plan.shared import Shared

DEEPSEEK = {
    **{"model_type": "deepseek_v3", "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 8},
    **{"moe_intermediate_size": 24, "n_shared_experts": 2, "q_lora_rank": 16, "kv_lora_rank": 8},
}


def facts(config, hf_config):
    quantities = Quantities(config.model_dump(), True, lambda: 1)
    return facts_of(config.model_copy(update={"model": "dense"}), quantities, hf_config)


def test_every_illegal_run_of_the_sweep_is_named_at_once_with_its_line(plan_of):
    with pytest.raises(ConfigError) as error:
        plan_of(
            "resources: {gpus_per_node: 8}\n"
            "sweep: {grid: {parallel.tp: [1, 3, 8], training.micro_batch_size: [1, 3]}}\n",
            **{"training.train_iters": 10, "training.global_batch_size": 24},
        )
    said = str(error.value)
    assert "more.yaml:2: sweep.grid.parallel.tp: 3 doesn't divide 4 attention heads; nearest: 2 or 4" in said
    assert "[heads_divide] (runs tp3-mbs1, tp3-mbs3)" in said
    assert "8 doesn't divide 4 attention heads; nearest: 4 [heads_divide] (runs tp8-mbs1, tp8-mbs3)" in said
    assert "8 is not a multiple of tp * pp * cp = 3 * 1 * 1 = 3 [ranks_fill_the_layout]" in said
    assert "tp1-mbs" not in said


def test_illegal_runs_are_left_out_and_listed_as_invalid(plan_of, tmp_path):
    plan = plan_of(
        "sweep: {skip_illegal: true, grid: {parallel.tp: [1, 3, 4]}}\n"
        "report: {agreements: [{reference: tp1, runs: ['*']}]}",
        **{"training.train_iters": 10, "resources.gpus_per_node": 4},
    )
    assert [run.name for run in plan.runs] == ["tp1", "tp4"]
    assert plan.agreements[0].runs == ("tp4",)
    [left_out] = plan.invalid
    assert left_out.name == "tp3" and any("heads_divide" in reason for reason in left_out.reasons)
    plan.write(tmp_path)
    head, *rows = [line.split("\t") for line in (tmp_path / "small/plan.tsv").read_text().splitlines()]
    states = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["run"], row["state"]) for row in states] == [("tp1", "-"), ("tp4", "-"), ("tp3", "INVALID")]
    assert "3 doesn't divide 4 attention heads" in states[-1]["why"]
    assert not (tmp_path / "small/runs/tp3").exists()


def test_runs_that_the_sweep_excludes_are_neither_checked_nor_planned(plan_of, tmp_path):
    text = (
        "sweep: {grid: {parallel.tp: [1, 3], training.seed: [1, 2]}, exclude: [tp1-seed2, 'tp3*']}\n"
        "report: {agreements: [{reference: tp1-seed2, runs: ['*'], twins: 2}]}\n"
        "export: {runs: [tp3-seed1]}\n"
    )
    plan = plan_of(text)
    assert [run.name for run in plan.runs] == ["tp1-seed1"] and plan.excluded == ("tp1-seed2", "tp3-seed1", "tp3-seed2")
    assert plan.left_out == ["left out of the sweep: tp1-seed2, tp3-seed1, tp3-seed2 (sweep.exclude)"]
    assert (plan.exports, plan.agreements, plan.invalid) == ([], [], [])
    report = specifications.contents(Shared(plan, tmp_path))["report.json"]
    assert report["excluded"] == ["tp1-seed2", "tp3-seed1", "tp3-seed2"]


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ("[sed2]", "more.yaml:1: sweep.exclude: there is no run 'sed2'; did you mean 'seed2'?"),
        ("['seed1*', '*2']", "sweep.exclude: leaves no run: remove a pattern"),
    ],
)
def test_a_pattern_of_the_sweep_excludes_something_and_not_everything(plan_of, patterns, said):
    with pytest.raises(ConfigError) as error:
        plan_of(f"sweep: {{grid: {{training.seed: [1, 2]}}, exclude: {patterns}}}")
    assert said in str(error.value)


def test_masks_of_documents_and_twins_are_left_out_with_their_layouts(plan_of):
    text = "data: {reset_attention_mask: true}\nsweep: {skip_illegal: true, grid: {parallel.cp: [1, 2]}}"
    plan = plan_of(text, **{"training.train_iters": 10, "resources.gpus_per_node": 2})
    assert [run.name for run in plan.runs] == ["cp1"] and "masks_of_documents" in plan.invalid[0].reasons[0]


def test_what_preflight_refused_is_left_out_of_the_next_plan_until_it_changes(plan_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "sweep: {skip_illegal: true, grid: {training.seed: [1, 2]}}"
    plan = plan_of(text, training__train_iters=10)
    plan.write("results")
    specifications.write(Shared(plan))
    refusals.write(tmp_path / "results/small", {"seed2": ["Bridge says no"]})
    again = plan_of(text, training__train_iters=10)
    assert [run.name for run in again.runs] == ["seed1"]
    assert again.invalid[0].reasons == ("Bridge says no",)
    changed = plan_of(text, training__train_iters=20)
    assert [run.name for run in changed.runs] == ["seed1", "seed2"]


def test_a_sweep_of_which_nothing_is_legal_is_refused(plan_of):
    with pytest.raises(ConfigError, match=r"no run is left: tp3 is INVALID: .*heads_divide"):
        plan_of("sweep: {skip_illegal: true, grid: {parallel.tp: [3]}}", **{"training.train_iters": 10})


def test_what_bridge_accepts_is_a_warning_of_the_plan(plan_of):
    plan = plan_of("sweep: {grid: {training.seed: [1, 2]}}", training__train_iters=10, checkpoint__save_interval=50)
    [(text, runs)] = plan.warnings.items()
    assert "50 in a run of 10 steps saves only the last" in text and runs == ["seed1", "seed2"]


def test_overrides_count_too(plan_of):
    more = "overrides: {model.recompute_granularity: full, model.recompute_method: uniform}"
    with pytest.raises(ConfigError, match=r"overrides.model.recompute_num_layers: is null with full recomputation"):
        plan_of(more, **{"training.train_iters": 10})


SPARSE = "{model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32}"


def said_of(plan_of, field, value):
    """The problem of an override in a sparse model's run on GPUs, whose memory is estimated; None if it has none."""
    more = f"device: cuda\nresources: {{gpu: h100-80g}}\nmodels: {{dense: {{config: {SPARSE}}}}}\n"
    try:
        plan_of(f"{more}overrides: {{{field}: {json.dumps(value)}}}")
    except ConfigError as error:
        return str(error.problems[0])
    return None


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("model.hidden_dropout", "lots", "'lots' is not a number"),
        ("model.hidden_dropout", 0, None),
        ("model.hidden_dropout", None, None),
        ("model.num_layers", True, "true is not a whole number"),
        ("model.num_layers", 2.5, "2.5 is not a whole number"),
        ("model.gated_linear_unit", None, "null is not true or false"),
        ("model.normalization", "LayerNorm", None),
        ("model.recompute_modules", 5, "5 is not a list of text"),
        ("model.recompute_modules", "core_attn", None),
        ("model.moe_layer_freq", [0, 1], None),
        ("model.moe_layer_freq", 2, None),
        ("model.pipeline_model_parallel_layout", [1], "[1] is not text, or a list with a list for each stage"),
        ("model.a_field_that_no_fact_has", {"any": ["value"]}, None),
    ],
)
def test_an_override_of_another_type(plan_of, field, value, problem):
    said = said_of(plan_of, field, value)
    assert said == problem or (problem and said.endswith(f"more.yaml:4: overrides.{field}: {problem}"))


def test_no_override_breaks_the_plan(plan_of):
    for field in (*FIELDS.values(), *OVERWRITTEN.values()):
        for value in ("lots", 0.5, None, [["x"]]):
            said_of(plan_of, field, value)


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ("{head_dim: 15}", True),
        ("{hidden_size: 60}", True),  # in four heads
        ("{head_dim: 16}", False),
        ("{head_dim: 15, partial_rotary_factor: 0.5}", False),
        ("{head_dim: 15, rope_parameters: {partial_rotary_factor: 0.5}}", False),
        ("{head_dim: 15, model_type: glm4_moe}", False),  # half of a head by default
    ],
)
def test_heads_that_rotary_positions_cannot_turn(plan_of, config, refused):
    models = f"models: {{dense: {{params: 1, config: {config}}}}}\n"
    if not refused:
        plan_of(models)
        return
    words = r": rotary positions turn a head's numbers in pairs, and 15 is odd; nearest: 14 or 16 \[rotary_"
    with pytest.raises(ConfigError, match=words):
        plan_of(models)
    for override in ("model.rotary_percent: 0.5", "model.position_embedding_type: learned_absolute"):
        plan_of(f"{models}overrides: {{{override}}}\n")  # preflight knows what becomes of it


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("", "small.yaml:18: tokenizers.bpe.vocab_size"),
        ("models: {dense: {config: {vocab_size: 512}}}", "more.yaml:1: models.dense.config.vocab_size"),
        ("overrides: {model.vocab_size: 512}", "more.yaml:1: overrides.model.vocab_size"),
        (
            "sweep: {grid: {models.dense.config.vocab_size: [512]}}",
            "more.yaml:1: sweep.grid.models.dense.config.vocab_size",
        ),
    ],
)
def test_a_rule_names_the_key_that_its_value_is_from(plan_of, more, key):
    with pytest.raises(ConfigError, match=rf"{key}: 512 rows can't be divided over tp = 3 \[vocabulary_divides"):
        plan_of(more, **{"training.train_iters": 10, "parallel.tp": 3})


def test_options_of_sbatch_that_contradict_the_layout(plan_of):
    with pytest.raises(ConfigError, match=r"resources.slurm_extra: asks for 4 .* 1: remove it"):
        plan_of("resources: {slurm_extra: '--exclusive --ntasks-per-node=4'}", **{"training.train_iters": 10})


def test_a_hugging_face_config_in_our_words(plan_of):
    config = plan_of().runs[0].config
    model = facts(config, DEEPSEEK).model
    assert (model.experts, model.moe_ffn, model.shared_ffn, model.topk) == (8, 24, 48, None)
    assert model.moe_layers == (False, True, True, True)
    assert model.latent and (model.q_rank, model.kv_rank, model.kv_groups) == (16, 8, None)
    llama = facts(config, {"model_type": "llama"}).model
    assert (llama.layers, llama.hidden, llama.heads, llama.head_dim, llama.ffn) == (32, 4096, 32, 128, 11008)
    assert facts(config, None).model.layers is None  # of the hub: not fetched yet


@pytest.mark.parametrize(("family", "fused"), [("llama", True), ("qwen3", False)])
def test_kernels_are_those_that_bridges_converter_chooses(plan_of, family, fused):
    config = plan_of(**{"models.dense.config.model_type": family, "training.train_iters": 10}).runs[0].config
    assert alone(config, None).kernels.fused_activation is fused  # as `advise` sees it
    assert facts(config, config.models["dense"].config).kernels.fused_activation is fused


EXPERTS = "models: {dense: {config: {model_type: qwen3_moe, num_experts: 8, num_experts_per_tok: 2}}}\n"
RECOMPUTED = "overrides: {model.recompute_granularity: selective, model.recompute_modules: [moe_act]}\n"


def test_products_of_experts_are_grouped_as_bridges_converters_do_it(plan_of):
    given = {"training.train_iters": 10}
    on_gpus = {**given, "device": "cuda"}
    assert not plan_of(**on_gpus).runs[0].facts.kernels.grouped_gemm
    assert plan_of(EXPERTS + RECOMPUTED, **on_gpus).runs[0].facts.kernels.grouped_gemm
    for apart in ({**given, "device": "cpu"}, {**on_gpus, "overrides": {"model.moe_grouped_gemm": False}}):
        with pytest.raises(ConfigError, match="moe_act without model"):
            plan_of(EXPERTS + RECOMPUTED, **apart)


@pytest.mark.parametrize(
    ("family", "more", "parts"),
    [
        ("qwen3_moe", "num_experts: 8", ("layernorm", "moe_act")),
        ("ernie4_5_moe", "moe_num_experts: 8, moe_num_shared_experts: 2", ("layernorm", "moe_act", "shared_experts")),
        ("glm4_moe", "n_routed_experts: 8, n_shared_experts: 1", ("layernorm", "moe_act")),  # which it overlaps
    ],
)
def test_selective_recomputation_that_is_proposed_is_legal(plan_of, family, more, parts):
    """Of experts whose products Bridge's converters group."""
    given = {"training.train_iters": 10, "device": "cuda", "resources.gpu": "h100-80g"}
    sizes = f"{more}, moe_intermediate_size: 16, num_experts_per_tok: 2"
    [run] = plan_of(f"models: {{dense: {{config: {{model_type: {family}, {sizes}}}}}}}\n", **given).runs
    [proposed] = [change for change in fit.changes(run.facts) if change.facts.kernels.recompute == "selective"]
    assert proposed.facts.kernels.recompute_modules == parts and table.is_legal(proposed.facts)


def test_of_a_recipe_only_what_the_file_says(plan_of, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def configure(): ...\n")
    more = f"model: r\nmodels: {{r: {{recipe: {recipe}, tokenizer: bpe}}}}\n"
    assert plan_of(more + "parallel: {sp: true, pp: 3}\n", **{"training.micro_batch_size": 3}).runs  # tp: its business
    with pytest.raises(ConfigError, match="one_copy_of_the_model_at_least"):
        plan_of(more + "parallel: {tp: 2, pp: 1, cp: 1}\n", **{"training.micro_batch_size": 1})


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (
            "parallel: {fsdp: torch}\ncheckpoint: {save_interval: 5, local: {every: 2}}",
            "copies_on_nodes_can_be_resumed",
        ),
        ("checkpoint: {save_interval: 5, local: {every: 2}}", None),  # whichever optimizer the recipe has
        ("schedule: {warmup_iters: 50, decay_iters: 40}", "warmup_ends_before_the_decay"),
        ("schedule: {warmup_iters: 50, decay_iters: null}", None),  # null leaves it to the recipe
        ("schedule: {warmup_iters: 50}", None),  # its decay may end later than the run
        ("optimizer: {name: sgd}\nparallel: {distributed_optimizer: true}", "sgd_has_nothing_to_shard"),
        ("optimizer: {name: sgd}", None),
        ("optimizer: {name: muon}\nparallel: {distributed_optimizer: true}", "muon_reads_whole_gradients"),
        ("optimizer: {name: muon}", None),
        ("parallel: {tp: 1, pp: 1, cp: 1, vpp: 2}", "interleaving_needs_a_pipeline"),
        ("parallel: {vpp: 2}", None),
        ("parallel: {cp: 2}\ndata: {reset_attention_mask: true}", "masks_of_documents_have_no_context_parallelism"),
        ("parallel: {fsdp: megatron, fsdp_sharding: no_shard}", None),  # its layers may have no gates
        ("parallel: {overlap_param_gather: true, distributed_optimizer: false}", None),
    ],
)
def test_keys_next_to_a_recipe_are_checked_as_far_as_they_say_enough(plan_of, keys, rule):
    recipe = "model: r\nmodels: {r: {recipe: llama32_1b_pretrain_config, tokenizer: bpe}}\n"
    if rule is None:
        assert plan_of(f"{recipe}{keys}\n").runs
        return
    with pytest.raises(ConfigError, match=rule):
        plan_of(f"{recipe}{keys}\n")


def test_a_plan_is_refused_and_says_what_would_fit(plan_of):
    model = {"vocab_size": 32000, "intermediate_size": 11008, "num_hidden_layers": 32, "max_position_embeddings": 4096}
    given = {"training.train_iters": 10, "device": "cuda", "models.dense.config": model, "training.seq_length": 4096}
    layout = {"resources.gpus_per_node": 8, "training.micro_batch_size": 8, "training.global_batch_size": 64}
    with pytest.raises(ConfigError, match=r"resources.gpu: h100-80g has 79.2 GiB.*fits by prediction.*memory_suffices"):
        plan_of(**given, **layout, **{"resources.gpu": "h100-80g"})
    assert plan_of(**given, **layout, **{"resources.gpu": "b999-2000g"}).runs


def test_a_plan_over_its_budget_is_stopped(plan_of):
    length = {"training.train_iters": 1000, "training.micro_batch_size": 1, "resources.step_seconds": 7.2}
    assert plan_of(**length, **{"budget.gpu_hours": 2.0}).runs
    with pytest.raises(ConfigError, match=r"budget.gpu_hours: 1.9 is less than the 2 GPU-hours of the plan"):
        plan_of(**length, **{"budget.gpu_hours": 1.9})
    with pytest.raises(ConfigError, match=r"budget.disk: 10M is less than the .* GB that the plan writes"):
        plan_of(**length, **{"budget.disk": "10M"})
