"""Explains failures of stages before and after training, from the logs of jobs without a manifest."""

from __future__ import annotations

import fcntl
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaboa.causes import INTERRUPT, RANK
from megaboa.doctor import troubles
from megaboa.errors import forbidden
from megaboa.paths import ExperimentFolder
from megaboa.records import InsideAsked, RunsSpec, read_if_there
from megaboa.run.failures import EVIDENCE_LENGTH, Tails, classify
from megaboa.scheduler.ranks import Ended
from megaboa.scheduler.registry import cluster

SHARED = ("models", "tokenizers", "corpora", "indexes")  # kinds of shared specifications
# An error message for the user, the last line of a traceback, preflight's refusals.
REFUSED = re.compile(r"^.*(?:\b(?:is|are) refused(?: in the image)?: |; nothing was trained\.$).*$", re.MULTILINE)
ENDED = re.compile(r"^(?:error: |(?:\w+\.)*\w*(?:Error|Exception)\b).*$", re.MULTILINE)
# By SIGINT, such as Ctrl-C: said by a command, or Python's traceback if it had not begun.
INTERRUPTED = re.compile(rf"^interrupted: |{INTERRUPT}", re.MULTILINE)
FROM_A_RANK = re.compile(f"^{RANK}", re.MULTILINE)
UNPROVED = re.compile(r"^FAIL .*$", re.MULTILINE)  # failed checks of a proof
MOST_CHECKS = 5
ANNOUNCED = 3  # indented lines below an error that ends with a colon


@dataclass(frozen=True)
class Job:
    """A job of a stage other than training.

    `needs`: manifests that it depends on. `part`: whether it is one of several jobs that make the manifest together.
    """

    log: Path
    manifest: Path
    needs: tuple[Path, ...] = ()
    part: bool = False

    @property
    def name(self) -> str:
        return str(self.log.with_suffix("")).split("/logs/")[-1]

    @property
    def has_begun(self) -> bool:
        """Whether it began with the present inputs. A log that is older than an input is that of an earlier job."""
        if not self.log.exists() or not all(path.exists() for path in self.needs):
            return False
        return all(path.stat().st_mtime <= self.log.stat().st_mtime for path in self.needs)


def failed(results: Path, over: bool | None = None, only: str | None = None) -> list[str]:
    """The explanations of all failed jobs, or of those of one run and of what all runs need."""
    over = not _is_worked_on(results) if over is None else over
    return list(dict.fromkeys(line for job in jobs(results, only) for line in _told_if_missing(job, over)))


def _told_if_missing(job: Job, over: bool) -> list[str]:
    try:
        return [] if job.manifest.exists() else told(job, over)
    except PermissionError as error:  # said once of a folder that several jobs write to
        return [forbidden(error)]


def keeps_runs_waiting(results: Path) -> bool:
    """Whether a job before training has said why it failed. It takes no lock, so it may be called often."""
    return any(told(job) for job in _before_training(results) if not job.manifest.exists())


def jobs(results: Path, only: str | None = None) -> list[Job]:
    """Every job that the plan's specifications ask for, except for training; `only`: of the runs, that one."""
    runs = [only] if only else _runs(results)
    return [*_before_training(results), *(job for run in runs for job in of_run(results, run))]


def of_run(results: Path, run: str) -> list[Job]:
    """A run's jobs other than training."""
    experiment = ExperimentFolder(results)
    logs, folder = experiment.logs, experiment.run(run)
    export, proof = folder.export, folder.proof
    return [
        Job(logs / "export" / f"{run}.log", export, (folder.train_manifest,)),
        Job(logs / "export" / f"{run}.proof.log", proof, (export,)),
        Job(logs / "export" / f"{run}.generate.log", folder.generations, (export,)),
        Job(logs / "export" / f"{run}.push.log", folder.push, (export, proof)),
        Job(logs / "evaluate" / f"{run}.log", folder.evaluation, (export, proof)),
        Job(logs / "export" / f"{run}.along.log", folder.along, (folder.train_manifest,)),
        Job(logs / "profiles" / f"{run}.log", folder.trace),
        Job(logs / "profiles" / f"{run}.analysis.log", folder.analysis, (folder.trace,)),
    ]


def of_model(results: Path, model: str) -> list[Job]:
    experiment = ExperimentFolder(results)
    logs, folder = experiment.logs / "models", experiment.model(model)
    manifests = (folder.source, folder.imported, folder.proof)
    return [Job(logs / f"{model}.{path.stem}.log", path, manifests[:number]) for number, path in enumerate(manifests)]


def _before_training(results: Path) -> Iterator[Job]:
    experiment = ExperimentFolder(results)
    logs, inside = experiment.logs, experiment.specs.inside
    boxed = bool((found := read_if_there(InsideAsked, inside)) and found.container)
    for path in (experiment.image, experiment.preflight, *([experiment.preflight_in_image] if boxed else [])):
        yield Job(logs / f"{path.stem}.log", path)
    names = {kind: [path.stem for path in experiment.specs.all(kind)] for kind in SHARED}
    for model in names["models"]:
        yield from of_model(results, model)
    for one in names["tokenizers"]:
        yield Job(logs / "tokenizers" / f"{one}.log", experiment.tokenizer(one))
    for corpus in names["corpora"]:
        folder, made = logs / "data" / corpus, experiment.corpus(corpus)
        for path in (made.sources, made.verification):
            yield Job(folder / f"{path.stem}.log", path)
        yield from (
            Job(log, made.manifest, part=True) for log in [*sorted(folder.glob("shard-*.log")), folder / "merge.log"]
        )
    for one in names["indexes"]:
        yield Job(logs / "data" / "indexes" / f"{one}.log", experiment.index(one))


def _runs(results: Path) -> tuple[str, ...]:
    found = read_if_there(RunsSpec, ExperimentFolder(results).specs.runs)
    return found.runs if found else ()


def told(job: Job, over: bool = False) -> list[str]:
    """The explanation of a failed job; empty if the job hasn't begun, or may still be running.

    `over`: no call is working on the experiment.
    """
    if not job.has_begun:
        return []
    text = FROM_A_RANK.sub("", Tails([(None, job.log)])[None])
    if refused := REFUSED.findall(text):
        return [f"{job.name}: refused", *(f"  | {line}" for line in refused), f"  logs: {job.log}"]
    if not (said := list(ENDED.finditer(text))):
        if over and INTERRUPTED.search(text):
            return [f"{job.name}: was interrupted, as by Ctrl-C; the same call makes it again"]
        own = f"logs/{cluster().profile}"
        ended = f", {cluster().name} ended it (its own log: {own})," if Path(own).is_dir() else ""
        without = (
            f"{job.name}: {job.manifest.name} is missing, and the log has no error. It was killed{ended} or the file "
            "was removed; the same call makes it again"
        )
        return [without, f"  logs: {job.log}"] if over and not job.part else []
    cause = classify(Ended(0, 1), {None: text}, 0).cause
    found = troubles.trouble(cause, _whole(said[-1]), {None: text})
    what = "failed" if found.name in ("unknown", "config") else found.name.replace("_", " ")
    return [
        f"{job.name}: {what}",
        *(f"  | {line[:EVIDENCE_LENGTH]}" for line in UNPROVED.findall(text)[:MOST_CHECKS]),
        *(f"  | {line}" for line in found.evidence),
        f"  logs: {job.log}",
        *(f"  try: {line}" for line in (troubles.hub(troubles.Case()) if found.name == "hub" else ())),
    ]


def _whole(last: re.Match[str]) -> str:
    """An error's line, with the indented lines below it if it announces them."""
    below = filter(str.strip, last.string[last.end() :].splitlines())
    announced = itertools.takewhile(lambda line: line[0].isspace(), below)
    more = itertools.islice(announced, ANNOUNCED if last[0].rstrip().endswith(":") else 0)
    return " ".join(map(str.strip, [last[0], *more]))


def _is_worked_on(results: Path) -> bool:
    """Whether a call holds the experiment's lock, as `megaboa.calls.lock` does."""
    path = results / ".lock"
    if not path.exists():
        return False
    with path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
