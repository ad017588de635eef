"""CPU time of `snakemake -n` for a sweep of many runs, compared with a bare Snakefile with the same jobs; and of the
start of Snakemake in the job of one run.

    .venv/bin/python benchmarks/planning.py [RUNS ...]      default: 100 1000 10000

Two dry runs each, in an empty folder: the first writes every run's files, the second finds them as they are. For a
job's start Snakemake is called as in a job, but for the job itself.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SEEDS = 10

EXPERIMENT = """\
experiment: sweep
device: cpu
models: {{m: {{recipe: {recipe}}}}}
sweep:
  grid:
    optimizer.lr: [{rates}]
    training.seed: [{seeds}]
"""

BARE = """\
RUNS = range({runs})
rule all:
    input: "report"
rule preflight:
    output: "preflight"
    shell: "touch {{output}}"
rule train:
    input: ancient("preflight")
    output: "runs/{{run}}/train"
    shell: "touch {{output}}"
rule summarize:
    input: "runs/{{run}}/train"
    output: "runs/{{run}}/steps", "runs/{{run}}/summary"
    shell: "touch {{output}}"
rule report:
    input: expand("runs/{{run}}/summary", run=RUNS)
    output: "report"
    shell: "touch {{output}}"
"""


def dry_run(folder: Path, *arguments: str) -> float:
    """CPU seconds (user and system) of a dry run, which are comparable even on a busy machine."""
    before = spent()
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "2", *arguments]
    # With PYTHONDONTWRITEBYTECODE our modules would be compiled in every call, unlike Snakemake's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    seconds = spent() - before
    if done.returncode:
        sys.exit(done.stderr)
    return seconds


def spent() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def megaboa(runs: int, folder: Path) -> tuple[float, float, float]:
    rates = ", ".join(f"{1e-5 * (i + 1):.6f}" for i in range(runs // SEEDS))
    recipe = REPOSITORY / "recipes" / "gpt_tiny.py"
    text = EXPERIMENT.format(recipe=recipe, rates=rates, seeds=", ".join(map(str, range(SEEDS))))
    (folder / "sweep.yaml").write_text(text)
    arguments = ("--snakefile", str(REPOSITORY / "Snakefile"), "--configfile", "sweep.yaml")
    first, again = dry_run(folder, *arguments), dry_run(folder, *arguments)
    results = folder / "results" / "sweep"
    (results / "preflight.json").touch()  # an input of the job
    run = max(path.name for path in (results / "runs").iterdir())
    job = ("--target-jobs", f"train:run={run}", "--allowed-rules", "train", "--force", "--nolock", "--mode", "remote")
    return first, again, dry_run(folder, *arguments, *job)


def bare(runs: int, folder: Path) -> float:
    (folder / "Snakefile").write_text(BARE.format(runs=runs))
    return dry_run(folder)


def main() -> None:
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{'runs':>7}  {'first':>8}  {'again':>8}  {'bare Snakefile':>14}  {'again / bare':>12}  {'job':>8}")
    for runs in [int(argument) for argument in sys.argv[1:]] or [100, 1000, 10000]:
        folders = [Path(tempfile.mkdtemp()) for _ in range(2)]
        try:
            first, again, job = megaboa(runs, folders[0])
            peer = bare(runs, folders[1])
        finally:
            for folder in folders:
                shutil.rmtree(folder)
        print(
            f"{runs:>7}  {first:>6.1f} s  {again:>6.1f} s  {peer:>12.1f} s  {again / peer:>12.2f}  {job:>6.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
