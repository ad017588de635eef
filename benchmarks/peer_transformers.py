"""One rank of what people would use instead: transformers' own model, PyTorch's FSDP2, torch.compile, fused AdamW.

Started by `benchmarks/peers.py`, by torchrun, with a JSON file that says the model, the batch and where to answer.
Weights and Adam's moments are fp32 shards, layers calculate in bf16, gradients are added up over ranks in fp32; layers
and loss are compiled, each by itself. One rank alone trains as nanoGPT does: no shards, bf16 by autocast, and the whole
model is compiled. Tokens are random: the loss says that it trains, and is none to compare.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    on_gpu = asked["device"] == "cuda"
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(1)
    model = made(asked, device)
    trained = train(model, asked, device)
    peaks = torch.tensor([trained.pop("allocated"), trained.pop("reserved")], dtype=torch.float64, device=device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        answer = {**trained, "tensors_gib": peaks[0].item() / 2**30, "gib": peaks[1].item() / 2**30}
        answer |= {"attention": model.config._attn_implementation, "params": parameters(model)}
        answer |= {"gpu": torch.cuda.get_device_name() if on_gpu else "CPU"}
        Path(asked["out"]).write_text(json.dumps(answer))
    dist.destroy_process_group()


def made(asked: dict[str, Any], device: torch.device) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(asked["model"])
    config.use_cache = False
    flash = device.type == "cuda" and transformers.utils.is_flash_attn_2_available()
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="flash_attention_2" if flash else "sdpa"
        )
    model.train()
    alone = dist.get_world_size() == 1
    layers = layers_of(model)
    if asked["recompute"] == "full":
        for number, layer in enumerate(layers):
            layers[number] = checkpoint_wrapper(layer)
    if asked["compile"]:
        for part in [model] if alone else layers:
            part.compile()
    if not alone:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*layers, model):
            fully_shard(part, mp_policy=policy)
    return model


def layers_of(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of a GPT-2 or a Llama, or of models with the same names."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def parameters(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def train(model: torch.nn.Module, asked: dict[str, Any], device: torch.device) -> dict[str, Any]:
    ranks, mbs, length = dist.get_world_size(), asked["mbs"], asked["seq_length"]
    count = asked["gbs"] // (mbs * ranks)
    vocabulary = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(cross_entropy, dynamic=False) if asked["compile"] else cross_entropy
    random = torch.Generator(device).manual_seed(dist.get_rank())
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees the unsharded weights
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for _ in range(asked["steps"]):
        began = time.perf_counter()
        total = torch.zeros((), device=device)
        for _ in range(count):
            tokens = torch.randint(vocabulary, (mbs, length + 1), generator=random, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=ranks == 1):
                logits = model(input_ids=tokens[:, :-1]).logits
            loss = loss_of(logits, tokens[:, 1:]) / count
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())  # synchronizes with the GPU
        seconds.append(time.perf_counter() - began)
    on_gpu = device.type == "cuda"
    return {
        "seconds": seconds,
        "losses": losses,
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
    }


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


if __name__ == "__main__":
    main()
