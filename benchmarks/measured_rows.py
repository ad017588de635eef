"""The measured runs that predictions are compared with, each with the facts that the plan would have of it.

The data, their sources, and what of them was fitted: benchmarks/measured/README.md.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow" / "scripts"))

from megaboa import records
from megaboa.check.facts import Cluster, Facts, Kernels, Model, Training
from megaboa.config import load
from megaboa.layout import Layout
from megaboa.plan import make_plan
from megaboa.records import Calibration

HERE = Path(__file__).parent / "measured"
PUBLISHED = Path(__file__).parents[1] / "config" / "published"
EXPERIMENTS = Path(__file__).parents[1] / "config" / "experiments"
FULL = Kernels(recompute="full", recompute_method="uniform", recompute_layers=1)
# What only half of a row was used for; the other half is held back.
FITTED = {"host": "seconds", "muon": "seconds", "uneven experts": "gib", "norms": "gib"}
NO_OVERLAP = {"grad_overlap": False, "gather_overlap": False}
DEEPSPEED = {**NO_OVERLAP, "scattered_stages": True}


@dataclass(frozen=True)
class Row:
    """A measured row. `group`: rows of one model, batch and number of GPUs, which are alternatives."""

    data: str
    name: str
    held_back: bool
    facts: Facts
    seconds: float | None = None
    gib: float | None = None
    group: str = ""
    reserved_gib: float | None = None  # reserved by PyTorch's allocator
    model: str = ""  # its name in the experiment


def _csv(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def vtrain(name: str) -> Iterator[Row]:
    """GPT-3 by Megatron-DeepSpeed in fp16: unfused attention and loss, no distributed optimizer, no overlap."""
    several = name == "vtrain-multi"
    for number, one in enumerate(_csv(f"{name}.csv"), 2):
        size = {key: int(value) for key, value in one.items() if value.isdigit()}
        hidden, heads, world = size["hidden size"], size["attention heads"], size["# GPUs"]
        model = Model(
            layers=size["# layers"], hidden=hidden, ffn=4 * hidden, heads=heads, kv_groups=heads,
            head_dim=hidden // heads, vocab_size=50257, vocab_rows=51200, learned_positions=True, tied=True,
            gated=False, bias=True, norm_bias=True, dropout=0.1,
        )  # fmt: skip
        layout = Layout(
            world, tp=size["tensor parallelism"], pp=size["pipeline parallelism"], distributed_optimizer=False
        )
        mbs = size["micro batch"]
        training = Training(
            gbs=size["global batch"], mbs=mbs, seq_length=size["sequence length"], precision="fp16_mixed"
        )
        kernels = replace(
            FULL if several else Kernels(), attention="unfused", attention_dropout=0.1, fused_loss=False, **DEEPSPEED
        )
        cluster = Cluster("cuda", max(1, world // 8), min(world, 8), "a100-80g")
        yield Row(
            name,
            f"line {number}",
            one["Parameters (billion)"] in ("39.1", "175") if several else model.layers != 12,
            Facts(layout, model, training, kernels, cluster=cluster),
            float(one["iteration time (ms)"]) / 1000,
            group=f"{model.layers} layers of {hidden}, {world} GPUs, batch {training.gbs}",
        )


LLAMA = Model(head_dim=128, tied=False, vocab_size=128256, vocab_rows=128256)
LATENT = Model(
    heads=128, experts=160, topk=6, moe_ffn=1536, shared_ffn=3072, latent=True, q_rank=1536, kv_rank=512,
    qk_head_dim=128, qk_position_dim=64, v_head_dim=128, tied=False,
)  # fmt: skip
MODELS = {
    "llama3_8b": replace(LLAMA, layers=32, hidden=4096, ffn=14336, heads=32, kv_groups=8),
    "llama3_70b": replace(LLAMA, layers=80, hidden=8192, ffn=28672, heads=64, kv_groups=8),
    "llama3_405b": replace(LLAMA, layers=126, hidden=16384, ffn=53248, heads=128, kv_groups=8),
    "deepseekv2": replace(LATENT, hidden=5120, ffn=12288, vocab_size=102400, vocab_rows=102400),
    "deepseekv3": replace(
        LATENT, layers=61, hidden=7168, ffn=18432, experts=256, topk=8, moe_ffn=2048, shared_ffn=2048,
        vocab_size=129280, vocab_rows=129280,
    ),
    "qwen3_30b": Model(
        layers=48, hidden=2048, ffn=6144, heads=32, kv_groups=4, head_dim=128, vocab_size=151936, vocab_rows=151936,
        tied=False, experts=128, topk=8, moe_ffn=768, qk_norm=True,
    ),
    "qwen3_235b": Model(
        layers=94, hidden=4096, ffn=12288, heads=64, kv_groups=4, head_dim=128, vocab_size=151936, vocab_rows=151936,
        tied=False, experts=128, topk=8, moe_ffn=1536, qk_norm=True,
    ),
}  # fmt: skip


def simumax() -> Iterator[Row]:
    for one in _csv("simumax-b200.csv"):
        size = {key: int(value) for key, value in one.items() if value.isdigit()}
        layers, dp = size["layers"], size["dp"]
        model = replace(MODELS[one["model"]], layers=layers)
        if model.kv_groups and one["model"] == "llama3_405b":
            model = replace(model, kv_groups=16)
        if model.experts:
            model = replace(model, moe_layers=(False,) + (True,) * (layers - 1))
        axes = {axis: size[axis] for axis in ("tp", "cp", "pp", "ep")}
        layout = Layout(8, **axes, sp=axes["tp"] > 1, cp_comm="a2a" if axes["cp"] > 1 else None)
        training = Training(
            gbs=dp * size["micro_batches"], mbs=1, seq_length=size["seq_length"], precision="bf16_mixed"
        )
        kernels = Kernels(
            loss_kernel="te",
            dispatcher="alltoall",
            grouped_gemm=True,
            expert_capacity=1.0,
            gradient_fusion=True,
            **NO_OVERLAP,
        )
        group = f"{one['model']}, {training.seq_length} tokens, batch {training.gbs}"
        facts = Facts(layout, model, training, kernels, cluster=Cluster("cuda", 1, 8, "b200-180g"))
        seconds, gib, reserved = (float(one[name]) for name in ("milliseconds", "gib", "reserved_gib"))
        yield Row("simumax-b200", one["case"], True, facts, seconds / 1000, gib, group, reserved)


GPT2_LARGE = Model(
    layers=36, hidden=1280, ffn=5120, heads=20, kv_groups=20, head_dim=64, vocab_size=50257, vocab_rows=50304,
    learned_positions=True, tied=True, gated=False, bias=True, norm_bias=True,
)  # fmt: skip


def gpt2_large(data: str) -> Iterator[Row]:
    for one in _csv(f"{data}.csv"):
        size = {key: int(value) for key, value in one.items() if value.isdigit()}
        stages = None
        if one["vpp"]:  # as the tuned file has it
            parts = [["decoder"] * layers for layers in (10, 10, 10, 6)]
            stages = tuple(map(tuple, (["embedding", *parts[0]], parts[1], parts[2], [*parts[3], "loss"])))
        axes = {axis: size[axis] for axis in ("tp", "pp", "cp")}
        layout = Layout(
            size["gpus"], **axes, vpp=size.get("vpp"), sp=bool(size["sp"]), stages=stages,
            distributed_optimizer=bool(size["distributed"]),
        )  # fmt: skip
        kernels = Kernels(
            graphs="full_iteration" if size["graph"] else "none",
            loss_kernel="ours" if size["kernels"] else "native",
            fused_activation=size["fused"] == 1,
            te_operations=size["fused"] == 2,
            attention_dropout=float(one["dropout"]),
        )
        training = Training(
            gbs=size["gbs"],
            mbs=size["mbs"],
            seq_length=1024,
            precision=one["precision"],
            fp8_weights=not one["name"].startswith("tuned"),
        )
        facts = Facts(
            layout, replace(GPT2_LARGE, dropout=float(one["dropout"])), training, kernels,
            cluster=Cluster("cuda", 1, size["gpus"], "h200-141g"),
        )  # fmt: skip
        seconds, gib = float(one["milliseconds"]) / 1000, float(one["gib"]) if one["gib"] else None
        yield Row(data, one["name"], not one["used_for"], facts, seconds, gib, one["group"], model="gpt2-large")


def of_experiment(data: str, *files: str | Path) -> Iterator[Row]:
    """Rows of an experiment's runs; further files are overlays. The facts come from its plan."""
    plan = make_plan(load([EXPERIMENTS / file for file in files]))
    for one in _csv(f"{data}.csv"):
        seconds = float(one["milliseconds"]) / 1000 if one["milliseconds"] else None
        gib = float(one["gib"]) if one["gib"] else None
        run = plan[one["name"]]
        used_for = one.get("used_for")
        row = Row(data, run.name, not used_for, run.facts, seconds, gib, one["group"], model=run.run.model["name"])
        if used_for in FITTED:
            yield replace(row, held_back=True, **{FITTED[used_for]: None})
            row = replace(row, **{"gib" if FITTED[used_for] == "seconds" else "seconds": None})
        yield row


GPT3_7B = replace(
    GPT2_LARGE, layers=16, hidden=4096, ffn=16384, heads=32, kv_groups=32, head_dim=128, vocab_size=50304,
)  # fmt: skip


def host_bound() -> Iterator[Row]:
    """Steps that wait for the host. They are predicted with a calibration of the same machine, because hosts differ a
    lot."""
    plan = make_plan(load([Path(__file__).parent / "host-bound.yaml"]))
    for one in _csv("h200-host-bound.csv"):
        name = one["name"]
        facts = plan[name].facts
        if name.startswith("dense"):  # a recipe's model isn't in the plan
            training = Training(gbs=16, mbs=4 if name == "dense-mbs4" else 1, seq_length=2048, precision="bf16_mixed")
            graphs = "full_iteration" if name == "dense-graphs" else "none"
            cluster = Cluster("cuda", 1, 2, "h200-141g")
            facts = Facts(Layout(2, tp=2), GPT3_7B, training, Kernels(graphs=graphs), cluster=cluster)
        held_back = not one["used_for"]
        yield Row("h200-host-bound", name, held_back, facts, float(one["milliseconds"]) / 1000, float(one["gib"]))


def same_machine() -> Calibration:
    """The calibration that `megaboa calibrate` wrote before these rows were measured."""
    return records.read(Calibration, HERE / "h200-host-bound.json")


OF_BRIDGE = {
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3_70B": "llama3_70b",
    "LLAMA3.1_405B": "llama3_405b",
    "Qwen3_30B_a3B": "qwen3_30b",
    "Qwen3_235B_a22B": "qwen3_235b",
}


def _of_recipe(model: str, ep: int) -> Kernels:
    """What Bridge 0.6.2's performance recipes for H100 have, and the tables don't say. That of Qwen3-30B-A3B is of 16
    expert parallel ranks: for other layouts its dispatcher isn't known."""
    kernels = Kernels(
        dispatcher="alltoall", grouped_gemm=True, forced_balance=True, loss_kernel="te", fp32_gradients=False
    )
    if "LLAMA" in model:
        return replace(kernels, tp_comm_overlap=True)
    if model == "Qwen3_235B_a22B":
        return replace(kernels, expert_overlap=True)
    return replace(kernels, dispatcher="flex", flex_backend="hybridep") if ep == 16 else kernels


def bridge() -> Iterator[Row]:
    """H100 rows in Bridge's tables, each set of conditions once, from the newest container that has it.

    `fp8` alone means current scaling; recomputation isn't stated.
    """
    found: dict[str, Row] = {}
    for path in sorted(PUBLISHED.glob("megatron-bridge-*.yaml")):
        for one in yaml.safe_load(path.read_text())["rows"]:
            said, tokens = one["conditions"], one["values"].get("tokens_per_second_per_gpu")
            if "H100" not in said["gpu"] or said["model"] not in OF_BRIDGE or not tokens or "precision" not in said:
                continue
            model, world, vpp = MODELS[OF_BRIDGE[said["model"]]], said["world_size"], said.get("vpp")
            axes = {axis: said[axis] for axis in ("tp", "pp", "cp", "ep")}
            # 126 or 94 layers are split unevenly, counting the embedding and the loss as a layer each
            ends = {"embedding_counts": True, "loss_counts": True} if model.layers % (axes["pp"] * (vpp or 1)) else {}
            layout = Layout(
                world, **axes, vpp=vpp, sp=axes["tp"] > 1, fsdp=said.get("fsdp", "none"), **ends
            )  # fmt: skip
            precision = "bf16_with_fp8_current_scaling_mixed" if "fp8" in said["precision"] else "bf16_mixed"
            training = Training(gbs=said["gbs"], mbs=said["mbs"], seq_length=said["seq_length"], precision=precision)
            kernels = _of_recipe(said["model"], layout.ep)
            facts = Facts(layout, model, training, kernels, cluster=Cluster("cuda", world // 8, 8, "h100-80g"))
            seconds = said["gbs"] * said["seq_length"] / (tokens * world)
            name = re.sub(r"[{}']", "", str(said))
            found[name] = Row("bridge-h100", f"{one['name']} {path.stem[-8:]}", True, facts, seconds)
    yield from found.values()


def rows() -> list[Row]:
    return [*vtrain("vtrain-multi"), *vtrain("vtrain-single"), *simumax(), *ours(), *bridge()]


def ours() -> list[Row]:
    llama = of_experiment("h200-llama3-8b", "llama3-8b-2xh200.yaml")
    again = of_experiment("h200-llama3-8b-again", "llama3-8b-2xh200.yaml", "overlays/llama3-8b-fusions.yaml")
    fastest = of_experiment("h200-llama3-8b-fastest", "llama3-8b-2xh200.yaml", "overlays/llama3-8b-fusions.yaml")
    bf16 = of_experiment("h200-llama3-8b-bf16", "llama3-8b-2xh200.yaml")
    eight = of_experiment("h200-llama3-slices", "slices-1xh200.yaml", "overlays/llama3-precisions.yaml")
    of_blind = ("h200-blind", "h200-blind-again", "h200-blind-one")
    blind = [one for data in of_blind for one in of_experiment(data, "blind-2xh200.yaml")]
    blind += of_experiment("h200-blind-one-more", "blind-1xh200.yaml")
    lora = of_experiment("h200-lora", "lora-llama3-8b-2xh200.yaml")
    even = of_experiment("h200-experts-balanced", "blind-2xh200.yaml", "overlays/experts-balanced.yaml")
    four = of_experiment("h200-four", "llama3-8b-8xh200.yaml", "overlays/llama3-8b-4xh200.yaml")
    scaling = [one for data in ("h200-scaling", "h200-scaling-4") for one in of_experiment(data, "scaling-8xh200.yaml")]
    tuned = of_experiment("h200-tune", "llama3-8b-2xh200.yaml", HERE / "h200-tune.yaml")
    of_experts = ("h200-experts", "h200-experts-one-kernel")
    experts = [one for data in of_experts for one in of_experiment(data, "moe-2xh200.yaml")]
    slices = [one for data in ("h200-slices", "h200-one-kernel") for one in of_experiment(data, "slices-1xh200.yaml")]
    gpt2 = [one for data in ("h200-gpt2-large", "h200-tune-gpt2", "h200-gpt2-joined") for one in gpt2_large(data)]
    llamas = [*llama, *again, *fastest, *bf16, *eight]
    return [*gpt2, *llamas, *blind, *lora, *even, *four, *scaling, *tuned, *experts, *slices]
