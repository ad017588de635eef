"""A copy of the repository in which the workflow runs as a user would run it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from megaboa.files import read_json, read_jsonl

REPOSITORY = Path(__file__).parents[2]

TINY = """\
experiment: {name}
device: cpu
tokenizers:
  bpe: {{train_on: text, vocab_size: 384}}
corpora:
  text: {{source: python-stdlib, limit: 60}}
models:
  dense:
    tokenizer: bpe
    init: pretrained
    config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}}
data: {{split: "90,5,5"}}
training: {{train_iters: {steps}, global_batch_size: 8, micro_batch_size: 2, seq_length: 64, precision: fp32}}
checkpoint: {{save_interval: {save_interval}}}
schedule: {{warmup_iters: 2}}
sweep:
  runs:
"""


class Workspace:
    """A clone, and what its user does in it."""

    def __init__(self, path: Path):
        self.path = path.resolve()

    def experiment(
        self, name: str, runs: dict[str, str], steps: int = 6, save_interval: int = 3, more: str = ""
    ) -> Path:
        """Write a small experiment; `runs`: the flow-style values of each."""
        text = TINY.format(name=name, steps=steps, save_interval=save_interval)
        text += "".join(f"    {run}: {values}\n" for run, values in runs.items()) + textwrap.dedent(more)
        config = self.path / f"{name}.yaml"
        config.write_text(text)
        return config

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *map(str, arguments)]

    def start(self, *arguments: str | Path) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.path,
            env=user_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *arguments: str | Path, code: int = 0, timeout: float = 900) -> str:
        """Run Snakemake to its end and return what it printed."""
        process = self.start(*arguments)
        try:
            output = process.communicate(timeout=timeout)[0]
        finally:
            kill_group(process)
        assert process.returncode == code, output
        return output

    def megaboa(self, *words: str) -> str:
        """Call the clone's command line; return what it printed."""
        done = subprocess.run(
            [sys.executable, "workflow/scripts/megaboa", *words],
            cwd=self.path,
            env=user_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def planned(self, *arguments: str | Path) -> dict[str, int]:
        """What a dry run would do: how many jobs of each rule."""
        return planned_in(self.snakemake("-n", *arguments))

    def results(self, *parts: str) -> Path:
        return self.path.joinpath("results", *parts)

    def json(self, *parts: str) -> dict:
        return read_json(self.results(*parts))

    def store(self, experiment: str, run: str) -> Path:
        """The payload folder of a run, from the moment its supervisor has started."""
        return self.results(experiment, "runs", run, "attempts.jsonl").resolve().parent

    def steps(self, experiment: str, run: str) -> list[tuple[int, str, str]]:
        """The run's curve: of every step the last time that it was done, its loss and gradient norm to the last bit."""
        return curve_of(self.store(experiment, run))

    def wait_for_step(self, experiment: str, run: str, step: int, timeout: float = 600) -> list[int]:
        """Wait until the run has come this far; return the process ids of its ranks."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            link = self.results(experiment, "runs", run, "attempts.jsonl")
            if link.exists() and any(done >= step for done, *_ in self.steps(experiment, run)):
                return self.rank_processes(experiment, run)
            time.sleep(0.05)
        raise TimeoutError(f"{run} did not come to step {step} in {timeout} s")

    def rank_processes(self, experiment: str, run: str) -> list[int]:
        """The ranks by number, without the processes that they fork: children of the supervisor, or of a zygote."""
        words = ("train_rank.py", f"--run={Path('results', experiment, 'runs', run)}")
        parents = {pid: command_line(parent(pid)) for pid in processes(*words, cwd=self.path)}
        starters = ("megaboa pretrain", "megaboa.bridge.zygote")
        ranks = [pid for pid, words in parents.items() if any(starter in words for starter in starters)]
        return sorted(ranks, key=lambda pid: str(Path(f"/proc/{pid}/fd/1").readlink()))  # ending in rank-K.log


def planned_in(output: str) -> dict[str, int]:
    """How many jobs of each rule a dry run has named."""
    if "Nothing to be done" in output:
        return {}
    table = output.rsplit("\njobs to do", 1)[1].split("\ntotal")[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+)\s+(\d+)  ", table, re.MULTILINE)}


def curve_of(store: Path) -> list[tuple[int, str, str]]:
    """Of every step the last time that it was done, its loss and gradient norm to the last bit."""
    curve = {}
    for attempt in sorted((store / "attempts").glob("[0-9]*")):
        for event in read_jsonl(attempt / "steps.jsonl"):
            if event["event"] == "step":
                curve[event["step"]] = (event["step"], float(event["loss"]).hex(), float(event["grad_norm"]).hex())
    return [curve[step] for step in sorted(curve)]


def processes(*words: str, cwd: Path) -> list[int]:
    """Processes started in this folder whose command line has all these words, oldest first."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted(
        pid for pid in pids if working_folder(pid) == cwd and all(word in command_line(pid) for word in words)
    )


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def working_folder(pid: int) -> Path | None:
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def user_environment() -> dict[str, str]:
    """What a user's shell has: nothing of pytest, no ranks, and a Python that keeps what it compiles."""
    of_python = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    dropped = ("PYTEST", *of_python, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SNAKEMAKE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy_repository(target: Path) -> Path:
    """The files that git would bring to somebody else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, copy = REPOSITORY / name, target / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    return target


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
