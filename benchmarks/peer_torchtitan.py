"""One rank of torchtitan's own training, with the model's shape from a Hugging Face config, not one of its flavors.

Started by `benchmarks/peers.py`, by torchrun: the first argument is the folder of config.json, the others are
torchtitan's.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule

config = json.loads((Path(sys.argv.pop(1)) / "config.json").read_text())  # before torchtitan parses its own
if not torch.cuda.is_available():  # without a GPU torchtitan assumes CUDA, and queries its memory
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=2**30)
    torch.cpu.memory_stats = lambda *_: defaultdict(int)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *_: None
    FSDPModule.set_gradient_divide_factor = lambda *_: None  # gloo doesn't support it

from torchtitan.models import llama3
from torchtitan.models.llama3.model.args import TransformerModelArgs

rope = config.get("rope_parameters") or config
llama3.llama3_args["peer"] = TransformerModelArgs(
    dim=config["hidden_size"],
    n_layers=config["num_hidden_layers"],
    n_heads=config["num_attention_heads"],
    n_kv_heads=config["num_key_value_heads"],
    vocab_size=config["vocab_size"],
    norm_eps=config["rms_norm_eps"],
    rope_theta=rope["rope_theta"],
    ffn_dim_multiplier=3 / config["hidden_size"],  # a few columns, rounded up to the wanted width
    multiple_of=config["intermediate_size"],
)

if __name__ == "__main__":
    from torchtitan.train import Trainer, dist_utils, main

    if not torch.cuda.is_available():
        dist_utils.set_pg_timeouts = lambda *_, **__: None
    main(Trainer)
