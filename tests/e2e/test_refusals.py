"""Mistakes as a user meets them: through Snakemake, at the terminal."""

import contextlib
import subprocess

import pytest
from clone import edit, kill_group

pytestmark = pytest.mark.slow


def test_a_wrong_experiment_stops_the_dry_run_with_every_mistake_at_once(workspace):
    config = workspace.experiment("wrong", {"a": "{optimizer.lr: -1}"}, more="trainign: {}\nparallel: {tp: two}\n")
    output = workspace.snakemake("-n", "--configfile", config, code=1)
    for said in ("wrong.yaml", "trainign", "did you mean", "training", "parallel.tp", "optimizer.lr"):
        assert said in output
    assert "Traceback" not in output and "common.smk" not in output  # which would look like a mistake of ours
    assert not workspace.results("wrong").exists()


def test_the_default_experiment_is_read_as_strictly(workspace):
    default = workspace.path / "config" / "config.yaml"
    text = default.read_text()
    default.write_text(text.replace("  train_iters: 30", "\ttrain_iters: 30"))
    try:
        output = workspace.snakemake("-n", code=1)
    finally:
        default.write_text(text)
    assert "config.yaml" in output and "tab" in output


def test_what_bridge_refuses_stops_before_training(workspace):
    deeper = "{model: new, overrides.model.num_layers: 3, optimizer.lr: 1.0e-4}"
    runs = {"a": "{model: dense, overrides.model.no_such_field: 1}", "b": deeper, "c": deeper.replace("e-4", "e-5")}
    config = workspace.experiment("refused", runs, more="export: {runs: [b]}\n")
    edit(config, "  dense:\n", "  dense: &dense\n")
    edit(config, "data: {split", "  new: {<<: *dense, init: scratch}\ndata: {split")
    output = workspace.snakemake("pretrain", "--configfile", config, code=1)
    assert "run a is refused" in output and "no_such_field" in output
    unlike = "Megatron-Bridge can't write the trained model as its config says: "
    assert "1 of 3 runs could never work" in output
    assert f"export.runs: run b: {unlike}" in output and "not in the model: decoder.layers.2." in output
    assert f"warning: run c: {unlike}" in output
    assert not workspace.results("refused", "runs", "a", "train.json").exists()
    assert not workspace.results("refused", "runs", "a", "attempts.jsonl").exists()


def test_what_the_cpu_cannot_do_is_refused_and_named(workspace):
    config = workspace.experiment("gpu", {"a": "{}"}, more="overrides: {model.fp8: hybrid}\n")
    output = workspace.snakemake("pretrain", "--configfile", config, code=1)
    assert "model.fp8" in output and "run a is refused" in output


def test_what_only_bridge_refuses_is_left_out_by_the_next_call(workspace):
    runs = {"a": "{}", "b": "{overrides.model.cp_comm_type: 'a2a+p2p', parallel.cp: 2, resources.gpus_per_node: 2}"}
    config = workspace.experiment("left-out", runs)
    edit(config, "sweep:", "sweep:\n  skip_illegal: true")
    output = workspace.snakemake("preflight", "--configfile", config, code=1)
    assert "run b is refused" in output and "run the same command again to leave them out" in output
    output = workspace.snakemake("preflight", "--configfile", config)
    assert "b is INVALID" in output and "1 run is accepted" in output
    assert "INVALID" in workspace.results("left-out", "plan.tsv").read_text()


def test_a_second_workflow_for_the_same_experiment_is_refused_and_who_only_looks_is_not(workspace):
    config = workspace.experiment("twice", {"a": "{}"})
    lock = workspace.results("twice", ".lock")
    lock.parent.mkdir(parents=True)
    with held(lock):
        output = workspace.snakemake("data", "--configfile", config, code=1)
    assert "results/twice is being worked on by" in output
    workspace.snakemake("data", "--configfile", config)
    with held(lock):
        assert "a: has not begun" in workspace.megaboa("doctor", "twice")
        assert "interim, NOT_RUN" in workspace.megaboa("interim", "twice")
    page = workspace.results("twice", "interim", "index.html").read_text()
    assert "1 of 1 runs are missing" in page and "has not begun" in page
    assert not workspace.results("twice", "report").exists()


@contextlib.contextmanager
def held(lock):
    """By a process of somebody else's."""
    holder = subprocess.Popen(["flock", lock, "sleep", "600"], start_new_session=True)
    try:
        yield
    finally:
        kill_group(holder)


def test_too_few_documents_for_a_split_are_named_and_nothing_hangs(workspace):
    config = workspace.experiment("few", {"a": "{}"})
    edit(config, '"90,5,5"', '"9999,8,2"')
    output = workspace.snakemake("pretrain", "--configfile", config, code=1)
    assert "corpus 'text' has 60 documents" in output and "none of them is left for validation" in output


RECIPE = """\
experiment: few-recipe
device: cpu
tokenizers: {bpe: {train_on: text, vocab_size: 384}}
corpora: {text: {source: python-stdlib, limit: 60, tokenizer: bpe}}
models: {gpt: {recipe: recipes/gpt_tiny.py, tokenizer: bpe}}
training: {precision: fp32}
data: {blend: text}
"""


def test_too_few_documents_for_the_split_of_a_recipe_are_named_and_nothing_hangs(workspace):
    (workspace.path / "few-recipe.yaml").write_text(RECIPE)
    output = workspace.snakemake("data", "--configfile", "few-recipe.yaml", code=1)
    assert "corpus 'text' has 60 documents, and with dataset.split '9999,8,2' none of them is left for" in output
