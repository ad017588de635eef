"""How long preflight takes for a sweep of many runs: real configurations of Bridge, without a GPU.

    .venv/bin/python benchmarks/preflight.py [RUNS ...]      default: 100 1000

Two models (a dense one of 8 billion parameters, a mixture of 30 billion) in five layouts each, on 64 GPUs; runs of one
layout differ in their learning rate. All is planned in an empty folder, then `megaboa preflight` is timed as the
workflow calls it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "workflow/scripts"))

from megaboa import files, records
from megaboa.config import load
from megaboa.plan import make_plan, specifications
from megaboa.plan.shared import Shared
from megaboa.records import ModelSource

COMMON = {
    **{"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "num_attention_heads": 32},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1000000},
}
MODELS = {
    "dense": {
        **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096},
        **{"intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8, **COMMON},
    },
    "moe": {
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048},
        **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
        **{
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            **COMMON,
        },
    },
}
LAYOUTS = {
    "dense": [{}, {"tp": 4, "sp": True}, {"tp": 8, "sp": True, "pp": 2}, {"pp": 4, "vpp": 3}, {"cp": 4, "tp": 2}],
    "moe": [{"ep": 8}, {"ep": 16}, {"ep": 8, "pp": 4}, {"ep": 8, "tp": 2, "sp": True}, {"ep": 8, "cp": 2}],
}


def experiment(runs: int, folder: Path) -> dict:
    layouts = {}
    for model, found in LAYOUTS.items():
        for layout in found:
            label = model + "".join(f"-{name}{value}" for name, value in layout.items())
            layouts[label] = {"model": model, **{f"parallel.{name}": value for name, value in layout.items()}}
    values = runs // len(layouts)
    return {
        "experiment": "sweep",
        "models": {name: {"hf": str(folder / name)} for name in MODELS},
        "training": {"train_iters": 1000, "global_batch_size": 256, "seq_length": 4096},
        "resources": {"nodes": 8, "gpus_per_node": 8},
        "sweep": {"grid": {"layout": layouts, "optimizer.lr": [1e-5 * (i + 1) for i in range(values)]}},
    }


def measure(runs: int, folder: Path) -> tuple[float, float, float]:
    os.chdir(folder)
    for name, config in MODELS.items():
        files.write_json(folder / name / "config.json", config)
    (folder / "sweep.yaml").write_text(json.dumps(experiment(runs, folder)))
    before = time.perf_counter()
    plan = make_plan(load(["sweep.yaml"]))
    plan.write("results")
    specifications.write(Shared(plan))
    planned = time.perf_counter() - before
    for name, config in MODELS.items():
        place, facts = str(folder / name), {"digest": "1", "params": 1, "dtype": "bfloat16", "device": "cpu"}
        source = ModelSource(name=name, path=place, tokenizer=place, vocab_size=config["vocab_size"], **facts)
        records.write(folder / "results/sweep/models" / name / "source.json", source)
    megaboa = REPOSITORY / "workflow/scripts/megaboa"
    command = [
        sys.executable,
        megaboa,
        "preflight",
        "results/sweep/specs/runs.json",
        "--out",
        "results/sweep/preflight.json",
    ]
    before, used = time.perf_counter(), cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds, used = time.perf_counter() - before, cpu_seconds() - used
    if done.returncode:
        sys.exit(done.stderr)
    assert len(files.read_json(Path("results/sweep/preflight.json"))["runs"]) == len(plan.runs) == runs
    return planned, seconds, used


def cpu_seconds() -> float:
    """CPU seconds of all ended child processes, which are comparable even on a shared machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{'runs':>7}  {'planning':>9}  {'preflight':>9}  {'CPU time':>9}")
    for runs in [int(argument) for argument in sys.argv[1:]] or [100, 1000]:
        folder = Path(tempfile.mkdtemp())
        try:
            planned, seconds, used = measure(runs, folder)
        finally:
            shutil.rmtree(folder)
        print(f"{runs:>7}  {planned:>7.1f} s  {seconds:>7.1f} s  {used:>7.1f} s", flush=True)


if __name__ == "__main__":
    main()
