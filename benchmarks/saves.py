"""What a save in the background costs a run, and how long it takes to resume from it: one table.

    python benchmarks/saves.py config/experiments/llama3-8b-2xh200.yaml --run fp8-dp2 --save-at 15 [--interval 50]

The run is trained by the workflow, with its own settings, and saves at that step; with `--saves 2` after as many steps
again. When the last of these checkpoints is complete, one rank is killed; when the next attempt has done a step, the
call ends, and the run can be trained on by the next one. Its results have the experiment's name and `-saves`. The stall
is how much longer the steps during a save took than as many usual ones, up to the step at which the next save begins:
that one waits until this one is complete.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "workflow/scripts"))

from megaboa.config import load
from megaboa.files import read_jsonl
from megaboa.paths import RunFolder
from megaboa.plan import make_plan
from megaboa.run.checkpoints import completed_at, sizes

WARMUP = 5  # steps of an attempt that are excluded
PATIENCE = 900.0
GIB = 2**30


class Saved:
    """A run that is being trained by the workflow."""

    def __init__(self, config: list[Path], run: str, folder: RunFolder) -> None:
        self.folder = folder
        target = str(folder.path / "train.json")
        words = [sys.executable, "-m", "snakemake", target, "--profile", str(ROOT / "profiles" / "local")]
        self.process = subprocess.Popen([*words, "--configfile", *map(str, config)], cwd=ROOT, start_new_session=True)

    @property
    def store(self) -> Path:
        return self.folder.attempts_link.resolve().parent

    def events(self, attempt: int) -> list[dict]:
        path = self.store / "attempts" / f"{attempt:02d}" / "steps.jsonl"
        return read_jsonl(path) if path.exists() else []

    def steps(self, attempt: int) -> dict[int, float]:
        """The time at which each step was done."""
        return {event["step"]: event["time"] for event in self.events(attempt) if event["event"] == "step"}

    def phases(self, attempt: int, since: float) -> str:
        """Seconds of each phase until the first step. A standby process had imported before `since`."""
        first = {event.get("phase", event["event"]): event["time"] - since for event in reversed(self.events(attempt))}
        return ", ".join(f"{name} {at:.1f} s" for name, at in sorted(first.items(), key=lambda one: one[1]) if at >= 0)

    def wait[Found](self, look: Callable[[], Found], what: str) -> Found:
        deadline = time.monotonic() + PATIENCE
        while not (found := look()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{what} did not come")
            time.sleep(0.05)
        return found

    def kill_a_rank(self) -> float:
        """Kill the last rank; returns the time."""
        named = f"--run={self.folder.path}"
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                starter = Path(
                    "/proc", (place / "stat").read_text().rsplit(")", 1)[1].split()[1], "cmdline"
                ).read_text()
                if "train_rank.py" in words and named in words and ("zygote" in starter or "megaboa" in starter):
                    log = (place / "fd" / "1").readlink().stem  # the name is rank-K
                    found.append((int(log.removeprefix("rank-")), int(place.name)))
            except (OSError, ValueError):  # an ended process, another user's, or no rank
                continue
        if not found:
            raise SystemExit("no rank is left to kill")
        hit = time.time()
        os.kill(max(found)[1], signal.SIGKILL)
        return hit

    def end(self) -> None:
        """Interrupt the run as by Ctrl-C: ranks save and end."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="the experiment's YAML files, as for --configfile")
    parser.add_argument("--run", required=True)
    parser.add_argument("--save-at", type=int, default=15, help="the step")
    parser.add_argument("--saves", type=int, default=1, help="later ones find memory that the first has taken")
    parser.add_argument("--interval", type=int, default=50, help="of which the stall is given as a share")
    asked = parser.parse_args()
    changes = {"checkpoint": {"save_interval": asked.save_at, "keep_last": 1}, "training": {"train_iters": 10_000}}
    given = [path.resolve() for path in asked.files]
    os.chdir(ROOT)  # the folder of results and the store
    with tempfile.TemporaryDirectory(prefix="megaboa-") as folder:
        changed = Path(folder, "saves.yaml")
        changed.write_text(yaml.safe_dump({"experiment": f"{load(given).experiment.experiment}-saves", **changes}))
        config = [*given, changed]
        plan = make_plan(load(config))
        run = plan[asked.run].folder("results", plan.experiment.experiment)
        saved = Saved(config, asked.run, run)
        try:
            for line in measured(saved, asked.save_at, asked.saves, asked.interval):
                print(line, flush=True)
        finally:
            saved.end()


def measured(saved: Saved, save_at: int, saves: int, interval: int) -> Iterator[str]:
    usual = 0.0
    for number in range(1, saves + 1):
        step = number * save_at
        what = f"the checkpoint of step {step}"
        complete = saved.wait(lambda step=step: completed_at(saved.store / "checkpoints").get(step), what)
        size = sizes(saved.store / "checkpoints")[step]
        saved.wait(lambda complete=complete: max(saved.steps(1).values()) > complete, "a step after the save")
        done = saved.steps(1)
        took = {later: done[later] - done[later - 1] for later in done if later - 1 in done}
        # all saves are compared with the steps before the first one
        usual = usual or statistics.median(seconds for later, seconds in took.items() if WARMUP < later <= step)
        until = step + save_at  # where the next save begins
        during = [seconds for later, seconds in took.items() if step < later <= until and done[later - 1] <= complete]
        stall = sum(during) - len(during) * usual
        yield f"{size / GIB:.1f} GiB, saved at step {step}; a step takes {usual:.3f} s"
        late = " before the next save, which waited" if complete > done.get(until, complete) else ""
        yield f"complete {complete - done[step]:.1f} s after the step: {len(during)} steps meanwhile{late}"
        yield f"the first of them took {during[0] - usual:+.2f} s longer, all of them {stall:+.2f} s"
        yield f"which is {stall / (interval * usual):.2%} of {interval} steps"

    yield f"after the first attempt's start: {saved.phases(1, min(event['time'] for event in saved.events(1)))}"
    hit = saved.kill_a_rank()
    saved.wait(lambda: saved.steps(2), "a step of the next attempt")
    yield f"after a rank's death: {saved.phases(2, hit)}"


if __name__ == "__main__":
    main()
