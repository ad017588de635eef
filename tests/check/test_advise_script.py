import contextlib

import yaml
from called import called

MODEL = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
}
EXPERIMENT = {
    "models": {"llama": {"config": MODEL, "tokenizer": "some/tokenizer"}},
    "training": {"train_iters": 10, "global_batch_size": 128, "seq_length": 4096},
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
    assert "--gpu: 'q9-80g' is not one of gb300, gb200" in said and said.endswith(": for example --gpu h100-80g")
    assert "mine is not one of llama" in advise(tmp_path, "--model", "mine", code=1)
    assert "no legal layout fits" in advise(tmp_path, "--gpu", "h100-8g", code=1)


def test_on_several_nodes_the_network_is_assumed(tmp_path):
    assert "; between nodes 40 GB/s per GPU are assumed" in advise(tmp_path, "--nodes", "2", "--top", "1")
    assert "assumed" not in advise(tmp_path, "--top", "1")


def test_fp32_has_no_predicted_times(tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERIMENT, "training", {**EXPERIMENT["training"], "precision": "fp32"})
    assert advise(tmp_path, code=1).endswith("16 bits and fewer: take bf16_mixed for a prediction\n")


def test_a_gpu_is_named_with_its_memory(tmp_path, monkeypatch):
    assert advise(tmp_path, "--gpu", "h200", code=1).endswith("with its memory: for example --gpu h200-141g\n")
    monkeypatch.delitem(EXPERIMENT["resources"], "gpu")
    assert advise(tmp_path, code=1) == "--gpu is missing: for example --gpu h100-80g\n"
