"""Try settings in turn, in one allocation, until the fastest is known: what the job of `snakemake tune` does.

A trial is a few steps of a run, by ranks that are forked from one process that has imported everything. If it runs out
of memory or crashes, it ends alone, and is a row of the table as any other. Each trial is a line of a ledger in the
store; what is tried next follows from the ledger alone (check/halving.py), so that a search that was killed resumes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megaboa import files, records, store
from megaboa.check import halving
from megaboa.formats import aligned, counted
from megaboa.image.runtimes import NO_CONTAINER
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import InsideAsked, RankEnd, Setting, Tree, Trial, Tried, TuneSpec, Tuning, Worth, plain, write
from megaboa.run import recipe_code
from megaboa.run import site as sites
from megaboa.run.command import RANK_SCRIPT, environment_digest, rank_environment
from megaboa.run.failures import classify, tails_of
from megaboa.run.identity import identity_of
from megaboa.run.inputs import check_data, check_image, check_nodes
from megaboa.scheduler import local
from megaboa.scheduler.protocol import Place
from megaboa.scheduler.ranks import FORKED, KEEPER, Ended, Ranks
from megaboa.store_paths import AttemptFolder, RunStore

POLL_SECONDS = 0.05
Say = Callable[[str], None]


def tune(folder: ExperimentFolder, spec: TuneSpec, say: Say) -> Tuning:
    """Run or resume the search until it is sure, or its time is up."""
    runs = {one.name: folder.run(one.name) for one in spec.settings}
    names = list(runs)
    packages = records.read(InsideAsked, folder.specs.inside).digest
    identities = {name: _identity(run, packages) for name, run in runs.items()}
    with trials_here(runs[spec.own], spec) as here:
        ledger = _Ledger(here.place / "trials.jsonl", identities)
        if ledger.trials:
            say(f"{counted(len(ledger.trials), 'trial')} made before: {ledger.minutes:.1f} minutes of {spec.minutes:g}")
        while batch := (verdict := halving.decide(names, ledger.trials, spec.tolerance, spec.confidence)).batch:
            if ledger.minutes >= spec.minutes:
                break
            name = batch[0]
            ledger.add(here.measure(runs[name], identities[name], verdict.round))
            say(f"round {verdict.round}, {len(batch) - 1} more: {told(ledger.trials[-1])}")
    return summary(spec, ledger.trials)


@contextlib.contextmanager
def trials_here(run: RunFolder, spec: TuneSpec) -> Iterator[Trials]:
    """The trials of this job or machine, locked against other processes that try settings of the experiment. `run`: any
    of the settings."""
    launch = run.launch
    site = sites.here(launch, run.run.device, container=sites.container_of(launch, run.image))
    check_nodes(run, site.nodes)
    check_image(run)
    check_data(run)
    # The job may get other nodes next time; nodes with the same partition and GPU are considered equal.
    machine = [launch.partition, launch.gpu] if site.job else [*site.nodes, launch.gpu]
    place = store.folder(launch.store, "tunings", run.experiment, machine)

    def say(holder: str) -> None:
        print(f"{holder} tries settings of {run.experiment} on this machine; waiting", file=sys.stderr, flush=True)

    # The image is removed last, and even after a SIGTERM, which `_ending_well` has turned into an exception.
    with (
        store.locked(place.with_name(f".{place.name}.lock"), on_wait=say),
        _ending_well(),
        sites.image_shared(site, AttemptFolder(place).image),
        _Importers(run, site) as importers,
    ):
        yield Trials(importers, place, spec)


def _identity(run: RunFolder, packages: str | None) -> str:
    """Digest of what a trial measures, without wall time, partition and the like."""
    launch = run.documents["launch"]
    started = {name: launch.get(name) for name in ("overrides", "cpus_per_rank", "num_workers", "gpu")}
    started["environment"] = launch["start"]["environment"]
    profile = run.documents["profile"]
    return files.digest(
        {"run": plain(identity_of(run)), "launch": started, "steps": profile["steps"], "packages": packages}
    )


class _Ledger:
    """The trials of the present settings; lines of others, from before the experiment was edited, are ignored."""

    def __init__(self, path: Path, identities: dict[str, str]):
        self._path = path
        files.make_folder(path.parent)
        every = records.events({Trial.event: Trial}, files.read_jsonl(path), path)
        self.trials: list[Trial] = [one for one in every if identities.get(one.setting) == one.identity]

    @property
    def minutes(self) -> float:
        return sum(trial.took for trial in self.trials) / 60

    def add(self, trial: Trial) -> None:
        files.append_line(self._path, records.line(trial))
        self.trials.append(trial)


@dataclass
class _Importers:
    """Processes that ranks are forked from, one for each environment, if all ranks run on one machine.

    They live as long as this process, so that no trial has to import anything, even minutes after the previous one.
    """

    run: RunFolder
    site: Place
    running: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __enter__(self) -> _Importers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    @functools.cached_property
    def packages(self) -> str | None:
        return environment_digest(self.run)

    @property
    def is_possible(self) -> bool:
        """Whether ranks are forked: only without an image and on a single node. Otherwise the place starts them."""
        return self.run.launch.image is None and len(self.site.nodes) == 1

    def environment(self, run: RunFolder) -> dict[str, str]:
        """The environment of a run's ranks; starts the process that they are forked from, if needed."""
        wanted = rank_environment(run, environment=self.packages)
        if not self.is_possible:
            return wanted
        wanted |= {FORKED: run.run.device, KEEPER: str(os.getpid())}
        key = files.digest(wanted)
        if key not in self.running or self.running[key].poll() is not None:
            self.running[key] = subprocess.Popen(
                [sites.python_of(run.launch), str(RANK_SCRIPT), "--keep"],
                env={**os.environ, **wanted},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return wanted

    @property
    def place(self) -> Place:
        return local.Machine(NO_CONTAINER, self.run.launch.start.ports) if self.is_possible else self.site


@dataclass
class Trials:
    importers: _Importers
    place: Path
    spec: TuneSpec

    def measure(self, run: RunFolder, identity: str, number: int) -> Trial:
        """Start the ranks of a setting, wait for them, and return the trial."""
        recipe_code.check(run)
        target = AttemptFolder((self.place / "trials" / run.name).absolute())
        shutil.rmtree(target.path, ignore_errors=True)
        files.make_folder(target.path)
        write(RunStore(target.path).identity, identity_of(run))
        # All settings share Megatron's index of the data, which the first trial builds.
        files.make_folder(self.place / "index-cache")
        files.link((self.place / "index-cache").absolute(), RunStore(target.path).index_cache)
        files.write_json(target.asked, run.documents)
        command = [sites.python_of(run.launch), str(RANK_SCRIPT), "--capture"]
        command += [f"--run={run.path}", f"--store={target.path}", f"--attempt={target.path}"]
        began = time.monotonic()
        ranks = self.importers.place.start(command, run.run.world_size, target.path, self.importers.environment(run))
        try:
            ended = _wait(ranks, began + self.spec.trial_minutes * 60)
        finally:
            ranks.kill()
        took = time.monotonic() - began
        found = Trial(setting=run.name, identity=identity, round=number, state="failed", took=took)
        return self._judged(found, target, ended, run.run.world_size)

    def _judged(self, found: Trial, target: AttemptFolder, ended: Ended | None, ranks: int) -> Trial:
        log = str(target.log((ended.rank if ended else 0) or 0))
        if ended is None:
            why = f"took longer than tune.trial_minutes: {self.spec.trial_minutes:g}"
            return _changed(found, state="too_slow", why=why, log=log)
        done = [line for line in files.read_jsonl(target.steps) if line.get("event") == "step"]
        steps = tuple(line["seconds"] for line in done if line["step"] > self.spec.warmup)
        if ended.ok and len(steps) == self.spec.steps:
            reserved, tensors = _memory(target, ranks)
            losses = [line["loss"] for line in done if line.get("loss") is not None]
            shutil.rmtree(target.path, ignore_errors=True)
            return _changed(
                found, state="measured", steps=steps, gib=reserved, tensors_gib=tensors, losses=tuple(losses)
            )
        failure = classify(ended, tails_of(target), len(done))
        state = "out_of_memory" if failure.cause == "out_of_memory" else "failed"
        return _changed(found, state=state, why=failure.evidence, log=log)


def _changed(trial: Trial, **values: Any) -> Trial:
    return records.parse(Trial, {**plain(trial), **values}, "a trial")


def _wait(ranks: Ranks, deadline: float) -> Ended | None:
    """Wait for the ranks; returns None if they take too long."""
    while (ended := ranks.poll()) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_SECONDS)
    return ended


def _memory(target: AttemptFolder, ranks: int) -> tuple[float | None, float | None]:
    """Peak GiB reserved by the allocator, and taken by tensors, each on the rank with the most."""
    found = [records.read_if_there(RankEnd, target.end_record(rank)) for rank in range(ranks)]
    ends = [end for end in found if end]
    return (
        max((end.peak_reserved / 2**30 for end in ends if end.peak_reserved), default=None),
        max((end.peak_allocated / 2**30 for end in ends if end.peak_allocated), default=None),
    )


@contextlib.contextmanager
def _ending_well() -> Iterator[None]:
    """Turn a scheduler's SIGTERM into an exit, so that the ranks are ended too."""

    def stop(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def told(trial: Trial) -> str:
    result = f"{halving.seconds_of(trial):.4g} s/step" if trial.steps else f"{trial.state}: {trial.why}"
    return f"{trial.setting} {result} ({trial.took:.0f} s)"


def summary(spec: TuneSpec, trials: Sequence[Trial]) -> Tuning:
    """The result of the trials, whether the search is over or its time is up."""
    verdict = halving.decide([one.name for one in spec.settings], trials, spec.tolerance, spec.confidence)
    found = verdict.estimate
    ended = "confident"
    if verdict.batch:
        ended = "out_of_time" if verdict.confidence < spec.confidence else "round_unfinished"
    rows = [_row(one, trials, found, spec) for one in spec.settings]
    rows.sort(key=lambda row: (row.slower is None, row.slower or 0.0))
    return Tuning(
        winner=found.leader if found else None,
        confidence=verdict.confidence,
        tolerance=spec.tolerance,
        ended="nothing_works" if found is None and not verdict.batch else ended,
        noise=found.noise if found else None,
        rounds=max((trial.round for trial in trials), default=0),
        trials=len(trials),
        minutes=sum(trial.took for trial in trials) / 60,
        settings=tuple(rows),
        worth=tuple(_worth(rows)) if found else (),
    )


def _row(setting: Setting, trials: Sequence[Trial], found: halving.Estimate | None, spec: TuneSpec) -> Tried:
    own = [trial for trial in trials if trial.setting == setting.name]
    if found is None or setting.name not in found.logs:
        last = own[-1] if own else None
        return Tried(setting=setting, state=last.state if last else "not_tried", why=last and last.why, trials=len(own))
    name = setting.name
    return Tried(
        setting=setting,
        state="measured",
        trials=len(own),
        seconds=statistics.median(halving.seconds_of(trial) for trial in own if trial.steps),
        gib=max((trial.gib for trial in own if trial.gib), default=None),
        slower=_share(found.behind(name)),
        error=found.error(name) if name != found.leader else None,
        chance=found.chance(name, spec.tolerance),
    )


def _share(log: float) -> float:
    return math.expm1(log)


def _worth(rows: Sequence[Tried]) -> Iterator[Worth]:
    """For each key in which the winner differs from other settings: the fastest of these, compared with the winner."""
    winner, *others = [row for row in rows if row.slower is not None]
    for key in sorted({key for row in rows for key in row.setting.values}):
        if key.rpartition(".")[2] in ("recompute_method", "recompute_num_layers"):
            continue  # these follow from the granularity
        value = winner.setting.values.get(key, UNCHANGED)
        other = next((row for row in others if row.setting.values.get(key, UNCHANGED) != value), None)
        if other:
            yield Worth(
                key=key, value=str(value), instead=other.setting.name, slower=other.slower or 0.0, error=other.error
            )


UNCHANGED = "as it is"


def yaml(tuning: Tuning, spec: TuneSpec) -> str:
    """The winner's keys, in a file that can be given after the experiment's own."""
    found = next((row for row in tuning.settings if row.setting.name == tuning.winner), None)
    lines = [f"# {sentence}" for sentence in conclusion(tuning)]
    values = found.setting.values if found else {}
    if not values:
        lines += ["# it is the run as it is: there is nothing to change"] if found else []
        return "\n".join([*lines, "{}"]) + "\n"  # Snakemake and the experiment's loader refuse a file of comments
    if spec.swept == "runs":  # only this run's: others keep theirs
        own = _flow({key: json.dumps(value) for key, value in values.items()})
        return "\n".join([*lines, "sweep:", "  runs:", f"    {spec.run}: {own}"]) + "\n"
    if spec.swept == "grid":
        lines.append("# the sweep's own values win over these: list the run with both below sweep.runs")
    sections: Tree = {}
    for key, value in values.items():
        *parents, name = spec.paths[key]
        branch = sections
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[name] = json.dumps(value)
    return "\n".join([*lines, *(f"{section}: {_flow(own)}" for section, own in sections.items())]) + "\n"


def _flow(tree: Tree | str) -> str:
    """A tree on one line; its leaves are JSON already."""
    if isinstance(tree, str):
        return tree
    return f"{{{', '.join(f'{name}: {_flow(value)}' for name, value in tree.items())}}}"


def conclusion(tuning: Tuning) -> list[str]:
    """The conclusions, one sentence each."""
    if tuning.winner is None:
        result = "no setting works" if tuning.ended == "nothing_works" else "no setting was measured"
        return [f"{result}: {counted(tuning.trials, 'trial')} failed", *_time_was_up(tuning)]
    row = next(row for row in tuning.settings if row.setting.name == tuning.winner)
    states = Counter(one.state for one in tuning.settings)
    works = "1 of which works" if states["measured"] == 1 else f"{states['measured']} of which work"
    untried = f", {states['not_tried']} not tried" if states["not_tried"] else ""
    noise = f"noise of a trial {tuning.noise:.1%}"
    return [
        f"{tuning.winner}: {row.seconds:.4g} s/step, of {counted(len(tuning.settings), 'setting')}, {works}{untried}",
        f"{tuning.confidence:.1%} sure that none of them is faster by more than {tuning.tolerance:.0%}"
        f" ({counted(tuning.trials, 'trial')}, {tuning.minutes:.1f} minutes, {noise})",
        *_time_was_up(tuning),
    ]


def _time_was_up(tuning: Tuning) -> list[str]:
    more = "raise tune.minutes, and call again"
    if tuning.ended == "out_of_time":
        return [f"the time was up before it was as sure as tune.confidence: {more}"]
    if tuning.ended == "round_unfinished":
        return [f"the time was up in a round, whose other trials may change this: {more}"]
    return []


COLUMNS = (
    "setting",
    "state",
    "trials",
    "s/step",
    "slower",
    "+-",
    "chance",
    "GiB",
    "predicted s",
    "predicted GiB",
    "why",
)


def table(tuning: Tuning) -> list[tuple[str, ...]]:
    """A row for each setting, the fastest first."""

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        (
            row.setting.name,
            row.state,
            str(row.trials),
            shown(row.seconds, ".4g"),
            shown(row.slower, ".1%"),
            shown(row.error, ".1%"),
            shown(row.chance, ".2g"),
            shown(row.gib, ".1f"),
            shown(row.setting.seconds, ".4g"),
            shown(row.setting.gib, ".1f"),
            " ".join((row.why or "-").split()),
        )
        for row in tuning.settings
    ]


def text(tuning: Tuning) -> str:
    """For the terminal."""
    rows = [COLUMNS[:7], *(row[:7] for row in table(tuning))]
    lines = aligned(rows)
    if tuning.rounds > 1:
        lines.append("slower: by trials of the same rounds, because the machine isn't equally fast in all of them")
    if tuning.worth:
        lines += ["", "what each key of it is worth: the fastest setting with another value is slower by"]
        for one in tuning.worth:
            error = "" if one.error is None else f" +- {one.error:.1%}"
            lines.append(f"  {one.key}: {one.value:<12} {one.slower:.1%}{error} ({one.instead})")
    return "\n".join([*lines, "", *conclusion(tuning)])
