# What all rules share: the plan, names of folders, and Snakemake's behaviour where its defaults don't fit.
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake_interface_executor_plugins.settings import ExecMode

SCRIPTS = os.path.relpath(f"{workflow.basedir}/workflow/scripts")
sys.path.insert(0, os.path.abspath(SCRIPTS))

from megaboa.config import ConfigError, command_line, load
from megaboa.plan import make_plan
from megaboa.plan.shared import Shared
from megaboa.results import RunFolder
from megaboa.run.identity import is_trained
from megaboa.workflow import (
    claim_experiment,
    introduce,
    print_outcome,
    require_claim,
    use_this_python,
)

use_this_python()
CONFIG_FILES = workflow.configfiles or [Path("config/config.yaml")]
try:
    PLAN = make_plan(load(CONFIG_FILES, command_line(workflow.config_settings.config)))
except ConfigError as error:
    raise WorkflowError(f"\n{error}") from None

SHARED = Shared(PLAN)
RESULTS = str(SHARED.folder)
RUNS = {run.name: run for run in PLAN.runs}
METRICS = expand(
    f"{RESULTS}/runs/{{run}}/metrics/{{table}}",
    run=RUNS,
    table=["steps.parquet", "summary.json"],
)
if workflow.exec_mode == ExecMode.DEFAULT:  # jobs read these files and never write them
    if claim_experiment(RESULTS):
        PLAN.write(SHARED.folder.parent)
        SHARED.write()
    introduce(PLAN)


def asked(run):
    return RUNS[run].config.resources


def cores(run):
    """Cores that a run takes on one node."""
    return asked(run).gpus_per_node * asked(run).cpus_per_rank


def gpu_request(run):
    """The plugin's own `gpu` resource would also set the number of tasks per GPU."""
    return (
        f"--gpus-per-node={asked(run).gpus_per_node}"
        if RUNS[run].config.device == "cuda"
        else ""
    )


# Partition and account of training, where the experiment names them; else the profile's hold.
PLACES = {
    f"slurm_{key}": lambda wildcards, key=key: getattr(asked(wildcards.run), key)
    for key in ("partition", "account")
    if all(getattr(run.config.resources, key) for run in PLAN.runs)
}


def preflight_of(run):
    """Preflight comes before a run's training; that it ran again, for the sake of another run, must not retrain this one.

    `ancient` alone would be wrong: below a job that runs, Snakemake doesn't look for other reasons, so that a run whose
    own file has changed would not be trained in the same call.
    """
    manifest = f"{RESULTS}/preflight.json"
    return (
        ancient(manifest)
        if is_trained(RunFolder(Path(RESULTS, "runs", run)))
        else manifest
    )


wildcard_constraints:
    run="[^/]+",
    model="[^/]+",
    corpus="[^/]+",
    tokenizer="[^/]+",
