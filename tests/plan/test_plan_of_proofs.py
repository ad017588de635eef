"""What `snakemake prove` trains: short runs of the user's, in an experiment of their own."""

import pytest

from megaboa.config import ConfigError, load
from megaboa.plan import make_plan, proof


@pytest.fixture
def proof_of(loaded_of, tmp_path):
    """The plan of the proof, read from its file as the call's jobs read it; and what it can't prove."""

    def make(text=""):
        tree, unproven = proof.experiment(loaded_of(text, {"training.train_iters": 100}), tmp_path)
        return make_plan(load([proof.write(tree, tmp_path / "experiment.yaml")]), tmp_path), unproven

    return make


def test_its_runs(proof_of):
    plan, unproven = proof_of()
    assert unproven == []
    assert plan.name == "small-proof-run"
    assert [run.name for run in plan.runs] == ["whole", "resumed", "tp2", "whole-twin1"]
    assert {run.run.training["train_iters"] for run in plan.runs} == {11}
    assert {run.launch.checkpoint["save_interval"] for run in plan.runs} == {6}
    assert plan["resumed"].run == plan["whole"].run, "one is only stopped"
    stops = {run.name: run.launch.overrides.get("train.exit_interval") for run in plan.runs}
    assert stops == {"whole": None, "resumed": 6, "tp2": None, "whole-twin1": None}
    assert str(plan["tp2"].run.parent) == "small-proof-run/resumed@6"
    assert (plan["tp2"].run.world_size, plan["tp2"].run.parallel["tp"]) == (2, 2)
    assert [run.launch.samples for run in plan.runs] == [True, True, True, False]
    [agreement] = plan.agreements
    assert (agreement.reference, agreement.runs, agreement.twins) == ("whole", ("resumed", "tp2"), ("whole-twin1",))
    assert agreement.tensors


def test_nodes_keep_no_copies_of_a_run_of_a_few_steps(proof_of):
    plan, unproven = proof_of("checkpoint: {save_interval: 50, local: {every: 20}}\n")
    assert unproven == [] and all(not run.launch.checkpoint["local"] for run in plan.runs)


def test_a_copys_settings_are_in_no_runs_identity(loaded_of, tmp_path):
    quiet, copied = (
        make_plan(
            loaded_of(f"checkpoint: {{save_interval: 50{more}}}\n", {"training.train_iters": 100}), tmp_path
        ).runs[0]
        for more in ("", ", local: {every: 20}")
    )
    assert copied.run == quiet.run and copied.launch.checkpoint["local"]["every"] == 20


def test_learning_rates_are_those_of_the_whole_run(proof_of):
    plan, _ = proof_of("schedule: {warmup_iters: 50}\noptimizer: {lr: 1e-4 * gbs}\n")
    for run in plan.runs:
        assert run.run.schedule["decay_iters"] == 100
        assert run.run.schedule["warmup_iters"] == 50
        assert run.run.optimizer["lr"] == pytest.approx(8e-4)


def test_a_run_of_the_sweep_is_named(proof_of):
    sweep = "sweep: {runs: {a: {optimizer.lr: 1.0}, b: {optimizer.lr: 2.0, training.seed: 7}}}\n"
    assert proof_of(sweep)[0]["whole"].run.optimizer["lr"] == 1.0
    plan, _ = proof_of(sweep + "prove: {run: b, steps: 4, more: 2}\n")
    assert plan.name == "small-proof-b"
    assert plan["whole"].run.training["seed"] == 7
    assert plan["resumed"].launch.overrides["train.exit_interval"] == 4
    assert plan["resumed"].run.training["train_iters"] == 6
    with pytest.raises(ConfigError, match=r"prove\.run.*did you mean|prove\.run"):
        proof_of(sweep + "prove: {run: c}\n")


def test_layouts_of_ones_own(proof_of):
    plan, unproven = proof_of("prove: {layouts: {both: {parallel.pp: 2, resources.gpus_per_node: 4}}}\n")
    assert [run.name for run in plan.runs] == ["whole", "resumed", "both", "whole-twin1"]
    assert plan["both"].run.world_size == 4
    plan, unproven = proof_of("prove: {layouts: {}}\n")
    assert [run.name for run in plan.runs] == ["whole", "resumed", "whole-twin1"]
    assert unproven == []


def test_several_ranks_are_laid_out_otherwise(proof_of):
    plan, _ = proof_of("resources: {gpus_per_node: 4}\nparallel: {tp: 2, sp: true}\n")
    assert (plan["whole"].run.parallel["tp"], plan["tp1"].run.parallel["tp"]) == (2, 1)
    assert plan["tp1"].run.world_size == 4


def test_experts_want_sequence_parallelism(proof_of):
    experts = "models: {dense: {config: {model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, head_dim: 16,"
    plan, unproven = proof_of(experts + " moe_intermediate_size: 32, hidden_size: 64}}}\n")
    assert unproven == []
    assert (plan["tp2-sp"].run.parallel["tp"], plan["tp2-sp"].run.parallel["sp"]) == (2, True)


def test_a_layout_that_does_not_divide_is_said(proof_of):
    one = "models: {dense: {config: {num_hidden_layers: 3, num_attention_heads: 3, num_key_value_heads: 3,"
    one += " hidden_size: 96}}}\n"
    plan, unproven = proof_of(one + "training: {global_batch_size: 3}\n")
    assert [run.name for run in plan.runs] == ["whole", "resumed", "whole-twin1"]
    [sentence] = unproven
    assert sentence.startswith("not proven: resuming in another layout, as no other is legal here: tp2: ")
    assert "tp2-sp: " in sentence
    assert "pp2: " in sentence
    assert "dp2: " in sentence
    assert sentence in plan.experiment.report.question


def test_checkpoints_that_no_other_layout_reads_are_said(proof_of):
    """Only the number of data parallel ranks may differ."""
    shards = "checkpoint: {reshardable: false}\n"
    plan, unproven = proof_of(shards)
    assert unproven == [] and plan["dp2"].run.world_size == 2
    _, [sentence] = proof_of(f"{shards}training: {{global_batch_size: 1, micro_batch_size: 1}}\n")
    assert "another layout (checkpoint.reshardable: false" in sentence


def test_no_twin_where_weights_lie_in_pieces(proof_of):
    plan, unproven = proof_of("device: cuda\nparallel: {fsdp: torch}\nresources: {gpus_per_node: 2}\n")
    assert "whole-twin1" not in [run.name for run in plan.runs]
    assert unproven[0].startswith("not proven: what rounding can do is not measured")


def test_what_belongs_to_the_users_runs_is_left_out(proof_of):
    more = "export: {runs: [run]}\ntrackers: {wandb: {}}\nrecovery: {notify: 'echo {run}', actions: {crash: stop}}\n"
    plan, _ = proof_of(more + "report: {figures: [{name: mine, kind: line, data: steps, x: step, y: loss}]}\n")
    assert plan.exports == []
    assert plan.experiment.report.figures == []
    for run in plan.runs:
        assert run.launch.trackers["wandb"] is None
        assert (run.launch.recovery.notify, run.launch.recovery.actions) == (None, {})


def test_a_run_that_continues_is_proven_by_its_parent(proof_of):
    sweep = "sweep: {runs: {a: {}, b: {continue_from: small/a@50}}}\n"
    with pytest.raises(ConfigError, match="name a run that starts at step 0"):
        proof_of(sweep + "checkpoint: {save_interval: 50}\nprove: {run: b}\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{steps: 5, more: 5}", "more must be less than steps"),
        ("{layouts: {whole: {parallel.tp: 2}}}", "is the name of another run of the proof"),
    ],
)
def test_mistakes(proof_of, given, message):
    with pytest.raises(ConfigError, match=message):
        proof_of(f"prove: {given}\n")


def test_two_equal_runs_are_refused_unless_their_tensors_are_compared(plan_of):
    sweep = "sweep: {runs: {a: {}, b: {overrides.train.exit_interval: 3}}}\n"
    with pytest.raises(ConfigError, match="train the same thing"):
        plan_of(sweep)
    with pytest.raises(ConfigError, match="train the same thing"):
        plan_of(sweep + "report: {agreements: [{reference: a, runs: [b]}]}")
    stop = r"b.overrides\.train\.exit_interval: ends the ranks before the last step.* training\.train_iters is the last"
    with pytest.raises(ConfigError, match=stop):
        plan_of(sweep)
    plan = plan_of(sweep + "report: {agreements: [{reference: a, runs: [b], tensors: true}]}")
    assert [run.launch.samples for run in plan.runs] == [True, True]


@pytest.mark.parametrize(("asked", "reshardable"), [("", True), ("checkpoint: {reshardable: false}\n", False)])
def test_tensors_that_are_compared_are_saved_whole(plan_of, asked, reshardable):
    large = "models.dense.config.num_hidden_layers: 3"  # 210 million parameters
    sweep = f"{asked}sweep: {{runs: {{a: {{{large}}}, b: {{{large}, overrides.train.exit_interval: 3}}}}}}\n"
    plan = plan_of(sweep + "report: {agreements: [{reference: a, runs: [b], tensors: true, twins: 1}]}")
    assert [run.name for run in plan.runs] == ["a", "b", "a-twin1"]
    assert {run.launch.checkpoint["reshardable"] for run in plan.runs} == {reshardable}


def test_fine_tuning_is_proven_in_its_own_layout(proof_of):
    plan, unproven = proof_of(
        "corpora: {text: {source: python-stdlib}, chats: {source: python-stdlib, messages: messages}}\n"
        "data: {blend: chats}\nmodels: {dense: {init: pretrained}}\ntask: lora\n"
    )
    assert [run.name for run in plan.runs] == ["whole", "resumed", "whole-twin1"]
    assert [one for one in unproven if "another layout, as a run with task: lora" in one]
    assert {run.run.task for run in plan.runs} == {"lora"}
