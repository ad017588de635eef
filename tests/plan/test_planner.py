"""From an experiment to its runs: names, precedence, identities."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from ordinary_user import as_ordinary_user

from megaboa.check import costs
from megaboa.check.facts import with_overrides
from megaboa.config import ConfigError, load
from megaboa.plan import Plan, make_plan
from megaboa.plan.planner import with_costs
from megaboa.records import LossSpike, plain

ROOT = Path(__file__).resolve().parents[2]
PlanOf = Callable[..., Plan]


def names(plan: Plan) -> list[str]:
    return [run.name for run in plan.runs]


# names


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("{grid: {parallel.tp: [1, 2], training.micro_batch_size: [1, 2]}}", "tp1-mbs1 tp1-mbs2 tp2-mbs1 tp2-mbs2"),
        ("{grid: {optimizer.lr: [3e-4, 1e-5, 2.0]}}", "lr0.0003 lr1e-05 lr2"),
        ("{grid: {parallel.distributed_optimizer: [true, false]}}", "distopt nodistopt"),
        ("{grid: {schedule.decay: [WSD, inverse-square-root]}}", "decay-WSD decay-inverse-square-root"),
        ("{grid: {checkpoint.keep_last: [null], training.seed: [1]}}", "keep_last-none-seed1"),
        ("{zip: {training.seed: [1, 2], optimizer.lr: [0.1, 0.2]}}", "seed1-lr0.1 seed2-lr0.2"),
        ("{runs: {b: {training.seed: 1}, a: {training.seed: 2}}}", "b a"),
        ("{grid: {parallel.tp: [2]}, runs: {a: {training.seed: 1}, b: {training.seed: 2}}}", "tp2-a tp2-b"),
        ("{grid: {layout: {two: {parallel.tp: 2}, wide: {parallel.tp: 4}}}}", "two wide"),
        ("{grid: {overrides.model.moe_permute_fusion: [true, false]}}", "moe_permute_fusion nomoe_permute_fusion"),
        ("{grid: {overrides.ddp.bucket_size: [1000000]}}", "bucket_size1000000"),
        ("{grid: {overrides.optimizer.lr: [0.1]}}", "lr0.1"),
        ("{grid: {data.blend: [{text: 2}]}}", "data-text2"),
        ("{grid: {data.split: ['90,5,5']}}", "split-90-5-5"),
        ("{grid: {training.micro_batch_size: [gbs / 2]}}", "mbs-gbs-2"),
    ],
)
def test_names(plan_of: PlanOf, sweep: str, expected: str) -> None:
    resources = "resources: {gpus_per_node: 4}\n" if "parallel.tp" in sweep else ""
    assert names(plan_of(f"{resources}sweep: {sweep}")) == expected.split()


def test_no_sweep_is_one_run(plan_of: PlanOf) -> None:
    assert names(plan_of()) == ["run"]


def test_a_swept_model_becomes_one_model_for_each_value(plan_of: PlanOf) -> None:
    plan = plan_of("sweep: {grid: {models.dense.config.hidden_size: [32, 64], training.seed: [1, 2]}}")
    assert names(plan) == ["h32-seed1", "h32-seed2", "h64-seed1", "h64-seed2"]
    assert [run.model for run in plan.runs] == ["dense-h32", "dense-h32", "dense-h64", "dense-h64"]
    assert {name: model.config["hidden_size"] for name, model in plan.models.items()} == {
        "dense-h32": 32,
        "dense-h64": 64,
    }
    assert plan["h32-seed1"].config.model == "dense-h32"
    assert plan["h32-seed1"].run.model["name"] == "dense-h32"


def test_sweeping_a_model_that_a_run_does_not_train_is_no_difference(plan_of: PlanOf) -> None:
    other = "models: {other: {tokenizer: bpe, config: {model_type: llama}}}\n"
    with pytest.raises(ConfigError, match=r"differ only in models\.other\.config\.hidden_size"):
        plan_of(other + "model: dense\nsweep: {grid: {models.other.config.hidden_size: [32, 64]}}")


def test_names_of_models_may_hold_dots(plan_of: PlanOf) -> None:
    text = "models: {q-2.5: {tokenizer: bpe, config: {model_type: llama}}}\nmodel: q-2.5\n"
    plan = plan_of(text + "sweep: {grid: {models.q-2.5.config.hidden_size: [64]}}")
    assert plan.runs[0].model == "q-2.5-h64"


def test_a_derived_model_may_not_take_the_name_of_another(plan_of: PlanOf) -> None:
    other = "models: {dense-h32: {hf: org/name}}\nmodel: dense\n"
    with pytest.raises(ConfigError, match="two different models would be called 'dense-h32'"):
        plan_of(other + "sweep: {grid: {models.dense.config.hidden_size: [32]}}")


# precedence and identity


def test_what_is_swept_reaches_the_run(plan_of: PlanOf) -> None:
    plan = plan_of("sweep: {runs: {a: {optimizer.lr: 1, overrides.model.x: {y: 1}}, b: {}}}")
    a, b = plan.runs
    assert (a.config.optimizer.lr, a.run.optimizer["lr"], a.row["lr"]) == (1.0, 1.0, 1.0)
    assert a.run.overrides == {"model.x": {"y": 1}}
    assert b.config.optimizer.lr == 3e-4
    assert b.run.overrides == {}
    assert a.values == {"optimizer.lr": 1, "overrides.model.x": {"y": 1}}


def test_an_override_of_a_key_is_another_spelling_of_it(plan_of: PlanOf) -> None:
    as_override = plan_of("overrides: {optimizer.lr: 0.1, model.context_parallel_size: 1}")
    as_key = plan_of("optimizer: {lr: 0.1}\nparallel: {cp: 1}")
    assert as_override.runs[0].texts["run"] == as_key.runs[0].texts["run"]
    assert as_override.runs[0].row["lr"] == 0.1


def test_a_bad_value_of_a_sweep_is_placed_in_the_sweep(plan_of: PlanOf) -> None:
    with pytest.raises(ConfigError, match=r"more\.yaml:1: sweep\.grid\.training\.micro_batch_size: -8 must be greater"):
        plan_of("sweep: {grid: {training.micro_batch_size: [1, -gbs]}}")


def test_the_same_number_written_differently_is_the_same_identity(plan_of: PlanOf) -> None:
    one = plan_of("optimizer: {lr: 3e-4, clip_grad: 1}\nparallel: {tp: 1}\ndata: {blend: text}")
    two = plan_of("optimizer: {lr: 0.0003, clip_grad: 1.0}\nparallel: {tp: 1.0}\ndata: {blend: {text: 1}}")
    three = plan_of("optimizer: {lr: 0.00030}\n# a comment\n")
    assert one.runs[0].texts["run"] == two.runs[0].texts["run"] == three.runs[0].texts["run"]


@pytest.mark.parametrize(
    "text",
    [
        "resources: {partition: gpu, runtime: 1d, cpus_per_rank: 2, mem_mb_per_rank: 1, account: me}",
        "checkpoint: {save_interval: 5, keep_last: 1, async_save: true, reshardable: false}",
        "profile: {tool: pytorch, steps: [1, 2], ranks: [0]}",
        "checkpoint: {verify: false}",
        "resources: {step_seconds: 2, slurm_extra: --exclusive}",
        "launch: {starter: local, tasks: node, srun_args: [--mpi=none], network: infiniband, environment: {A: null}}",
        "recovery: {budget: 0, actions: {hang: stop}, loss_spike: {factor: 3}, notify: mail me}",
        "export: {runs: all}",
        "report: {title: Another, figures: [{name: a, kind: bar, x: run, y: mfu}]}",
        "export: {runs: all}\nevaluate: {command: 'x {model} {out}'}",
        "trackers: {wandb: {}, mlflow: {}, offline: true}",
        "store: elsewhere",
        "data: {num_workers: 7}",
        "data: {max_epochs: 1}",
        "data: {reset_position_ids: false, validation_sets: {}, fim: null, blend_per_split: null}",
        "overrides: {logger.log_interval: 5, profiling.nvtx_ranges: true, checkpoint.save_retain_interval: 5}",
        "overrides: {straggler.log_straggler: true, nvrx_straggler.enabled: true}",
    ],
)
def test_what_can_not_change_the_losses_is_not_identity(plan_of: PlanOf, text: str) -> None:
    plain, changed = plan_of().runs[0], plan_of(text).runs[0]
    assert plain.texts["run"] == changed.texts["run"]


@pytest.mark.parametrize(
    "text",
    [
        "resources: {gpus_per_node: 2}",
        "resources: {nodes: 2}",
        "parallel: {distributed_optimizer: false}",
        "optimizer: {eps: 1e-6}",
        "schedule: {warmup_iters: 1}",
        "training: {seed: 1}",
        "data: {split: '90,9,1'}",
        "data: {blend_per_split: {train: text}}",
        "data: {validation_sets: {held-out: text}}",
        "data: {reset_position_ids: true}",
        "data: {reset_attention_mask: true}",
        "data: {eod_mask_loss: true}",
        "data: {fim: {}}",
        "device: cuda",
        "models: {dense: {seed: 1}}",
        "models: {dense: {init: pretrained}}",
        "models: {dense: {config: {rms_norm_eps: 1e-5}}}",
        "overrides: {model.moe_permute_fusion: true}",
    ],
)
def test_what_can_change_the_losses_is_identity(plan_of: PlanOf, text: str) -> None:
    assert plan_of().runs[0].texts["run"] != plan_of(text).runs[0].texts["run"]


def test_evaluated_are_the_exported_runs_that_match(plan_of: PlanOf) -> None:
    sweep = "sweep: {grid: {training.seed: [1, 2, 3]}}\nexport: {runs: ['*1', '*2']}\n"
    command = "evaluate: {command: 'x {model} {out}', runs: %s}"
    assert plan_of(sweep + command % "all").evaluated == ["seed1", "seed2"]
    assert plan_of(sweep + command % "['*2']").evaluated == ["seed2"]
    assert plan_of(sweep).evaluated == []


def test_launch_and_profile_hold_the_rest(plan_of: PlanOf) -> None:
    run = plan_of("resources: {nodes: 2, partition: gpu}\noverrides: {logger.log_interval: 5}\nstore: there").runs[0]
    assert run.run.world_size == 2
    assert {
        key: getattr(run.launch, key) for key in ("nodes", "gpus_per_node", "partition", "store", "num_workers")
    } == {
        "nodes": 2,
        "gpus_per_node": 1,
        "partition": "gpu",
        "store": "there",
        "num_workers": 2,
    }
    assert run.launch.overrides == {"logger.log_interval": 5}
    assert plain(run.profile) == {
        "tool": "none",
        "steps": [2, 8],
        "ranks": [0],
        "domains": ["cuda", "nvtx"],
        "arguments": [],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profile: {tool: nsys}\ndevice: cpu", "nothing to record with device: cpu: nsys sees the steps of a GPU"),
        ("profile: {tool: memory}\ndevice: cpu", "nothing to record with device: cpu: snapshots are of CUDA"),
        ("profile: {tool: pytorch, steps: [0, 3]}", "profile.steps: [0, 3]: there is no step 0; nearest: [1, 3]"),
        ("profile: {tool: pytorch, ranks: [0, 3]}", "profile.ranks: [3] of 1 ranks; nearest: [0]"),
    ],
)
def test_a_profile_that_can_not_be_is_refused(plan_of: PlanOf, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        plan_of(text)
    assert plan_of("profile: {tool: nsys}\ndevice: cuda").runs[0].profile.tool == "nsys"
    assert plan_of("profile: {tool: none, ranks: [3]}").runs[0].profile.ranks == (3,)


def test_how_ranks_start_and_what_is_done_when_they_fail_is_launched(plan_of: PlanOf) -> None:
    settings = "launch: {network: efa, environment: {A: b, C: null}}\n"
    settings += "recovery: {actions: {hang: requeue}, loss_spike: {patience: 7}}\n"
    launch = plan_of(settings).runs[0].launch
    assert launch.start.network == "efa" and launch.start.environment == {"A": "b", "C": None}
    assert (launch.start.starter, launch.start.srun, launch.start.health_check) == (
        "auto",
        "srun",
        False,
    )
    assert launch.recovery.actions == {"hang": "requeue"} and launch.recovery.budget == 5
    assert launch.recovery.loss_spike == LossSpike(factor=2.0, window=50, patience=7, limit=3)
    assert plan_of().runs[0].launch.recovery.loss_spike is None


# data


CORPORA = "corpora: {a: {source: python-stdlib}, b: {source: 'hf:org/b'}, c: {source: 'hf:org/c'}}\n"


def test_a_run_reads_every_corpus_that_its_data_names(plan_of: PlanOf) -> None:
    plan = plan_of(CORPORA + "data: {blend_per_split: {train: {a: 2, b: 1}, valid: c}, validation_sets: {far: c}}")
    (run,) = plan.runs
    assert run.corpora == ("a", "b", "c")
    assert set(plan.corpus_tokenizers) == {"a", "b", "c"}
    assert run.run.data == {
        "blend_per_split": {"train": {"a": 2.0, "b": 1.0}, "valid": {"c": 1.0}, "test": None},
        "validation_sets": {"far": {"c": 1.0}},
    }
    assert run.row["data"] == "a:2,b:1"


def test_a_validation_set_may_be_the_held_out_share_of_one_corpus_of_the_blend(plan_of: PlanOf) -> None:
    plan = plan_of(CORPORA + "data: {blend: {a: 2, b: 1}, validation_sets: {a: a, far: c}}")
    assert plan.runs[0].run.data["validation_sets"] == {"a": {"a": 1.0}, "far": {"c": 1.0}}


def test_a_corpus_of_the_same_source_with_other_texts_may_be_a_validation_set(plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text("def keep(record): return True")
    for text in ("split: test", "subset: de", "text_key: answer", f"filter: {tmp_path}/held.py"):
        copy = f"corpora: {{a: {{source: 'hf:org/a'}}, b: {{source: 'hf:org/a', {text}}}}}\n"
        assert plan_of(copy + "data: {blend_per_split: {train: a, valid: b}}").runs[0].corpora == ("a", "b")


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ("{blend: a, split: '100,0,0'}", "data.split"),
        ("{blend_per_split: {train: a}}", "data.blend_per_split.valid"),
    ],
)
def test_who_asks_for_evaluations_has_data_for_them(plan_of: PlanOf, data: str, remedy: str) -> None:
    asked = "training: {eval_interval: 100}\n"
    with pytest.raises(ConfigError, match=rf"training\.eval_interval: 100, .* set {remedy}, or remove"):
        plan_of(CORPORA + asked + f"data: {data}")
    plan_of(CORPORA + f"data: {data}")
    plan_of(CORPORA + "training: {eval_interval: 100, eval_iters: 0}\n" + f"data: {data}")
    plan_of(CORPORA + asked + "data: {blend: a}")


def test_blends_are_swept(plan_of: PlanOf) -> None:
    axis = "sweep: {grid: {data.blend: [a, {a: 1, b: 3}]}}"
    assert names(plan_of(CORPORA + axis)) == ["data-a", "data-a1-b3"]
    axis = "sweep: {grid: {data.blend_per_split.train: [a, b]}}\ndata: {blend_per_split: {valid: c}}"
    with pytest.raises(ConfigError, match=r"data\.blend_per_split\.train: is missing"):
        plan_of(CORPORA + axis)
    axis = "sweep: {runs: {one: {data.blend: a}, two: {data.blend_per_split.train: a, data.blend_per_split.valid: b}}}"
    assert [run.corpora for run in plan_of(CORPORA + axis).runs] == [("a",), ("a", "b")]


# recipes


RECIPE = "models: {r: {recipe: RECIPE_FILE, tokenizer: bpe, args: {layers: 2}}}\nmodel: r\noptimizer: {lr: 1.0e-3}\n"


def recipe_run(tmp_path: Path, code: str):
    file = tmp_path / "recipe.py"
    file.write_text(code)
    experiment = tmp_path / "recipes.yaml"
    corpus = "corpora: {text: {source: python-stdlib}}\ntokenizers: {bpe: {train_on: text}}\n"
    experiment.write_text(corpus + RECIPE.replace("RECIPE_FILE", str(file)))
    return make_plan(load([experiment])).runs[0]


def test_keys_that_are_not_set_never_overwrite_a_recipe(tmp_path: Path) -> None:
    run = recipe_run(tmp_path, "def configure(layers): ...\n")
    assert run.run.optimizer == {"lr": 0.001}
    assert run.run.training == run.run.parallel == run.run.schedule == {}
    assert run.run.data == {"blend": {"text": 1.0}}
    assert (run.row["lr"], run.row["gbs"], run.row["dp"], run.row["tokens"]) == (0.001, "recipe", "recipe", "recipe")


def test_a_comment_in_a_recipe_is_no_change_but_code_is(tmp_path: Path) -> None:
    plain = recipe_run(tmp_path, "def configure(layers):\n    return layers\n")
    commented = recipe_run(
        tmp_path, '"""Doc."""\n\n\ndef configure(layers):\n    """Why."""\n    # c\n    return layers\n'
    )
    changed = recipe_run(tmp_path, "def configure(layers):\n    return layers + 1\n")
    assert plain.run.model["recipe_code"] == commented.run.model["recipe_code"]
    assert plain.run.model["recipe_code"] != changed.run.model["recipe_code"]


def test_what_a_recipe_imports_is_part_of_it(tmp_path: Path) -> None:
    digests = []
    for code in ("SIZE = 1\n", "SIZE = 1  # one\n", "SIZE = 2\n"):
        (tmp_path / "sizes.py").write_text(code)
        digests.append(recipe_run(tmp_path, "import sizes\n\n\ndef configure(layers): ...\n").run.model["recipe_code"])
    first, commented, changed = digests
    assert first == commented != changed


def test_a_recipe_that_the_bundle_will_refuse_is_warned_of_once(plan_of: PlanOf, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def configure(): ...\n")
    models = f"{{own: {{recipe: {own}}}, ours: {{recipe: {ROOT}/recipes/gpt_tiny.py}}}}"
    text = f"models: {models}\nsweep: {{grid: {{model: [own, ours], training.seed: [1, 2]}}}}\n"
    said = f"models.own.recipe: {own} lies outside of the clone, so `snakemake bundle` will refuse it: copy it"
    [(warning, runs)] = plan_of(text, corpora__text__tokenizer="bpe").warnings.items()
    assert warning == f"{said} into recipes/" and len(runs) == 2
    (tmp_path / "sizes.py").write_text("")
    own.write_text("import sizes\n\n\ndef configure(): ...\n")
    [warning] = plan_of(text, corpora__text__tokenizer="bpe").warnings
    assert warning == f"{said} and the modules that it imports into recipes/"


# what runs share


def test_corpora_and_tokenizers_of_runs(plan_of: PlanOf) -> None:
    run = plan_of().runs[0]
    assert (run.corpora, run.tokenizers) == (("text",), ("bpe",))
    assert plan_of().corpus_tokenizers == {"text": "bpe"}


def test_models_with_different_tokenizers_can_not_share_a_corpus(plan_of: PlanOf) -> None:
    text = "models: {other: {hf: org/name}}\nsweep: {runs: {a: {model: dense}, b: {model: other}}}"
    with pytest.raises(
        ConfigError, match=r"corpora\.text: .*dense wants bpe, other wants org/name.*or name one .*: bpe"
    ):
        plan_of(text)


def test_models_whose_tokenizers_have_the_same_files_share_a_corpus(plan_of: PlanOf, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
        (tmp_path / name / "tokenizer.json").write_text("{}")
    models = f"models: {{one: {{hf: {tmp_path}/one}}, two: {{hf: {tmp_path}/two}}}}\n"
    text = f"corpora: {{text: {{source: python-stdlib}}}}\n{models}sweep: {{grid: {{model: [one, two]}}}}\n"
    assert plan_of(text).corpus_tokenizers["text"] == f"{tmp_path}/one"
    (tmp_path / "two" / "tokenizer.json").write_text('{"model": null}')
    with pytest.raises(ConfigError, match=r"corpora\.text: the models need different tokenizers"):
        plan_of(text)


# files


def test_files_are_written_only_when_they_change(plan_of: PlanOf, tmp_path: Path) -> None:
    sweep = "sweep: {grid: {training.seed: [1, 2]}}\n"
    plan = plan_of(sweep)
    assert len(plan.write(tmp_path / "results")) == 7, "three for each run, and the table"
    folder = tmp_path / "results/small/runs/seed1"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name for path in before} == {"run.json", "launch.json", "profile.json"}
    (folder / "train.json").write_text("{}")
    assert plan_of(sweep + "# a comment\n").write(tmp_path / "results") == []
    changed = plan_of(sweep + "resources: {partition: gpu}\n").write(tmp_path / "results")
    assert {path.name for path in changed} == {"launch.json"}
    assert (folder / "run.json").stat().st_mtime_ns == before[folder / "run.json"]
    assert (folder / "train.json").read_text() == "{}"


def test_the_table_is_written_with_the_runs(plan_of: PlanOf, tmp_path: Path) -> None:
    plan_of("sweep: {grid: {optimizer.lr: [3e-4, 1e-3]}}").write(tmp_path)
    head, first, second = [line.split("\t") for line in (tmp_path / "small/plan.tsv").read_text().splitlines()]
    assert head[:3] == ["run", "model", "data"]
    assert dict(zip(head, first, strict=True))["tokens"] == str(10 * 8 * 128)
    assert dict(zip(head, second, strict=True))["lr"] == "0.001"
    assert dict(zip(head, first, strict=True))["vpp"] == "-"


def test_settings_of_what_is_not_in_use_are_no_part_of_the_identity(plan_of: PlanOf) -> None:
    base = plan_of("").runs[0].run
    assert plan_of("parallel: {fsdp_sharding: optim}\nschedule: {wsd_decay_iters: 5}\n").runs[0].run == base
    assert plan_of("schedule: {decay: WSD, wsd_decay_iters: 5}\n").runs[0].run != base


def test_a_recipes_own_way_of_saving_is_left_alone(plan_of: PlanOf, tmp_path: Path) -> None:
    recipe = tmp_path / "r.py"
    recipe.write_text("def configure(): ...\n")
    loaded = tmp_path / "recipe.yaml"
    loaded.write_text(f"device: cpu\nmodels: {{r: {{recipe: {recipe}}}}}\ncheckpoint: {{keep_last: 2}}\n")
    assert make_plan(load([loaded])).runs[0].launch.checkpoint == {"keep_last": 2}


@pytest.mark.parametrize(
    ("more", "layers", "reshardable"),
    [
        ("", 2, True),  # 142 million parameters
        ("", 3, False),  # 210 million
        ("resources: {gpus_per_node: 2}\nparallel: {tp: 2}\n", 3, True),
        ("resources: {gpus_per_node: 2}\n", 3, False),
        ("checkpoint: {reshardable: true}\n", 3, True),
        ("checkpoint: {reshardable: false}\n", 2, False),
        ("parallel: {distributed_optimizer: false}\n", 3, True),
        ("device: cuda\nparallel: {fsdp: megatron}\n", 3, True),
    ],
)
def test_large_models_are_saved_as_the_ranks_are_cut(
    plan_of: PlanOf, more: str, layers: int, reshardable: bool
) -> None:
    sizes = f"models.dense.config.num_hidden_layers: [{layers}]"
    plan = plan_of(f"{more}sweep: {{grid: {{{sizes}}}}}\n")
    assert plan.runs[0].launch.checkpoint["reshardable"] is reshardable


def test_the_shipped_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    plan = make_plan(load([ROOT / "config/config.yaml"]))
    assert len(plan.runs) >= 7
    assert set(plan.models) == {"dense", "fresh", "moe"}
    assert {plan.models[run.model].init for run in plan.runs if run.name in plan.exports} == {"pretrained", "scratch"}
    assert all(isinstance(run.row["params"], int) for run in plan.runs)


def test_overrides_that_change_no_loss_are_no_part_of_what_a_run_is(plan_of):
    text = "overrides: {dist.distributed_timeout_minutes: 45, train.manual_gc: true, ddp.bucket_size: 1000}"
    (run,) = plan_of(text).runs
    assert run.run.overrides == {"ddp.bucket_size": 1000}, "another order of summation"
    assert run.launch.overrides == {"train.manual_gc": True}
    assert run.launch.start.timeout_minutes == 45, "another spelling of the key"


def test_a_folder_without_a_tokenizer_is_refused_before_it_is_imported(plan_of, tmp_path):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "qwen3", "intermediate_size": 128, "vocab_size": 512, "head_dim": 16, **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = f"models: {{other: {{hf: {tmp_path}}}}}\nmodel: other\n"
    with pytest.raises(ConfigError, match=r"models\.other\.hf: .* has no tokenizer: set models\.other\.tokenizer"):
        plan_of(text)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert plan_of(text).runs[0].model == "other"


def test_a_store_that_cannot_be_written_is_a_note(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    Path("held").mkdir(mode=0o555)
    with as_ordinary_user(tmp_path):
        (note,) = plan_of(**{"training.train_iters": 10, "store": "held/store"}).notes
    assert note == f"warning: store: you can't write in {tmp_path / 'held'}: jobs that make something will fail"


@pytest.mark.parametrize(
    "mistake", [{"training.global_batch_size": 9, "parallel.tp": 2}, {"schedule.warmup_iters": 500}], ids=str
)
def test_figures_are_not_judged_by_the_runs_that_other_problems_leave(plan_of, mistake):
    """The swept keys are columns, even if no run can be planned."""
    text = (
        "sweep: {grid: {optimizer.lr: [0.1, 0.2], training.seed: [1, 2]}}\n"
        "report: {figures: [{name: a, kind: line, x: optimizer.lr, y: NAME, over: training.seed}]}\n"
    )
    for name, expected in (("validation", []), ("validaton", ["report.figures[0].y"])):
        with pytest.raises(ConfigError) as raised:
            plan_of(text.replace("NAME", name), **{"training.train_iters": 10, **mistake})
        keys = [problem.key for problem in raised.value.problems]
        assert [key for key in keys if key.startswith("report")] == expected and len(keys) > len(expected)


@pytest.mark.parametrize(
    ("column", "wanted", "note"),
    [
        ("optimizer.lr", "[0.2, 0.3]", "optimizer.lr 0.2 or 0.3; there are 0.1, 0.02"),
        ("optimizer.lr", "0.020", ""),
        ("optimizer.lr", "'0.1'", ""),
        ("parallel.sp", "false", "parallel.sp false; there are true"),
        ("parallel.sp", "[true, false]", ""),
        ("model", "moe", "model moe; there are dense"),
        ("validation", "0.3", ""),
    ],
)
def test_a_filter_that_no_run_matches_is_warned_of(plan_of, column, wanted, note):
    text = (
        "sweep: {runs: {a: {optimizer.lr: 0.1, parallel.sp: true}, b: {optimizer.lr: 0.02, parallel.sp: true}}}\n"
        f"report: {{figures: [{{name: mine, kind: bar, x: run, y: loss.last, filter: {{{column}: {wanted}}}}}]}}\n"
    )
    notes = plan_of(text, **{"training.train_iters": 10, "parallel.tp": 2, "resources.gpus_per_node": 2}).notes
    said = "warning: report.figures[0].filter: mine has nothing to show: no run has "
    assert [one for one in notes if "figures" in one] == ([f"{said}{note}"] if note else [])


@pytest.mark.parametrize("given", ["held", "held/store", "dead"])
def test_a_store_that_can_not_be_is_refused(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held").touch()
    Path("dead").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"store: {tmp_path / given.partition('/')[0]} is a .*: name a folder, or"):
        plan_of(**{"training.train_iters": 10, "store": given})


def test_runs_that_cost_the_same_are_predicted_once(plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call plans all runs, and a third of 600 runs' plan was their predictions."""
    predicted = []
    of_run = costs.of_run
    monkeypatch.setattr(costs, "of_run", lambda f, **more: predicted.append(f) or of_run(f, **more))
    grid = "grid: {training.seed: [1, 2], parallel.tp: [1, 2]}"
    runs = "runs: {a: {optimizer.lr: 0.1}, b: {optimizer.lr: 0.2, resources.step_seconds: 2}, c: {optimizer.lr: 0.3}}"
    gpus = "device: cuda\nresources: {gpus_per_node: 2, gpu: h200-141g}\n"
    plan = plan_of(f"{gpus}sweep: {{{grid}, {runs}}}\n")
    assert (len(plan.runs), len(predicted)) == (12, 4)
    assert len({run.costs.step_seconds for run in plan.runs}) == 3


def test_facts_with_a_list_have_costs(plan_of: PlanOf, tmp_path: Path) -> None:
    """They have no hash."""
    plan = plan_of()
    (run,) = plan.runs
    growing = replace(run, facts=with_overrides(run.facts, {"train.rampup_batch_size": [2, 2, 8]}))
    assert with_costs([growing], (), plan.experiment.budget, tmp_path)[0].costs == run.costs
