"""Is the layer split that the doctor advises faster? Two pipeline stages of a small model with a large vocabulary.

    python benchmarks/stages.py --repeat 3

The even split and the advised one by turns, each a run of an experiment of its own, `results/stages`, whose shared
stages were made before. A step's time is that of the median step after the first ones.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa import files
from megaboa.check.facts import Facts, from_json
from megaboa.doctor import passed
from megaboa.paths import RunFolder

SKIPPED = 3
RESULTS = Path("results/stages")
CONFIG = Path("stages.yaml")
EXPERIMENT = """\
experiment: stages
device: cpu
tokenizers: {bpe: {train_on: text, vocab_size: 8192}}
corpora: {text: {source: python-stdlib, limit: 400}}
models:
  wide:
    tokenizer: bpe
    init: scratch
    config: {model_type: qwen3, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 8,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 256}
data: {split: "100,0,0"}
training: {train_iters: 15, global_batch_size: 8, micro_batch_size: 1, seq_length: 256, precision: fp32}
schedule: {warmup_iters: 2}
checkpoint: {save_interval: 0}
parallel: {pp: 2}
resources: {gpus_per_node: 2}
export: {runs: []}
sweep:
  runs:
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    even = preflight({"even-1": "{}"})["even-1"]
    best = passed.better_split(even)
    if best is None:
        sys.exit("the doctor knows no better split")
    split = {"first": best.layout.first_stage_layers, "last": best.layout.last_stage_layers}
    keys = {name: f"overrides.model.num_layers_in_{name}_pipeline_stage" for name in split}
    advised = ", ".join(f"{keys[name]}: {size}" for name, size in split.items() if size is not None)
    runs = {}
    for number in range(1, repeat + 1):
        seed = f"training.seed: {number}"
        runs |= {f"even-{number}": f"{{{seed}}}", f"advised-{number}": f"{{{seed}, {advised}}}"}
    preflight(runs)
    times: dict[str, list[float]] = {"even": [], "advised": []}
    for name in runs:
        folder = RunFolder(RESULTS / "runs" / name)
        snakemake(str(folder.train_manifest))
        times[name.rpartition("-")[0]].append(step_time(folder))
        print(f"{name}: {times[name.rpartition('-')[0]][-1]:.1f} ms", file=sys.stderr, flush=True)
    print(table(times, even, best, advised))


def preflight(runs: dict[str, str]) -> dict[str, Facts]:
    CONFIG.write_text(EXPERIMENT + "".join(f"    {name}: {values}\n" for name, values in runs.items()))
    snakemake("preflight", "data")
    found = files.read_json(RESULTS / "preflight.json")["runs"]
    return {name: from_json(one["facts"]) for name, one in found.items()}


def snakemake(*targets: str) -> None:
    command = [sys.executable, "-m", "snakemake", *targets, "--profile", "profiles/local", "--configfile", str(CONFIG)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def step_time(folder: RunFolder) -> float:
    """Median step time in milliseconds."""
    (log,) = (folder.store / "attempts").glob("*/steps.jsonl")
    steps = [event for event in files.read_jsonl(log) if event["event"] == "step" and event["step"] > SKIPPED]
    return 1e3 * statistics.median(step["seconds"] for step in steps)


def table(times: dict[str, list[float]], even: Facts, best: Facts, advised: str) -> str:
    lines = [f"advised: {{{advised}}}", f"{'':10}{'ms a step':>12}{'least':>8}{'most':>8}{'work of the stages':>24}"]
    for (name, steps), facts in zip(times.items(), (even, best), strict=True):
        work = passed.works(facts)
        shares = " ".join(f"{one / sum(work):.0%}" for one in work)
        lines.append(f"{name:10}{statistics.median(steps):12.1f}{min(steps):8.1f}{max(steps):8.1f}{shares:>24}")
    ratios = [new / old for old, new in zip(times["even"], times["advised"], strict=True)]
    lines.append(
        f"a step of the advised split takes {statistics.median(ratios):.2f} times as long as an even one's "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
