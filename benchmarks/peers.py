r"""Ours next to what people would use instead: same GPUs, one call, same model, batch and sequence length.

    snakemake data import --configfile config/experiments/llama3-8b-2xh200.yaml
    python benchmarks/peers.py config/experiments/llama3-8b-2xh200.yaml --runs bf16-fsdp fp8-fsdp \
        --torchtitan ~/torchtitan

Runs of the experiment are measured as by in_turn.py. Then come transformers' own model with torch.compile and fused
AdamW (peer_transformers.py, which needs nothing that isn't installed), with FSDP2 on several ranks, and as nanoGPT
trains on one; and with --torchtitan a checkout's own training loop in bf16 and float8 (peer_torchtitan.py). torchrun
starts them, one after another. The first run's model, batch and sequence length are theirs too. Of a recipe they can't
read the model: --model names the folder of a config.json that describes the same one to transformers, e.g.
benchmarks/gpt2-large. Printed are a table, how much faster the fastest of ours is, and every condition.

The checkout is of torchtitan 0.2 (v0.2.2), the last that is configured by TOML files; what it imports (tyro, tomli,
torchdata, einops, torchao) may lie in a folder of PYTHONPATH. A side that fails is a row with its first error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from in_turn import Row, measured, refuse_without_inputs

from megaboa import files
from megaboa.check.facts import Facts
from megaboa.config import load
from megaboa.plan import make_plan
from megaboa.plan.plan import Run
from megaboa.plan.run_facts import known_facts
from megaboa.records import ModelSource, read

HERE = Path(__file__).parent
WARMUP = 5
MINUTES = 8
PACKAGES = ("torch", "transformers", "transformer-engine-torch", "megatron-core", "megatron-bridge", "torchao")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
ERROR = re.compile(r"\w(Error|Exception)\b.*:|Unrecognized|stopped after|terminate called|failed \(exitcode: ")
SIZE = re.compile(r"size: ([\d,]+) total parameters")
STEP = re.compile(r"step: +(\d+) +loss: +([\d.]+).*?memory: +(-?[\d.]+)GiB.*?tps: ([\d,]+)")


@dataclass
class Side:
    """The result of one side of the comparison. `conditions`: everything that could make a difference, by name."""

    name: str
    ours: bool
    conditions: dict[str, str]
    seconds: list[float] = field(default_factory=list)  # step times after warm-up
    losses: list[float] = field(default_factory=list)
    gib: float | None = None  # memory reserved by PyTorch, on the rank with the most
    why: str = ""  # why it failed

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Asked:
    """The settings that all sides share."""

    name: str
    model: Path  # folder with config.json
    tokenizer: Path | None
    device: str
    ranks: int
    seq_length: int
    mbs: int
    gbs: int
    steps: int
    lr: float
    out: Path

    def tokens(self, seconds: float) -> float:
        """Tokens per second and GPU."""
        return self.gbs * self.seq_length / seconds / self.ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="the experiment's YAML files, as for --configfile")
    parser.add_argument(
        "--runs", nargs="+", required=True, help="ours; peers have the model and the batch of the first"
    )
    parser.add_argument("--model", type=Path, help="folder of the config.json of a recipe's model")
    parser.add_argument("--torchtitan", type=Path, help="a checkout of torchtitan 0.2")
    parser.add_argument(
        "--recompute", nargs="+", default=["none"], choices=["none", "full"], help="of the peers' layers"
    )
    parser.add_argument("--micro-batch", type=int, help="of the peers; default: the first run's")
    parser.add_argument("--steps", type=int, default=12, help=f"measured steps, after {WARMUP} others")
    parser.add_argument("--no-compile", action="store_true", help="peers without torch.compile")
    parser.add_argument("--no-transformers", action="store_true", help="torchtitan alone")
    parser.add_argument("--out", type=Path, default=Path("peers"), help="folder of logs and results")
    asked = parser.parse_args()
    plan = make_plan(load(asked.files))
    runs = [plan[name] for name in asked.runs]
    folders = {run.name: run.folder("results", plan.experiment.experiment) for run in runs}
    has_source = runs[0].run.has_source
    if has_source and asked.model:
        sys.exit(f"--model: the peers read the model of {runs[0].name} itself: leave it out")
    if not has_source and not asked.model:
        sys.exit(f"--runs: {runs[0].name} trains a recipe, which the peers can't read: say --model FOLDER")
    if asked.torchtitan and not has_source:
        sys.exit("--torchtitan: a recipe's model has no tokenizer that torchtitan reads: leave it out")
    refuse_without_inputs(folders.values(), asked.files)
    known = {run.name: known_facts(run, folders[run.name].experiment_folder) for run in runs}
    if unread := [name for name, facts in known.items() if facts is None]:
        sys.exit(f"preflight has not read the run {unread[0]} as it is now: call `snakemake preflight` first")
    runs = [replace(run, facts=known[run.name]) for run in runs]
    asked.out.mkdir(parents=True, exist_ok=True)
    source = read(ModelSource, folders[runs[0].name].source_manifest) if has_source else None
    common = _common(runs[0], source, asked)
    _refuse_other_batches(runs)
    (asked.out / "ours.jsonl").unlink(missing_ok=True)  # measure all in one call
    trials = measured(folders, asked.steps, 1, asked.out / "ours.jsonl")
    rows = [Row(run.name, run.facts, tuple(one for one in trials if one.setting == run.name)) for run in runs]
    sides = [_of_ours(run, row, source) for run, row in zip(runs, rows, strict=True)]
    for recompute in asked.recompute:
        if not asked.no_transformers:
            sides.append(transformers_peer(common, recompute, not asked.no_compile))
        for precision in ("bf16", "float8") if asked.torchtitan else ():
            sides.append(torchtitan_peer(common, asked.torchtitan, precision, recompute, not asked.no_compile))
    text = [*table(common, sides), "", *verdict(sides), "", *conditions(sides), "", versions(asked.torchtitan)]
    files.write_json(asked.out / "peers.json", [asdict(side) for side in sides])
    files.write_text(asked.out / "peers.md", "\n".join(text) + "\n")
    print("\n".join(text))
    if all(side.ours or side.why for side in sides) or any(side.ours and side.why for side in sides):
        sys.exit("a side that is needed for the comparison failed")


def _common(run: Run, source: ModelSource | None, asked: argparse.Namespace) -> Asked:
    training, ranks = run.facts.training, run.facts.layout.world_size or 1
    mbs, gbs = asked.micro_batch or training.mbs or 1, training.gbs or 1
    if gbs % (mbs * ranks):
        sys.exit(f"peers: batch {gbs} is no multiple of {ranks} ranks times micro-batch {mbs}: set --micro-batch")
    return Asked(
        name=run.model,
        model=Path(source.path if source else asked.model).absolute(),
        tokenizer=Path(source.tokenizer or source.path).absolute() if source else None,
        device=run.run.device,
        ranks=ranks,
        seq_length=training.seq_length or 1,
        mbs=mbs,
        gbs=gbs,
        steps=WARMUP + asked.steps,
        lr=run.config.optimizer.lr,
        out=asked.out.absolute(),
    )


def _refuse_other_batches(runs: Sequence[Run]) -> None:
    """Exit if the runs differ in model, batch, sequence length or number of GPUs, which one table must share."""
    sizes = {
        (run.model, run.facts.training.gbs, run.facts.training.seq_length, run.facts.layout.world_size): run.name
        for run in runs
    }
    if len(sizes) > 1:
        listed = "; ".join(
            f"{name}: {model}, batch {gbs} of {seq}, {n} ranks" for (model, gbs, seq, n), name in sizes.items()
        )
        sys.exit(f"--runs must have one model, batch, sequence length and number of GPUs: {listed}")


# --- ours -------------------------------------------------------------------------------------------------------------


def _of_ours(run: Run, row: Row, source: ModelSource | None) -> Side:
    trial = row.trials[0]
    count = source.params if source else run.run.model.get("params")
    told = {"parameters": f"{count:,}" if count else "-", **_our_conditions(run)}
    side = Side(f"Megaboa, `{run.name}`", True, told, list(trial.steps), list(trial.losses), trial.gib)
    if not trial.steps:
        side.why = f"{trial.state}: {trial.why}"
    return side


def _our_conditions(run: Run) -> dict[str, str]:
    f = run.facts
    recompute = f.kernels.recompute or "none"
    if recompute == "full" and f.kernels.recompute_method == "block":
        recompute = f"first {f.kernels.recompute_layers} layers"
    low = "fp8" in (f.training.precision or "")
    half = f.layout.fsdp == "megatron" or not f.kernels.fp32_gradients
    return {
        "layout": _layout(f),
        "micro-batch": str(f.training.mbs),
        "precision": f"{f.training.precision}" + (", weights in bf16" if low and not f.training.fp8_weights else ""),
        "weights, optimizer": "bf16 weights; fp32 copies and Adam's moments, sharded",
        "gradients are added up in": "bf16" if half else "fp32",
        "recomputed": recompute,
        "compiled or graphs": f"Megatron's fused kernels; CUDA graphs: {f.kernels.graphs}",
        "attention": "Transformer Engine" if run.run.device == "cuda" else "Megatron's own on CPUs",
        "loss": f"cross entropy: {f.kernels.loss_kernel}",
        "data": ", ".join(run.corpora) or "mock",
    }


def _layout(f: Facts) -> str:
    axes = [f"{name}{getattr(f.layout, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(f.layout, name) > 1]
    copies = f"FSDP ({f.layout.fsdp}) over {f.layout.dp}" if f.layout.fsdp != "none" else f"dp{f.layout.dp}"
    sharded = ", optimizer sharded" if f.layout.fsdp == "none" and f.layout.distributed_optimizer else ""
    return " ".join([*axes, *(["sp"] if f.layout.sp else []), copies]) + sharded


# --- peers ------------------------------------------------------------------------------------------------------------


def transformers_peer(common: Asked, recompute: str, compiled: bool) -> Side:
    spec, out = common.out / "transformers.spec.json", common.out / f"transformers-{recompute}.json"
    out.unlink(missing_ok=True)
    wanted = {**asdict(common), "model": str(common.model), "tokenizer": None, "out": str(out)}
    files.write_json(spec, {**wanted, "recompute": recompute, "compile": compiled})
    log = common.out / f"transformers-{recompute}.log"
    code = _torchrun(common, log, [str(HERE / "peer_transformers.py"), str(spec)])
    alone = common.ranks == 1
    compiled_parts = "the whole model" if alone else "each layer"
    side = Side(
        f"transformers{'' if alone else ', FSDP2'}{', torch.compile' if compiled else ''}{_again(recompute)}",
        False,
        {
            "layout": "one rank" if alone else f"FSDP2 over {common.ranks}",
            "micro-batch": str(common.mbs),
            "precision": "bf16 by autocast" if alone else "bf16",
            "weights, optimizer": f"fp32 weights and Adam's moments{'' if alone else ', sharded; gathered in bf16'}",
            "gradients are added up in": "fp32",
            "recomputed": recompute,
            "compiled or graphs": f"torch.compile, {compiled_parts} and the loss" if compiled else "eager",
            "attention": "-",
            "loss": "cross entropy of fp32 logits",
            "data": "random tokens",
        },
    )
    if code or not out.exists():
        side.why = _end(log)
        return side
    answer = json.loads(out.read_text())
    side.conditions |= {"attention": answer["attention"], "parameters": f"{answer['params']:,}"}
    side.seconds, side.losses, side.gib = answer["seconds"][WARMUP:], answer["losses"], answer["gib"] or None
    return side


def torchtitan_peer(common: Asked, checkout: Path, precision: str, recompute: str, compiled: bool) -> Side:
    checkout = checkout.expanduser().absolute()
    side = Side(
        f"torchtitan, {precision}{', torch.compile' if compiled else ''}{_again(recompute)}",
        False,
        {
            "layout": f"FSDP2 over {common.ranks}",
            "micro-batch": str(common.mbs),
            "precision": precision if precision == "bf16" else "bf16 with float8 products, tensorwise, and gathering",
            "weights, optimizer": "fp32 weights and Adam's moments, sharded; gathered in bf16",
            "gradients are added up in": "fp32",
            "recomputed": recompute,
            "compiled or graphs": "torch.compile, each layer and the loss" if compiled else "eager",
            "attention": "PyTorch's scaled_dot_product_attention",
            "loss": "cross entropy of fp32 logits",
            "data": "Python's standard library, tokenized while it trains",
        },
    )
    if not (checkout / "torchtitan/models/llama3/train_configs/llama3_8b.toml").exists():
        side.why = f"{checkout} is no torchtitan 0.2: git checkout v0.2.2"
        return side
    documents = common.out / "text"
    _write_text(documents)
    log = common.out / f"torchtitan-{precision}-{recompute}.log"
    command = [str(HERE / "peer_torchtitan.py"), str(common.model), *_flags(common, documents, recompute, compiled)]
    if precision == "float8":
        command += ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output"]
        command += ["--quantize.linear.float8.enable_fsdp_float8_all_gather"]
        command += ["--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"]
    code = _torchrun(common, log, command, [str(checkout)])
    text = COLORS.sub("", log.read_text(errors="replace"))
    side.conditions["parameters"] = size[1] if (size := SIZE.search(text)) else "-"
    found = map(STEP.search, text.splitlines())
    steps = {int(one[1]): one for one in found if one}
    if code or len(steps) < common.steps:
        side.why = _end(log)
        return side
    side.losses = [float(one[2]) for one in steps.values()]
    side.gib = max(0.0, *(float(one[3]) for one in steps.values())) or None  # -0.00 on a CPU
    rates = [float(one[4].replace(",", "")) for number, one in sorted(steps.items()) if number > WARMUP]
    side.seconds = [common.tokens(1.0) / rate for rate in rates if rate]
    return side


def _flags(common: Asked, text: Path, recompute: str, compiled: bool) -> list[str]:
    values = {
        "job.dump_folder": common.out / "torchtitan",
        "model.name": "llama3",
        "model.flavor": "peer",
        "model.hf_assets_path": common.tokenizer,
        "metrics.log_freq": 1,
        "optimizer.lr": common.lr,
        "lr_scheduler.warmup_steps": WARMUP,
        "training.local_batch_size": common.mbs,
        "training.global_batch_size": common.gbs,
        "training.seq_len": common.seq_length,
        "training.steps": common.steps,
        "training.dataset": "c4_test",  # the dataset type that reads a local folder of text
        "training.dataset_path": text,
        "activation_checkpoint.mode": recompute,
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*flags, *(["--compile.enable"] if compiled else [])]


def _write_text(folder: Path) -> None:
    """Write Python's standard library as text, one file per document. 20 MB suffice for any of these runs."""
    folder.mkdir(parents=True, exist_ok=True)
    size = 0
    with (folder / "data.json").open("w") as out:
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" not in path.parts and size < 20e6:
                text = path.read_text(errors="replace")
                size += len(text)
                out.write(json.dumps({"text": text}) + "\n")


def _torchrun(common: Asked, log: Path, command: list[str], paths: Sequence[str] = ()) -> int:
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={common.ranks}",
        *command,
    ]
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    print(f"{log.stem} ...", file=sys.stderr, flush=True)
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait(60 * MINUTES)
        except BaseException as error:
            process.terminate()  # torchrun ends its ranks, which have their own sessions
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            out.write(f"\nstopped after {MINUTES} minutes\n")
            return 124


def _again(recompute: str) -> str:
    return "" if recompute == "none" else ", recomputed"


def _end(log: Path) -> str:
    """The first error in a log, or else its last line."""
    lines = [COLORS.sub("", line).strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if ERROR.search(line) and "ChildFailed" not in line]
    return f"{(errors or [line for line in lines if line][-1:] or ['no output'])[0][:300]} ({log})"


# --- what is printed --------------------------------------------------------------------------------------------------


def table(common: Asked, sides: Sequence[Side]) -> list[str]:
    lines = [
        f"{common.name}: batch {common.gbs}, sequence {common.seq_length:,}, {common.ranks} ranks, "
        f"median of {common.steps - WARMUP} steps after {WARMUP}",
        "",
        "| | tokens/s/GPU | ms a step (lowest, highest) | GiB reserved | loss, first and last |",
        "|---|---:|---:|---:|---|",
    ]
    for side in sides:
        if side.median is None:
            lines.append(f"| {side.name} | - | - | - | failed: {side.why} |")
            continue
        spread = f"{min(side.seconds) * 1000:,.0f} to {max(side.seconds) * 1000:,.0f}"
        memory = f"{side.gib:.1f}" if side.gib else "-"
        losses = f"{side.losses[0]:.3f}, {side.losses[-1]:.3f}"
        rate, step = f"{common.tokens(side.median):,.0f}", f"{side.median * 1000:,.0f}"
        lines.append(f"| {side.name} | {rate} | {step} ({spread}) | {memory} | {losses} |")
    return lines


def verdict(sides: Sequence[Side]) -> list[str]:
    """Compare the fastest of ours with the fastest of the others."""
    best = {
        ours: min(
            (side for side in sides if side.median and side.ours is ours),
            key=lambda side: side.median or 0.0,
            default=None,
        )
        for ours in (True, False)
    }
    if not best[True] or not best[False]:
        return ["No ratio: one of the two sides has no measured run."]
    ratio = (best[False].median or 0.0) / (best[True].median or 1.0)
    return [f"{best[True].name} is {ratio:.2f} times as fast as {best[False].name}, the fastest of the others."]


def conditions(sides: Sequence[Side]) -> list[str]:
    names = list(dict.fromkeys(name for side in sides for name in side.conditions))
    lines = ["| condition | " + " | ".join(side.name for side in sides) + " |", "|---" * (len(sides) + 1) + "|"]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(side.conditions.get(name, "-") for side in sides) + " |")
    return lines


def versions(checkout: Path | None) -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    if checkout:
        version = checkout.expanduser() / "assets/version.txt"
        found.append(f"torchtitan {version.read_text().strip() if version.exists() else 'of an unknown version'}")
    return f"Python {sys.version.split()[0]}, {', '.join(found)}"


if __name__ == "__main__":
    main()
