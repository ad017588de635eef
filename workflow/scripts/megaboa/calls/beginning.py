"""What happens before a call's first job: preparations, checks, and what is printed about the plan."""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megaboa.calls import say
from megaboa.calls.lock import require_claim
from megaboa.check.refusals import some
from megaboa.config import LoadedExperiment
from megaboa.formats import counted
from megaboa.paths import RunFolder
from megaboa.plan import Plan, device, restarts, screen
from megaboa.plan.resources import JobResources
from megaboa.plan.screen import describe, describe_trials, of_trials, submission
from megaboa.run import bad_nodes, checkpoints, completion, renamed
from megaboa.run.identity import identity_of, is_trained
from megaboa.scheduler.answers import Excess
from megaboa.scheduler.ranks import FORKED
from megaboa.scheduler.registry import cluster
from megaboa.store_paths import RunStore

MAKE_INPUTS = {"get_model", "import_model", "train_tokenizer", "merge_corpus"}  # their results are in a run's identity
SKEW_SECONDS = 60  # a job may take so long, and clocks of hosts may differ by less
SHOWN = 5  # files that are named


def prepare_process(dry_run: bool) -> None:
    """Prepare Snakemake's process for its jobs.

    Where no conda environment or container is deployed, jobs run with the Python that runs Snakemake. The scheduler's
    commands, which Snakemake's executor calls too, must ignore the user's own defaults.
    """
    if dry_run:
        gc.disable()  # garbage collection would take a quarter of the time for ten thousand runs
    cluster().prepare()
    if dry_run:
        cluster().ask_once()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def in_a_thread(handler: Callable[[Any], None]) -> Callable[..., None]:
    """Run Snakemake's SIGTERM handler in a thread of its own.

    The handler (Snakemake 9.27) takes a lock that the main thread holds while it selects jobs and checks on ended ones.
    Python runs signal handlers in the main thread, so it would deadlock, and only SIGKILL would end it.
    """

    def leave(scheduler: Any) -> None:
        handler(scheduler)
        say("running jobs continue until they end; `megaboa stop EXPERIMENT` lets its runs save and stop")

    @functools.wraps(handler)
    def handle(scheduler: Any, *_: Any) -> None:
        _thread.start_new_thread(leave, (scheduler,))  # threading.Thread.start takes locks too

    return handle


def require_rules_with_files(workflow: Any) -> None:
    """Exit if -R or -f names a stage: it has no files of its own, so Snakemake would make nothing again."""
    settings, rules = workflow.dag_settings, {rule.name: rule for rule in workflow.rules}
    for name in sorted({*settings.forcerun, *(settings.targets if settings.forcetargets else ())} & rules.keys()):
        stage = rules[name]
        if stage.output or not stage.norun:
            continue
        made = [rule.name for rule in workflow.rules if rule.output and rule.snakefile == stage.snakefile]
        instead = f"--forcerun {' or '.join(made)}" if made else "--forceall"
        sys.exit(f"{name} is forced, and has no files of its own, so nothing would be made again: call with {instead}")


def begin(
    asked: JobResources,
    loaded: LoadedExperiment,
    workflow: Any,
    train: str,
    others: Collection[str],
    restarted: Collection[str],
) -> None:
    """Checks and preparations before the first job of a call. `train`, `others`: the rules that start ranks on the
    experiment's device."""
    plan, executor = asked.plan, workflow.executor_plugin.name
    require_claim()
    require_settings(workflow)
    use_zygote(plan, executor)
    jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name in {train, *others}]
    require_cluster(plan, executor, {job.wildcards.get("run") for job in jobs})
    require_gpus(loaded, executor, bool(jobs))
    trained = [job.wildcards.run for job in jobs if job.rule.name == train]
    require_grants(asked, trained, workflow.execution_settings.keep_going)
    if ahead := from_the_future(workflow.dag, workflow.dag.needrun_jobs()):
        sys.exit("\n".join(ahead))
    for line in outlooks(plan, workflow.dag, jobs, train, restarted):
        say(line)
    if executor == cluster().profile:  # nobody else may be left to update the nodes that waiting jobs avoid
        bad_nodes.revise_in_background(Path("results"))


def outlooks(plan: Plan, dag: Any, jobs: Iterable[Any], train: str, restarted: Collection[str]) -> list[str]:
    """Of the runs that these jobs train, as far as they have begun before."""
    trains = {job.wildcards.run: job for job in jobs if job.rule.name == train}
    lines = restarts.outlooks(plan, "results", trains, restarted, lambda run: _making(dag, trains[run]))
    return [*lines, *begun_elsewhere(plan, trains.keys() - restarted)]


def begun_elsewhere(plan: Plan, trains: Collection[str]) -> list[str]:
    """A line for each of these runs that has been trained under a name that the plan doesn't have."""
    planned, found = {run.name for run in plan.runs}, []
    others = renamed.stores_of_others(Path(plan.experiment.store), plan.name, planned) if trains else []
    for run in plan.runs if others else ():
        folder = run.folder("results", plan.name)
        with contextlib.suppress(*renamed.HIDDEN):  # also if what it reads isn't made yet
            if run.name not in trains or not (store := renamed.same_training(folder, identity_of(folder), others)):
                continue
            if standing := _standing(folder, store):
                found.append(f"{run.name}: the same training as {store.path.parent.name}, {standing}")
    lines, more = found[:SHOWN], len(found) - SHOWN
    return [*lines, f"and {counted(more, 'more run')} with training under another name"] if more > 0 else lines


def _standing(folder: RunFolder, store: RunStore) -> str | None:
    """How far the training in another name's store is, and how to have it; None if nothing was saved."""
    name = store.path.parent.name
    if completion.finished(folder, store):
        return f"which is finished: to keep its result instead of training again, name the run {name} under sweep.runs"
    step = checkpoints.latest(store.checkpoints)
    return f"which has saved step {step}: to resume it, name the run {name} under sweep.runs" if step else None


def _making(dag: Any, train: Any) -> set[str]:
    """The rules of jobs before this one that make a run's data or model."""
    before, left = set(), [train]
    while left:
        for one in dag.job_dependencies(left.pop()):
            if one not in before and dag.needrun(one):
                before.add(one)
                left.append(one)
    return {one.rule.name for one in before} & MAKE_INPUTS


def require_cluster(plan: Plan, executor: str, starting: Collection[str]) -> None:
    """Exit if a run needs several nodes and there is no scheduler to provide them. Called before the first job.

    `starting`: the runs whose ranks this call will start. Earlier stages need no nodes, and run on any machine.
    """
    wide = next((run for run in plan.runs if run.name in starting and run.config.resources.nodes > 1), None)
    if wide and executor != cluster().profile:
        sys.exit(
            f"run {wide.name}: resources.nodes is {wide.config.resources.nodes}, and this machine is one: "
            f"call `snakemake --profile {cluster().profile}`, or set it to 1; what comes before training works here "
            f"too (`snakemake preflight`, `data`, `import`)"
        )


def require_settings(workflow: Any) -> None:
    """Exit if settings of the executor keep jobs of this call from starting their ranks."""
    jobs = [(job.rule.name, job.rule.resources) for job in workflow.dag.needrun_jobs()]
    if problem := cluster().settings_problem(workflow.executor_settings, jobs):
        sys.exit(problem)


def require_grants(asked: JobResources, trained: Collection[str], keep_going: bool) -> None:
    """Exit if the cluster has no nodes for the runs that this call trains: their jobs would be refused or wait for
    ever. With `keep_going`, runs that can start are trained all the same.

    Limits that a QOS may lift, and names that the scheduler may replace, are only warned about.
    """
    found = asked.excesses(trained)
    certain = {one: runs for one, runs in found.items() if one.certain}
    others = {*trained}.difference(*certain.values())
    ends = bool(certain) and not (keep_going and others)
    for line in _warnings({one: runs for one, runs in found.items() if one not in certain} if ends else found):
        say(line)
    if ends:
        rest = "; --keep-going trains the other runs" if others else ""
        before = "what comes before training can be made already (`snakemake preflight`, `data`, `import`)"
        sys.exit("\n".join(f"{one} ({some(runs)})" for one, runs in certain.items()) + f"{rest}; {before}")
    if certain:
        waits = "`megaboa status` shows which wait"
        say(f"{cluster().name} refuses these jobs, or never starts them ({waits}); the other runs are trained")


def out_of_reach(asked: JobResources, jobs: Iterable[Any], train: str) -> list[str]:
    """Warnings about runs that these jobs train, and whose request the cluster doesn't grant."""
    return _warnings(asked.excesses([job.wildcards.run for job in jobs if job.rule.name == train]))


def _warnings(found: Mapping[Excess, Sequence[str]]) -> list[str]:
    return [f"warning: {one} ({some(runs)})" for one, runs in found.items()]


def require_gpus(loaded: LoadedExperiment, executor: str, starts_ranks: bool) -> None:
    """Exit if ranks would start on the GPUs of this machine, which has none. Called before the first job.

    `starts_ranks`: whether this call trains, captures, tunes or calibrates. Preflight and the data need no GPU.
    """
    if starts_ranks and executor == "local" and (why := device.unfit(loaded.experiment)):
        remedy = f"set it to auto or cpu, or call `snakemake --profile {cluster().profile}` on a cluster"
        here = "`snakemake preflight` and `snakemake data` work here too"
        sys.exit(str(loaded.problem(("device",), f"is cuda, and {why}: {remedy}; {here}")))


def from_the_future(dag: Any, jobs: Iterable[Any]) -> list[str]:
    """A line for each file that these jobs read, that no job makes, and whose time of modification lies in the future.

    Snakemake lets such a job run, and then fails it, because its output is older than its input.
    """
    read = {str(path) for job in jobs for path in {*job.input}.difference(*dag.dependencies[job].values())}
    soon, found = time.time() + SKEW_SECONDS, []
    for path in sorted(read):
        with contextlib.suppress(OSError):  # as Snakemake, the time of a link and not of its target
            if (changed := os.lstat(path).st_mtime) > soon:
                found.append((path, f"{datetime.fromtimestamp(changed):%Y-%m-%d %H:%M}"))
    lines = [
        f"{path}: its time of modification, {when}, is in the future, so Snakemake would fail what is made from it: "
        f"touch {shlex.quote(path)}"
        for path, when in found[:SHOWN]
    ]
    return [*lines, f"and {counted(len(found) - SHOWN, 'more file')}"] if len(found) > SHOWN else lines


def use_zygote(plan: Plan, executor: str) -> None:
    """Let jobs that need Bridge be forked from one process, if all jobs run on this machine and in this Python."""
    here = executor == "local" and plan.experiment.image.runtime == "none"
    wanted = here and os.environ.get(FORKED) != "0"
    os.environ[FORKED] = plan.experiment.device if wanted else "0"


def introduce(plan: Plan, on_cluster: bool) -> None:
    """Print what was planned and, on a cluster or GPUs, what it costs."""
    for note in plan.notes:
        say(note)
    for warning in screen.warnings(plan):
        say(warning)
    for left_out in plan.left_out:
        say(left_out)
    say(screen.heading(plan))
    for line in asked_for(plan, on_cluster):
        say(line)
    say(f"one run by hand, for debugging: megaboa pretrain {plan.name}/{plan.runs[0].name}")


def asked_for(plan: Plan, on_cluster: bool) -> list[str]:
    """What training, or the job of trials, asks of a cluster or GPUs, and what isn't available for recipes."""
    said = []
    if recipes := sorted(name for name, model in plan.models.items() if not model.has_source):
        said.append(f"recipes have no Hugging Face import, export or proof: {', '.join(recipes)}")
    tune = plan.experiment.tune
    if (on_cluster or plan.experiment.device == "cuda") and tune.trials_of:
        trials = of_trials(tune, plan.runs[0].config.resources)
        said.append(describe_trials(trials, len(plan.runs), plan.experiment.device))
    elif on_cluster or plan.experiment.device == "cuda":
        trained = {run.name for run in plan.runs if is_trained(run.folder("results", plan.name))}
        said += describe(submission(plan.runs, trained), plan.experiment.device)
    return said
