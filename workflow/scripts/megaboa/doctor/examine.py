"""Explains every failed stage and every run that isn't PASS: what happened, what the pipeline did, and what to try.

It also reports runs that passed but have problems.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megaboa import recipe_files
from megaboa.blends import corpora
from megaboa.causes import NODE_CAUSES
from megaboa.check.facts import Facts, from_json
from megaboa.data import batches
from megaboa.doctor import failed_stages, passed, troubles, unstarted
from megaboa.errors import InputError, forbidden
from megaboa.formats import counted
from megaboa.paths import ExperimentFolder, RunFolder
from megaboa.records import (
    Analysis,
    AttemptEnd,
    AttemptStart,
    DataIndex,
    ExamplesRead,
    Preflight,
    PreflightInImage,
    ReportSpec,
    RunsSpec,
    Step,
    Summary,
    TrainStart,
    read,
    read_if_there,
    read_ledger,
    read_steps,
)
from megaboa.run import checkpoints, claims, ledger, unfinished
from megaboa.run.failures import tails_of
from megaboa.run.gpu_use import use_of
from megaboa.run.identity import is_outdated, is_trained
from megaboa.run.outlook import without_store
from megaboa.run.site import python_of
from megaboa.scheduler.answers import QueuedJob
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import AttemptFolder, RunStore

CALL = re.compile(r'^.*  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


def experiment(
    results: Path, only: str | None = None, jobs: Mapping[str, Sequence[QueuedJob]] = MappingProxyType({})
) -> list[str]:
    """The findings of an experiment, or of one run of it, as lines; a healthy run has none.

    `jobs`: the runs' jobs in the scheduler's queue.
    """
    folder = ExperimentFolder(results)
    found = read_if_there(Preflight, folder.preflight)
    known = found.runs if found else {}
    calls = unstarted.Calls(results)
    lines = [f"{one}: left out of the plan" for one in read(ReportSpec, folder.specs.report).invalid]
    lines += failed_stages.failed(results, only=only)
    for name in [only] if only else read(RunsSpec, folder.specs.runs).runs:
        facts = known[name].facts if name in known else None
        try:
            lines += run(folder.run(name), from_json(facts) if facts else None, jobs.get(name, ()), calls)
        except InputError as error:  # a damaged file of this run; the others are explained all the same
            lines.append(f"{name}: {error}")
        except PermissionError as error:
            lines.append(f"{name}: can't be looked at: {forbidden(error)}")
    return lines


def failures(results: Path, names: Iterable[str]) -> list[str]:
    """A line for each failed or lost attempt of these runs, even if a later one succeeded: for the report."""
    return [line for name in names for line in _failed_attempts(ExperimentFolder(results).run(name))]


def _failed_attempts(folder: RunFolder) -> list[str]:
    if (store := _store(folder)) is None:
        return []
    ends = [end for end in ledger.ends(read_ledger(store.ledger)) if end.outcome == "failed" or end.cause == "lost"]
    lines = []
    for end in ends:
        found = _trouble(store, end)
        said = f": {found.evidence[0]}" if found.evidence else ""
        name = found.name.replace("_", " ")
        lines.append(f"{folder.name}, {_which(end, _failed_step(store, end))}: {name}{said}. {_done(end)}")
    return lines


def run(
    folder: RunFolder, facts: Facts | None, jobs: Sequence[QueuedJob] = (), calls: unstarted.Calls | None = None
) -> list[str]:
    """The findings of a run, as lines. `calls`: one for all runs that are asked about."""
    if gone := without_store(folder):
        return [f"{folder.name}: {gone}"]
    if is_trained(folder):  # otherwise the summary describes the run as it was configured earlier
        summary = read_if_there(Summary, folder.summary)
        return _of_summary(folder, summary, facts) if summary else []
    store = _store(folder)
    if store is None:
        return unstarted.told(folder, jobs, calls or unstarted.Calls(folder.experiment_folder.path))
    entries = read_ledger(store.ledger)
    if begun := ledger.open_attempt(entries):
        lost = claims.is_held(store.claims) is False
        return _of_failure(folder, store, _lost(store, begun), facts, bool(begun.job)) if lost else []
    ends = ledger.ends(entries)
    if not ends or ends[-1].outcome == "completed":
        return []
    in_job = any(start.job for start in ledger.starts(entries) if start.attempt == ends[-1].attempt)
    return _of_failure(folder, store, ends[-1], facts, in_job)


def _store(folder: RunFolder) -> RunStore | None:
    """The store of the run's attempts; None if it hasn't begun in its present configuration."""
    if not folder.attempts_link.exists():
        return None
    store = RunStore.of(folder.attempts_link)
    return None if is_outdated(folder, store) else store


def _lost(store: RunStore, begun: AttemptStart) -> AttemptEnd:
    """The missing end of an attempt, as the next call will record it."""
    events = read_steps(store.attempt(begun.attempt).steps)
    steps = [event.step for event in events if isinstance(event, Step)]
    job = f"{cluster().name} job {begun.job}, " if begun.job else ""
    where = ", ".join(begun.nodes or [begun.host])
    return AttemptEnd(
        attempt=begun.attempt,
        cause="lost",
        detail=f"its end was not recorded, and it isn't running: its supervisor was killed or lost ({job}{where})",
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        iteration=checkpoints.latest(store.checkpoints),
    )


def _of_summary(folder: RunFolder, summary: Summary, facts: Facts | None) -> list[str]:
    if summary.state != "PASS":
        return [f"{folder.name}: {summary.state}", *(f"  {reason}" for reason in summary.reasons)]
    analysis = read_if_there(Analysis, folder.analysis)
    lines = passed.waits_for_data(analysis, folder.launch.num_workers)
    if facts is not None:
        lines += [*passed.slow(facts, summary), *passed.unbalanced(facts, analysis)]
        lines += [*passed.waits_for_host(facts, analysis), *passed.casts_single_rows(facts)]
    lines += [
        *passed.of_examples(_examples(folder)),
        *passed.gpu_findings(summary.gpus),
        *passed.curve_findings(_steps(folder), _course(folder), _reader(folder)),
    ]
    return [line if line.startswith(" ") else f"{folder.name}: passed; {line}" for line in lines]


def _examples(folder: RunFolder) -> ExamplesRead | None:
    name = folder.launch.index if folder.run.is_tuned else None
    index = read_if_there(DataIndex, folder.experiment_folder.index(name)) if name else None
    return index.examples if index else None


def _steps(folder: RunFolder) -> list[Step]:
    """The last record of each step, over all attempts."""
    if not folder.attempts_link.exists():
        return []
    attempts = RunStore.of(folder.attempts_link).attempts
    events = (event for attempt in attempts for event in read_steps(attempt.steps))
    found = {event.step: event for event in events if isinstance(event, Step)}
    return [found[step] for step in sorted(found)]


def _reader(folder: RunFolder) -> Callable[[int], list[str]]:
    return lambda step: _read_in(folder, step)


def _read_in(folder: RunFolder, step: int) -> list[str]:
    """The data that a step read, if known: the corpora's shares, and the document with most of its tokens."""
    try:
        batch = batches.of_step(folder, step)
    except (
        InputError,
        OSError,
        ValueError,
        LookupError,
    ):  # no corpora, a deleted index, another kind of loader
        return []
    by_corpus, documents = batch.corpora, batch.documents
    total = sum(by_corpus.values())
    shares = ", ".join(f"{name} {tokens / total:.0%}" for name, tokens in by_corpus.most_common(3))
    (corpus, _, document), most = documents.most_common(1)[0]
    largest = f"{most / total:.0%} of its tokens are from document {document} of {corpus}"
    return [
        f"  step {step} read {shares}, of {counted(len(documents), 'document')}; {largest}",
        f"  all of them: megaboa documents {folder.experiment}/{folder.name} --step {step}",
    ]


def _course(folder: RunFolder) -> passed.Course:
    run = folder.run
    return passed.Course(
        lr=run.optimizer.get("lr"),
        warmup=run.schedule.get("warmup_iters") or 0,
        clip=run.optimizer.get("clip_grad"),
        pretrained=run.parent is not None or run.model.get("init") == "pretrained",
    )


def _of_failure(folder: RunFolder, store: RunStore, end: AttemptEnd, facts: Facts | None, in_job: bool) -> list[str]:
    attempt, found = store.attempt(end.attempt), _trouble(store, end)
    launch, results = folder.launch, folder.experiment_folder
    inside = read_if_there(PreflightInImage, results.preflight_in_image) if launch.image else None
    case = troubles.Case(
        facts=facts,
        checkpoint_bytes=max(checkpoints.sizes(store.checkpoints).values(), default=None),
        evidence=found.evidence,
        iteration=end.iteration,
        save_interval=launch.checkpoint.get("save_interval"),
        lr=folder.run.optimizer.get("lr"),
        python=python_of(launch) if launch.start else None,
        in_image=launch.image is not None,
        in_job=in_job,
        own_data=folder.run.is_recipe and not corpora(folder.run.data),
        preflighted=results.preflight.exists(),  # written if all runs passed
        preflighted_in_image=inside is not None and inside.state == "PASS",
        refused=unfinished.why_refused(folder),
    )
    rank = "" if end.rank is None else f", rank {end.rank}"
    step = _failed_step(store, end)
    return [
        f"{folder.name}: {found.name.replace('_', ' ')} ({_which(end, step)}{rank}; cause: {end.cause})",
        *(f"  | {line}" for line in found.evidence),
        *_lines_of_the_recipe(folder, attempt, end.rank),
        *(f"  | {line}" for line in passed.gpu_findings(use_of({end.attempt: attempt})) if not line.startswith(" ")),
        *([] if step is None else _read_in(folder, step)),
        f"  logs: {attempt.path}",
        f"  done: {_done(end)}",
        *(f"  try: {line}" for line in troubles.advice(found.name, case)),
    ]


def _failed_step(store: RunStore, end: AttemptEnd) -> int | None:
    """The step whose loss ended the attempt. One with a NaN ends its rank before it is recorded, even the first."""
    if end.cause == "loss_spike":
        return end.last_step
    if end.cause != "nan":
        return None
    begun = (event.step for event in read_steps(store.attempt(end.attempt).steps) if isinstance(event, TrainStart))
    done = next(begun, None) if end.last_step is None else end.last_step
    return None if done is None else done + 1


def _which(end: AttemptEnd, step: int | None) -> str:
    return f"attempt {end.attempt}" + ("" if step is None else f", step {step}")


def _lines_of_the_recipe(folder: RunFolder, attempt: AttemptFolder, rank: int | None) -> list[str]:
    """Where in the user's recipe the rank failed, if a traceback in its log leads there."""
    if rank is None or not folder.run.own_recipe:
        return []
    own = recipe_files.by_place(folder.run.own_recipe)
    calls = [
        (own[path], line, name) for path, line, name in CALL.findall(tails_of(attempt).get(rank, "")) if path in own
    ]
    return [f"  at {path}:{line} in {name}" for path, line, name in calls[-1:]]


def _trouble(store: RunStore, end: AttemptEnd) -> troubles.Trouble:
    logs = tails_of(store.attempt(end.attempt))
    return troubles.trouble(str(end.cause), end.detail or "", logs)


def _done(end: AttemptEnd) -> str:
    """What the pipeline did about a failure."""
    steps = f"steps {end.first_step} to {end.last_step}" if end.last_step else "no step"
    kept = f"checkpoint of iteration {end.iteration} is kept" if end.iteration else "no checkpoint yet"
    avoided = f"; avoids {', '.join(end.bad_nodes)}" if end.bad_nodes and end.cause in NODE_CAUSES else ""
    return f"{steps}; {kept}; then: {end.action or 'nothing'}{avoided}"
