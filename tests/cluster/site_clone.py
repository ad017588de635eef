"""A clone of the repository in an ordinary user's home on the lab, with the site's account and partitions."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from clone import TINY, copy_repository, curve_of
from lab import UID, Lab

from megaboa.files import read_json, read_jsonl
from megaboa.paths import begun

SITE_FILE = Path("profiles", "slurm", "site.yaml")
SHORT = "training.train_iters: 12"
# The lab answers at once, so Snakemake need not wait as long as on a real site.
FAST = ("--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "10", "--max-status-checks-per-second", "2")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class SiteClone:
    """What a user does on the login host."""

    def __init__(self, lab: Lab, name: str = "megaboa"):
        self.lab, self.path = lab, lab.home / name
        self.needed: subprocess.Popen | None = None  # the call to Snakemake after whose failure nothing is waited for
        copy_repository(self.path)
        (self.path / SITE_FILE).write_text("slurm_account: lab\nslurm_partition: cpu\ngpu_partition: gpu\n")
        subprocess.run(["chown", "-R", f"{UID}:{UID}", str(self.path)], check=True)

    def experiment(self, name: str, runs: dict[str, str], save_interval: int = 10) -> str:
        """Write a small experiment of long steps (a few a second); `runs`: the flow-style values of each.

        Every run has a setting of its own that changes nothing, as its model has no experts: so it is a run of its
        own, with the losses of the others and the same index of samples.
        """
        text = TINY.format(name=name, steps=0, save_interval=save_interval)
        text = text.replace("train_iters: 0, global_batch_size: 8,", "global_batch_size: 32, eval_interval: 1001,")
        for number, (run, values) in enumerate(runs.items()):
            text += f"    {run}: {{overrides.model.moe_aux_loss_coeff: {1 + number}, {values}}}\n"
        (self.path / f"{name}.yaml").write_text(text)
        return f"{name}.yaml"

    def default_on_two_hosts(self, runs: list[str]) -> str:
        """Write the default experiment with these of its runs; the second rank of each is on another host."""
        config = yaml.safe_load((self.path / "config" / "config.yaml").read_text())
        config["sweep"]["runs"] = {run: config["sweep"]["runs"][run] for run in runs}
        for values in config["sweep"]["runs"].values():
            if values.pop("resources.gpus_per_node", 1) == 2:
                values["resources.nodes"] = 2
        named = {values["model"] for values in config["sweep"]["runs"].values()}
        config["models"] = {model: values for model, values in config["models"].items() if model in named}
        config["export"]["runs"] = ["dp1"]
        agreements = config["report"]["agreements"]
        for agreement in agreements:
            agreement["runs"] = [run for run in agreement["runs"] if run in runs]
        config["report"]["agreements"] = [agreement for agreement in agreements if agreement["runs"]]
        (self.path / "spread.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return "spread.yaml"

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, **options: object) -> subprocess.Popen:
        """`snakemake --profile slurm` on the login host; its output goes to a file, which `output` reads.

        `env`: what the user's shell exports besides.
        """
        self.log = self.path / f"snakemake-{time.monotonic_ns()}.out"
        command = [sys.executable, "-m", "snakemake", *arguments, "--profile", "slurm", *FAST]
        with self.log.open("wb") as stream:
            return self.lab.popen(
                command,
                cwd=self.path,
                env=ENVIRONMENT | dict(env or {}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                **options,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def snakemake(
        self, *arguments: str, code: int = 0, timeout: float = 1200, env: Mapping[str, str] | None = None
    ) -> str:
        process = self.start(*arguments, env=env)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        assert process.returncode == code, self.output()[-8000:]
        return self.output()

    def before_training(self, config: str, *targets: str) -> None:
        """Make what the runs read without SLURM: it has nothing to say there, and its queue takes time."""
        words = [sys.executable, "-m", "snakemake", "--cores", "all", *(targets or ("pretrain",))]
        options = ["--omit-from", "train", "--configfile", config]
        self.lab.run([*words, *options], cwd=self.path, env=ENVIRONMENT, timeout=900)

    def megaboa(self, *words: str, **options: object) -> str:
        return self.lab.run(self.command(*words), cwd=self.path, env=ENVIRONMENT, **options).stdout

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "workflow/scripts/megaboa", *words]

    def results(self, *parts: str) -> Path:
        return self.path.joinpath("results", *parts)

    def json(self, *parts: str) -> dict:
        return read_json(self.results(*parts))

    def store(self, experiment: str, run: str) -> Path:
        return self.results(experiment, "runs", run, "attempts.jsonl").resolve().parent

    def ledger(self, experiment: str, run: str) -> list[dict]:
        return read_jsonl(self.results(experiment, "runs", run, "attempts.jsonl"))

    def ends(self, experiment: str, run: str) -> list[dict]:
        return [entry for entry in self.ledger(experiment, run) if entry["event"] == "end"]

    def starts(self, experiment: str, run: str) -> list[dict]:
        return [entry for entry in self.ledger(experiment, run) if entry["event"] == "start"]

    def curve(self, experiment: str, run: str) -> list[tuple[int, str, str]]:
        """Of every step the last time that it was done, its loss and gradient norm to the last bit."""
        return curve_of(self.store(experiment, run))

    def steps(self, experiment: str, run: str, attempt: int) -> list[dict]:
        events = read_jsonl(self.store(experiment, run) / "attempts" / f"{attempt:02d}" / "steps.jsonl")
        return [event for event in events if event["event"] == "step"]

    def phases(self, experiment: str, run: str, attempt: int) -> list[tuple[str, float]]:
        """Until the end of the first step, each with the time when it was reached."""
        events = read_jsonl(self.store(experiment, run) / "attempts" / f"{attempt:02d}" / "steps.jsonl")
        first = next(number for number, event in enumerate(events) if event["event"] == "step")
        return [(event.get("phase", event["event"]), event["time"]) for event in events[: first + 1]]

    def last_step(self, experiment: str, run: str) -> int:
        if not self.ledger(experiment, run):
            return 0
        return max((step for step, *_ in self.curve(experiment, run)), default=0)

    def wait_for_step(self, experiment: str, run: str, step: int, timeout: float = 600) -> None:
        self.wait(lambda: self.last_step(experiment, run) >= step, timeout, f"step {step} of {experiment}/{run}")

    def wait(self, condition: Callable[[], object], timeout: float, what: str) -> None:
        """As long as some run makes steps, a slow machine has more time, within reason."""
        begun = moved = time.monotonic()
        steps = 0
        while not condition():
            if self.needed and (code := self.needed.poll()):
                raise AssertionError(f"before {what}, the call ended with {code}\n{self.output()[-4000:]}")
            time.sleep(0.1)
            now = time.monotonic()
            if now < moved + timeout:
                continue
            if now > begun + 4 * timeout or (found := self._logged_steps()) == steps:
                message = f"{what} did not come in {now - begun:.0f} s"
                raise TimeoutError(f"{message}\n{self.output()[-4000:]}\n{self.lab.logs()}")
            steps, moved = found, now

    def _logged_steps(self) -> int:
        """Bytes of them, by any run."""
        stores = (run.attempts_link.resolve().parent for run in begun(self.results()))
        return sum(path.stat().st_size for store in stores for path in store.glob("attempts/*/steps.jsonl"))

    def jobs(self, run: str) -> list[str]:
        """Every job that was ever submitted to train a run; the executor's comment names rule and wildcards."""
        listed = self.lab.run(["squeue", "--noheader", "--states=all", "--format=%i|%k"], user="root").stdout
        return [line.split("|")[0] for line in listed.splitlines() if line.endswith(f"|rule_train_wildcards_{run}")]
