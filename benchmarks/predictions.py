"""How far predicted step times and memory are from measured ones, and how good the layout is that would be chosen.

    .venv/bin/python benchmarks/predictions.py [--fit] [--rows] [--speed] [--expect] [--write]

The data, their sources, and what of them was fitted: benchmarks/measured/README.md. `--fit`: errors of the rows that
were fitted; `--rows`: every row; `--speed`: how long the ranking of 10,000 layouts of a 70B model takes.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, cycle, islice
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow" / "scripts"))

import former_speed

from megaboa import peaks, records
from megaboa.check import adviser, calibration, memory, speed
from megaboa.check.facts import Cluster, Facts, Kernels, Model, Training
from megaboa.check.memory import GIB
from megaboa.config import load
from megaboa.layout import Layout
from megaboa.plan import make_plan
from megaboa.records import Calibration, HeldBack, Law, Link

HERE = Path(__file__).parent / "measured"
PUBLISHED = Path(__file__).parents[1] / "config" / "published"
EXPERIMENTS = Path(__file__).parents[1] / "config" / "experiments"
FULL = Kernels(recompute="full", recompute_method="uniform", recompute_layers=1)
FITTED = {"host": "seconds", "uneven experts": "gib"}  # to half of a row: the other half is held back
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


Pair = tuple[float, float]  # a predicted and a measured time
CLEAR = 0.05  # a difference of two measured times that is more than noise


@dataclass(frozen=True)
class Errors:
    """Errors of step times, as ratios of predicted to measured, and of memory, as relative differences."""

    rows: int
    median: float
    worst: float
    bias: float  # the median ratio
    ordered: float | None  # share of pairs that are ordered correctly
    clear: float | None  # the same of pairs that differ by CLEAR or more
    regret: float | None  # mean loss by choosing the layout that is predicted to be fastest
    worst_regret: float | None


# --- the rows ---------------------------------------------------------------------------------------------------------


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
    blind = [one for data in ("h200-blind", "h200-blind-again") for one in of_experiment(data, "blind-2xh200.yaml")]
    even = of_experiment("h200-experts-balanced", "blind-2xh200.yaml", "overlays/experts-balanced.yaml")
    four = of_experiment("h200-four", "llama3-8b-8xh200.yaml", "overlays/llama3-8b-4xh200.yaml")
    scaling = [one for data in ("h200-scaling", "h200-scaling-4") for one in of_experiment(data, "scaling-8xh200.yaml")]
    tuned = of_experiment("h200-tune", "llama3-8b-2xh200.yaml", HERE / "h200-tune.yaml")
    of_experts = ("h200-experts", "h200-experts-one-kernel")
    experts = [one for data in of_experts for one in of_experiment(data, "moe-2xh200.yaml")]
    slices = [one for data in ("h200-slices", "h200-one-kernel") for one in of_experiment(data, "slices-1xh200.yaml")]
    gpt2 = [one for data in ("h200-gpt2-large", "h200-tune-gpt2", "h200-gpt2-joined") for one in gpt2_large(data)]
    llamas = [*llama, *again, *fastest, *bf16, *eight]
    return [*gpt2, *llamas, *blind, *even, *four, *scaling, *tuned, *experts, *slices]


# --- the errors -------------------------------------------------------------------------------------------------------


def of_times(given: list[Row], predict: Callable[[Facts], float]) -> Errors | None:
    timed = [(one, predict(one.facts)) for one in given if one.seconds]
    if not timed:
        return None
    ratios = [predicted / one.seconds for one, predicted in timed if one.seconds]
    groups = defaultdict(list)
    for one, predicted in timed:
        if one.group:
            groups[one.group].append((predicted, one.seconds or 0.0))
    pairs = [(a, b) for group in groups.values() for a, b in combinations(group, 2) if a[1] != b[1]]
    chosen = [min(group)[1] / min(measured for _, measured in group) - 1 for group in groups.values() if len(group) > 1]
    clear = [(a, b) for a, b in pairs if max(a[1], b[1]) >= (1 + CLEAR) * min(a[1], b[1])]
    return Errors(
        len(timed),
        statistics.median(abs(ratio - 1) for ratio in ratios),
        max(abs(ratio - 1) for ratio in ratios),
        statistics.median(ratios),
        _in_order(pairs),
        _in_order(clear),
        statistics.mean(chosen) if chosen else None,
        max(chosen) if chosen else None,
    )


def _in_order(pairs: list[tuple[Pair, Pair]]) -> float | None:
    return sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs) / len(pairs) if pairs else None


def of_memory(given: Iterable[Row]) -> dict[str, float]:
    """Relative errors of predicted memory, by row."""
    return {one.name: memory.peak(one.facts).tensors / GIB / one.gib - 1 for one in given if one.gib}


def table(given: list[Row], models: dict[str, Callable[[Facts], float]]) -> list[str]:
    lines = [
        "| data | model | rows | median error | worst | median ratio | pairs in order | 5% apart | regret, mean "
        "| worst |",
        "|---|---|" + "---:|" * 8,
    ]
    for data in dict.fromkeys(one.data for one in given):
        for name, predict in models.items():
            found = of_times([one for one in given if one.data == data], predict)
            if found is None:
                continue
            shares = (found.ordered, found.clear, found.regret, found.worst_regret)
            cells = ["-" if share is None else f"{share:.1%}" for share in shares]
            lines.append(
                f"| {data} | {name} | {found.rows:,} | {found.median:.1%} | {found.worst:.0%} | {found.bias:.2f} "
                f"| {' | '.join(cells)} |"
            )
    return lines


def host_table() -> list[str]:
    """Predictions of steps that wait for the host. The shipped calibration is from another host."""
    lines = [
        "| run | measured ms | with what is shipped | error | with the machine's own | error |",
        "|---|" + "---:|" * 5,
    ]
    own = same_machine()
    for one in host_bound():
        measured = one.seconds or 0.0
        both = [speed.of_step(one.facts, known).seconds for known in (None, own)]
        cells = [f"{seconds * 1000:,.0f} | {seconds / measured - 1:+.0%}" for seconds in both]
        lines.append(f"| `{one.name}` | {measured * 1000:,.0f} | {' | '.join(cells)} |")
    return lines


def memory_table(given: list[Row]) -> list[str]:
    lines = ["| data | rows | mean error | lowest | highest |", "|---|---:|---:|---:|---:|"]
    for data in dict.fromkeys(one.data for one in given):
        found = list(of_memory(one for one in given if one.data == data).values())
        if found:
            mean = statistics.mean(map(abs, found))
            lines.append(f"| {data} | {len(found)} | {mean:.1%} | {min(found):+.1%} | {max(found):+.1%} |")
    return lines


# --- what to expect ---------------------------------------------------------------------------------------------------

ADAPTER = 50e9  # a GPU's share of the network in bytes per second: 400 Gbit/s


def limit(gpu: str) -> Calibration:
    """An ideal machine by the data sheets: every part at its peak, without waiting.

    The rates of memory and NVLink are bytes per second in each direction.
    """
    sheet = peaks.BY_KIND[gpu]
    full, low = Law(rate=sheet.tflops * 1e12), Law(rate=2 * sheet.tflops * 1e12)
    products = {"bf16": full, **dict.fromkeys(("fp8_current", "fp8_delayed", "fp8_blocks", "mxfp8"), low)}
    passes = Law(rate=sheet.bandwidth * 1e12 * speed.BYTES_OF_PASS)
    node, network = (
        Link(ranks=8, all_reduce=law, all_gather=law, reduce_scatter=law, all_to_all=law, send=law)
        for law in (Law(rate=sheet.links.rate * 1e9), Law(rate=ADAPTER))
    )
    return Calibration(
        name=f"{gpu}, data sheet", gpu=gpu, source="data sheets", products=products, grouped=products,
        attention={"forward": full, "backward": full}, memory=passes, launch=0.0, layer={"bf16": 0.0}, node=node,
        network=network,
    )  # fmt: skip


def expected(given: Iterable[Row]) -> list[str]:
    lines = ["| run | GPUs | measured ms | predicted | limit | predicted parts |", "|---|---:|---:|---:|---:|---|"]
    for one in given:
        if not one.seconds:
            continue
        gpu = str(one.facts.cluster.gpu).split("-")[0]
        predicted, least = speed.of_step(one.facts), speed.of_step(one.facts, limit(gpu))
        times = " | ".join(f"{seconds * 1000:,.0f}" for seconds in (one.seconds, predicted.seconds, least.seconds))
        gpus = f"{one.facts.layout.world_size} {gpu.upper()}"
        name = one.name if one.name.startswith(one.model) else f"{one.model} {one.name}"
        name += ", one kernel for all experts" if one.data.endswith("one-kernel") else ""
        lines.append(f"| {name} | {gpus} | {times} | {predicted.shares(0.05)} |")
    return lines


def ranked(count: int = 10_000) -> tuple[int, float]:
    """Check the memory of many layouts of a 70B model and predict their times; returns their number and the seconds."""
    training = Training(gbs=1024, mbs=1, seq_length=8192, precision="bf16_mixed")
    facts = Facts(Layout(), MODELS["llama3_70b"], training, cluster=Cluster("cuda", 64, 8, "h100-80g"))
    every = list(islice(cycle(list(adviser.candidates(facts))), count))
    start = time.process_time()
    for one in every:
        memory.peak(one)
        speed.of_step(one)
    return len(every), time.process_time() - start


def checked() -> dict[str, Calibration]:
    """The shipped calibrations with their errors, by GPU."""
    found = defaultdict(list)
    for one in (*rows(), *host_bound()):
        if one.held_back and one.seconds:
            found[str(one.facts.cluster.gpu).split("-")[0]].append(one)
    return {gpu: _checked(gpu, given) for gpu, given in found.items()}


def _checked(gpu: str, given: list[Row]) -> Calibration:
    known = records.read(Calibration, calibration.SHIPPED / f"{gpu}.json")
    kinds: dict[bool, list[Row]] = {False: [], True: []}
    for one in given:
        kinds[speed.is_uncertain(one.facts, speed.of_step(one.facts, known))].append(one)
    return replace(known, held_back=_errors(kinds[False], known), held_back_by_host=_errors(kinds[True], known))


def _errors(given: list[Row], known: Calibration) -> HeldBack | None:
    errors = of_times(given, lambda f: speed.of_step(f, known).seconds)
    if errors is None:
        return None
    data = ", ".join(dict.fromkeys(one.data for one in given))
    return HeldBack(data=data, rows=errors.rows, median=round(errors.median, 3), worst=round(errors.worst, 3))


def write() -> None:
    for gpu, found in checked().items():
        records.write(calibration.SHIPPED / f"{gpu}.json", found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="the rows that were fitted")
    parser.add_argument("--rows", action="store_true", help="every row")
    parser.add_argument("--speed", action="store_true", help="layouts per second")
    parser.add_argument("--expect", action="store_true", help="measured, predicted, and what data sheets allow")
    parser.add_argument("--write", action="store_true", help="errors into the shipped calibrations")
    arguments = parser.parse_args()
    if arguments.write:
        write()
    given = [one for one in rows() if one.held_back is not arguments.fit]
    models = {"before": lambda f: former_speed.of_step(f).seconds, "now": lambda f: speed.of_step(f).seconds}
    print("\n".join([*table(given, models), "", *memory_table(given), "", *host_table()]))
    if arguments.expect:
        print("\n".join(["", *expected([*ours(), *bridge(), *simumax()])]))
    if arguments.rows:
        for one in given:
            gib = f"{one.gib:.1f} GiB {memory.peak(one.facts).tensors / GIB / one.gib:.3f}" if one.gib else ""
            step = speed.of_step(one.facts)
            parts = " ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in vars(step).items() if seconds)
            ratio = step.seconds / one.seconds if one.seconds else 0.0
            print(f"{one.data} {one.name}: {(one.seconds or 0) * 1000:.0f} ms {ratio:.3f} ({parts}) {gib}")
    if arguments.speed:
        count, seconds = ranked()
        print(f"\n{count:,} layouts of Llama-3-70B on 512 GPUs: {seconds:.1f} s of one core")


if __name__ == "__main__":
    main()
