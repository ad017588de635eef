"""Faults that are done to runs on a real cluster.

All runs train the same thing, so that their curves must be that of a run that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from statistics import median

import matrix
from lab import Lab
from site_clone import SiteClone

NAME = "faults"
SAVE_INTERVAL, HIT_AT = 10, 13
TWO_HOSTS = "resources.nodes: 2"
STEPS, LONG = "training.train_iters: 60", "training.train_iters: 500"
AT_ONCE = "recovery.backoff_seconds: 0"


class Faults:
    """The runs of the matrix, on their way."""

    def __init__(self, lab: Lab, clone: SiteClone, runs: dict[str, str]):
        self.lab, self.clone, self.rows, self.run = lab, clone, [], ""
        self.process: subprocess.Popen | None = None
        self.config = clone.experiment(
            NAME, {run: f"{TWO_HOSTS}, {values}" for run, values in runs.items()}, SAVE_INTERVAL
        )

    def prepare(self, *undisturbed: str) -> None:
        """The shared stages, and the runs that nothing disturbs."""
        targets = [f"results/{NAME}/runs/{run}/train.json" for run in undisturbed]
        self.clone.snakemake(*targets, "--configfile", self.config)

    def lengthen(self, seconds: float) -> None:
        """Give the long runs as many steps as fill this time on this machine."""
        durations = [step["seconds"] for step in self.clone.steps(NAME, "quiet", 1)]
        path = self.clone.path / self.config
        path.write_text(path.read_text().replace(LONG, f"training.train_iters: {round(seconds / median(durations))}"))

    def start(self, run: str) -> subprocess.Popen:
        self._end_older_call()
        self.run = run
        self.process = self.clone.start(f"results/{NAME}/runs/{run}/train.json", "--configfile", self.config)
        return self.process

    def _end_older_call(self) -> None:
        """A test that failed has left its Snakemake, which keeps the experiment to itself."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def start_and_wait(self, run: str, step: int = HIT_AT) -> tuple[subprocess.Popen, dict]:
        """Bring a run to a step; its first attempt's start says on which hosts it is."""
        process = self.start(run)
        self.clone.wait_for_step(NAME, run, step)
        return process, self.clone.starts(NAME, run)[0]

    def finish(self, run: str, process: subprocess.Popen | None = None, timeout: float = 300) -> None:
        """Wait until the run is trained, and leave Snakemake: its next look at the queue may be half a minute away."""
        process = process or self.start(run)
        manifest = self.clone.results(NAME, "runs", run, "train.json")
        self.clone.wait(manifest.exists, timeout, f"the end of {run}")
        self._leave(run, process)

    def stop(self, run: str, process: subprocess.Popen | None = None, timeout: float = 300) -> dict:
        """Wait until the run has stopped before its end, and return the end of its last attempt."""
        process = process or self.start(run)
        self.clone.wait(lambda: self._stopped(run), timeout, f"the stop of {run}")
        self._leave(run, process)
        assert not self.clone.results(NAME, "runs", run, "train.json").exists()
        return self.ends(run)[-1]

    def _stopped(self, run: str) -> bool:
        last = self.clone.ledger(NAME, run)[-1:]
        return bool(last) and last[0]["event"] == "end" and last[0]["action"] == "stop"

    def _leave(self, run: str, process: subprocess.Popen) -> None:
        job = ["squeue", "--noheader", f"--jobs={self.job(run)}", "--format=%T"]
        self.clone.wait(lambda: not self.lab.run(job, check=False).stdout.strip(), 60, f"the end of the job of {run}")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def snakemake_ends(self, process: subprocess.Popen, code: int = 0, timeout: float = 300) -> None:
        process.wait(timeout)
        assert process.returncode == code, self.clone.output()[-6000:]

    def ends(self, run: str) -> list[dict]:
        return self.clone.ends(NAME, run)

    def curve(self, run: str) -> list[tuple[int, str, str]]:
        return self.clone.curve(NAME, run)

    def ranks(self, host: str) -> list[int]:
        found = self.lab.on_node(host, ["pgrep", "-f", r"^\S*python\S* .*train_rank\.py"], user="root", check=False)
        return [int(pid) for pid in found.stdout.split()]

    def signal_rank(self, host: str, name: str) -> None:
        """Send a signal to the rank on a host: the oldest of the processes with its name."""
        self.lab.on_node(host, ["kill", f"-{name}", str(min(self.ranks(host)))], user="root")

    def kill_rank_when_there(self, host: str, path: Path) -> None:
        """SIGKILL to the rank on a host as soon as a file is there: who waits is on that host and knows its process."""
        wait = f"for try in $(seq 12000); do [ -e {path} ] && exec kill -KILL {min(self.ranks(host))}; sleep 0.01; done"
        self.lab.on_node(host, ["bash", "-c", f"{wait}; exit 1"], user="root")

    def job(self, run: str) -> str:
        return self.clone.starts(NAME, run)[-1]["job"]

    def store(self, run: str) -> Path:
        return self.clone.store(NAME, run)

    def lost_steps(self, run: str) -> int:
        """Steps that were done more than once."""
        attempts = [start["attempt"] for start in self.clone.starts(NAME, run)]
        return sum(len(self.clone.steps(NAME, run, attempt)) for attempt in attempts) - len(self.curve(run))

    def recovery(self, run: str, since: float) -> float | None:
        """Seconds from the event to the first step of a later attempt."""
        attempts = [start["attempt"] for start in self.clone.starts(NAME, run)]
        times = [step["time"] for attempt in attempts[1:] for step in self.clone.steps(NAME, run, attempt)[:1]]
        return min((moment - since for moment in times if moment > since), default=None)

    def record(self, event: str, outcome: str, jobs: int = 1, since: float = 0.0, of: str = "quiet") -> None:
        """Check what every line of the matrix promises of the run that was started last, and keep the line."""
        run = self.run
        lost, same = self.lost_steps(run), self.curve(run) == self.curve(of)
        submitted = len({start["job"] for start in self.clone.starts(NAME, run)})
        assert same, "the curve is not that of the undisturbed run"
        assert lost <= SAVE_INTERVAL * len(self.ends(run)[:-1])
        assert submitted == jobs, "a job more than expected has trained"
        recovery = self.recovery(run, since) if since else None
        self.rows.append(matrix.Row(event, outcome, lost, jobs, recovery, same))

    def stops(self, event: str, outcome: str) -> None:
        """A run that must not be tried again has made one attempt."""
        assert len(self.clone.starts(NAME, self.run)) == 1
        self.rows.append(matrix.Row(event, outcome, None, 1, None, None))
