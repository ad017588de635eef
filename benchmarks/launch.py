"""How long it takes from the allocation to the first line of the first rank, and from a failure to the next step.

Starts a SLURM cluster of three hosts on this machine (as root, for it needs namespaces: tests/cluster/lab.py). The peer
is a bare `srun` of the same two tasks.

    python benchmarks/launch.py [--repeat 5]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("workflow/scripts", "tests/cluster", "tests/e2e")]

from lab import Lab
from site_clone import ENVIRONMENT, SiteClone

NAME = "launch"
# a Python that first prints its start time
CLOCK = """\
#!/bin/sh
date +%s.%N
exec {python} "$@"
"""
KILLED_AT = 13


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory(prefix="megaboa-launch-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with Lab(Path(folder) / "lab", memory_mb=32000) as lab:
            print(table(measure(SiteClone(lab), repeat), repeat))


def measure(clone: SiteClone, repeat: int) -> dict[str, list[float]]:
    clock = clone.path / "clock"
    clock.write_text(CLOCK.format(python=sys.executable))
    clock.chmod(0o755)
    values = f"training.train_iters: 60, resources.nodes: 2, launch.python: {clock}, recovery.backoff_seconds: 0"
    config = clone.experiment(NAME, {f"run{number}": values for number in range(repeat)})
    clone.snakemake("data", "import", "preflight", "--configfile", config)
    found: dict[str, list[float]] = {}
    for number in range(repeat):
        for what, seconds in {"bare srun": bare_srun(clone, clock), **one_run(clone, f"run{number}")}.items():
            found.setdefault(what, []).append(seconds)
        print(f"{number + 1} of {repeat}", file=sys.stderr, flush=True)
    return found


def bare_srun(clone: SiteClone, clock: Path) -> float:
    srun = f"srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --output={clone.path}/bare-%t.log {clock} -c pass"
    begun = submit(clone, f"date +%s.%N; {srun}", wait=True)
    return float((clone.path / "bare-0.log").read_text().split()[0]) - begun()


def one_run(clone: SiteClone, run: str) -> dict[str, float]:
    """Start a run, kill a rank, and wait for the end."""
    script = f"date +%s.%N; {sys.executable} workflow/scripts/megaboa pretrain {NAME}/{run}"
    begun = submit(clone, script, wait=False)
    link = clone.results(NAME, "runs", run, "attempts.jsonl")
    wait_until(lambda: link.exists() and clone.last_step(NAME, run) >= KILLED_AT)
    start = clone.starts(NAME, run)[0]
    ranks = clone.lab.on_node(
        start["nodes"][1], ["pgrep", "-f", r"^\S*python\S* .*train_rank\.py"], user="root"
    ).stdout.split()
    killed = time.time()
    clone.lab.on_node(start["nodes"][1], ["kill", "-KILL", min(ranks, key=int)], user="root")
    wait_until(lambda: len(clone.ends(NAME, run)) == 2)
    first, second = (clone.store(NAME, run) / "attempts" / number for number in ("01", "02"))
    steps = {attempt: clone.steps(NAME, run, attempt)[0]["time"] for attempt in (1, 2)}
    line = {path: float((path / "rank-0.log").read_text().split()[0]) for path in (first, second)}
    return {
        "Megaboa": line[first] - begun(),
        "first line to first step": steps[1] - line[first],
        "kill to the attempt's end in the ledger": clone.ends(NAME, run)[0]["time"] - killed,
        "kill to the first rank's first line": line[second] - killed,
        "kill to the next step": steps[2] - killed,
    }


def submit(clone: SiteClone, script: str, wait: bool):
    log = clone.path / f"batch-{time.monotonic_ns()}.log"
    command = [
        "sbatch",
        "--requeue",
        "--nodes=2",
        "--ntasks-per-node=2",
        "--mem=8000",
        "--account=lab",
        f"--output={log}",
    ]
    clone.lab.run(
        [*command, *(["--wait"] if wait else []), f"--wrap={script}"], cwd=clone.path, env=ENVIRONMENT, timeout=120
    )
    return lambda: float(log.read_text().split()[0])


def wait_until(condition, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not come so far")
        time.sleep(0.05)


def table(found: dict[str, list[float]], repeat: int) -> str:
    median = {what: statistics.median(seconds) for what, seconds in found.items()}
    lines = [f"median of {repeat} (smallest to largest), in seconds"]
    lines += [f"  {what:<42} {median[what]:6.2f}  ({min(all_):.2f} to {max(all_):.2f})" for what, all_ in found.items()]
    added = median["Megaboa"] - median["bare srun"]
    lines.append(f"allocation to the first rank's first line: Megaboa adds {added:.2f} s to a bare srun")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
