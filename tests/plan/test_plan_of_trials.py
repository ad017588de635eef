"""What `snakemake tune` tries: every legal setting of a run, in an experiment of its own."""

import functools
from dataclasses import asdict

import pytest
import yaml

from megaboa.calls import beginning
from megaboa.check import overview
from megaboa.config import ConfigError, keys, load
from megaboa.plan import make_plan, proof, specifications, trials
from megaboa.plan.quantities import overlay
from megaboa.plan.shared import Shared
from megaboa.records import Preflight, RunCheck, Tried, Tuning, write
from megaboa.run import trials as run_trials

TWO = "resources: {gpus_per_node: 2}\n"
H100 = "device: cuda\nresources: {gpus_per_node: 8, gpu: h100-80g}\n"
LARGE = """\
models: {dense: {config: {hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, num_attention_heads: 32,
  num_key_value_heads: 8, vocab_size: 32000}}}
training: {global_batch_size: 64, seq_length: 4096}
"""


TRAINED = "may decide what is trained, and settings are compared by their seconds per step alone: remove it"
FP8 = "bf16_with_fp8_current_scaling_mixed"
RECIPE = "models: {dense: {config: null, recipe: llama32_1b_pretrain_config}}\n"


@pytest.fixture
def tuning_of(loaded_of, tmp_path):
    """The plan of the trials, read from its file as the call's jobs read it; and what is said of it."""

    def make(text=""):
        tree, said = trials.experiment(loaded_of(text, {"training.train_iters": 100}), tmp_path)
        return make_plan(load([proof.write(tree, tmp_path / "experiment.yaml")]), tmp_path), said

    return make


def test_every_layout_and_micro_batch_of_two_ranks(tuning_of):
    plan, said = tuning_of(f"{TWO}tune: {{settings: 100}}\n")
    assert plan.name == "small-tune-run"
    names = {run.name for run in plan.runs}
    assert said == [f"{len(names)} legal settings of run on 2 ranks; {len(names)} are tried"]
    assert {"mbs1", "mbs4", "tp2-sp-mbs8", "pp2-mbs2-recompute", "cp2-mbs4"} <= names
    assert "mbs8" not in names, "two copies of the model share a batch of 8"
    assert plan.runs[0].name == "mbs1", "the user's own comes first"
    assert {run.run.world_size for run in plan.runs} == {2}
    assert {run.run.training["train_iters"] for run in plan.runs} == {15}
    assert {run.run.model["init"] for run in plan.runs} == {"scratch"}
    assert not plan.invalid


def test_further_values_that_are_not_legal_are_named_and_not_tried(tuning_of):
    plan, said = tuning_of(f"{TWO}tune: {{settings: 100, also: {{training.precision: [fp32, {FP8}]}}}}\n")
    assert not plan.invalid and FP8 not in {run.run.training["precision"] for run in plan.runs}
    assert said[0] == f"{len(plan.runs)} legal settings of run on 2 ranks; {len(plan.runs)} are tried"
    assert said[1].startswith(
        f"tune.also: training.precision: {FP8} isn't tried: training.precision: {FP8} with device"
    )


def test_layouts_are_tried_of_sgd_too(tuning_of):
    """Which has no state to distribute: with a distributed optimizer, no layout is legal."""
    sgd = "optimizer: {name: sgd}\nparallel: {distributed_optimizer: false}\n"
    plan, _ = tuning_of(f"{TWO}{sgd}tune: {{settings: 100}}\n")
    assert {"mbs1", "mbs4", "tp2-sp-mbs8", "pp2-mbs2-recompute"} <= {run.name for run in plan.runs}
    assert not any("parallel.distributed_optimizer" in run.values for run in plan.runs)


def test_a_setting_says_how_it_differs_from_the_users_run(tuning_of):
    plan, _ = tuning_of("resources: {gpus_per_node: 4}\nparallel: {tp: 2, sp: true}\ntune: {settings: 100}\n")
    assert plan.runs[0].name == "tp2-sp-mbs1"
    assert plan["mbs2"].values == {"parallel.tp": 1, "parallel.sp": False, "training.micro_batch_size": 2}
    assert plan["tp2-sp-mbs1-recompute"].values["overrides.model.recompute_granularity"] == "full"
    own, *_ = specifications.tune(Shared(plan)).settings
    assert (own.name, own.values) == ("tp2-sp-mbs1", {}), "the micro-batch is only there because a run needs a key"


def test_three_more_keys_make_no_name_that_is_too_long(tuning_of):
    """As in docs/how-to/tune.md."""
    more = ["parallel.overlap_grad_reduce: [null, false]", f"training.precision: [bf16_mixed, {FP8}]"]
    also = ", ".join([*more, "overrides.model.cuda_graph_impl: [none, transformer_engine]"])
    plan, _ = tuning_of(f"{H100}{LARGE}parallel: {{tp: 2, sp: true}}\ntune: {{settings: 400, also: {{{also}}}}}\n")
    tried = {tuple(run.values.get(key.split(":")[0]) for key in also.split(", ") if ":" in key) for run in plan.runs}
    assert len(tried) >= 8 and max(len(run.name) for run in plan.runs) <= 100


def test_what_does_not_fit_is_left_out_and_the_fastest_by_prediction_are_tried(tuning_of):
    plan, said = tuning_of(f"{H100}{LARGE}parallel: {{tp: 2, sp: true}}\ntune: {{settings: 6}}\n")
    assert len(plan.runs) == 6
    assert "6 are tried" in said[0]
    spec = specifications.tune(Shared(plan))
    assert spec.own == "tp2-sp-mbs1"
    seconds = [one.seconds for one in spec.settings if one.name != spec.own]
    assert seconds == sorted(seconds)
    assert all(one.gib < 80 for one in spec.settings)
    assert not [run for run in plan.runs if run.name == "mbs8"], "an 8 B model with eight samples on each GPU"


def test_the_users_own_setting_is_predicted_where_it_is_none_of_those_that_are_found(tuning_of):
    also = "tune: {settings: 4, also: {training.precision: [bf16_with_fp8_current_scaling_mixed]}}"
    plan, said = tuning_of(f"{H100}{LARGE}parallel: {{tp: 2, sp: true}}\n{also}\n")
    own, *_ = specifications.tune(Shared(plan)).settings
    assert own.name == "own" and own.seconds and own.gib
    assert len(said) == 1


def test_further_values_are_tried_with_every_layout(tuning_of):
    plan, _ = tuning_of(f"{TWO}tune: {{settings: 200, also: {{training.precision: [fp32, bf16_mixed]}}}}\n")
    precisions = [run.run.training["precision"] for run in plan.runs]
    assert precisions.count("fp32") == precisions.count("bf16_mixed")


def test_what_changes_no_loss_is_a_setting_all_the_same(tuning_of):
    plan, _ = tuning_of(f"{TWO}tune: {{settings: 200, also: {{parallel.overlap_grad_reduce: [null, false]}}}}\n")
    early, late = plan["mbs1"], plan["mbs1-overlap_grad_reduce.False"]
    assert early.run == late.run
    assert early.launch.overrides != late.launch.overrides


def test_only_so_many_of_each_layout_where_nothing_predicts_times(tuning_of):
    plan, said = tuning_of(f"{TWO}tune: {{settings: 5}}\n")
    assert "nothing predicts" in said[1]
    layouts = [(run.facts.layout.tp, run.facts.layout.pp, run.facts.layout.cp) for run in plan.runs]
    assert len(set(layouts)) == 4


def test_memory_on_processors_is_that_of_the_overview(tuning_of):
    """Where no CUDA and no NCCL take three GiB."""
    plan, _ = tuning_of(f"{TWO}tune: {{settings: 5}}\n")
    for setting in specifications.tune(Shared(plan)).settings:
        row = overview.row(setting.name, RunCheck(), plan[setting.name].facts, None)
        assert round(setting.gib, 2) == row["memory_gib"] == row["tensors_gib"]


def test_trials_without_predictions_have_none(plan_of):
    """As of an experiment.yaml from before they were in it."""
    spec = specifications.tune(Shared(plan_of(f"{TWO}tune: {{trials_of: dp2}}\n")))
    assert [(one.seconds, one.gib) for one in spec.settings] == [(None, None)] * len(spec.settings)


def test_a_plan_without_tuning_has_no_such_specification(plan_of):
    assert "tune.json" not in specifications.contents(Shared(plan_of()))


@pytest.mark.parametrize(
    ("sweep", "place"),
    [
        ("", "no"),
        ("sweep: {runs: {a: {}, b: {training.seed: 2}}}\n", "runs"),
        ("sweep: {grid: {training.seed: [1, 2]}}\n", "grid"),
        ("sweep: {runs: {a: {}}, grid: {training.seed: [1, 2]}}\n", "grid"),
    ],
)
def test_the_job_knows_where_the_winners_keys_belong(tuning_of, sweep, place):
    spec = specifications.tune(Shared(tuning_of(f"{TWO}{sweep}tune: {{settings: 2}}\n")[0]))
    assert (spec.swept, spec.run == "a") == (place, place == "runs")


def wins(spec, setting) -> Tuning:
    row = Tried(setting=setting, state="measured", trials=1, seconds=1.0)
    given = {"confidence": 1.0, "tolerance": 0.03, "noise": 0.01, "rounds": 1, "trials": 1, "minutes": 1.0}
    return Tuning(winner=setting.name, settings=(row,), ended="confident", **given)


@pytest.mark.parametrize("sweep", ["", "sweep: {runs: {a: {model: dense}, b: {model: dense-2.5}}}\n"])
@pytest.mark.parametrize(
    "also",
    [
        "training.precision: [bf16_mixed, fp32]",
        "recovery.stragglers.factor: [2.0]",
        "data.num_workers: [0, 2]",
        "overrides.model.cp_comm_type: [p2p, a2a]",
    ],
)
def test_whichever_setting_wins_its_file_can_be_given_after_the_users_own(tuning_of, loaded_of, tmp_path, sweep, also):
    dense = loaded_of("", {"training.train_iters": 1}).raw["models"]["dense"]
    models = yaml.safe_dump({"model": "dense", "models": {"dense-2.5": dense}})
    plan, _ = tuning_of(f"{TWO}{models}{sweep}tune: {{settings: 200, also: {{{also}}}}}\n")
    spec = specifications.tune(Shared(plan))
    own = [tmp_path / "small.yaml", tmp_path / "more.yaml"]
    name, tried = also.split(":")[0], set()
    for setting in (spec.settings[0], *(one for one in spec.settings if name in one.values)):
        (tmp_path / "winner.yaml").write_text(run_trials.yaml(wins(spec, setting), spec))
        loaded = load([*own, tmp_path / "winner.yaml"], {"training.train_iters": 100})
        assert make_plan(loaded, tmp_path, only=(spec.run,))[spec.run]
        tree = overlay(loaded.raw, proof.chosen(loaded, "tune", spec.run).values)
        for key, value in setting.values.items():
            path = keys.split(key, {"models": ["dense", "dense-2.5"]})
            assert functools.reduce(dict.__getitem__, path, tree) == value
            tried.add(key)
    assert {name, "parallel.tp"} <= tried


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ("foo.bar: [1]", r"more.yaml:2: tune.also.foo.bar: unknown key"),
        ("training.precision: [nope]", r"more.yaml:2: tune.also.training.precision: .*nope"),
        ("parallel.tp: [1, 2]", r"more.yaml:2: tune.also.parallel.tp: is what the search itself varies: remove it"),
        ("overrides.model.recompute_granularity: [null, full]", "tune.also.overrides.model.rec.* the search itself"),
        (
            "overrides.model.recompute_modules: [[core_attn]]",
            "recompute_modules: says nothing without recompute_granularity, which the search itself varies: remove it",
        ),
        ("overrides.model.tensor_model_parallel_size: [1, 2]", "what the search itself varies: remove it"),
        ("training.global_batch_size: [8, 4]", f"more.yaml:2: tune.also.training.global_batch_size: {TRAINED}"),
        ("overrides.train.global_batch_size: [8, 4]", f"tune.also.overrides.train.global_batch_size: {TRAINED}"),
        ("training.seq_length: [16, 32]", TRAINED),
        ("training.train_iters: [5, 50]", TRAINED),
        ("optimizer.lr: [0.1, 0.2]", TRAINED),
        ("data.split: ['1,0,0', '9,1,0']", TRAINED),
        ("task: [pretrain, sft]", TRAINED),
        ("model: [dense, dense-2.5]", TRAINED),
        ("models.dense.config.num_hidden_layers: [2, 4]", TRAINED),
        ("overrides.model.num_layers: [2, 4]", TRAINED),
        ("overrides.model.moe_expert_capacity_factor: [1.0, 2.0]", TRAINED),
        ("resources.nodes: [1, 2]", r"tune.also.resources.nodes: can't be tried: all trials share one job"),
    ],
)
def test_mistakes_in_further_keys_name_the_users_file(tuning_of, also, message):
    with pytest.raises(ConfigError, match=message) as error:
        tuning_of(f"{TWO}tune: {{also: {{{also}}}}}\n")
    assert "experiment.yaml" not in str(error.value) and "sweep.runs" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tune: {run: other}\n", r"tune\.run"),
        (
            "tune: {run: run-seed1}\nreport: {agreements: [{reference: run, runs: [], seeds: 1}]}\n",
            "more.yaml:1: tune.run: the run 'run-seed1' repeats 'run' for report.agreements, and is as fast: name that",
        ),
        (RECIPE, "has not read the run 'run' as it is now: call `snakemake preflight` first"),
        ("tune: {confidence: 1.5}\n", r"tune\.confidence"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tuning_of, text, message):
    with pytest.raises(ConfigError, match=message):
        tuning_of(text)


@pytest.fixture
def known(plan_of, tmp_path):
    """What preflight writes of a recipe, as if it set what another run does."""

    def make(recipe, like):
        runs = {"run": RunCheck(facts=asdict(plan_of(like)["run"].facts))}
        identities = {"run": plan_of(recipe, **{"training.train_iters": 100})["run"].digest[:12]}
        write(tmp_path / "small" / "preflight.json", Preflight(runs=runs, identities=identities))

    return make


def test_a_recipe_is_tuned_by_what_preflight_has_read_of_it(tuning_of, known):
    """Of which the plan knows neither the model nor the micro-batch."""
    known(f"{TWO}{RECIPE}", f"{TWO}training: {{micro_batch_size: 2}}\n")
    also = "tune: {settings: 100, also: {training.precision: [fp32, bf16_mixed]}}\n"
    plan, _ = tuning_of(f"{TWO}{RECIPE}{also}")
    assert plan.runs[0].name == "mbs2" and plan["mbs2"].run.training["micro_batch_size"] == 2
    assert plan["tp2-sp-mbs4"].values == {"parallel.tp": 2, "parallel.sp": True, "training.micro_batch_size": 4}
    assert plan["pp2-mbs2-precision.fp32"].values == {"parallel.pp": 2, "training.precision": "fp32"}
    with pytest.raises(ConfigError, match="call `snakemake preflight` first"):  # it is another run now
        tuning_of(f"{TWO}parallel: {{tp: 2}}\n{RECIPE}{also}")


def test_what_is_tried_also_is_predicted_of_a_recipe_too(tuning_of, known):
    gpus = "device: cuda\nresources: {gpus_per_node: 2, gpu: h200-141g}\n"
    unseen = "rerun_state_machine.check_for_nan_in_loss: false, ddp.check_for_nan_in_grad: false"
    graph = f"overrides: {{model.cuda_graph_impl: full_iteration, {unseen}}}\n"
    known(f"{gpus}{RECIPE}{graph}", f"{gpus}{LARGE}{graph}")
    also = f"training.precision: [bf16_mixed, {FP8}], overrides.model.cuda_graph_impl: [none, full_iteration]"
    plan, _ = tuning_of(f"{gpus}{RECIPE}{graph}tune: {{settings: 400, also: {{{also}}}}}\n")
    names = [run.name for run in plan.runs]
    assert "fp8" in names[1], "the fastest by prediction"
    in_fp8 = "precision.bf16_with_fp8_current_scaling_"
    assert all(names.index(f"{name}-{in_fp8}") < names.index(name) for name in ("mbs2", "fsdp-mbs2"))
    assert "pp2-mbs2-cuda_graph_impl.none" in names and "pp2-mbs2" not in names, "illegal with this graph"
    settings = specifications.tune(Shared(plan)).settings
    assert all(one.seconds and one.gib for one in settings)
    assert [one.seconds for one in settings[1:]] == sorted(one.seconds for one in settings[1:])


def test_all_settings_are_one_job_and_count_as_one(tuning_of):
    """Whatever 24 jobs of the run itself would cost."""
    tune = "tune: {settings: 24, minutes: 10, trial_minutes: 5}\n"
    gpus = f"{H100.replace('gpus_per_node: 8', 'nodes: 4, gpus_per_node: 8')}{LARGE}"
    plan, _ = tuning_of(f"{gpus}{tune}budget: {{gpu_hours: 8}}\n")
    said = "tuning: 1 job for 24 settings, 4 nodes x 8 GPUs; at most 8 GPU-hours in 15m of trials"
    assert beginning.asked_for(plan, on_cluster=True) == [said]
    message = r"more.yaml:\d+: budget.gpu_hours: 7.9 is less than the 8 GPU-hours that the job of all trials may take"
    with pytest.raises(ConfigError, match=message):
        tuning_of(f"{gpus}{tune}budget: {{gpu_hours: 7.9}}\n")
    short = gpus.replace("nodes: 4", "nodes: 4, runtime: 6m")
    assert "at most 3.2 GPU-hours in 6m" in beginning.asked_for(tuning_of(f"{short}{tune}")[0], on_cluster=True)[0]


def test_weights_are_sharded_with_tensor_ranks_too(tuning_of):
    def sharded(text):
        plan, _ = tuning_of(f"{H100}{LARGE}tune: {{settings: 500}}\n{text}")
        return {run.name for run in plan.runs if run.values.get("parallel.fsdp")}

    found = sharded("")
    assert {"fsdp-mbs1", "tp2-sp-fsdp-mbs1", "tp4-sp-fsdp-mbs2"} <= found
    assert not [name for name in found if name.startswith(("tp8", "pp", "cp")) or "-pp" in name or "-cp" in name]
    assert not sharded("optimizer: {name: muon}\nparallel: {distributed_optimizer: false, tp: 2, sp: true}\n")


def test_a_single_gpu_has_nothing_to_shard(tuning_of):
    one_gpu = "device: cuda\nresources: {gpus_per_node: 1, gpu: h200-141g}\ntune: {settings: 400}\n"
    plan, _ = tuning_of(f"{one_gpu}{LARGE.replace('num_hidden_layers: 32', 'num_hidden_layers: 8')}")
    assert "mbs1" in [run.name for run in plan.runs]
    assert not [run.name for run in plan.runs if "parallel.fsdp" in run.values]
