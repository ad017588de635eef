"""The faults that nvidia-resiliency-ext's tests inject into a rank, done to a run of this workflow one after another.

    python benchmarks/injected_faults.py [--faults SIGKILL LOCK_GIL ...] [--device cuda]

Two ranks of the real Megatron-Bridge on this machine, without SLURM; by default all faults that need no GPU. It prints
what the ledger says of each, the seconds to the next step that is new, and whether losses are those of a run without
faults.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "workflow" / "scripts"))

from megaboa.files import read_jsonl
from megaboa.paths import RunFolder
from megaboa.run.checkpoints import latest

ON_GPU = ("GPU_ERROR", "GPU_SLEEP")
FAULTS = (
    "WORKLOAD_EXC",
    "ASYNC_EXC",
    "SIGNAL_EXC",
    "OS_ABORT",
    "LOCK_GIL",
    "SEGFAULT",
    "SIGINT",
    "SIGKILL",
    "SIGTERM",
    "SIGSTOP",
)
SAVE_INTERVAL = 10
STEPS = {"cpu": 3 * SAVE_INTERVAL, "cuda": 8 * SAVE_INTERVAL}  # per attempt: enough for a fault before the last one
PATIENCE = 300.0
EXPERIMENT = """\
experiment: injected
store: store
device: {device}
tokenizers: {{bpe: {{train_on: text, vocab_size: 512}}}}
corpora: {{text: {{source: python-stdlib, limit: 200}}}}
models:
  tiny:
    tokenizer: bpe
    init: scratch
    config: {{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 256, tie_word_embeddings: false}}
training: {{train_iters: {steps}, global_batch_size: 32, micro_batch_size: 2, seq_length: 128, precision: {precision}}}
checkpoint: {{save_interval: {interval}, keep_last: 2}}
recovery: {{backoff_seconds: 0, budget: 100, no_progress_minutes: 0.25}}
launch: {{environment: {{MEGABOA_ZYGOTE: "0", PYTHONPATH: {injected}, INJECTED_FAULTS: {faults}}}}}
data: {{blend: text}}
resources: {{gpus_per_node: 2}}
sweep:
  runs:
    quiet: {{overrides.model.moe_aux_loss_coeff: 1}}  # which changes nothing, but makes it a run of its own
    hit: {{}}
"""


class Experiment:
    """Two runs in a folder: one without faults, and one with injected faults."""

    def __init__(self, folder: Path, steps: int, device: str):
        self.folder, self.faults = folder, folder / "faults"
        self.faults.mkdir(exist_ok=True)
        values = {"injected": REPOSITORY / "benchmarks" / "injected", "faults": self.faults, "interval": SAVE_INTERVAL}
        precision = {"cpu": "fp32", "cuda": "bf16_mixed"}[device]
        text = EXPERIMENT.format(steps=steps, device=device, precision=precision, **values)
        (folder / "injected.yaml").write_text(text)

    def start(self, run: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "snakemake", "--cores=all", f"--snakefile={REPOSITORY / 'Snakefile'}"]
        words += [f"--directory={self.folder}", f"--configfile={self.folder / 'injected.yaml'}"]
        target = f"results/injected/runs/{run}/train.json"
        with (self.folder / f"{run}.log").open("wb") as log:
            return subprocess.Popen([*words, target], stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)

    def store(self, run: str) -> Path:
        return RunFolder(self.folder / "results" / "injected" / "runs" / run).attempts_link.resolve().parent

    def ledger(self, event: str) -> list[dict]:
        path = self.store("hit") / "attempts.jsonl"
        return [entry for entry in read_jsonl(path) if entry["event"] == event] if path.exists() else []

    def steps(self, run: str, attempt: int) -> list[dict]:
        path = self.store(run) / "attempts" / f"{attempt:02d}" / "steps.jsonl"
        return [one for one in read_jsonl(path) if one["event"] == "step"] if path.exists() else []

    def losses(self, run: str, attempts: int) -> dict[int, float]:
        """The last recorded loss of every step."""
        return {one["step"]: one["loss"] for number in range(1, attempts + 1) for one in self.steps(run, number)}

    def hit(self, process: subprocess.Popen, fault: str, rank: int) -> float:
        """Inject a fault into the newest attempt once it has saved a checkpoint.

        Returns the seconds to the next attempt's first step.
        """

        def saved() -> int:
            starts = self.ledger("start")
            is_new = starts and latest(self.store("hit") / "checkpoints") > starts[-1]["resumed_from"]
            return len(starts) if is_new else 0

        attempt = wait(saved, process, f"a checkpoint before {fault}")
        began = time.time()
        (self.faults / f"{rank}.new").write_text(fault)
        (self.faults / f"{rank}.new").rename(self.faults / str(rank))
        first = wait(lambda: self.steps("hit", attempt + 1), process, f"a step after {fault}")[0]
        return first["time"] - began


def wait[Found](look: Callable[[], Found], process: subprocess.Popen, what: str) -> Found:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come")
        time.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=(*FAULTS, *ON_GPU), default=FAULTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there, and leave everything")
    args = parser.parse_args()
    with contextlib.ExitStack() as held:
        folder = args.keep or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="megaboa-")))
        folder.mkdir(parents=True, exist_ok=True)
        made = Experiment(folder.resolve(), STEPS[args.device] * (1 + len(args.faults)), args.device)
        if made.start("quiet").wait():
            raise SystemExit((folder / "quiet.log").read_text()[-3000:])
        process = made.start("hit")
        try:
            seconds = [made.hit(process, fault, number % 2) for number, fault in enumerate(args.faults)]
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()  # this also ends the supervisor and its ranks
                process.wait()
        if process.returncode:
            raise SystemExit((folder / "hit.log").read_text()[-3000:])
        ends = made.ledger("end")
        same = made.losses("hit", len(ends)) == made.losses("quiet", 1)
    print(
        "| fault | rank | cause | what the ledger says | next | seconds to the next step |\n|---|---|---|---|---|---|"
    )
    for fault, end, took in zip(args.faults, ends, seconds, strict=False):
        print(f"| {fault} | {end['rank']} | {end['cause']} | {end['detail'][:160]} | {end['action']} | {took:.0f} |")
    print(f"\n{len(ends)} attempts on {os.cpu_count()} processors; losses {'as' if same else 'NOT as'} without faults")


if __name__ == "__main__":
    main()
