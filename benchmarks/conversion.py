"""Seconds and peak memory of an import and of an export, compared with a plain copy of the same files.

    .venv/bin/python benchmarks/conversion.py [--gigabytes 2.2] [--repetitions 3] [--folder /tmp] [--cases export ...]

A model of random weights in bfloat16 is made once. Each conversion runs in a process of its own, in turn with a copy
that also waits for the disk; memory is the process's largest resident set, of several ranks that of the largest one.
`Bridge` is its own `import_ckpt` and `export_ckpt` on the same files, as a peer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "workflow" / "scripts"
sys.path.insert(0, str(SCRIPTS))

from megaboa.scheduler import local

LAYER = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
BYTES_PER_LAYER = 2 * (2048 * 2048 * 2 + 2048 * 1024 * 2 + 3 * 2048 * 6144)
BYTES_OUTSIDE = 2 * 2 * 32768 * 2048

MAKE = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("qwen3", **{layer}, num_hidden_layers={layers}, head_dim=128, vocab_size=32768,
    tie_word_embeddings=False, dtype="bfloat16")
torch.set_default_dtype(torch.bfloat16)
model = AutoModelForCausalLM.from_config(config)
model.save_pretrained({folder!r}, max_shard_size="1GB")
"""
BEGIN = """
import atexit, resource
from pathlib import Path
from megaboa.bridge.process import join_ranks, prepare
from megaboa import conversion
from megaboa.records import ModelSource
layout = conversion.layout({layout})
join_ranks(layout)
prepare("cpu", 2 // layout.world_size)
atexit.register(lambda: print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))
facts = dict(name="m", digest="1", vocab_size=1, params=1, dtype="bfloat16")
source = ModelSource(path={source!r}, device="cpu", **facts)
target = Path({target!r})
"""
IMPORT = """
from megaboa.bridge.convert import import_checkpoint, process_groups
with process_groups("cpu", layout):
    import_checkpoint(source, target, layout)
"""
EXPORT = """
from megaboa.bridge.convert import export_checkpoint, process_groups
target.mkdir(exist_ok=True)
with process_groups("cpu", layout):
    export_checkpoint(source, Path({checkpoint!r}, "iter_0000000"), target, 10**8, layout)
"""
LAYOUTS = {f"{what}, {by} 2": f"{by}=2" for what in ("import", "export") for by in ("tp", "pp")}
CASES = {
    "import": IMPORT,
    "import, tp 2": IMPORT,
    "import, pp 2": IMPORT,
    "import, Bridge": "from megatron.bridge import AutoBridge\nAutoBridge.import_ckpt({source!r}, target)",
    "export": EXPORT,
    "export, tp 2": EXPORT,
    "export, pp 2": EXPORT,
    "export, Bridge": "from megatron.bridge import AutoBridge\n"
    "AutoBridge.from_hf_pretrained({source!r}).export_ckpt({checkpoint!r}, target, show_progress=False)",
}


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds and peak resident memory (GB) of a command."""
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        sys.exit(output[-4000:])
    return seconds, usage.ru_maxrss / 2**20


def measured_ranks(command: list[str], count: int, logs: Path) -> tuple[float, float]:
    """Seconds of a command with several ranks, and the peak memory of the largest one."""
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir()
    began = time.perf_counter()
    ended = local.wait(local.start(command, count, logs, {"PYTHONPATH": str(SCRIPTS)}))
    seconds = time.perf_counter() - began
    said = [path.read_text() for path in sorted(logs.glob("rank-*.log"))]
    if not ended.ok:
        sys.exit(f"{ended}: {said[ended.rank or 0][-4000:]}")
    return seconds, max(float(text.rsplit("peak ", 1)[1]) for text in said)


def copied(source: Path, target: Path) -> tuple[float, float]:
    return measured(["bash", "-c", f"cp -r '{source}' '{target}' && sync '{target}'/*"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where the files lie; default: the folder for temporary files")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="default: all")
    arguments = parser.parse_args()
    layers = max(2, 2 * round((arguments.gigabytes * 1e9 - BYTES_OUTSIDE) / BYTES_PER_LAYER / 2))  # for two stages
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        source, checkpoint = folder / "hf", folder / "megatron"
        measured([sys.executable, "-c", MAKE.format(layer=LAYER, layers=layers, folder=str(source))])
        size = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
        values = {"source": str(source), "checkpoint": str(checkpoint)}
        begin = BEGIN.format(**values, target=str(checkpoint), layout="")
        measured([sys.executable, "-c", begin + CASES["import"].format(**values)])
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("copy", *arguments.cases)}
        for _ in range(arguments.repetitions):
            for case in arguments.cases:
                code, target = CASES[case], folder / "target"
                layout = LAYOUTS.get(case, "")
                script = BEGIN.format(**values, target=str(target), layout=layout) + code.format(**values)
                command = [sys.executable, "-c", script]
                one = measured_ranks(command, 2, folder / "logs") if layout else measured(command)
                found[case].append(one)
                shutil.rmtree(target)
                found["copy"].append(copied(source, target))
                shutil.rmtree(target)
    print(
        f"{size:.2f} GB in {layers} layers, bfloat16; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};", end=" "
    )
    print(", ".join(f"{package} {version(package)}" for package in ("megatron-bridge", "megatron-core", "torch")))
    print(f"{'':16}{'seconds':>9}{'of a copy':>11}{'peak GB':>9}{'of the model':>14}")
    plain = statistics.median(seconds for seconds, _ in found["copy"])
    for case, runs in found.items():
        seconds, peak = (statistics.median(values) for values in zip(*runs, strict=True))
        print(f"{case:16}{seconds:9.1f}{seconds / plain:11.1f}{peak:9.2f}{peak / size:14.2f}")


if __name__ == "__main__":
    main()
