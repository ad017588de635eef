import contextlib
import copy
import dataclasses

import pytest
import yaml
from called import called

from megaboa.check import adviser, memory
from megaboa.config import load
from megaboa.plan import make_plan
from megaboa.plan.run_facts import alone

MODEL = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
}
EXPERIMENT = {
    "tokenizers": {"bpe": {"train_on": "text", "vocab_size": 1000}},
    "corpora": {"text": {"source": "python-stdlib", "limit": 50}},
    "models": {"llama": {"config": MODEL, "tokenizer": "bpe"}},
    "training": {"train_iters": 10, "global_batch_size": 128, "seq_length": 4096},
    "device": "cuda",
    "resources": {"nodes": 1, "gpus_per_node": 8, "gpu": "h100-80g"},
}


def advise(folder, *arguments, code=0):
    (folder / "my.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    with contextlib.chdir(folder):
        done = called("advise", "my.yaml", *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_layouts_and_a_sweep_for_an_experiment(tmp_path):
    output = advise(tmp_path, "--top", "3")
    assert output.startswith("layout") and output.count("parallel.") >= 3
    assert len(yaml.safe_load(output[output.index("sweep:") :])["sweep"]["runs"]) == 3


def test_what_it_cannot_know_is_asked_for(tmp_path):
    (said,) = advise(tmp_path, "--gpu", "q9-80g", code=1).splitlines()
    assert (
        "--gpu: 'q9-80g' is not one of gb300, gb200" in said and "with its memory: for example --gpu h100-80g" in said
    )
    assert said.endswith("; or measure it with `megaboa calibrate`")
    assert "my.yaml: --model: mine is not one of llama" in advise(tmp_path, "--model", "mine", code=1)
    assert "no layout fits on 8 GPUs" in advise(tmp_path, "--gpu", "h100-8g", code=1)
    assert "--nodes: 0 is not a whole number" in advise(tmp_path, "--nodes", "0", code=2)
    assert "--top: -2 is not a whole number" in advise(tmp_path, "--top", "-2", code=2)


@pytest.mark.parametrize(
    ("section", "name", "value", "more"),
    [
        ("training", "global_batch_size", "dp * 16", ""),
        ("training", "seq_length", "cp * 4096", ""),
        ("resources", "nodes", "tp * 2", ", or given by --nodes"),
        ("resources", "gpus_per_node", "tp * 4", ""),
    ],
)
def test_expressions_that_depend_on_a_layout_are_refused_by_their_key(
    tmp_path, monkeypatch, section, name, value, more
):
    monkeypatch.setitem(EXPERIMENT, section, {**EXPERIMENT[section], name: value})
    said = advise(tmp_path, code=1)
    assert said == f"my.yaml: {section}.{name}: {value!r} is an expression: it must be a number here{more}\n"
    if name == "nodes":
        assert "resources.nodes: 2" in advise(tmp_path, "--nodes", "2", "--top", "1")


RECOMPUTE = {"granularity": "full", "method": "uniform", "num_layers": 1}


@pytest.mark.parametrize(
    ("own", "arguments"),
    [
        ({"parallel": {"tp": 2, "sp": True}}, ()),
        ({"parallel": {"tp": 4, "sp": True, "pp": 2, "vpp": 2}, "training": {"micro_batch_size": 2}}, ()),
        ({"parallel": {"distributed_optimizer": False}}, ()),
        ({"parallel": {"fsdp": "megatron"}}, ()),
        ({"optimizer": {"name": "sgd"}, "parallel": {"distributed_optimizer": False}}, ()),
        ({"overrides": {f"model.recompute_{name}": value for name, value in RECOMPUTE.items()}}, ()),
        (
            {
                "overrides": {
                    "model.recompute_granularity": "selective",
                    "optimizer.use_precision_aware_optimizer": True,
                }
            },
            (),
        ),
        ({}, ("--nodes", "4")),
        ({}, ("--gpu", "h200-141g")),
        ({"device": "cpu"}, ("--gpu", "h200-141g")),
        ({"device": "auto"}, ()),
        ({"models": {"other": {"recipe": "llama32_1b_pretrain_config", "tokenizer": "bpe"}}}, ("--model", "llama")),
    ],
)
def test_the_pasted_sweep_is_planned_as_it_was_advised(tmp_path, monkeypatch, own, arguments):
    base = copy.deepcopy(EXPERIMENT)
    for section, values in own.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    monkeypatch.setitem(globals(), "EXPERIMENT", base)
    output = advise(tmp_path, "--top", "5", *arguments)
    pasted = yaml.safe_load(output.split("\n\n", 1)[1])
    (tmp_path / "pasted.yaml").write_text(yaml.safe_dump(base | pasted, sort_keys=False))
    plan = make_plan(load([tmp_path / "pasted.yaml"]), tmp_path)
    assert len(plan.runs) == 5 and not plan.invalid
    facts = alone(load([tmp_path / "my.yaml"]).experiment, "llama")
    nodes = int(arguments[1]) if "--nodes" in arguments else 1
    cluster = plan.runs[0].facts.cluster
    gpu = arguments[1] if "--gpu" in arguments else "h100-80g"
    assert (cluster.device, cluster.nodes, cluster.gpu) == ("cuda", nodes, gpu)
    advised = adviser.advise(dataclasses.replace(facts, cluster=cluster), 5)
    for run, promised in zip(plan.runs, advised, strict=True):
        assert run.name == promised.name
        assert (run.facts.layout, run.facts.kernels) == (promised.facts.layout, promised.facts.kernels)
        assert run.facts.training.mbs == promised.facts.training.mbs
        assert memory.peak(run.facts).total == promised.need


def test_on_several_nodes_the_network_is_assumed(tmp_path):
    assert "; between nodes 40 GB/s per GPU are assumed" in advise(tmp_path, "--nodes", "2", "--top", "1")
    assert "assumed" not in advise(tmp_path, "--top", "1")


def test_fp32_has_no_predicted_times(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENT, "training", {**EXPERIMENT["training"], "precision": "fp32"})
    assert advise(tmp_path, code=1).endswith("16 bits and fewer: take bf16_mixed for a prediction\n")


def test_a_gpu_is_named_with_its_memory(tmp_path, monkeypatch):
    assert advise(tmp_path, "--gpu", "h200", code=1).endswith("with its memory: for example --gpu h200-141g\n")
    assert advise(tmp_path, "--gpu", "l40s", code=1).endswith("with its memory: for example --gpu l40s-48g\n")
    misspelt = advise(tmp_path, "--gpu", "H100-80g", code=1)
    assert misspelt.endswith("for example --gpu h100-80g\n"), "a calibration can't have this name"
    monkeypatch.delitem(EXPERIMENT["resources"], "gpu")
    assert advise(tmp_path, code=1) == "--gpu is missing: for example --gpu h100-80g\n"
