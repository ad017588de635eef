"""Faults that are done to runs on a real cluster.

All runs train the same thing, so that their curves must be that of a run that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import matrix
from clone import edit
from lab import REPOSITORY, UID, Lab
from site_clone import SiteClone

from megaboa.paths import RunFolder
from megaboa.run import node_memory
from megaboa.run.identity import identity_of, store_of
from megaboa.store_paths import RunStore

NAME = "faults"
SAVE_INTERVAL, HIT_AT = 10, 13
ONE_HOST, TWO_HOSTS = "resources.nodes: 1", "resources.nodes: 2"
LAST = 60
STEPS = f"training.train_iters: {LAST}"
WAIT = 400.0  # for what comes when it comes: other work may share this machine
AT_ONCE = "recovery.backoff_seconds: 0"
POLL = f"""
import os, sys, time
end = time.monotonic() + {WAIT}
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
    if time.monotonic() > end:
        sys.exit(1)
"""
PAGE = 4096
ZYGOTE = r"megaboa\.bridge\.zygote"
RANKS_OF = r"\S*train_rank\.py .*--run=\S*/runs/{}( |$)"


def fill(disk: Path) -> Path:
    """To the last byte; what fills it is returned."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"\x00" * PAGE)
        except OSError:
            assert os.statvfs(disk).f_bavail == 0
    return ballast


class Faults:
    """The runs of the matrix, on their way."""

    bound = 0.0  # of the differences from the undisturbed run's losses and gradient norms

    def __init__(
        self,
        lab: Lab,
        clone: SiteClone,
        runs: dict[str, str],
        hosts: str = TWO_HOSTS,
        save_interval: int = SAVE_INTERVAL,
    ):
        self.lab, self.clone, self.rows, self.run = lab, clone, [], ""
        self.save_interval = save_interval
        self.process: subprocess.Popen | None = None
        runs = {run: f"{hosts}, {values}" if hosts else values for run, values in runs.items()}
        self.config = clone.experiment(NAME, runs, save_interval)

    def use_gpus(self) -> None:
        """Before anything is made."""
        config = self.clone.path / self.config
        edit(config, "device: cpu", "device: cuda")
        edit(config, "seq_length: 64, precision: fp32", "seq_length: 128, precision: bf16_mixed")

    def prepare(self, *undisturbed: str) -> None:
        """What comes before training, on the login host as that is quicker, and the runs that nothing disturbs."""
        self.clone.before_training(self.config)
        targets = [f"results/{NAME}/runs/{run}/train.json" for run in undisturbed]
        self.clone.snakemake(*targets, "--configfile", self.config)

    def start(self, run: str, *more: str, env: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Call for a run; `more` runs of the same call are on their way at the same time."""
        self.end_call()
        self.run = run
        targets = [f"results/{NAME}/runs/{name}/train.json" for name in (run, *more)]
        self.process = self.clone.start(*targets, "--configfile", self.config, env=env)
        return self.process

    def end_call(self) -> None:
        """Kill Snakemake, which keeps the experiment to itself; a test that failed may have left it."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def start_and_wait(
        self, run: str, step: int = HIT_AT, env: Mapping[str, str] | None = None
    ) -> tuple[subprocess.Popen, dict]:
        """Bring a run to a step; its first attempt's start says on which hosts it is."""
        process = self.start(run, env=env)
        self.clone.wait_for_step(NAME, run, step)
        return process, self.clone.starts(NAME, run)[0]

    def wait_for_start(self, run: str, number: int) -> dict:
        """Of an attempt, which is returned."""
        self.clone.wait(lambda: len(self.clone.starts(NAME, run)) >= number, WAIT, f"attempt {number} of {run}")
        return self.clone.starts(NAME, run)[number - 1]

    def wait_for_end(self, run: str, number: int) -> dict:
        self.clone.wait(lambda: len(self.ends(run)) >= number, WAIT, f"the end of attempt {number} of {run}")
        return self.ends(run)[number - 1]

    def wait_for_the_word_to_stop(self, run: str) -> None:
        """The supervisor has told the ranks of the last attempt to save and end."""
        attempt = self.clone.starts(NAME, run)[-1]["attempt"]
        word = RunStore(self.store(run)).attempt(attempt).stop_now
        self.clone.wait(word.exists, WAIT, f"the word to stop attempt {attempt} of {run}")

    def wait_for_steps(self, run: str, attempt: int, count: int = 1) -> None:
        self.wait_for_start(run, attempt)
        steps = self.clone.steps
        self.clone.wait(lambda: len(steps(NAME, run, attempt)) >= count, WAIT, f"steps of attempt {attempt} of {run}")

    def park(self, run: str, step: int = 3) -> None:
        """Let the first rank of a run stand still from a step on, until `unpark`."""
        self.clone.wait_for_step(NAME, run, step)
        self._signal_first_rank(run, "STOP")

    def park_in_a_save(self, run: str) -> Path:
        """Let a parked run go on until the middle of a save, whose folder is returned.

        On a busy machine a save may be over before its folder is seen: then it is the next one.
        """
        host = self.clone.starts(NAME, run)[-1]["nodes"][0]
        rank = min(self.ranks(host, run))
        for iteration in range(SAVE_INTERVAL, LAST, SAVE_INTERVAL):
            saving = self.store(run) / "checkpoints" / f"iter_{iteration:07d}"
            if not saving.exists():
                self._do_when_there(host, saving, f"kill -STOP {rank}", first=f"kill -CONT {rank}")
            if not (saving / "complete.json").exists():
                return saving
        raise AssertionError(f"every save of {run} was over before it could be stopped")

    def unpark(self, run: str) -> None:
        self._signal_first_rank(run, "CONT")

    def _signal_first_rank(self, run: str, name: str) -> None:
        host = self.clone.starts(NAME, run)[-1]["nodes"][0]
        self.lab.on_node(host, ["kill", f"-{name}", str(min(self.ranks(host, run)))], user="root")

    def admin(self, *words: str) -> None:
        self.lab.run(["scontrol", *words], user="root")

    def return_to_service(self) -> None:
        """Drained hosts; a controller that was killed may have forgotten that it was asked to do so."""
        for host in self.lab.nodes:
            if "drain" in self.lab.state(host):
                self.lab.run(["scontrol", "update", f"nodename={host}", "state=resume"], user="root", check=False)

    def queue(self, job: str) -> tuple[str, str]:
        """A job's state, and why it waits."""
        shown = self.lab.run(["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r"], check=False)
        state, _, reason = shown.stdout.strip().partition(" ")
        return state, reason

    def finish(self, run: str, process: subprocess.Popen | None = None, timeout: float = WAIT) -> None:
        """Wait until the run is trained, and leave Snakemake: its next look at the queue may be half a minute away."""
        process = process or self.start(run)
        self.trained(run, timeout)
        self._leave(run, process)

    def trained(self, run: str, timeout: float = WAIT) -> None:
        """Wait until the run is trained, without a new call."""
        self.run = run
        manifest = self.clone.results(NAME, "runs", run, "train.json")
        self.clone.wait(manifest.exists, timeout, f"the end of {run}")
        self.job_ends(run)

    def stop(self, run: str, process: subprocess.Popen | None = None, timeout: float = WAIT) -> dict:
        """Wait until the run has stopped before its end, and return the end of its last attempt."""
        process = process or self.start(run)
        self.clone.wait(lambda: self._stopped(run), timeout, f"the stop of {run}")
        self._leave(run, process)
        assert not self.clone.results(NAME, "runs", run, "train.json").exists()
        return self.ends(run)[-1]

    def _stopped(self, run: str) -> bool:
        last = self.clone.ledger(NAME, run)[-1:]
        return bool(last) and last[0]["event"] == "end" and last[0]["action"] == "stop"

    def job_ends(self, run: str, timeout: float = WAIT) -> None:
        job = ["squeue", "--noheader", f"--jobs={self.job(run)}", "--format=%T"]
        self.clone.wait(
            lambda: not self.lab.run(job, check=False).stdout.strip(), timeout, f"the end of the job of {run}"
        )

    def _leave(self, run: str, process: subprocess.Popen) -> None:
        self.job_ends(run)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def snakemake_ends(self, process: subprocess.Popen, code: int = 0, timeout: float = WAIT) -> None:
        process.wait(timeout)
        assert process.returncode == code, self.clone.output()[-6000:]

    def ends(self, run: str) -> list[dict]:
        return self.clone.ends(NAME, run)

    def curve(self, run: str) -> list[tuple[int, str, str]]:
        return self.clone.curve(NAME, run)

    def difference(self, run: str, other: str) -> float:
        """The largest between two curves, and without end where one has steps that the other lacks."""
        ours, theirs = self.curve(run), self.curve(other)
        if [step for step, *_ in ours] != [step for step, *_ in theirs]:
            return math.inf
        pairs = zip(ours, theirs, strict=True)
        both = ((one, two) for left, right in pairs for one, two in zip(left[1:], right[1:], strict=True))
        return max((abs(float.fromhex(one) - float.fromhex(two)) for one, two in both if one != two), default=0.0)

    def ranks(self, host: str, run: str | None = None) -> list[int]:
        """Processes with their name; where ranks are forked, those that are."""
        named = rf"^\S*python\S* {RANKS_OF.format(run or self.run)}"
        keepers = self._processes(host, ZYGOTE)
        forked = self._processes(host, named, f"--parent={','.join(map(str, keepers))}") if keepers else []
        return forked or self._processes(host, named)

    def kill_srun(self, host: str) -> None:
        """That of the run's ranks: another run's may be on the host, too."""
        self.lab.on_node(host, ["pkill", "-KILL", "-f", rf"^srun .*{RANKS_OF.format(self.run)}"], user="root")

    def signal_forked_rank(self, host: str, name: str, when: Path | None = None) -> None:
        """With `launch.tasks: node`, in a first attempt: to the last child of the process that ranks are forked from,
        which is older than what stands by; jobs without ranks have such processes, too. With `when`, the host waits
        for that file first."""
        keepers = "$(pgrep -f 'megaboa[.]bridge[.]zygote')"
        look = f"for keeper in {keepers}; do pkill -{name} --newest -P $keeper -f train_rank && exit; done"
        shown = "ps -eo pid,ppid,etimes,stat,args | grep -E '[z]ygote|[t]rain_rank' | grep -v pgrep | cut -c1-300"
        reason = f"grep -rhs 'imports for itself' {self.store(self.run) / 'attempts'}"
        look = f"{look}; echo no rank is forked:; {shown}; {reason}; exit 1"
        if when:
            self._do_when_there(host, when, f"bash -c {shlex.quote(look)}")
        else:
            self.lab.on_node(host, ["bash", "-c", look], user="root")

    def park_until_others_stand_by(self, run: str) -> list[str]:
        """Let a run stand still after its first save, else it would end before a process on each of its hosts has
        imported Bridge for the next attempt; returns these hosts. Who waits for the save is there before the first
        step: GPUs may do hundreds in a second."""
        start = self.wait_for_start(run, 1)
        saved = self.store(run) / "checkpoints" / f"iter_{self.save_interval:07d}" / "complete.json"
        self.signal_forked_rank(start["nodes"][0], "STOP", when=saved)
        standby = self.store(run) / "attempts" / f"{start['attempt']:02d}" / "standby"
        hosts = len(start["nodes"])
        self.clone.wait(lambda: len(list(standby.glob("keeper-*.log"))) == hosts, WAIT, "processes that stand by")
        for host in start["nodes"]:
            self.clone.wait(lambda host=host: self.has_imported(host), WAIT, f"{host} to stand by")
        return start["nodes"]

    def kill_parked_rank(self, hosts: list[str]) -> float:
        """That of the last host; returns when. The one that stands still is another, if there are several hosts."""
        hit = time.time()
        self.signal_forked_rank(hosts[-1], "KILL")
        if len(hosts) > 1:
            self.signal_forked_rank(hosts[0], "CONT")  # else it would be given its time for last words, and have none
        return hit

    def was_started_by_what_stood_by(self, run: str) -> bool:
        """Its second attempt."""
        attempts = self.store(run) / "attempts"
        return (attempts / "02" / "srun.log").resolve().parent == (attempts / "01" / "standby").resolve()

    def has_imported(self, host: str) -> bool:
        """The last process there that keeps ranks has worked for a second or more, and does nothing now."""
        keepers = self._processes(host, ZYGOTE)
        if len(keepers) < 2:  # that of the running attempt's ranks is one
            return False
        keeper = max(keepers)
        both = [
            self.lab.on_node(host, ["cat", f"/proc/{keeper}/stat"], user="root").stdout.rsplit(")", 1)[1].split()[11]
            for pause in (0, 1)
            if not time.sleep(pause)
        ]
        return both[0] == both[1] and int(both[0]) >= os.sysconf("SC_CLK_TCK")

    def supervisor(self, host: str) -> list[int]:
        """With the process that keeps it, and what it is about to start."""
        return self._processes(host, rf"^\S*python\S* \S*megaboa pretrain \S*/runs/{self.run}/run\.json$")

    def _processes(self, host: str, pattern: str, *options: str) -> list[int]:
        found = self.lab.on_node(host, ["pgrep", *options, "-f", pattern], user="root", check=False)
        return [int(pid) for pid in found.stdout.split()]

    def signal_supervisor(self, host: str, name: str) -> None:
        """To itself, whose number is in the ledger, and not to the process that keeps it."""
        number, found = self.clone.starts(NAME, self.run)[-1]["pid"], self.supervisor(host)
        assert number in found, (number, found, self.clone.ledger(NAME, self.run)[-4:])
        self.lab.on_node(host, ["kill", f"-{name}", str(number)], user="root")

    def kill_supervisor(self, host: str) -> None:
        """With the process that keeps it, which goes first: else it starts the next one."""
        numbers = [str(number) for number in sorted(self.supervisor(host))]
        self.lab.on_node(host, ["kill", "-KILL", *numbers], user="root")

    def kill_health_rank(self, host: str) -> bool:
        """The process of the health check that tests the host's GPU; whether there was one."""
        words = ["pkill", "-KILL", "-f", r"megaboa\.run\.health_rank"]
        return self.lab.on_node(host, words, user="root", check=False).returncode == 0

    def remembered(self, run: str) -> list[node_memory.Remembered]:
        """What the store's runs know of hosts."""
        (known,) = node_memory.of_store(self.store(run).parents[3], time.time(), node_memory.USUAL_DAYS).values()
        return known

    def slow_down(self, host: str) -> None:
        """The rank on a host stands still for five sixths of the time, which is slow on a busy machine, too."""
        words = (sys.executable, REPOSITORY / "tests" / "stop_and_go.py", min(self.ranks(host)), 0.05, 0.01)
        self.lab.on_node(host, ["sh", "-c", f"{' '.join(map(str, words))} >/dev/null 2>&1 &"], user="root")

    def signal_rank(self, host: str, name: str, run: str | None = None) -> None:
        """Send a signal to the rank on a host: the oldest of the processes with its name."""
        self.lab.on_node(host, ["kill", f"-{name}", str(min(self.ranks(host, run)))], user="root")

    def has_pending(self, host: str, number: signal.Signals) -> bool:
        """The rank on a host, which stands still, has been sent a signal."""
        status = self.lab.on_node(host, ["cat", f"/proc/{min(self.ranks(host))}/status"], user="root").stdout
        pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
        return bool(int(pending, 16) & 1 << number - 1)

    def wait_for_a_save(self, run: str, timeout: float = 120) -> Path:
        """A checkpoint that is being written now."""
        folder, deadline = self.store(run) / "checkpoints", time.monotonic() + timeout
        while time.monotonic() < deadline:
            for path in folder.glob("iter_*"):
                if not (path / "complete.json").exists():
                    return path
            time.sleep(0.01)
        raise TimeoutError(f"no save of {run} in {timeout} s")

    def newest_copies(self, host: str) -> list[str]:
        """The parts of the state that a host keeps for itself and for its partner, by rank."""
        script = f"ls -d /tmp/megaboa-{UID}/*/*/{host}/iter_*/0.json | sort | tail -1"
        newest = self.lab.on_node(host, ["sh", "-c", script], user="root").stdout.strip()
        found = self.lab.on_node(host, ["sh", "-c", f"ls {Path(newest).parent}/*.pt"], user="root").stdout.split()
        assert len(found) == 2
        return found

    def flip_byte(self, host: str, path: str) -> None:
        """In the middle of a file, which keeps its size."""
        program = (
            "import os, sys; file = open(sys.argv[1], 'r+b'); file.seek(os.path.getsize(sys.argv[1]) // 2); "
            "old = file.read(1); file.seek(-1, 1); file.write(bytes([old[0] ^ 1]))"
        )
        self.lab.on_node(host, [sys.executable, "-c", program, path], user="root")

    def kill_rank_when_there(self, host: str, path: Path) -> None:
        self.signal_rank_when_there(self.run, host, path, "KILL")

    def signal_rank_when_there(self, run: str, host: str, path: Path, name: str) -> None:
        """To the rank on a host, as soon as a file is there: who waits is on that host and knows its process."""
        self._do_when_there(host, path, f"kill -{name} {min(self.ranks(host, run))}")

    def _do_when_there(self, host: str, path: Path, command: str, first: str = ":") -> None:
        wait = f"{first}; {sys.executable} -S -c {shlex.quote(POLL)} {path} && exec {command}"
        self.lab.on_node(host, ["bash", "-c", f"{wait}; echo {path} never came; exit 1"], user="root", timeout=2 * WAIT)

    def keep_on(self, disk: Path, run: str) -> None:
        """Let the store of a run, its ledger too, lie on a file system of its own."""
        folder = RunFolder(self.clone.results(NAME, "runs", run))
        store, target = self.clone.path / store_of(folder, identity_of(folder)).path, disk / run
        for path in (store.parent, target):
            path.mkdir(parents=True)
        subprocess.run(["chown", "-R", f"{UID}:{UID}", str(target), str(store.parent)], check=True)
        store.symlink_to(target)

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

    def given_up(self, host: str) -> float:
        """When SLURM has taken a host for dead."""
        self.clone.wait(lambda: self.lab.state(host).startswith("down"), WAIT, f"SLURM to give up {host}")
        return time.time()

    def tell_phases(self, run: str, hit: float, noticed: float | None = None) -> None:
        """How long each part took from a fault to the next step, for docs/benchmarks/recovery.md."""
        starts = self.clone.starts(NAME, run)
        attempt = next(start["attempt"] for start in starts if start["time"] > hit)
        moments = [("SLURM's word", noticed)] if noticed else []
        moments += [("the attempt closed", self.ends(run)[attempt - 2]["time"])]
        moments += [("the next begun", starts[attempt - 1]["time"]), *self.clone.phases(NAME, run, attempt)]
        last = hit
        for name, moment in moments:
            print(f"{name}: {moment - last:+.1f} s, {moment - hit:.1f} s in all")
            last = moment

    def record(self, event: str, outcome: str, jobs: int = 1, since: float = 0.0) -> None:
        """Check what every line of the matrix promises of the run that was started last, and keep the line."""
        run = self.run
        lost, same = self.lost_steps(run), self.difference(run, "quiet") <= self.bound
        submitted = len({start["job"] for start in self.clone.starts(NAME, run)})
        assert same, "the curve is not that of the undisturbed run"
        assert lost <= self.save_interval * len(self.ends(run)[:-1])
        assert submitted == jobs, "a job more than expected has trained"
        recovery = self.recovery(run, since) if since else None
        self.rows.append(matrix.Row(event, outcome, lost, jobs, recovery, same))

    def stops(self, event: str, outcome: str) -> None:
        """A run that must not be tried again has made one attempt."""
        assert len(self.clone.starts(NAME, self.run)) == 1
        self.rows.append(matrix.Row(event, outcome, None, 1, None, None))
