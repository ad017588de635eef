"""From run.json to Bridge's configuration: every key of a layout arrives, and what Megaboa sets by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from configurations import FIM

from megaboa.config.models.outputs import Trackers
from megaboa.config.models.resources import Launch
from megaboa.files import write_json

pytestmark = pytest.mark.slow

# Bridge turns both of the latter on where one of them is.
OVERLAPS = ("ddp.overlap_grad_reduce", "ddp.overlap_param_gather", "optimizer.overlap_param_gather")
PARENT = {"experiment": "small", "run": "dp1"}
GPT3 = {  # one that sets `comm_overlap`, by which Bridge writes all of OVERLAPS
    "device": "cuda",
    "model": {"recipe": "gpt3_175b_pretrain_32gpu_h100_bf16_config", "args": {}, "tokenizer": None},
    "data": {},
}
NAMED = {"recipe": "llama32_1b_pretrain_config", "args": {}, "hf": "meta-llama/Llama-3.2-1B"}
CASES = {
    "defaults": {
        "run": {},
        "expected": {
            "checkpoint.dist_ckpt_optim_fully_reshardable": True,
            "checkpoint.save_interval": 6,
            "checkpoint.load": None,
            "checkpoint.fully_parallel_save": True,
            "checkpoint.async_save": False,  # by default on GPUs only
            "checkpoint.async_write_results_mp_mode": "spawn",
            "checkpoint.most_recent_k": -1,  # the supervisor removes what need not be kept
            "dist.distributed_backend": "gloo",
            "dataset.num_workers": 0,
            "dataset.split": "90,5,5",
            "model.vocab_size": 500,  # the model's own, whatever its tokenizer has
            "tokenizer.use_tokenizer_vocab_size": False,
            "model.bf16": False,
            "model.params_dtype": "torch.float32",
            "validation.eval_interval": 7,  # beyond the end: evaluated there only
        },
    },
    **{
        f"overlaps: {name}": {
            "run": run,
            "launch": launch,
            "ranks": 4,
            "expected": dict(zip(OVERLAPS, expected, strict=True)),
        }
        for name, (run, launch, expected) in {
            "on the CPU there are none": ({}, {}, (False, False, False)),
            "on GPUs both": ({"device": "cuda"}, {}, (True, True, False)),
            "under Megatron-FSDP both": ({"device": "cuda", "parallel": {"fsdp": "megatron"}}, {}, (True, True, False)),
            "FSDP2 has its own": ({"device": "cuda", "parallel": {"fsdp": "torch"}}, {}, (False, False, False)),
            "nothing to gather": (
                {"device": "cuda", "parallel": {"distributed_optimizer": False}},
                {},
                (True, False, False),
            ),
            "an override of one": (
                {"device": "cuda", "overrides": {"ddp.overlap_param_gather": False}},
                {},
                (True, False, False),
            ),
            "FSDP2 with a comm_overlap of the experiment's": (
                {"device": "cuda", "parallel": {"fsdp": "torch"}, "overrides": {"comm_overlap.tp_comm_overlap": False}},
                {},
                (False, False, False),
            ),
            "the key wins": (
                {"device": "cuda"},
                {"overrides": dict.fromkeys(OVERLAPS, False)},
                (False, False, False),
            ),
        }.items()
    },
    **{
        f"overlaps of a recipe's comm_overlap: {name}": {
            "run": GPT3 | {"overrides": overrides},
            "launch": {"overrides": launched},
            "ranks": 64,
            "expected": dict(zip(OVERLAPS, expected, strict=True)),
        }
        for name, (overrides, launched, expected) in {
            "Bridge's default": ({}, {}, (True, True, True)),
            "the key": ({}, dict.fromkeys(OVERLAPS, False), (False, False, False)),
            "the key of one": ({}, dict.fromkeys(OVERLAPS[1:], False), (True, False, False)),
            "an override of ddp": ({"ddp.overlap_param_gather": False}, {}, (True, False, False)),
            "an override of its own": (
                {"ddp.overlap_grad_reduce": True, "comm_overlap.overlap_grad_reduce": False},
                {},
                (False, True, True),
            ),
        }.items()
    },
    "tensor and sequence": {
        "run": {"parallel": {"tp": 4, "sp": True}},
        "expected": {
            "model.tensor_model_parallel_size": 4,
            "model.sequence_parallel": True,
        },
    },
    "pipeline, interleaved": {
        "run": {"parallel": {"pp": 2, "vpp": 2}},
        "expected": {
            "model.pipeline_model_parallel_size": 2,
            "model.virtual_pipeline_model_parallel_size": 2,
            "model.overlap_p2p_comm": True,
            "model.batch_p2p_comm": False,
        },
    },
    "context and experts": {
        "run": {"parallel": {"cp": 2, "ep": 4, "etp": 1}},
        "expected": {
            "model.context_parallel_size": 2,
            "model.expert_model_parallel_size": 4,
            "model.expert_tensor_parallel_size": 1,
        },
    },
    "Megatron-FSDP": {
        "run": {"parallel": {"fsdp": "megatron", "fsdp_sharding": "optim_grads"}},
        "expected": {
            "dist.use_megatron_fsdp": True,
            "ddp.use_megatron_fsdp": True,
            "dist.use_torch_fsdp2": False,
            "ddp.data_parallel_sharding_strategy": "optim_grads",
            "checkpoint.ckpt_format": "fsdp_dtensor",
        },
    },
    "torch FSDP2": {
        "run": {"parallel": {"fsdp": "torch"}},
        "expected": {"dist.use_torch_fsdp2": True, "dist.use_megatron_fsdp": False},
    },
    "optimizer and schedule": {
        "run": {
            "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "weight_decay": 0.2, "beta2": 0.99, "clip_grad": 0.5},
            "schedule": {"decay": "linear", "warmup_iters": 2, "decay_iters": 5},
            "parallel": {"distributed_optimizer": False},
        },
        "expected": {
            "optimizer.lr": 1e-3,
            "optimizer.min_lr": 1e-4,
            "optimizer.weight_decay": 0.2,
            "scheduler.end_weight_decay": 0.2,
            "optimizer.adam_beta2": 0.99,
            "optimizer.clip_grad": 0.5,
            "scheduler.lr_decay_style": "linear",
            "scheduler.lr_warmup_iters": 2,
            "scheduler.lr_decay_iters": 5,
            "ddp.use_distributed_optimizer": False,
            "optimizer.use_distributed_optimizer": False,
        },
    },
    "training": {
        "run": {"training": {"seed": 7, "eval_interval": 3, "eval_iters": 2, "precision": "bf16_mixed"}},
        "expected": {
            "rng.seed": 7,
            "dataset.random_seed": 7,
            "dataset.seq_length": 64,
            "model.seq_length": 64,
            "validation.eval_interval": 3,
            "validation.eval_iters": 2,
            "mixed_precision.bf16": True,
            "ddp.check_for_nan_in_grad": True,
        },
    },
    "fp16: an overflow is the loss scaler's business, and its fields can be reached": {
        "run": {"training": {"precision": "fp16_mixed"}, "overrides": {"mixed_precision.initial_loss_scale": 65536}},
        "expected": {
            "mixed_precision.fp16": True,
            "mixed_precision.initial_loss_scale": 65536,
            "ddp.check_for_nan_in_grad": False,
        },
    },
    "one corpus": {
        "run": {"data": {"blend": {"text": 2.0}, "split": "90,5,5"}},
        "expected": {
            "dataset.blend": [["/data/text"], None],
            "dataset.blend_per_split": None,
            "dataset.reset_attention_mask": False,
            "dataset.create_attention_mask": False,
            "dataset.skip_getting_attention_mask_from_dataset": True,
        },
    },
    "a corpus of several datasets": {
        "run": {"data": {"blend": {"text": 1.0, "talk": 2.0}, "split": "90,5,5"}},
        "expected": {"dataset.blend": [["/data/talk-a", "/data/talk-b", "/data/text"], [1.5, 0.5, 1.0]]},
    },
    "blends per split": {
        "run": {"data": {"blend_per_split": {"train": {"text": 3.0, "law": 1.0}, "valid": {"law": 1.0}, "test": None}}},
        "expected": {
            "dataset.blend": None,
            "dataset.split": None,
            "dataset.blend_per_split": [[["/data/law", "/data/text"], [1.0, 3.0]], [["/data/law"], None], None],
        },
    },
    "packed sequences": {
        "run": {
            "data": {
                "blend": {"text": 1.0},
                "reset_position_ids": True,
                "reset_attention_mask": True,
                "eod_mask_loss": True,
            },
            "overrides": {"ddp.bucket_size": 1000},
        },
        "expected": {
            "dataset.reset_position_ids": True,
            "dataset.reset_attention_mask": True,
            "dataset.create_attention_mask": True,
            "dataset.skip_getting_attention_mask_from_dataset": False,
            "dataset.eod_mask_loss": True,
        },
    },
    "fill-in-the-middle": {
        "run": {
            "data": {"blend": {"text": 1.0}, "split": "90,5,5", "fim": FIM},
            "overrides": {"ddp.bucket_size": 1000},
        },
        "expected": {
            "dataset.fim_data": True,
            "dataset.fim_rate": 0.9,
            "dataset.fim_split_sample": None,
            "dataset.blend": [["/data/text"], None],
            "dataset.split": "90,5,5",
            "dataset.seq_length": 64,
        },
    },
    "GPUs without nvidia-resiliency-ext": {
        "run": {"device": "cuda"},
        "expected": {"dist.distributed_backend": "nccl", "checkpoint.async_save": False},
    },
    "first steps under a profiler save nothing, not in the background either": {
        "run": {"device": "cuda"},
        "launch": {"checkpoint": {"save_interval": None, "async_save": True, "keep_last": 3}},
        "profile": {"tool": "pytorch", "steps": [2, 3]},
        "expected": {"checkpoint.save": None, "checkpoint.async_save": False, "train.train_iters": 7},
    },
    "nothing is saved": {
        "run": {"device": "cuda"},
        "launch": {"checkpoint": {"save_interval": 0, "async_save": True, "keep_last": 3}},
        "expected": {"checkpoint.save": None, "checkpoint.async_save": False},
    },
    "going on with the optimizer's state": {
        "run": {"parent": {**PARENT, "iteration": 4, "load": {"optimizer": True, "rng": True}}},
        "expected": {"scheduler.lr_decay_iters": None},  # the last step
    },
    "going on without it: the schedule begins again": {
        "run": {"parent": {**PARENT, "iteration": 4, "load": {"optimizer": False, "rng": True}}},
        "expected": {"scheduler.lr_decay_iters": 2},
    },
    "TensorBoard alone": {
        "run": {},
        "launch": {"trackers": Trackers().model_dump(mode="json")},
        "expected": {"logger.wandb_project": None, "logger.mlflow_experiment": None},
    },
    "no tracker": {
        "run": {},
        "launch": {"trackers": Trackers(tensorboard=False).model_dump(mode="json")},
        "expected": {"logger.tensorboard_dir": None},
    },
    "trackers with names of the experiment": {
        "run": {},
        "launch": {"trackers": Trackers(wandb={"entity": "us"}, mlflow={}).model_dump(mode="json")},
        "expected": {
            "logger.wandb_project": "tiny",
            "logger.wandb_entity": "us",
            "logger.wandb_exp_name": "dp2",
            "logger.mlflow_experiment": "tiny",
            "logger.mlflow_run_name": "dp2",
            "logger.mlflow_tracking_uri": None,
            "logger.mlflow_tags": {"megaboa.run": "tiny-dp2-0123456789ab", "megaboa.attempt": "02"},
            "logger.mlflow_log_artifacts": False,
        },
    },
    "trackers with names of one's own, and what overrides say of them": {
        "run": {},
        "launch": {
            "trackers": Trackers(
                wandb={"project": "p"}, mlflow={"experiment": "e", "tracking_uri": "http://t"}
            ).model_dump(mode="json"),
            "overrides": {"logger.wandb_exp_name": "mine"},
        },
        "expected": {
            "logger.wandb_project": "p",
            "logger.wandb_exp_name": "mine",
            "logger.mlflow_experiment": "e",
            "logger.mlflow_tracking_uri": "http://t",
        },
    },
    "trackers offline": {
        "run": {},
        "launch": {"trackers": Trackers(wandb={}, mlflow={}, offline=True).model_dump(mode="json")},
        "expected": dict.fromkeys(["logger.mlflow_tracking_uri", "logger.wandb_save_dir"]),
    },
    "how long ranks wait for each other": {
        "run": {},
        "launch": {"start": Launch(timeout_minutes=45).model_dump(mode="json")},
        "expected": {"dist.distributed_timeout_minutes": 45},
    },
    "harmless overrides, which don't take SIGTERM away from the supervisor": {
        "run": {},
        "launch": {
            "overrides": {"train.manual_gc": True, "dataset.pin_memory": False, "train.exit_signal_handler": False}
        },
        "expected": {"train.manual_gc": True, "dataset.pin_memory": False, "train.exit_signal_handler": True},
    },
    "overrides of parts that the recipe left out": {
        "run": {"overrides": {"straggler.log_straggler": True, "comm_overlap.tp_comm_overlap": False}},
        "expected": {
            "straggler.log_straggler": True,
            "straggler.straggler_minmax_count": 1,
            "comm_overlap.tp_comm_overlap": False,
        },
    },
    "a part that can't be made of what is said of it": {
        "run": {"overrides": {"comm_overlap.overlap_grad_reduce": True}},
        "refused": "overrides: comm_overlap isn't set here, and needs comm_overlap.tp_comm_overlap too",
    },
    "a field that a part doesn't have": {
        "run": {"overrides": {"straggler.no_such": 1}},
        "refused": "overrides.straggler.no_such: 1: Bridge has no such field",
    },
    "fields that are spelled wrong": {
        "run": {"overrides": {"model.hiden_dropout": 0.1, "ddp.bucket_size": 1000, "modle.hidden_dropout": 0.1}},
        "refused": "overrides.model.hiden_dropout: 0.1: Bridge has no such field; did you mean "
        "overrides.model.hidden_dropout?; overrides.modle.hidden_dropout: 0.1: Bridge has no such field; did you mean "
        "overrides.model.hidden_dropout?",
    },
    "a field that is spelled wrong, and that a key sets": {
        "run": {"overrides": {"model.sequence_lenght": 64, "model.seq_lenght": 64}},
        "refused": "overrides.model.seq_lenght: 64: Bridge has no such field; did you mean training.seq_length?",
    },
    "a field of a number": {
        "run": {"overrides": {"model.hidden_size.x": 1}},
        "refused": "overrides.model.hidden_size.x: 1: model.hidden_size is 32 here, and has no fields",
    },
    "no mixed precision is fp32": {
        "run": {"overrides": {"mixed_precision.grad_reduce_in_fp32": True}},
        "refused": "overrides.mixed_precision.grad_reduce_in_fp32: true: mixed_precision is None here, and has no",
    },
    "a choice of Bridge's, which leaves the word": {
        "run": {"overrides": {"model.attention_backend": "unfused"}},
        "expected": {"model.attention_backend": "AttnBackend.unfused"},
    },
    "a choice that is none": {
        "run": {"overrides": {"model.inference_cuda_graph_scope": None}},
        "expected": {"model.inference_cuda_graph_scope": None},
    },
    "a list that is no choice": {
        "run": {"overrides": {"model.attention_backend": ["unfused"]}},
        "refused": "overrides.model.attention_backend: there is no ['unfused']; one of flash, fused",
    },
    "a word that is no choice": {
        "run": {"overrides": {"model.attention_backend": "unfuse"}},
        "refused": "overrides.model.attention_backend: there is no 'unfuse'; one of flash, fused, unfused, local, auto",
    },
    "a recipe of Bridge's that reads this model on the hub reads it in the folder that was fetched": {
        "run": {"model": NAMED, "data": {}},
        "expected": {
            "model.num_layers": 4,
            "model.hidden_size": 32,
            "model.vocab_size": 500,
            "scheduler.lr_warmup_iters": 2000,
        },
    },
    "a recipe of Bridge's that reads another model on the hub reads it there": {
        "run": {"model": NAMED | {"hf": "somebody/else"}, "data": {}},
        "refused": "meta-llama/Llama-3.2-1B",
    },
    "a ramp of weight decay, with its end by the key": {
        "run": {
            "optimizer": {"weight_decay": 0.3},
            "overrides": {
                "scheduler.start_weight_decay": 0.01,
                "scheduler.weight_decay_incr_style": "linear",
                "dataset.random_seed": 5,
            },
        },
        "expected": {
            "optimizer.weight_decay": 0.3,
            "scheduler.start_weight_decay": 0.01,
            "scheduler.end_weight_decay": 0.3,
            "scheduler.weight_decay_incr_style": "linear",
            "dataset.random_seed": 5,
        },
    },
    "null takes what a recipe has set": {
        "run": {
            "model": {"recipe": "tests/bridge/recipe_with_schedule.py", "args": {}, "tokenizer": None},
            "data": {},
            "schedule": {"decay_iters": None},
            "overrides": {"scheduler.lr_decay_iters": None, "validation.eval_interval": None},
        },
        "expected": {
            "scheduler.lr_decay_iters": None,
            "validation.eval_interval": 7,  # evaluated at the end only
        },
    },
    "the key's null leaves it to the recipe": {
        "run": {
            "model": {"recipe": "tests/bridge/recipe_with_schedule.py", "args": {}, "tokenizer": None},
            "data": {},
            "schedule": {"decay_iters": None},
            "training": {"eval_interval": None},
        },
        "expected": {"scheduler.lr_decay_iters": 15, "validation.eval_interval": 3},
    },
    "rotary positions that Bridge loses, of a model that was fetched before anyone asked": {
        "run": {},
        "config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "refused": "/config.json: rope_parameters.rope_type: 'linear' is lost: Bridge's converter of qwen3 knows only",
    },
    "a secret of the environment, of a run that an earlier version planned": {
        "run": {"overrides": {"logger.wandb_entity": "${oc.env:HOME}"}},
        "refused": "overrides.logger.wandb_entity: '${oc.env:HOME}' holds `${`",
    },
    "a secret of the environment from another key": {
        "run": {"optimizer": {"name": "${oc.env:HOME}"}, "overrides": {"ddp.bucket_size": 1000}},
        "refused": "optimizer: '${oc.env:HOME}' holds `${`",
    },
    "a fused activation that is another": {
        "run": {"overrides": {"model.bias_activation_fusion": True}},
        "config": {"hidden_act": "gelu"},
        "refused": "overrides.model.bias_activation_fusion: true: that kernel calculates GELU by its tanh "
        "approximation, and ",
    },
    "a function by a name": {
        "run": {"overrides": {"model.init_method": "torch.nn.init.zeros_"}},
        "refused": "overrides.model.init_method: 'torch.nn.init.zeros_': is a function in Bridge, which an override "
        "can't name: set it in a recipe of your own",
    },
    "a number for a function": {
        "run": {"overrides": {"model.embedding_init_method": 0}},
        "refused": "overrides.model.embedding_init_method: 0: is a function in Bridge",
    },
    "a function that Bridge knows by name": {
        "run": {"overrides": {"model.activation_func": "relu", "model.init_method": None}},
        "expected": {"model.activation_func.__name__": "relu", "model.init_method": None},
    },
    "overrides win": {
        "run": {"overrides": {"tokenizer.use_tokenizer_vocab_size": True, "ddp.bucket_size": 1000}},
        "expected": {"tokenizer.use_tokenizer_vocab_size": True, "ddp.bucket_size": 1000},
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configurations")
    write_json(folder / "cases.json", CASES)
    script = Path(__file__).with_name("configurations.py")
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "empty")}
    done = subprocess.run([sys.executable, script, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_trackers_without_a_network_write_into_the_store(found):
    uri = found["trackers offline"]["logger.mlflow_tracking_uri"]
    assert uri.startswith("sqlite:////") and uri.endswith("/store/runs/tiny/dp2/0123456789ab/mlflow.db")
    assert found["trackers offline"]["logger.wandb_save_dir"] == uri.removeprefix("sqlite:///").removesuffix(
        "/mlflow.db"
    )


@pytest.mark.parametrize("name", [name for name in CASES if "refused" in CASES[name]])
def test_what_is_refused_says_why(found, name):
    assert CASES[name]["refused"] in found[name]


@pytest.mark.parametrize("name", [n for n in CASES if n != "trackers offline" and "expected" in CASES[n]])
def test_fields_arrive(found, name):
    assert found[name] == CASES[name]["expected"]
