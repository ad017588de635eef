"""From an attempt's start to the end of its first step, by phase; and what a rank asks of the file system until then.

    python benchmarks/startup.py results/EXPERIMENT [...]              a table of runs that were trained there
    python benchmarks/startup.py --compare config/config.yaml dp1     ranks that import for themselves, and forked ones
    python benchmarks/startup.py --files config/config.yaml dp1       calls on files of a rank, both ways (strace)

The latter two train a run of an experiment's file for a few steps, in experiments of their own (`results/startup-...`),
with what comes before training made first. "forked, cold": nothing has imported Bridge when the supervisor begins;
"forked, warm": the process that ranks are forked from is there, as in a sweep or after a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.observe.goodput import STARTUP, startup
from megaboa.observe.steps import read_attempts, read_events
from megaboa.scheduler.ranks import FORKED
from megaboa.store_paths import RunStore

Parts = dict[str, float]
WAYS = {"each imports": "0", "forked, cold": "1", "forked, warm": "1"}
IDLE_SECONDS = 35  # longer than an unused standby process lives
CALLS = "%file,%process,read,pread64,getdents64"
CALL = re.compile(r"(\w+)\(.* = (-?\d+)[^=]*$")
STARTS = {"clone", "clone3", "fork", "vfork"}
PROCESS = STARTS | {"wait4", "waitid", "exit_group", "kill", "tgkill", "exit", "execve"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="results/EXPERIMENT")
    parser.add_argument("--compare", nargs=2, metavar=("FILE", "RUN"))
    parser.add_argument("--files", nargs=2, metavar=("FILE", "RUN"))
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    wanted = parser.parse_args()
    if wanted.compare:
        print(table(compared(*wanted.compare, wanted.repeat, wanted.steps)))
    elif wanted.files:
        print(files_table(*wanted.files, wanted.steps))
    else:
        print(table([attempt for results in wanted.results for attempt in of_results(results)]))


def of_results(results: Path) -> Iterator[tuple[str, Parts]]:
    """The parts of every attempt of an experiment that completed a step."""
    for ledger in sorted(results.glob("runs/*/attempts.jsonl")):
        store = RunStore(ledger.resolve().parent)
        events = read_events(store)
        for start in read_attempts(store):
            parts = startup(start, [event for event in events if event.attempt == start.attempt])
            if "first_step" in parts:
                yield f"{ledger.parent.name}, attempt {start.attempt}", parts


def compared(file: str, run: str, repeat: int, steps: int) -> list[tuple[str, Parts]]:
    """The median of each part, for every way of starting."""
    found: dict[str, list[Parts]] = {way: [] for way in WAYS}
    stamp = int(time.time())
    for number in range(repeat):
        for way, fork in WAYS.items():
            experiment = f"startup-{stamp}-{way.split()[-1]}-{number}"
            snakemake(file, experiment, steps, "import", "data", "preflight")
            if way != "forked, warm":
                time.sleep(IDLE_SECONDS)
            else:  # reuses the process of the run before, or makes it now
                warmer = f"{experiment}-before"
                snakemake(file, warmer, steps, "import", "data", "preflight")
                snakemake(file, warmer, steps, f"results/{warmer}/runs/{run}/train.json", fork=fork)
            snakemake(file, experiment, steps, f"results/{experiment}/runs/{run}/train.json", fork=fork)
            [(_, parts)] = [one for one in of_results(Path("results", experiment)) if one[0].startswith(f"{run},")]
            found[way].append(parts)
        print(f"{number + 1} of {repeat}", file=sys.stderr, flush=True)
    return [(way, {part: median(part, attempts) for part in known(attempts)}) for way, attempts in found.items()]


def median(part: str, attempts: list[Parts]) -> float:
    return statistics.median(one.get(part, 0.0) for one in attempts)


def known(attempts: list[Parts]) -> list[str]:
    return [part for part in STARTUP if any(part in one for one in attempts)]


def table(attempts: list[tuple[str, Parts]]) -> str:
    parts = known([one for _, one in attempts])
    lines = [f"{'seconds':<22}" + "".join(f"{part.replace('_', ' '):>13}" for part in [*parts, "whole"])]
    for name, one in attempts:
        values = [f"{one[part]:.2f}" if part in one else "" for part in parts]
        lines.append(f"{name:<22}" + "".join(f"{value:>13}" for value in [*values, f"{sum(one.values()):.2f}"]))
    return "\n".join(lines)


def snakemake(
    file: str, experiment: str, steps: int, *targets: str, fork: str = "0", more: dict[str, str] | None = None
) -> None:
    own = Path("results", experiment, "startup.json")  # JSON is valid YAML
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(json.dumps({"experiment": experiment, "training": {"train_iters": steps}, **(more or {})}))
    command = [
        sys.executable,
        "-m",
        "snakemake",
        *targets,
        "--profile",
        "profiles/local",
        "--configfile",
        file,
        str(own),
    ]
    done = subprocess.run(command, env={**os.environ, FORKED: fork}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def files_table(file: str, run: str, steps: int) -> str:
    """File system calls of all ranks of a run: with separate imports, and forked (without the parent process)."""
    rows: dict[str, Counter[str]] = {}
    for way, fork in (("each imports", "0"), ("forked", "1")):
        experiment = f"startup-files-{int(time.time())}"
        folder = Path("results", experiment, "strace").absolute()
        snakemake(file, experiment, steps, "import", "data", "preflight")
        folder.mkdir(parents=True)
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\nexec strace -ff -qq -s 300 -e trace={CALLS} -o {folder}/pid {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        train = f"results/{experiment}/runs/{run}/train.json"
        snakemake(file, experiment, steps, train, fork=fork, more={"launch": {"python": str(python)}})
        time.sleep(IDLE_SECONDS if fork == "1" else 0)  # the parent process writes its calls when it ends
        calls = {int(path.suffix[1:]): traced(path) for path in folder.glob("pid.*")}
        keepers = {pid for pid, one in calls.items() if "megaboa.bridge.zygote" in one.words}
        ranks = {pid for pid, one in calls.items() if "train_rank.py" in one.words and "--warm" not in one.words}
        forked = {child for pid in keepers for child, thread in calls[pid].started.items() if not thread}
        rows[way] = total(calls, ranks | forked, keepers)
        if keepers:
            rows["what they are forked from, once"] = total(calls, keepers, forked)
    names = [name for name, _ in rows["each imports"].most_common() if name != "ENOENT"][:6]
    lines = [f"{'calls':<34}" + "".join(f"{name:>12}" for name in ["all", *names, "not there"])]
    for way, one in rows.items():
        missing = one.pop("ENOENT", 0)
        numbers = [one.total(), *(one[name] for name in names), missing]
        lines.append(f"{way:<34}" + "".join(f"{number:>12,}" for number in numbers))
    return "\n".join(lines)


class Traced:
    """The calls of one process or thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.started: dict[int, bool] = {}  # by process id: whether it is a thread
        self.words = ""


def traced(path: Path) -> Traced:
    found = Traced()
    for line in path.read_text(errors="replace").splitlines():
        if not (match := CALL.match(line)):
            continue
        name, result = match[1], int(match[2])
        if name == "execve" and result == 0:
            found.words = line
        if name in STARTS and result > 0:
            found.started[result] = "CLONE_THREAD" in line
        if name not in PROCESS:
            found.counts[name] += 1
            found.counts["ENOENT"] += "ENOENT" in line
    return found


def total(calls: dict[int, Traced], roots: set[int], without: set[int]) -> Counter[str]:
    """The calls of these processes and of all that they have started."""
    counts: Counter[str] = Counter()
    waiting, seen = list(roots), set(without)
    while waiting:
        pid = waiting.pop()
        if pid in seen or pid not in calls:
            continue
        seen.add(pid)
        counts += calls[pid].counts
        waiting += calls[pid].started
    return counts


if __name__ == "__main__":
    main()
