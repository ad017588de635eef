"""The Snakefile's logic outside of its rules. Imports no Snakemake."""

from __future__ import annotations

import _thread
import atexit
import fcntl
import functools
import gc
import itertools
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from megaboa import files
from megaboa.check.refusals import some_of
from megaboa.config import DEFAULT_CONFIG, LoadedExperiment, load
from megaboa.doctor import failed_stages
from megaboa.errors import InputError
from megaboa.observe import status
from megaboa.paths import ExperimentFolder
from megaboa.plan import Plan, in_place, places, proof, restarts, screen, tuning
from megaboa.plan.screen import describe, submission
from megaboa.plan.shared import Shared
from megaboa.records import Checks, Fault, Tree, read
from megaboa.run import bad_nodes, submitted
from megaboa.run.identity import is_trained
from megaboa.scheduler import local
from megaboa.scheduler.answers import UnreachableError
from megaboa.scheduler.registry import cluster

PREVIEW = "preview"  # folder below the results for a plan that is only looked at
LOOKS = {
    *("--dag", "--rulegraph", "--filegraph", "--d3dag", "--summary", "-S", "--detailed-summary", "-D", "--lint"),
    *("--list-rules", "--list", "-l", "--list-target-rules", "--lt", "--list-changes", "--list-untracked", "--lu"),
    *("--report", "--unlock", "--cleanup-metadata", "--print-compilation", "--archive"),
}  # Snakemake's other options that inspect a workflow without running its jobs
_held: list[IO[str]] = []  # kept open for the life of this process, because they hold locks
_holder: list[str] = []  # description of another process that works on the experiment
_interrupted: list[int] = []
SHOWN, LENGTH = 5, 200  # of the last line: number of failed checks, and characters for each
MOST_LINES = 20  # limit for lines about other failed jobs


def prepare_process(dry_run: bool) -> None:
    """Prepare Snakemake's process for its jobs.

    Where no conda environment or container is deployed, jobs run with the Python that runs Snakemake. The scheduler's
    commands, which Snakemake's executor calls too, must ignore the user's own defaults.
    """
    if dry_run:
        gc.disable()  # garbage collection would take a quarter of the time for ten thousand runs
    cluster().prepare()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def in_a_thread(handler: Callable[[Any], None]) -> Callable[..., None]:
    """Run Snakemake's SIGTERM handler in a thread of its own.

    The handler (Snakemake 9.27) takes a lock that the main thread holds while it selects jobs and checks on ended ones.
    Python runs signal handlers in the main thread, so it would deadlock, and only SIGKILL would end it.
    """

    @functools.wraps(handler)
    def handle(scheduler: Any, *_: Any) -> None:
        _thread.start_new_thread(handler, (scheduler,))  # threading.Thread.start takes locks too

    return handle


def claim_experiment(results: str | Path) -> bool:
    """Lock the experiment against other workflow processes until this one ends, however it ends.

    Returns False if another process holds the lock; its files must not be written then.
    """
    path = Path(results) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        _holder.append(f"{results} is being worked on by {stream.read().strip()}")
        say(f"{_holder[0]}: its files are left as they are")
        return False
    stream.truncate(0)
    stream.write(f"snakemake, process {os.getpid()} on host {socket.gethostname()}")
    stream.flush()
    _held.append(stream)
    return True


def configuration(workflow: Any, config: Tree) -> tuple[list[Path], Tree]:
    """The experiment's files, and the values from the command line that override them.

    As a module, Megaboa gets its configuration from the surrounding workflow: all of it, or a part, which is written to
    a file of its own.
    """
    given = list(workflow.config_settings.configfiles)
    if workflow.modifier.is_main_snakefile():
        return list(map(Path, workflow.configfiles)) or [DEFAULT_CONFIG], workflow.config_settings.config
    if workflow.modifier.modify_path("results") != "results":
        raise InputError("as a module, Megaboa takes neither `prefix` nor `replace_prefix`: it writes to results/")
    if config == workflow.modifier_stack[0].globals["config"]:
        declared = [path for path in map(Path.absolute, map(Path, workflow.configfiles)) if path not in given]
        return [*declared, *given], workflow.config_settings.config
    path = Path("results", ".modules", f"{workflow.modifier.namespace}.yaml")
    files.write_if_changed(path, yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False))
    told = workflow.config_settings.config
    return [path], {key: told[key] for key in (restarts.KEY,) if key in told}


def looks_only(dry_run: bool, words: Collection[str]) -> bool:
    """Whether a call of Snakemake with these words submits nothing."""
    return dry_run or not LOOKS.isdisjoint(words)


def runs_of_job(words: Sequence[str]) -> set[str]:
    """The runs that a job is for, from the command line of the Snakemake inside it; none if it isn't for runs."""
    if "--target-jobs" not in words:
        return set()
    after = itertools.islice(words, words.index("--target-jobs") + 1, None)
    targets = [target.partition(":")[2] for target in itertools.takewhile(lambda word: not word.startswith("-"), after)]
    wildcards = [dict(pair.split("=", 1) for pair in target.split(",") if pair) for target in targets]
    return {one["run"] for one in wildcards} if all("run" in one for one in wildcards) else set()


def write_plan(
    plan: Plan,
    shared: Shared,
    config_files: Sequence[str | Path],
    looks: bool,
    mine: bool,
    command: str,
    restarted: Collection[str] = (),
) -> tuple[dict[str, str], list[Path]]:
    """Write the plan. Return the preview's replacements of files, and the copies of the configuration that jobs read.

    A real call also records what it submits. A call that only looks, such as a dry run, writes a preview that no job
    reads, if the experiment was called before or isn't `mine`. `mine`: no other process works on the experiment.
    """
    if looks and (shared.paths.was_called or not mine):
        if differing := write_preview(plan, shared):
            count = f"{len(differing)} file{'s differ' if len(differing) > 1 else ' differs'}"
            say(f"{count} from the last call's: this plan lies in {shared.folder / PREVIEW}/")
        return differing, []
    if not mine:
        return {}, []
    in_place.keep(plan, shared.folder.parent)
    plan.write(shared.folder.parent)
    shared.write()
    if looks:
        return {}, []
    # A real call makes the preview obsolete.
    shutil.rmtree(shared.folder / PREVIEW, ignore_errors=True)
    return {}, submitted.record(shared.folder, config_files, plan.submitted(restarted), command)


def write_preview(plan: Plan, shared: Shared) -> dict[str, str]:
    """Write the plan of a dry run (`snakemake -n`) where no job reads it. Return the files of the experiment that would
    change, each with its replacement in the preview.

    Snakemake compares files to say which jobs would run. So the files that would change are written to the preview
    folder, and replace the experiment's in the dry run only.
    """
    results, preview = shared.folder, shared.folder / PREVIEW
    shutil.rmtree(preview, ignore_errors=True)  # so all files in it are newer than any result
    found = {}
    for name, text in (*plan.texts(), *shared.texts()):
        path = results / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            files.write_bytes(preview / name, text.encode(), durable=False)
            found[str(path)] = str(preview / name)
    return found


def require_claim() -> None:
    """Exit if another process works on the experiment. Called before the first job."""
    if _holder:
        sys.exit(f"{_holder[0]}. Wait for it, or end it, and try again.")


def profile_resources(default_resources: Any) -> dict[str, str]:
    """A profile's default-resources by name.

    Account and partitions set to `auto` are looked up, and set for all rules. If the scheduler leaves a choice to the
    user, the call ends.
    """
    found = {name: _unquoted(str(getattr(value, "raw", value))) for name, value in (default_resources or {}).items()}
    if open_names := [name for name in cluster().names if found.get(name) == places.AUTO]:
        taken = places_of(open_names, {name: value for name, value in found.items() if name not in open_names})
        listed = ", ".join(f"{name} {value}" for name, value in taken.items())
        say(f"{listed}: for `{places.AUTO}` in the profile")
        # Quoted, because Snakemake evaluates values as Python expressions, here and in jobs.
        words = [f"{name}={value!r}" for name, value in taken.items()]
        default_resources.update(type(default_resources).parse(words, allow_expressions=True))
        found |= taken
    return found


def partition(profile: dict[str, str]) -> str | None:
    """The partition for training; None without a cluster."""
    return cluster().where(profile).partition


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def places_of(names: Collection[str], known: dict[str, str]) -> dict[str, str]:
    """Account and partitions that the profile leaves open. `known`: the profile's other values."""
    try:
        choice = places.choose(names, known)
    except InputError as error:
        sys.exit(str(error))
    except UnreachableError as error:
        sys.exit(
            f"the profile's default-resources: {' and '.join(names)} can't be found, as {cluster().name} can't be "
            f"asked here ({error}). Call this on a login node, or put a line for each into {places.shown()}"
        )
    if choice.left:
        listed = "\n".join(f"  {line}" for line in choice.left)
        choice.missing.append(
            f"{cluster().name} leaves you a choice. Put a line for each name into {places.shown()}, or export "
            f"{', '.join(choice.variables)}; `megaboa site` shows the "
            f"cluster:\n{listed}"
        )
    if choice.missing:
        sys.exit("the profile's default-resources: " + "\n".join(choice.missing))
    return choice.taken


def begin(plan: Plan, workflow: Any, trains: Collection[str]) -> None:
    """Checks and preparations before the first job of a call. `trains`: the rules that start ranks."""
    executor = workflow.executor_plugin.name
    require_claim()
    use_zygote(plan, executor)
    require_cluster(plan, executor, starting(workflow.dag, trains))
    if executor == cluster().profile:  # nobody else may be left to update the nodes that waiting jobs avoid
        bad_nodes.revise_in_background(Path("results"))


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


def use_this_machine(settings: Any, limits: Any) -> None:
    """Use all cores of this machine if a call names neither cores nor a number of jobs, so `snakemake data` needs no
    --cores. Training jobs run one at a time, because each would take the machine's first GPUs."""
    if settings.nodes is not None:
        return
    if settings.cores is None:
        settings.cores = limits["_cores"] = len(os.sched_getaffinity(0))
    if "gpu_machine" not in limits:
        limits["gpu_machine"] = 1


def use_zygote(plan: Plan, executor: str) -> None:
    """Let jobs that need Bridge be forked from one process, if all jobs run on this machine and in this Python."""
    here = executor == "local" and plan.experiment.image.runtime == "none"
    wanted = here and os.environ.get(local.FORKED) != "0"
    os.environ[local.FORKED] = plan.experiment.device if wanted else "0"


def introduce(plan: Plan, on_cluster: bool) -> None:
    """Print what was planned and, on a cluster or GPUs, what it costs."""
    for note in plan.notes:
        say(note)
    for warning in screen.warnings(plan):
        say(warning)
    for left_out in plan.invalid:
        say(str(left_out))
    say(screen.heading(plan))
    for line in asked_for(plan, on_cluster):
        say(line)
    say(f"one run by hand, for debugging: megaboa pretrain {plan.name}/{plan.runs[0].name}")


def asked_for(plan: Plan, on_cluster: bool) -> list[str]:
    """What training asks of a cluster or GPUs, and what isn't available for recipes."""
    said = []
    if recipes := sorted(name for name, model in plan.models.items() if not model.has_source):
        said.append(f"recipes have no Hugging Face import, export or proof: {', '.join(recipes)}")
    if on_cluster or plan.experiment.device == "cuda":
        trained = {run.name for run in plan.runs if is_trained(run.folder("results", plan.name))}
        said += describe(submission(plan.runs, trained), plan.experiment.device)
    return said


def end_with_one_screen(workflow: Any, plan: Plan, on_cluster: bool, quiet: Collection[Any]) -> None:
    """Replace a dry run's output by one screen. Snakemake would list all files of each job, and calls no hook at the
    end.

    With -p or --verbose the list stays and the screen follows it. Otherwise Snakemake is set to `quiet`, so that it
    doesn't compose output that nobody sees: for ten thousand runs that takes longer than the plan.
    """
    everything = _shows_jobs(workflow)
    if not everything:
        workflow.output_settings.quiet = quiet
        workflow.logger_manager.logger.addFilter(lambda record: record.levelno >= logging.WARNING)

    def show() -> None:
        if workflow.scheduler:  # otherwise Snakemake failed before it knew the jobs
            for line in screen.lines(plan, list(jobs_of(workflow.dag)), asked_for(plan, on_cluster), everything):
                print(line)

    atexit.register(show)


def _shows_jobs(workflow: Any) -> bool:
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
        return "forced"
    if why.noio or why.nooutput:
        return "always runs"
    if why.missing_output:
        return "not made yet"
    if why.incomplete_output:
        return "was cut off"
    if changed := sorted({Path(path).name for path in why.updated_input - why.updated_input_run}):
        return f"{some_of(changed)} changed"
    if why.is_provenance_triggered():
        return "its input files, parameters or command changed"
    return f"after {some_of(sorted({before.rule.name for before in dag.job_dependencies(job) if dag.needrun(before)}))}"


def concluding(
    workflow: Any,
    results: str | Path,
    report: str,
    onstart: Callable[[], None] | None = None,
    onerror: Callable[[], None] | None = None,
) -> Callable[..., None]:
    """Snakemake's own `execute` with our hooks added and the report's verdict at the end.

    Snakemake calls no hook if there is nothing to do, and no hook is sure to come last.
    """
    execute = workflow.execute

    @functools.wraps(execute)
    def executed(*arguments: Any, **options: Any) -> None:
        for name, hook in (("_onstart", onstart), ("_onerror", onerror)):
            if hook:
                setattr(workflow, name, _both(hook, getattr(workflow, name)))
        execute(*arguments, **options)
        if workflow.dryrun:
            if onstart is None and not _shows_jobs(workflow):
                try_each_rule(workflow.dag)
        elif not workflow.touch and _is_made(report, workflow.dag):
            conclude(results)

    return executed


def _both(hook: Callable[[], None], other: Callable[[Any], None]) -> Callable[[Any], None]:
    def called(log: Any) -> None:
        hook()
        other(log)

    return called


def try_each_rule(dag: Any) -> None:
    """Format one job of each rule, which a quiet dry run skips, so that an error in a profile's resources shows before
    anything is submitted."""
    for job in {job.rule.name: job for job in dag.needrun_jobs(exclude_finished=False)}.values():
        job.log_info()


def _is_made(rule: str, dag: Any) -> bool:
    """Whether the call includes this rule, and its output is up to date."""
    jobs = [job for job in dag.jobs if job.rule.name == rule]
    return any(dag.finished(job) or not dag.needrun(job) for job in jobs)


def conclude(results: str | Path) -> None:
    """Print the report's verdict and path as the last lines of a call; exit with an error if a check failed."""
    found = read(Checks, ExperimentFolder(Path(results)).checks)
    by_state = {"checks": found.counts.checks, "runs": found.counts.runs}
    counts = "; ".join(f"{_count(states)} {what}" for what, states in by_state.items() if states)
    say(f"{found.state}: {counts}\nreport: {Path(results) / 'report' / 'index.html'}")
    untold = (Fault(name=found.state, detail=""),) if found.state == "FAIL" else ()
    if failed := untold if found.failed is None else found.failed:
        sys.exit(f"failed: {'; '.join(map(_failed, failed[:SHOWN]))}{_more(failed)}")


def _failed(one: Fault) -> str:
    return f"{one.name} ({one.detail[:LENGTH]})" if one.detail else one.name


def _more(failed: Sequence[Fault]) -> str:
    return f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""


def print_failures(results: str | Path) -> None:
    """Print which runs and other jobs failed, and what is available without them."""
    if not _holder and ExperimentFolder(Path(results)).plan.exists():
        for line in status.failed(Path(results).name, status.missing(Path(results))):
            say(line)
        lines = failed_stages.failed(Path(results), over=True)
        for line in lines[:MOST_LINES]:
            say(line)
        if len(lines) > MOST_LINES:
            say(f"`megaboa doctor {Path(results).name}` says the rest")


def note_interrupts() -> None:
    """Note Ctrl-C, so that the interrupted call isn't reported as a failure; it still ends the call."""

    def noted(number: int, frame: Any) -> None:
        _interrupted.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, noted)


def report_after_failure(results: str | Path, report: str, command: str, needed: Collection[str], dag: Any) -> None:
    """Make the report in spite of failed jobs, if every run is trained and measured. The report names the failures.

    It isn't made by a job, because the rule's inputs include what has failed. The next call retries the failed jobs,
    and then makes the report by its rule.
    """
    asked = any(job.rule.name == report for job in dag.jobs)
    if _interrupted or _holder or not asked or _is_made(report, dag):
        return
    if not all(map(os.path.exists, needed)) or status.missing(Path(results)):
        return
    log = Path(results) / "logs" / "report.log"
    with log.open("w") as stream:
        done = subprocess.run(["bash", "-c", f"{command} --after-failure"], stdout=stream, stderr=subprocess.STDOUT)
    if done.returncode:
        say(f"the report could not be made: {log}")
        return
    conclude(results)


def _count(states: dict[str, int]) -> str:
    """`all 7` if all passed, else the number of each state."""
    if set(states) == {"PASS"}:
        return "all {PASS}".format(**states)
    return ", ".join(f"{number} {state}" for state, number in states.items())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def starting(dag: Any, rules: Collection[str]) -> set[str]:
    """Runs whose ranks this call will start by these rules; only known once Snakemake knows the jobs."""
    return {job.wildcards.run for job in dag.needrun_jobs() if job.rule.name in rules}


def call_again(config_files: Sequence[str | Path], given: dict[str, Any]) -> str:
    """A command that repeats this call, without its profile and cores."""
    paths = map(os.path.relpath, config_files)
    return shlex.join(["snakemake", *(["--configfile", *paths] if config_files else []), *given_values(given)])


def report_command(scripts: str, captions: str, results: str, config_files: Sequence[str | Path], command: str) -> str:
    """The shell command that makes the report; configuration and command are shown in it."""
    words = [f"{scripts}/megaboa", "report", "--settings", f"{results}/specs/report.json", "--captions", captions]
    words += ["--config-file", *map(os.path.relpath, config_files), "--command", command]
    return shlex.join(["python", *words, "--out", f"{results}/report/index.html"])


def conversion_commands(scripts: str, shared: Shared) -> tuple[str, str, str]:
    """The shell words that start a model conversion: Python, the image option, and the starter for several ranks.

    The number of ranks is in specs/conversions, which is not an input, because it changes no weight.
    """
    results, scripts = shared.folder, shlex.quote(scripts)
    conversion = f"python {scripts}/convert.py --spec {results}/specs/conversions/{{model}}.json"
    if not shared.image_manifest:
        return "python", "", f"{conversion} "
    image, inside = f"{results}/image.json", f"{results}/specs/inside.json"
    python = f"python {scripts}/inside.py {inside} {image}"
    return python, f"--image {image}", f"{conversion} --image {image} --inside {inside}"


def export_command(shared: Shared, python: str, convert: str, run: str, kind: str) -> str:
    """The command that converts a run: `python`, or the starter for as many ranks as its model's conversion uses."""
    model = shared.runs[run].model
    if shared.plan.models[model].conversion.ranks == 1:
        return python
    return f"{convert.format(model=model)} --logs {shared.folder}/logs/export/{run}.{kind}.ranks"


def own_experiment(workflow: Any, loaded: LoadedExperiment, target: str) -> tuple[list[Path], LoadedExperiment]:
    """Replace the user's experiment by the one that `snakemake prove` or `snakemake tune` runs; return its file and
    content.

    Its jobs read that file alone: values from `--config` are included in it.
    """
    tree, said = {"prove": proof.experiment, "tune": tuning.experiment}[target](loaded)
    path = proof.write(tree, ExperimentFolder(Path("results", tree["experiment"])).own_config)
    for sentence in said:
        say(sentence)
    workflow.config_settings.config_args = []
    return [path], replace(load([path], variables=os.environ), machine_gpus=loaded.machine_gpus)


def compared(shared: Shared) -> list[str]:
    if not shared.tensors:
        raise InputError(
            "`prove` plans an experiment of its own: call `snakemake prove` alone, in a clone, not as a module's rule"
        )
    return shared.tensors


def tuned(shared: Shared) -> str:
    if not shared.plan.experiment.tune.trials_of:
        raise InputError(
            "`tune` plans an experiment of its own: call `snakemake tune` alone, in a clone, not as a module's rule"
        )
    return str(shared.paths.tuning)


def given_values(values: dict[str, Any]) -> list[str]:
    """The words of `--config` from its values, which Snakemake has already parsed."""
    if not values:
        return []
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return ["--config", *(f"{key}={text}" for key, text in texts.items())]
