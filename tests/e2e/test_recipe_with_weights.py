"""A recipe together with a Hugging Face model: its settings, imported weights, and a proven export.

One is the shipped recipe of DeepSeek-V2-Lite with a small random model of that very configuration; another is a recipe
of Bridge's by name, whose model on the hub is a small random one, at a commit in the cache.
"""

import json

import pytest
import yaml

from megaboa.bridge.source import PERTURBATION

pytestmark = pytest.mark.slow

SMALL = {
    **{"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "vocab_size": 384},
    **{"bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32"},
}
HUB, COMMIT = "meta-llama/Llama-3.2-1B", "c" * 40  # the only commit in the cache, which has no branch
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 384},
    **{"bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32", "tie_word_embeddings": True},
    **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}
RECIPE = '''\
"""Reads the model's folder, and trains it in a way of its own."""

from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common


def configure(hf_path, layers=None):
    config = _pretrain_common()
    config.model = AutoBridge.from_hf_pretrained(hf_path).to_megatron_provider(load_weights=False)
    if layers:
        config.model.num_layers = layers
    config.model.seq_length = config.dataset.seq_length = 64
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 3, 4, 2
    config.validation.eval_iters, config.validation.eval_interval = 1, 3
    config.scheduler.lr_warmup_iters = 1
    config.optimizer.lr = 2e-3
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    return config
'''
EXPERIMENT = """\
experiment: own
device: cpu
tokenizers:
  bpe: {train_on: text, vocab_size: 384}
corpora:
  text: {source: python-stdlib, limit: 60}
models:
  llama: &llama
    recipe: mine.py
    tokenizer: bpe
    init: pretrained
    config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,
      num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128, tie_word_embeddings: false}
  scratch: {<<: *llama, init: scratch}
  plain: {<<: *llama, recipe: null}
  lite: {recipe: recipes/deepseek_v2_lite.py, hf: lite, tokenizer: bpe, init: pretrained}
  named: {recipe: llama32_1b_pretrain_config, hf: meta-llama/Llama-3.2-1B, tokenizer: bpe, init: pretrained,
    revision: cccccccccccccccccccccccccccccccccccccccc}
data: {split: "90,5,5"}
training: {precision: fp32, seed: 1234}
checkpoint: {save_interval: 3}
sweep:
  runs:
    llama: {model: llama}
    scratch: {model: scratch}
    plain: {model: plain, training.train_iters: 3, training.global_batch_size: 4, training.micro_batch_size: 2,
      training.seq_length: 64, training.eval_interval: 3, training.eval_iters: 1}
    lite: {model: lite, resources.gpus_per_node: 2, parallel.tp: 1, parallel.ep: 2, parallel.sp: false,
      optimizer.lr: 1.0e-3, training.train_iters: 3, training.global_batch_size: 4, training.seq_length: 64,
      training.eval_interval: 3, training.eval_iters: 1, schedule.warmup_iters: 1, parallel.overlap_grad_reduce: false,
      parallel.overlap_param_gather: false}
    named: {model: named, training.train_iters: 3, training.global_batch_size: 4, training.micro_batch_size: 2,
      training.seq_length: 64, training.eval_interval: 3, training.eval_iters: 1, schedule.warmup_iters: 1,
      parallel.overlap_grad_reduce: false, parallel.overlap_param_gather: false}
export: {runs: [llama, scratch, lite, named]}
"""
WRONG = """\
  deep: {<<: *llama, args: {layers: 4}}
"""


def write_model(config, folder):
    """A random model, and the config as it is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.dim() == 1):
            weight.add_(torch.randn_like(weight) * PERTURBATION)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def small(workspace):
    """A model of DeepSeek-V2-Lite's configuration but for its sizes, and one of Llama 3.2's."""
    given = json.loads((workspace.path / "recipes/deepseek-v2-lite/config.json").read_text())
    write_model({**given, **SMALL}, workspace.path / "lite")
    cache = workspace.path / "hub"
    write_model(LLAMA, cache / f"models--{HUB.replace('/', '--')}" / "snapshots" / COMMIT)
    (workspace.path / "mine.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_CACHE", str(cache))
        yield workspace


@pytest.fixture(scope="module")
def done(small):
    (small.path / "own.yaml").write_text(EXPERIMENT)
    small.snakemake("--configfile", "own.yaml", timeout=1800)
    return small


def proof(workspace, *where):
    found = workspace.json("own", *where, "proof.json")
    assert found["state"] == "PASS"
    return {check["name"]: check["detail"] for check in found["checks"]}, found.get("left_out") or {}


@pytest.mark.parametrize("name", ["llama", "lite", "named"])
def test_weights_are_imported_for_a_recipe(done, name):
    checks, _ = proof(done, "models", name)
    assert {"tensors", "round trip", "Megatron parameters", "logits"} <= checks.keys()
    first, *_ = done.steps("own", name)
    assert first[0] == 1


@pytest.mark.parametrize("name", ["llama", "scratch", "lite", "named"])
def test_a_recipes_run_is_exported_and_proved(done, name):
    checks, left_out = proof(done, "runs", name)
    assert {"trained", "second export", "read back", "logits", "validation loss"} <= checks.keys()
    assert left_out == {}
    assert ("experts" in checks) == (name == "lite")


def test_a_recipe_of_bridges_trains_the_commit_that_was_fetched(done):
    """It names the model on the hub alone, of which the cache has no branch."""
    source = done.json("own", "models", "named", "source.json")
    assert source["revision"] == COMMIT and source["path"].startswith(str(done.path / "hub"))
    manifest = done.json("own", "runs", "named", "train.json")
    saved = yaml.safe_load((done.path / manifest["checkpoint"] / "run_config.yaml").read_text())
    assert (saved["model"]["hf_model_id"], saved["model"]["hidden_size"]) == (source["path"], 32)
    assert saved["env_vars"]["TORCH_NCCL_HIGH_PRIORITY"] and saved["optimizer"]["min_lr"] == 3e-5, "the recipe's"
    card = (done.results("own", "runs", "named", "export") / "README.md").read_text()
    assert f"| started from | {HUB} at {COMMIT} |" in card


def test_deepseek_v2_lite_has_no_norm_of_the_queries(done):
    _, left_out = proof(done, "models", "lite")
    record = done.json("own", "models", "lite", "import.json")
    saved = yaml.safe_load((done.path / record["checkpoint"] / "iter_0000000" / "run_config.yaml").read_text())
    assert saved["model"]["qk_layernorm"] is True and saved["model"]["q_lora_rank"] is None
    assert left_out == {}


def test_the_recipe_decides_what_the_file_leaves_open(done):
    run = done.json("own", "runs", "llama", "run.json")
    assert run["training"] == {"precision": "fp32", "seed": 1234} and run["optimizer"] == {}
    manifest = done.json("own", "runs", "llama", "train.json")
    saved = yaml.safe_load((done.path / manifest["checkpoint"] / "run_config.yaml").read_text())
    assert (saved["train"]["train_iters"], saved["optimizer"]["lr"], saved["model"]["seq_length"]) == (3, 2e-3, 64)


def test_the_card_says_what_the_recipe_chose(done):
    card = (done.results("own", "runs", "llama", "export") / "README.md").read_text()
    for line in (
        "| sequence length | 64 |",
        "| global batch | 4 sequences |",
        "peak learning rate 0.002",
        "| tokens seen | 768 |",
    ):
        assert line in card
    assert "| started from | random weights, drawn from seed 0 |" in card


def test_the_recipes_run_begins_with_the_imported_weights(done):
    """As a run without a recipe does, which reads the same samples first; random weights have another loss."""
    losses = {name: done.steps("own", name)[0][1] for name in ("llama", "plain", "scratch")}
    assert losses["llama"] == losses["plain"] != losses["scratch"]


def test_a_recipe_of_another_model_is_refused(done):
    text = EXPERIMENT.replace("experiment: own", "experiment: other").replace("data: {split", f"{WRONG}data: {{split")
    sweep = "sweep:\n  runs:\n    deep: {model: deep}\n    llama: {model: llama}\n"
    (done.path / "other.yaml").write_text(text.split("sweep:")[0] + sweep)
    output = done.snakemake("preflight", "--configfile", "other.yaml", code=1)
    assert "run deep is refused: ValueError: models.deep.recipe: mine.py makes another model than " in output
    assert "model.num_layers is 4 in the recipe and 2 there (num_hidden_layers)" in output
    assert "1 of 2 runs could never work" in output
