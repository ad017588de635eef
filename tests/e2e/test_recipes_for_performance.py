"""NVIDIA's performance recipes, with a small model in place of theirs, trained on the CPU.

What needs a GPU is overridden: Adam's states in fewer bits, DeepEP, HybridEP. Recipes in FP8, or with CUDA graphs,
can't be trained here.
"""

import json

import pytest
import yaml

pytestmark = pytest.mark.slow

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 4352, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "meta-llama/Meta-Llama-3-8B": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL},
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, **SMALL,
    },
}  # fmt: skip
EXPERIMENT = """\
experiment: performance
device: cpu
models:
  llama: {recipe: llama3_8b_pretrain_8gpu_h100_bf16_config}
  qwen: {recipe: perf_recipes.qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config}
training: {train_iters: 12, global_batch_size: 4, seq_length: 64}
resources: {gpus_per_node: 2}
overrides: {optimizer.use_precision_aware_optimizer: false, tokenizer.vocab_size: 4352, model.vocab_size: 4352}
sweep:
  runs:
    llama: {model: llama}
    qwen:
      model: qwen
      parallel.ep: 2
      overrides.model.moe_token_dispatcher_type: alltoall
      overrides.model.cuda_graph_impl: none
      overrides.comm_overlap.tp_comm_overlap: false
      overrides.comm_overlap.overlap_moe_expert_parallel_comm: false
      overrides.comm_overlap.delay_wgrad_compute: false
"""


@pytest.fixture(scope="module")
def done(workspace):
    for name, config in MODELS.items():  # transformers takes the name for a folder, where there is one
        path = workspace.path / name / "config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(config))
    (workspace.path / "performance.yaml").write_text(EXPERIMENT)
    workspace.snakemake("--configfile", "performance.yaml")
    return workspace


@pytest.mark.parametrize("run", ["llama", "qwen"])
def test_it_is_trained_to_its_end(done, run):
    assert [step for step, *_ in done.steps("performance", run)] == list(range(1, 13))
    assert done.json("performance", "runs", run, "train.json")["train_iters"] == 12
    assert done.json("performance", "report", "checks.json")["state"] == "PASS"


def test_the_rest_is_the_recipes(done):
    """Nothing is saved; batches are made up; preflight keeps the environment for ranks on GPUs."""
    checked = done.json("performance", "preflight.json")["runs"]
    assert checked["llama"]["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert checked["qwen"]["environment"]["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert not list(done.store("performance", "llama").glob("checkpoints/iter_*"))
    facts = checked["llama"]["facts"]
    assert facts["layout"]["cp"] == 2 and facts["training"]["warmup_iters"] == 10
    spec = yaml.safe_load(EXPERIMENT)
    assert checked["llama"]["train_iters"] == spec["training"]["train_iters"]
