"""A dry run's one screen: which jobs would run, and why."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from megaboa import files
from megaboa.calls.beginning import asked_for, from_the_future, out_of_reach, outlooks
from megaboa.calls.snakemake_records import SNAKEMAKE
from megaboa.formats import some_of
from megaboa.plan import screen
from megaboa.plan.resources import JobResources

CUT_OFF = "its last call was cut off"
INDEX = "the data's index"
# What lies below the results and isn't the plan's: many files have the same name.
MADE = re.compile(r"results/[^/]+/(models|data|runs)/([^/]+?)(?:\.json$|/(?!run\.json$))")
KINDS = {"models": "model", "data": "corpus", "runs": "run"}


def end_with_one_screen(workflow: Any, asked: JobResources, restarted: Collection[str], quiet: Collection[Any]) -> None:
    """Replace a dry run's output by one screen. Snakemake would list all files of each job, and calls no hook at the
    end.

    With -p or --verbose the list stays and the screen follows it. Otherwise Snakemake is set to `quiet`, so that it
    doesn't compose output that nobody sees: for ten thousand runs that takes longer than the plan.
    """
    plan, everything = asked.plan, shows_jobs(workflow)
    if not everything:
        workflow.output_settings.quiet = quiet
        workflow.logger_manager.logger.addFilter(lambda record: record.levelno >= logging.WARNING)

    def show() -> None:
        if workflow.scheduler:  # otherwise Snakemake failed before it knew the jobs
            jobs = list(jobs_of(workflow.dag))
            needed = list(workflow.dag.needrun_jobs(exclude_finished=False))
            begun = outlooks(plan, workflow.dag, needed, "train", restarted)
            begun += [f"warning: {line}" for line in from_the_future(workflow.dag, needed)]
            begun += out_of_reach(asked, needed, "train")
            for line in screen.lines(plan, jobs, asked_for(plan, asked.shared.on_cluster), everything, begun):
                print(line)

    atexit.register(show)


def of_an_archive() -> None:
    """Let Snakemake plan jobs whose outputs this user may not write: nothing is written in a dry run."""
    from snakemake.jobs import Job

    async def allow(job: Any) -> None:
        del job

    Job.check_protected_output = allow


def with_or_without_writing() -> None:
    """Let Snakemake plan where it can't write what it remembers: in somebody else's folder, or on a full disk.

    It makes its folders in a dry run too, and saves what it found out about files, for a call with --trust-io-cache.
    """
    from snakemake.persistence.file import FilePersistence

    begin, save = FilePersistence.__init__, FilePersistence.save_iocache

    @functools.wraps(begin)
    def started(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            begin(self, *arguments, **options)
        except OSError:
            begin(self, *arguments, **{**options, "path": _folder_with_records()})

    @functools.wraps(save)
    def saved(self: Any) -> None:
        with contextlib.suppress(OSError):
            save(self)

    FilePersistence.__init__, FilePersistence.save_iocache = started, saved


def _folder_with_records() -> Path:
    """A temporary folder for Snakemake, with links to its records of earlier calls."""
    place = files.temporary_folder("megaboa-plan-")
    for name in ("metadata", "incomplete"):
        if os.access(records := SNAKEMAKE.absolute() / name, os.R_OK | os.X_OK):
            (place / name).symlink_to(records)
    return place


def shows_jobs(workflow: Any) -> bool:
    given = workflow.output_settings
    return given.printshellcmds or given.verbose or given.debug_dag


def jobs_of(dag: Any) -> Iterator[screen.Job]:
    """The jobs that Snakemake would run, in topological order, without `all`, which does nothing itself."""
    needed = {job for job in dag.needrun_jobs(exclude_finished=False) if job.rule.name != "all"}
    for level in dag.toposorted(needed):
        for job in sorted(level, key=lambda job: (job.rule.name, *job.wildcards)):
            yield screen.Job(job.rule.name, next(iter(job.wildcards), ""), reason(dag, job))


def reason(dag: Any, job: Any) -> str:
    """Why a job runs, in a few words: the first reason that is sufficient by itself."""
    why = dag.reason(job)
    if why.forced:
        return "forced" if _is_forced_by_user(dag, job) else CUT_OFF
    if why.noio or why.nooutput:
        return "always runs"
    if why.missing_output:
        return "not made yet"
    if why.incomplete_output:
        return CUT_OFF
    updated = why.updated_input - why.updated_input_run
    if updated or why.is_provenance_triggered():
        return _changes(dag, job, updated) or "its input files, parameters or command changed"
    return f"after {some_of(sorted({before.rule.name for before in dag.job_dependencies(job) if dag.needrun(before)}))}"


def _is_forced_by_user(dag: Any, job: Any) -> bool:
    """By -f, -F or -R; Snakemake also forces jobs that a killed call has left incomplete."""
    asked = dag.workflow.dag_settings
    named = {*asked.forcerun, *(dag.targetfiles if asked.forcetargets else ())}
    return job.rule in dag.forcerules or not named.isdisjoint(job.output)


def _changes(dag: Any, job: Any, updated: set[Any]) -> str:
    """The inputs that have changed, are new, gone or no longer used since the job's last end, as Snakemake recorded.

    A file of both is the plan's, which lies elsewhere in a dry run that changes it.
    """
    recorded = {path for output in job.output for path in dag.workflow.persistence.input(output) or ()}
    now = set(map(str, job.input))
    new, past = (_names(now - recorded), _names(recorded - now)) if recorded else (set(), set())
    gone = _names(path for path in recorded - now if not Path(path).exists())
    changed = {_file_name(path) for path in updated if _name(path) not in new}
    parts = {"changed": changed | new & past, "new": new - past}
    parts |= {"gone": past & gone - new, "no longer used": past - gone - new}
    return "; ".join(
        f"{some_of(sorted(names))} {'' if what == 'changed' else 'is ' if len(names) == 1 else 'are '}{what}"
        for what, names in parts.items()
        if names
    )


def _names(paths: Iterable[Any]) -> set[str]:
    return {_name(path) for path in paths}


def _name(path: Any) -> str:
    """What a file is about, such as `model dense`, or else its name."""
    name, found = _file_name(path), MADE.match(str(path))
    return f"{KINDS[found[1]]} {found[2]}" if found and name != INDEX else name


def _file_name(path: Any) -> str:
    """An index has its settings' digest as its name, which says nothing to anybody."""
    return INDEX if Path(path).parent.name == "indexes" else Path(path).name


def try_each_rule(dag: Any) -> None:
    """Format one job of each rule, which a quiet dry run skips, so that an error in a profile's resources shows before
    anything is submitted."""
    for job in {job.rule.name: job for job in dag.needrun_jobs(exclude_finished=False)}.values():
        job.log_info()
