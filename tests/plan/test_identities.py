"""Which keys are part of a run's identity. Identities that runs had before the axes of a layout stood in one table
stay, so that stores of then are found again."""

import pytest

from megaboa.config import ConfigError
from megaboa.files import digest

CHANGED = (
    "stores of existing runs would not be found any more, and all runs would train again. A new key must stay out of "
    "run.json where it isn't set: plan/documents.py, NEWER (docs/explanation/architecture.md, what a new key needs)"
)
MOE = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16"
EXPERTS = f"models: {{dense: {{config: {{model_type: qwen3_moe, {MOE}}}}}}}\n"
RECIPE = (
    "models: {r: {recipe: llama32_1b_pretrain_config, tokenizer: bpe}}\n"
    "model: r\ntraining: {global_batch_size: 8, seq_length: 128}\n"
)
KNOWN = {
    "plain": ("", "15d1a2619f698958f31466f8b87862a00991a1b1435df3925b69650ca4313e4d"),
    "tensors and stages": (
        "parallel: {tp: 2, pp: 2, vpp: 1, sp: true}\nresources: {gpus_per_node: 4}\n",
        "58fddb81bf152a86158340a85756023c9ab3e457988df32fa16a00eb3a222ac2",
    ),
    "context": (
        "parallel: {cp: 2}\nresources: {gpus_per_node: 2}\n",
        "1306cbe7955c3869677f4c575d46829badd946412b0db6990f7007b270782fe4",
    ),
    "experts": (
        EXPERTS + "parallel: {tp: 2, ep: 2, etp: 1, sp: true}\nresources: {gpus_per_node: 2}\n",
        "aae739872112da587cdb47a88108e18c9e2dd6d4500e8a65d5ac30bcdedd34be",
    ),
    "fsdp": (
        "parallel: {fsdp: megatron, fsdp_sharding: optim_grads}\nresources: {gpus_per_node: 2}\n",
        "7153dbfb48da65db1308f4244068c3932e6d5f796aba9fb313d1ba32cfac1a19",
    ),
    "recipe": (RECIPE, "1a339fd6c3d993275ce6b7d91439458073570af870d4fe48e07ef4c15ca42c94"),
    "recipe with a layout": (
        RECIPE + "parallel: {tp: 2, etp: 1}\nresources: {gpus_per_node: 2}\n",
        "ad6d252346d2868323d3cae3c7ceb2a69d46e0ed1ab100f851a4702f0f7c391a",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_identity_is_what_it_was(plan_of, name):
    text, known = KNOWN[name]
    [run] = plan_of(text).runs
    assert digest(run.documents["run"]) == known, CHANGED


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("{overlap_grad_reduce: true}", {"ddp.overlap_grad_reduce": True}),
        (
            "{overlap_grad_reduce: false}",  # then there is nothing to gather early
            {
                "ddp.overlap_grad_reduce": False,
                "ddp.overlap_param_gather": False,
                "optimizer.overlap_param_gather": False,
            },
        ),
        (
            "{overlap_param_gather: false}",
            {"ddp.overlap_param_gather": False, "optimizer.overlap_param_gather": False},
        ),
        ("{}", {}),
    ],
)
def test_an_overlap_is_no_part_of_the_identity(plan_of, text, fields):
    [run] = plan_of(f"parallel: {text}\n").runs
    assert digest(run.documents["run"]) == KNOWN["plain"][1] and run.launch.overrides == fields


def test_as_an_override_it_stays_one(plan_of):
    """Runs whose experiments turned it on before there was a key keep their stores."""
    [run] = plan_of("overrides: {ddp.overlap_grad_reduce: true}\n").runs
    assert run.run.overrides == {"ddp.overlap_grad_reduce": True} and run.launch.overrides == {}
    assert digest(run.documents["run"]) != KNOWN["plain"][1]


EMPTIED = "overrides: {scheduler.lr_decay_iters: null, validation.eval_interval: null}\n"
NULL = {"scheduler.lr_decay_iters": None, "validation.eval_interval": None}


def test_null_for_a_field_is_kept_where_a_recipe_may_have_set_it(plan_of):
    """There the key's null is another thing: it leaves the field to the recipe."""
    [run] = plan_of(RECIPE + EMPTIED).runs
    assert run.run.overrides == NULL
    assert "decay_iters" not in run.run.schedule and "eval_interval" not in run.run.training
    [run] = plan_of(RECIPE + "schedule: {decay_iters: null}\n").runs
    assert run.run.overrides == {} and run.run.schedule == {"decay_iters": None}
    [run] = plan_of(RECIPE, **{"overrides.scheduler.lr_decay_iters": None}).runs
    assert run.run.overrides == {"scheduler.lr_decay_iters": None}


def test_null_for_a_field_is_the_default_of_its_key_elsewhere(plan_of):
    """So stores of runs that set it are found again."""
    [run] = plan_of(EMPTIED).runs
    assert digest(run.documents["run"]) == KNOWN["plain"][1], CHANGED


def test_null_is_swept_beside_values(plan_of):
    sweep = "sweep: {grid: {overrides.scheduler.lr_decay_iters: [null, 5]}}\n"
    none, five = plan_of(RECIPE + sweep).runs
    assert (none.name, five.name) == ("decayiters-none", "decayiters5")
    assert (none.run.overrides, none.run.schedule) == ({"scheduler.lr_decay_iters": None}, {})
    assert (five.run.overrides, five.run.schedule) == ({}, {"decay_iters": 5})


def test_null_for_when_checkpoints_are_saved_is_that_of_the_key(plan_of):
    [run] = plan_of(RECIPE + "overrides: {checkpoint.save_interval: null}\n").runs
    assert run.run.overrides == run.launch.overrides == {} and run.launch.checkpoint["save_interval"] is None


def test_a_ramp_of_weight_decay_and_a_seed_of_the_data_refine_their_keys(plan_of):
    ramp = {
        "scheduler.start_weight_decay": 0.01,
        "scheduler.end_weight_decay": 0.2,
        "scheduler.weight_decay_incr_style": "linear",
        "dataset.random_seed": 5,
    }
    plan = plan_of(f"overrides: {ramp}\nsweep: {{grid: {{optimizer.weight_decay: [0.1, 0.3]}}}}\n")
    assert [run.run.overrides for run in plan.runs] == [ramp, ramp] and not plan.warnings
    assert [run.run.optimizer["weight_decay"] for run in plan.runs] == [0.1, 0.3]
    assert len({run.launch.index for run in (*plan.runs, *plan_of().runs)}) == 2, "the data's order is another"


def test_a_style_that_the_key_undoes_is_warned_of(plan_of):
    plan = plan_of("optimizer: {weight_decay: 0.3}\noverrides: {scheduler.weight_decay_incr_style: linear}\n")
    [said] = plan.warnings
    assert said.startswith("scheduler.weight_decay_incr_style: linear, and weight decay is 0.3 from beginning to end")


def test_a_precision_that_the_cpu_lacks_is_refused_by_its_key(plan_of):
    with pytest.raises(ConfigError, match=r"training\.precision: fp16_mixed with device: cpu; nearest: fp32 or bf16"):
        plan_of("training: {precision: fp16_mixed}\n")


def test_an_override_of_a_key_is_another_spelling_of_it(plan_of):
    as_override = plan_of("overrides: {optimizer.lr: 0.1, model.context_parallel_size: 1}")
    as_key = plan_of("optimizer: {lr: 0.1}\nparallel: {cp: 1}")
    assert as_override.runs[0].texts["run"] == as_key.runs[0].texts["run"]
    assert as_override.runs[0].row["lr"] == 0.1


def test_the_same_number_written_differently_is_the_same_identity(plan_of):
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
def test_what_can_not_change_the_losses_is_not_identity(plan_of, text):
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
def test_what_can_change_the_losses_is_identity(plan_of, text):
    assert plan_of().runs[0].texts["run"] != plan_of(text).runs[0].texts["run"]


def test_settings_of_what_is_not_in_use_are_no_part_of_the_identity(plan_of):
    base = plan_of("").runs[0].run
    assert plan_of("parallel: {fsdp_sharding: optim}\nschedule: {wsd_decay_iters: 5}\n").runs[0].run == base
    assert plan_of("schedule: {decay: WSD, wsd_decay_iters: 5}\n").runs[0].run != base


def test_overrides_that_change_no_loss_are_no_part_of_what_a_run_is(plan_of):
    text = "overrides: {dist.distributed_timeout_minutes: 45, train.manual_gc: true, ddp.bucket_size: 1000}"
    (run,) = plan_of(text).runs
    assert run.run.overrides == {"ddp.bucket_size": 1000}, "another order of summation"
    assert run.launch.overrides == {"train.manual_gc": True}
    assert run.launch.start.timeout_minutes == 45, "another spelling of the key"
