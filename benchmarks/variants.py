"""Which settings make a run faster? Trains variants of one planned run, each for its few steps, and prints a table.

    python benchmarks/variants.py results/gpt2-large-2xh200/runs/gpu1 benchmarks/gpt2_large_variants.json --out variants

The file holds a list of `{"name": ..., "training": {...}, "parallel": {...}, "overrides": {...}, "args": {...}}`. Each
is laid over the run's own values (`args`: of its recipe); `"ranks"` is the number of ranks (default 1), `"run"` another
run of the same experiment, `"environment"` variables, and `"profile": true` writes a table of the kernels of two steps.
Variants run side by side, on as many GPUs as there are. A step's time is Bridge's own, the median of step 9 and later.
While some ranks train, the next ones have been started and have made their imports.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa import files
from megaboa.bridge import process
from megaboa.paths import RunFolder
from megaboa.records import RunSpec, parse
from megaboa.scheduler.local import die_with_parent
from megaboa.store_paths import AttemptFolder, RunStore

FIRST_TIMED = 9
FIRST_PORT = 20_000
PROFILED = (16, 18)
LINE = re.compile(
    r"iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)(?:.*throughput per GPU \(TFLOP/s/GPU\): ([\d.]+))?"
)
CLASSES = {  # classes of kernels, by the first pattern in the name
    "communication": "nccl",
    "attention": "fmha|flash|sdpa|_attn|attention",
    "matrix products": "gemm|nvjet|cutlass|xmma|wgmma|cublas|splitk",
    "quantization": "fp8|amax|quantize|cast_transpose|transpose",
    "optimizer": "multi_tensor|adam|l2norm",
    "norms": "layernorm|ln_fwd|ln_bwd|norm_kernel|normalization|rmsnorm",
    "compiled by Inductor": "^triton_",
    "dropout": "dropout",
    "reductions": "reduce",
    "copies": "memcpy|memset|copy|fill|^cat|catarray",
    "elementwise": "elementwise|vectorized|index|gather|scatter|gelu",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("variants", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=4, help="ranks that are started ahead")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further variant after so long")
    parser.add_argument("--limit", type=float, default=150, help="seconds that one variant may take")
    arguments = parser.parse_args()
    wanted = [
        v for v in json.loads(arguments.variants.read_text()) if not arguments.only or v["name"] in arguments.only
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    Schedule(wanted, arguments).run()
    report(wanted, arguments.out)


class Schedule:
    """Starts variants in order, each as soon as enough GPUs are free."""

    def __init__(self, wanted: list[dict[str, Any]], arguments: argparse.Namespace):
        self.waiting, self.arguments = list(wanted), arguments
        self.free = set(range(arguments.gpus))
        self.running: list[tuple[dict[str, Any], list[int], list[subprocess.Popen], float]] = []
        self.ready: list[subprocess.Popen] = []
        self.began = time.time()
        self.port = FIRST_PORT  # one per variant, as another process may take a port that is released

    def run(self) -> None:
        while self.waiting or self.running:
            self.start_ahead()
            while self.waiting and len(self.free) >= self.waiting[0].get("ranks", 1):
                if time.time() - self.began > self.arguments.seconds:
                    print("no time for", *(variant["name"] for variant in self.waiting), flush=True)
                    self.waiting = []
                    break
                self.start(self.waiting.pop(0))
            for entry in list(self.running):
                self.look_after(entry)
            time.sleep(0.1)
        for worker in self.ready:
            worker.kill()

    def start_ahead(self) -> None:
        ranks = sum(variant.get("ranks", 1) for variant in self.waiting)
        while len(self.ready) < min(self.arguments.ahead, ranks):
            command = [sys.executable, __file__, "--rank", str(self.arguments.run)]
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self.ready.append(worker)

    def start(self, variant: dict[str, Any]) -> None:
        gpus = sorted(self.free)[: variant.get("ranks", 1)]
        self.free -= set(gpus)
        folder = self.arguments.out / variant["name"]
        folder.mkdir(parents=True, exist_ok=True)
        self.port += 1
        workers = []
        for rank in range(len(gpus)):
            if not self.ready:
                self.start_ahead()
            worker = self.ready.pop(0)
            job = {"variant": variant, "folder": str(folder.absolute()), "rank": rank, "gpus": gpus, "port": self.port}
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            worker.stdin.flush()
            workers.append(worker)
        self.running.append((variant, gpus, workers, time.time()))

    def look_after(self, entry: tuple[dict[str, Any], list[int], list[subprocess.Popen], float]) -> None:
        variant, gpus, workers, since = entry
        codes = [worker.poll() for worker in workers]
        if any(codes) or time.time() - since > self.arguments.limit:
            for worker in workers:
                worker.kill()
                worker.wait()
        elif None in codes:
            return
        self.running.remove(entry)
        self.free |= set(gpus)
        print(f"{time.time() - self.began:4.0f} s: {one_line(variant, self.arguments.out)}", flush=True)


def be_a_rank(run: Path) -> None:
    """Import everything, then wait for a job."""
    die_with_parent()
    process.prepare(RunFolder(run).run.device, 4)
    from megatron.bridge.training import gpt_step, initialize, pretrain  # noqa: F401

    job = json.loads(sys.stdin.readline())
    folder, rank, gpus = Path(job["folder"]), job["rank"], job["gpus"]
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    environment(job["variant"], rank, gpus, job["port"])
    try:
        train(job["variant"], folder, run, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # leftovers of a failed run may wait forever


def environment(variant: dict[str, Any], rank: int, gpus: list[int], port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(gpus[rank]),
        "WORLD_SIZE": str(len(gpus)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **variant.get("environment", {}),
    }


def planned(variant: dict[str, Any], run: Path) -> tuple[RunFolder, RunSpec]:
    folder = RunFolder(run.parent / variant["run"] if "run" in variant else run)
    changed = copy.deepcopy(folder.document("run"))
    changed["model"]["args"] = {**changed["model"].get("args", {}), **variant.get("args", {})}
    for section in ("training", "optimizer", "schedule", "parallel", "overrides"):
        changed[section] = {**changed.get(section, {}), **variant.get(section, {})}
        changed[section] = {name: value for name, value in changed[section].items() if value is not None}
    changed["world_size"] = variant.get("ranks", 1)
    return folder, parse(RunSpec, changed, folder.file("run"))


def train(variant: dict[str, Any], out: Path, run: Path, rank: int) -> None:
    import torch
    from megatron.bridge.training import initialize
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge import configuration, wheels
    from megaboa.bridge.callbacks import EndRecord, StepWriter

    for command in variant.get("python", []):
        exec(command, {"torch": torch})
    folder, changed = planned(variant, run)
    config = configuration.build(changed, configuration.Inputs.read(folder))
    attempt = AttemptFolder(out)
    cache = Path(folder.index.cache) if folder.index else out / "index-cache"
    configuration.place(config, folder.launch, RunStore(out), attempt, None, cache)
    wheels.keep_compiled_helpers(initialize)
    wheels.without_missing_kernels(config.model, changed.overrides)
    if variant.get("profile"):
        profiled = config.profiling
        profiled.use_pytorch_profiler, profiled.profile_ranks = True, [0]
        profiled.profile_step_start, profiled.profile_step_end = PROFILED
    callbacks = [EndRecord(attempt, rank)]
    if rank == changed.world_size - 1:
        attempt.steps.unlink(missing_ok=True)
        callbacks.append(StepWriter(attempt.steps))
    (out / "end").mkdir(exist_ok=True)
    pretrain(config, forward_step, callbacks=callbacks)


def result(variant: dict[str, Any], out: Path) -> dict[str, Any]:
    folder = out / variant["name"]
    last = variant.get("ranks", 1) - 1
    lines = [LINE.search(line) for line in read(folder / f"rank-{last}.log").splitlines()]
    profiled = range(PROFILED[0] - 1, PROFILED[1] + 3) if variant.get("profile") else ()
    timed = [m for m in lines if m and int(m[1]) >= FIRST_TIMED and int(m[1]) not in profiled]
    recorded = [event for event in files.read_jsonl(folder / "steps.jsonl") if event["event"] == "step"]
    ends = [files.read_json(path) for path in sorted((folder / "end").glob("*.json"))]
    found: dict[str, Any] = {"name": variant["name"], "steps": len(recorded), "done": len(ends) == last + 1}
    if timed:
        times = [float(m[2]) for m in timed]
        found |= {"ms": statistics.median(times), "least": min(times), "most": max(times), "timed": len(times)}
        if timed[-1][3]:
            found["tflops"] = statistics.median(float(m[3]) for m in timed)
    if recorded:
        found |= {"loss": recorded[-1]["loss"], "skipped": sum(event["skipped"] for event in recorded)}
        found["losses"] = [event["loss"] for event in recorded]
    if ends and "peak_allocated" in ends[0]:
        found["gib"] = max(end["peak_allocated"] for end in ends) / 2**30
    if not found["done"]:
        found["why"] = why(folder)
    return found


def why(folder: Path) -> str:
    for log in sorted(folder.glob("rank-*.log")):
        wrong = [line for line in read(log).splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Exit)\b.*", line)]
        if wrong:
            return wrong[-1].strip()[:300]
    return "it was ended: no time was left"


def one_line(variant: dict[str, Any], out: Path) -> str:
    found = result(variant, out)
    if not found["done"]:
        return f"{found['name']:28} FAILED after {found['steps']} steps: {found['why']}"
    return (
        f"{found['name']:28} {found.get('ms', 0):7.1f} ms ({found.get('least', 0):.1f} to {found.get('most', 0):.1f})"
        f" {found.get('tflops', 0):5.0f} TFLOP/s {found.get('gib', 0):6.1f} GiB loss {found['loss']:.4f}"
        f" skipped {found['skipped']}"
    )


def report(wanted: list[dict[str, Any]], out: Path) -> None:
    files.write_json(out / "results.json", [result(variant, out) for variant in wanted])
    for variant in wanted:
        for trace in (out / variant["name"]).glob("**/torch_profile/rank-*.json.gz"):
            text = kernels(trace)
            (out / f"{variant['name']}.kernels.txt").write_text(text)
            trace.unlink()
    print("\n".join(one_line(variant, out) for variant in wanted))


def kernels(trace: Path) -> str:
    """Milliseconds per step on the GPU, by class and by kernel."""
    with gzip.open(trace, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not on_gpu:
        return "no kernel\n"
    steps = PROFILED[1] - PROFILED[0]
    by_name: dict[str, list[float]] = {}
    for event in on_gpu:
        by_name.setdefault(event["name"], []).append(event["dur"] / 1000 / steps)
    by_class: dict[str, float] = {}
    for name, times in by_name.items():
        by_class[class_of(name)] = by_class.get(class_of(name), 0) + sum(times)
    first, last = min(e["ts"] for e in on_gpu), max(e["ts"] + e["dur"] for e in on_gpu)
    total = sum(by_class.values())
    lines = [f"{(last - first) / 1000 / steps:9.1f} ms a step, {total:.1f} ms of kernels"]
    lines += [f"{value:9.2f}  {name}" for name, value in sorted(by_class.items(), key=lambda item: -item[1])]
    lines += [""]
    ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:45]
    lines += [f"{sum(t):9.2f} {len(t) / steps:6.0f} x  [{class_of(n)[:12]}] {n[:150]}" for n, t in ordered]
    return "\n".join(lines) + "\n"


def class_of(name: str) -> str:
    lowered = name.lower()
    return next((found for found, pattern in CLASSES.items() if re.search(pattern, lowered)), "other")


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        be_a_rank(Path(sys.argv[2]))
    else:
        main()
