"""Run the tests: `make test`, `make test-all`, and what CI does.

fast: tests that take seconds. walks: flows that the README and the tutorial promise, as written, with one small cluster
and one image. rest: all other slow tests, a file at a time, those next to what changed first; `--until 55` starts no
further file when so many minutes have gone by since `--begun`, and names the files that were left out. The storm comes
before the rest, and is never left out.

Of slow tests three files run at once on two cores, two of them of the cluster at most: those mostly wait, but three
clusters at once are slower than two.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
MARKS = {"fast": "not slow", "walks": "slow and walk", "rest": "slow and not walk"}
RECENT_HOURS = 12  # of commits, where nobody says what is compared with what
LIBRARY = "workflow/scripts/megaboa/"
# What tests of the whole workflow exercise: packages of the library, or rules. Other tests mirror a package.
EXERCISED = {
    "tests/check/test_rope.py": "check bridge",
    "tests/cluster": "run launch scheduler",
    "tests/cluster/test_pyxis.py": "image run scheduler",
    "tests/cluster/test_refused_jobs.py": "scheduler plan calls doctor",
    "tests/e2e/test_agreement.py": "report bridge",
    "tests/e2e/test_bert_and_t5.py": "bridge plan",
    "tests/e2e/test_bundle.py": "bundle report",
    "tests/e2e/test_commands.py": "plan workflow common",
    "tests/e2e/test_continue_from.py": "plan run bridge",
    "tests/e2e/test_data.py": "data",
    "tests/e2e/test_export.py": "bridge export evaluate",
    "tests/e2e/test_exports_along.py": "run export evaluate",
    "tests/e2e/test_stages_that_fail.py": "report doctor workflow export evaluate",
    "tests/e2e/test_families.py": "bridge export import",
    "tests/e2e/test_from_elsewhere.py": "workflow common config",
    "tests/e2e/test_in_image.py": "image",
    "tests/e2e/test_interruptions.py": "run",
    "tests/e2e/test_layouts.py": "bridge",
    "tests/e2e/test_loss_spike.py": "run",
    "tests/e2e/test_muon.py": "bridge run check",
    "tests/e2e/test_observed.py": "observe bridge",
    "tests/e2e/test_other_users.py": "run calls",
    "tests/e2e/test_prediction_heads.py": "bridge export import",
    "tests/e2e/test_profile.py": "profile observe",
    "tests/e2e/test_prove.py": "prove plan bridge",
    "tests/e2e/test_tokenizers.py": "report data",
    "tests/e2e/test_tune.py": "tune plan run",
    "tests/e2e/test_recipe_with_weights.py": "plan bridge",
    "tests/e2e/test_recipes.py": "plan bridge",
    "tests/e2e/test_recipes_for_performance.py": "plan bridge",
    "tests/e2e/test_refusals.py": "check config doctor",
    "tests/e2e/test_reruns.py": "plan config common",
    "tests/e2e/test_sharded_corpus.py": "data",
    "tests/e2e/test_vision.py": "bridge plan",
    "tests/e2e/test_slurm_profile.py": "scheduler plan common",
    "tests/e2e/test_finetuning.py": "bridge data plan",
}
# The longest first, so that none of them is alone at the end.
LONGEST = (
    "tests/e2e/test_newcomer.py",
    "tests/cluster",
    "tests/e2e/test_families.py",
    "tests/e2e/test_continue_from.py",
)
# Never left out, and so started first: no other test has one fault after another, whatever was changed.
CERTAIN = ("tests/cluster/test_storm.py",)
CLUSTERS = 2  # at once
LONG_MINUTES = 20  # before the end of its time none of these is started any more
_COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_DURATION = re.compile(r"^(\d+\.\d+)s (\w+) +(\S+)", re.MULTILINE)


@dataclass
class Tally:
    """What has come of the tests so far."""

    counts: Counter = field(default_factory=Counter)
    slowest: list[tuple[float, str]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # with the summary

    def add(self, name: str, returncode: int, output: str) -> str:
        """Count a pytest's tests; return its summary."""
        summary = next((line for line in reversed(output.splitlines()) if " in " in line and _COUNTED.search(line)), "")
        for number, what in _COUNTED.findall(summary):
            self.counts["failed" if what.startswith("error") else what] += int(number)
        self.slowest += [(float(seconds), test) for seconds, _, test in _DURATION.findall(output)]
        summary = summary.strip("= ") or f"pytest ended with {returncode}"
        if returncode not in (0, 5):  # 5: none was selected
            self.failed[name] = summary
        return summary


@dataclass
class Running:
    """A pytest of one file."""

    name: str
    output: Path
    process: subprocess.Popen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="of fast, walks and rest; the first two unless said otherwise")
    parser.add_argument("--until", type=float, metavar="MINUTES", help="start no file of the rest after so many")
    parser.add_argument("--begun", type=float, metavar="UNIX", default=time.time(), help="since when they are counted")
    parser.add_argument("--since", metavar="COMMIT", help="what changed is compared with this; else the last hours'")
    args = parser.parse_args()
    stages = args.stages or ["fast", "walks"]
    if unknown := set(stages) - set(MARKS):
        parser.error(f"no stage {', '.join(sorted(unknown))}: take {', '.join(MARKS)}")
    os.chdir(REPOSITORY)
    os.environ["OMP_NUM_THREADS"] = "1"
    tally, left_out = Tally(), []
    for stage in stages:
        if stage == "fast":
            run_fast(tally)
            continue
        files = order(slow_files(stage), changed_files(args.since) if stage == "rest" else ())
        deadline = args.begun + 60 * args.until if args.until and stage == "rest" else None
        left_out += run_files(stage, files, deadline, tally)
    return conclude(tally, left_out, time.time() - args.begun)


def run_fast(tally: Tally) -> None:
    """All at once, on two workers, which show how far they are themselves."""
    command = pytest("-q", "-ra", "--numprocesses", "2", "--dist", "loadfile", "-m", MARKS["fast"], "--durations", "10")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output = []
    for line in process.stdout:
        output.append(line)
        print(line, end="", flush=True)
    say(f"fast: {tally.add('fast', process.wait(), ''.join(output))}")


def run_files(stage: str, files: list[str], deadline: float | None, tally: Tally) -> list[str]:
    """Each file in a process of its own, a few at once; return those that no time was left for."""
    waiting, running, left_out, done, began = list(files), [], [], 0, time.time()
    say(f"{stage}: {len(files)} files")
    workers = (os.cpu_count() or 1) + 1
    with tempfile.TemporaryDirectory(prefix="megaboa-tests-") as folder:
        while running or waiting:
            clusters = sum(is_of_cluster(one.name) for one in running)
            startable = [name for name in waiting if clusters < CLUSTERS or not is_of_cluster(name)]
            if startable and len(running) < workers:
                name = startable[0]
                waiting.remove(name)
                if deadline and is_too_late(name, deadline):
                    left_out.append(name)
                else:
                    running.append(start(name, stage, Path(folder)))
                continue
            ended = next((one for one in running if one.process.poll() is not None), None)
            if ended is None:
                time.sleep(0.2)
                continue
            running.remove(ended)
            done += 1
            output = ended.output.read_text(errors="replace")
            summary = tally.add(ended.name, ended.process.returncode, output)
            if ended.name in tally.failed:
                print(output, flush=True)
            minutes, seconds = divmod(round(time.time() - began), 60)
            say(f"{stage} {done:>2}/{len(files)}  {minutes:>2}:{seconds:02}  {ended.name}: {summary}")
    return left_out


def is_too_late(name: str, deadline: float) -> bool:
    return name not in CERTAIN and time.time() > deadline - 60 * LONG_MINUTES * name.startswith(LONGEST)


def is_of_cluster(name: str) -> bool:
    return name.startswith("tests/cluster")


def start(name: str, stage: str, folder: Path) -> Running:
    output = folder / f"{name.replace('/', '.')}.out"
    with output.open("wb") as stream:
        command = pytest("-q", "-ra", "-m", MARKS[stage], "--durations", "5", "--durations-min", "5", name)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT)
    return Running(name, output, process)


def slow_files(stage: str) -> list[str]:
    """Files with tests of this stage, by their text: collecting them all would take half a minute.

    Those that need GPUs are `make test-gpu`'s.
    """
    texts = {path: path.read_text() for path in sorted(Path("tests").rglob("test_*.py")) if "gpus" not in path.parts}
    slow = {str(path): text for path, text in texts.items() if "mark.slow" in text}
    if stage == "walks":
        return [name for name, text in slow.items() if "mark.walk" in text]
    return [name for name, text in slow.items() if not re.search(r"^pytestmark = .*mark\.walk", text, re.MULTILINE)]


def changed_files(since: str | None) -> list[str]:
    """What the commits since then have changed; nothing where git can't tell."""
    if since is None:
        newest = git("log", "-1", "--format=%ct")
        since = newest and git("rev-list", "-1", f"--before={int(newest) - 3600 * RECENT_HOURS}", "HEAD")
    return git("diff", "--name-only", since).splitlines() if since else []


def order(files: Sequence[str], changed: Sequence[str]) -> list[str]:
    """After those that are certain those next to what changed; of the others not always the same ones last."""
    packages = {package for path in changed if (package := package_of(path))}
    commit = git("rev-parse", "HEAD")

    def rank(name: str) -> tuple[bool, bool, bool, bool, int]:
        touched = name in changed
        near = bool(packages.intersection(exercised(name)))
        long = name.startswith(LONGEST)
        return name not in CERTAIN, not touched, not near, not long, zlib.crc32(f"{commit}{name}".encode())

    return sorted(files, key=rank)


def exercised(name: str) -> Iterable[str]:
    """What a file tests: `tests/run/test_claims.py` the package `run`."""
    known = EXERCISED.get(name) or EXERCISED.get(str(Path(name).parent))
    return known.split() if known else Path(name).parts[1:-1]


def package_of(path: str) -> str | None:
    """The package of the library that a changed file is of, or the rule."""
    if path.startswith(LIBRARY):
        return path.removeprefix(LIBRARY).split("/")[0].removesuffix(".py")
    return Path(path).stem if path.startswith("workflow/rules/") else None


def conclude(tally: Tally, left_out: list[str], seconds: float) -> int:
    if slowest := sorted(tally.slowest, reverse=True)[:10]:
        say("the ten slowest:", *(f"  {seconds:7.1f} s  {test}" for seconds, test in slowest))
    if left_out:
        say(f"no time was left for {len(left_out)} files:", *(f"  {name}" for name in left_out))
    if tally.failed:
        say("failed:", *(f"  {name}: {summary}" for name, summary in tally.failed.items()))
    counts = ", ".join(f"{tally.counts[what]} {what}" for what in ("passed", "failed", "skipped"))
    say(f"{seconds / 60:.0f} minutes", counts)
    return 1 if tally.failed or not tally.counts["passed"] else 0


def pytest(*arguments: str) -> list[str]:
    return [str(REPOSITORY / ".venv" / "bin" / "python"), "-m", "pytest", *arguments]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
