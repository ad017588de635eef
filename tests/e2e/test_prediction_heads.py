"""Heads for multi-token prediction: in from a folder of Hugging Face's and out again, and trained from scratch."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "vocab_size": 512,
}  # fmt: skip
HEAD = "model.layers.4."
EXPERIMENT = {
    "experiment": "heads",
    "device": "cpu",
    "tokenizers": {"bpe512": {"train_on": "stdlib", "vocab_size": 512}},
    "corpora": {"stdlib": {"source": "python-stdlib", "limit": 100}},
    "models": {
        "bought": {"hf": "bought", "init": "pretrained", "tokenizer": "bpe512"},
        "own": {"config": {**CONFIG, "num_nextn_predict_layers": 1}, "init": "scratch", "tokenizer": "bpe512"},
    },
    "data": {"split": "90,5,5"},
    "training": {"train_iters": 3, "global_batch_size": 4, "micro_batch_size": 2, "seq_length": 64},
    "resources": {"gpus_per_node": 2},
    "sweep": {
        "runs": {
            "bought": {"model": "bought", "parallel.pp": 2, "training.precision": "fp32"},
            "own": {"model": "own", "parallel.tp": 2, "parallel.sp": True},
        }
    },
    "export": {"runs": "all"},
}


def bought(folder):
    """A folder such as DeepSeek's own: the head's layer is behind the last one, and repeats embeddings and output
    layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.3.")}
    head = {name.replace("model.layers.3.", HEAD): tensor + 0.01 for name, tensor in last.items()}
    norms = {f"{HEAD}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "shared_head.norm")}
    head |= norms | {
        f"{HEAD}eh_proj.weight": 0.02 * torch.randn(32, 64),
        f"{HEAD}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{HEAD}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors.keys() | head.keys()


@pytest.fixture(scope="module")
def done(workspace):
    names = bought(workspace.path / "bought")
    (workspace.path / "heads.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    workspace.snakemake("--configfile", "heads.yaml", timeout=900)
    return workspace, names


def checks(workspace, *path):
    return {one["name"]: one for one in workspace.json("heads", *path, "proof.json")["checks"]}


def test_heads_go_in_and_come_out_unharmed(done):
    workspace, names = done
    assert workspace.json("heads", "report", "checks.json")["state"] == "PASS"
    whole = f"{len(names)} of {len(names)} tensors"
    assert checks(workspace, "models", "bought")["round trip"]["detail"].startswith(whole)
    proof = checks(workspace, "runs", "bought")
    assert proof["tensors"]["detail"].startswith(whole) and {"loads", "logits", "read back"} <= proof.keys()
    trained = load_file(workspace.results("heads", "runs", "bought", "export") / "model.safetensors")
    before = load_file(workspace.path / "bought" / "model.safetensors")
    assert not torch.equal(trained[f"{HEAD}eh_proj.weight"], before[f"{HEAD}eh_proj.weight"])
    assert torch.equal(trained[f"{HEAD}shared_head.head.weight"], trained["lm_head.weight"])


def test_heads_that_are_trained_from_scratch_are_exported(done):
    """Without copies of the embeddings and the output layer, which only folders of others have."""
    workspace, names = done
    written = load_file(workspace.results("heads", "runs", "own", "export") / "model.safetensors")
    assert names - written.keys() == {f"{HEAD}embed_tokens.weight", f"{HEAD}shared_head.head.weight"}
    assert written.keys() <= names


def test_weights_that_are_made_have_no_heads(done):
    workspace, _ = done
    made = {**EXPERIMENT, "experiment": "made", "sweep": {"runs": {"own": {"model": "own"}}}}
    made["models"] = {"own": {**EXPERIMENT["models"]["own"], "init": "pretrained"}}
    (workspace.path / "made.yaml").write_text(yaml.safe_dump(made))
    said = workspace.snakemake("--configfile", "made.yaml", code=1)
    assert "models.own.config.num_nextn_predict_layers: weights that are made from a config have no heads" in said
