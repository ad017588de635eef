# What all rules share: the plan, names of folders, and Snakemake's behaviour where its defaults don't fit.
import functools
import json
import os
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake_interface_executor_plugins.settings import ExecMode

SCRIPTS = os.path.relpath(f"{workflow.basedir}/workflow/scripts")
sys.path.insert(0, os.path.abspath(SCRIPTS))

from megaboa.bundle.contents import code_state
from megaboa.config import ConfigError, command_line, load, nested
from megaboa.files import read_json
from megaboa.image.image_file import as_recorded
from megaboa.launch import queue, slurm
from megaboa.plan import make_plan, restarts
from megaboa.plan.shared import Shared
from megaboa.records import Image, RecordError, read
from megaboa.paths import RunFolder
from megaboa.run import bad_nodes, submitted
from megaboa.run.identity import is_trained
from megaboa.workflow import (
    claim_experiment,
    concluding,
    end_with_one_screen,
    given_values,
    in_a_thread,
    introduce,
    looks_only,
    note_interrupts,
    print_failures,
    profile_resources,
    report_after_failure,
    require_claim,
    require_cluster,
    use_this_machine,
    use_this_python,
    use_zygote,
    write_plan,
)

use_this_python()
slurm.forget_users_defaults()  # Snakemake's executor asks squeue too
if workflow.exec_mode == ExecMode.DEFAULT:
    use_this_machine(workflow.resource_settings, workflow.global_resources)
JobScheduler.exit_gracefully = in_a_thread(JobScheduler.exit_gracefully)
CONFIG_FILES = workflow.configfiles or [Path("config/config.yaml")]
GIVEN, RESTART = restarts.split(workflow.config_settings.config)
try:
    LOADED = load(CONFIG_FILES, command_line(GIVEN), os.environ)
    PLAN = make_plan(LOADED)
    RESTARTED = []
    if workflow.exec_mode == ExecMode.DEFAULT:
        RESTARTED = restarts.check(PLAN, "results", RESTART)
except (ConfigError, RecordError, restarts.UnfinishedWorkError) as error:
    raise WorkflowError(f"\n{error}") from None

# What somebody types to get this report again; profiles and cores are theirs.
COMMAND = shlex.join(
    [
        "snakemake",
        *(
            ["--configfile", *map(os.path.relpath, CONFIG_FILES)]
            if workflow.configfiles
            else []
        ),
        *given_values(GIVEN),
    ]
)
PROFILE = profile_resources(workflow.resource_settings.default_resources)
SHARED = Shared(PLAN, profile=PROFILE)
RESULTS = str(SHARED.folder)
RUNS = {run.name: run for run in PLAN.runs}
METRICS = expand(
    f"{RESULTS}/runs/{{run}}/metrics/{{table}}",
    run=RUNS,
    table=["steps.parquet", "summary.json", "goodput.json"],
)
DATA = expand(f"{RESULTS}/data/{{corpus}}/verification.json", corpus=SHARED.corpora)
ANALYSES = expand(f"{RESULTS}/runs/{{run}}/analysis.json", run=SHARED.profiled_runs)
INDEXES = expand(f"{RESULTS}/data/indexes/{{index}}.json", index=SHARED.indexes)
PREVIEW = {}  # of a dry run: the files that a call would change, and where they are now
# Without these there is no report; where what is made beside training is missing, it says so.
REPORTED = [f"{RESULTS}/image.json", *METRICS, *DATA, *INDEXES]
CAPTIONS = os.path.relpath(f"{workflow.basedir}/workflow/report/captions.yaml")


def report_command():
    files = [os.path.relpath(path) for path in CONFIG_FILES]
    words = [f"{SCRIPTS}/report.py", "--settings", f"{RESULTS}/specs/report.json"]
    words += ["--captions", CAPTIONS, "--config-file", *files, "--command", COMMAND]
    return shlex.join(["python", *words, "--out", f"{RESULTS}/report/index.html"])


if workflow.exec_mode == ExecMode.DEFAULT:  # jobs read these files and never write them
    LOOKS = looks_only(workflow.output_settings.dryrun, sys.argv)
    PREVIEW, CALL_CONFIG = write_plan(
        PLAN, SHARED, CONFIG_FILES, LOOKS, claim_experiment(RESULTS), RESTARTED
    )
    if CALL_CONFIG:  # what Snakemake in the jobs reads, whenever they start
        workflow.config_settings.configfiles = CALL_CONFIG
        submitted.submit_from(CALL_CONFIG[0])
    if workflow.output_settings.dryrun:
        end_with_one_screen(workflow, PLAN, on_cluster="gpu_partition" in PROFILE)
    else:
        introduce(PLAN, on_cluster="gpu_partition" in PROFILE)
else:
    submitted.submit_from(CONFIG_FILES[0])


def planned_file(name):
    return PREVIEW.get(f"{RESULTS}/{name}", f"{RESULTS}/{name}")


def planned(pattern):
    """A file of the plan, as an input."""
    if not PREVIEW:
        return f"{RESULTS}/{pattern}"
    return lambda wildcards: planned_file(pattern.format(**dict(wildcards.items())))


def asked(run):
    return RUNS[run].config.resources


def cores(run):
    """Cores that a run takes on one node."""
    return asked(run).gpus_per_node * asked(run).cpus_per_rank


def sbatch_options(run, rule):
    """What sbatch is told about a run beside its size: GPUs, what must end before it, nodes that it avoids."""
    gpus = (
        RUNS[run].config.device == "cuda"
    )  # the plugin's own `gpu` resource would also set tasks per GPU
    options = [f"--gpus-per-node={asked(run).gpus_per_node}"] if gpus else []
    on_cluster = "gpu_partition" in PROFILE
    if (
        on_cluster and workflow.exec_mode == ExecMode.DEFAULT
    ):  # the job itself would find itself
        options += queue.options(rule, RunFolder(Path(RESULTS, "runs", run)))
    # A job that is put back into the queue writes to the same log again.
    return " ".join([*options, "--open-mode=append", asked(run).slurm_extra]).strip()


# One allocation for all ranks of a run. With `mpi` the plugin leaves srun to the job, which starts the ranks itself; then
# it wants at least two tasks per node. Tasks only size the allocation: they are as many as ranks, or two for one rank.
ALLOCATION = {
    "mpi": "srun",
    "nodes": lambda wildcards: asked(wildcards.run).nodes,
    "tasks_per_node": lambda wildcards: max(2, asked(wildcards.run).gpus_per_node),
    "cpus_per_task": lambda wildcards: -(
        -cores(wildcards.run) // max(2, asked(wildcards.run).gpus_per_node)
    ),
    "mem_mb": lambda wildcards: asked(wildcards.run).mem_mb_per_rank
    * asked(wildcards.run).gpus_per_node,
    "runtime": lambda wildcards: asked(wildcards.run).runtime,
    # Without SLURM two runs would both take this machine's first GPU: profiles/local lets one in at a time.
    "gpu_machine": int(PLAN.experiment.device == "cuda"),
    "gpus_in_flight": lambda wildcards: asked(wildcards.run).nodes
    * asked(wildcards.run).gpus_per_node,
}


def place_of(run, kind):
    """Partition or account of a run's training: the experiment's, else the profile's."""
    profile = "gpu_partition" if kind == "partition" else "slurm_account"
    return getattr(asked(run), kind) or PROFILE[profile]


# Only where a profile names them: elsewhere a job has neither.
PLACES = {
    f"slurm_{kind}": lambda wildcards, kind=kind: place_of(wildcards.run, kind)
    for kind in ("partition", "account")
    if "gpu_partition" in PROFILE
}


def runs_to_start():
    """Runs whose ranks this call will start; known when the jobs are."""
    return {
        job.wildcards.run
        for job in workflow.dag.needrun_jobs()
        if job.rule.name in ("train", "capture")
    }


def ranks_per_node(model):
    """Of a model's import."""
    asked = PLAN.models[model].conversion
    return asked.ranks // asked.nodes


def import_cores(model):
    """Cores that a model's import takes on one node."""
    asked = PLAN.models[model].conversion
    if asked.ranks == 1:
        return 1
    each = SHARED.first_run_of(model).config.resources.cpus_per_rank
    return ranks_per_node(model) * each


def conversion(run_of):
    """What a conversion takes beside memory, for the run that `run_of` finds for its wildcards.

    A model for GPUs is made of Transformer Engine's modules, also where it is only converted: that needs a GPU.
    """
    if PLAN.experiment.device == "cpu":
        return {}
    one_gpu = {"gpu_machine": 1, "gpus_in_flight": 1}
    if "gpu_partition" not in PROFILE:
        return one_gpu
    places = {
        f"slurm_{kind}": lambda wildcards, kind=kind: place_of(run_of(wildcards), kind)
        for kind in ("partition", "account")
    }
    return {**one_gpu, **places, "slurm_extra": "--gpus-per-node=1"}


# Conversions take place where ranks do: in the experiment's image, if it has one.
PYTHON = "python"
IMAGE = INSIDE = ""
if SHARED.image_manifest:
    PYTHON = f"python {shlex.quote(SCRIPTS)}/inside.py {RESULTS}/specs/inside.json {RESULTS}/image.json"
    IMAGE = f"--image {RESULTS}/image.json"
    INSIDE = f"{IMAGE} --inside {RESULTS}/specs/inside.json"
# By how many ranks a model is imported stands in specs/conversions, which is no input: it changes no weight.
CONVERT = f"python {shlex.quote(SCRIPTS)}/convert.py --spec {RESULTS}/specs/conversions/{{model}}.json {INSIDE}"
CONVERSION_OF_RUN = conversion(lambda wildcards: wildcards.run)
CONVERSION_OF_MODEL = conversion(
    lambda wildcards: SHARED.first_run_of(wildcards.model).name
)
if any(PLAN.models[model].conversion.ranks > 1 for model in SHARED.imported_models):
    # As ALLOCATION: without `mpi` the job would be a step itself, in which no ranks can be started.
    CONVERSION_OF_MODEL |= {
        "mpi": "srun",
        "nodes": lambda wildcards: PLAN.models[wildcards.model].conversion.nodes,
        "tasks_per_node": lambda wildcards: max(2, ranks_per_node(wildcards.model)),
        "cpus_per_task": lambda wildcards: -(
            -import_cores(wildcards.model) // max(2, ranks_per_node(wildcards.model))
        ),
    }
    if PLAN.experiment.device == "cuda":
        CONVERSION_OF_MODEL |= {
            "gpus_in_flight": lambda wildcards: PLAN.models[
                wildcards.model
            ].conversion.ranks,
            "slurm_extra": lambda wildcards: f"--gpus-per-node={ranks_per_node(wildcards.model)}",
        }


@functools.cache
def is_made(image):
    """Whether the image's manifest is there, of what its specification says now, and tells of the file that is there."""
    spec = planned_file("specs/image.json")
    return is_newer(image, [spec]) and as_recorded(read(Image, image))


def is_newer(manifest, inputs):
    """As Snakemake would see it, if it looked."""
    if not all(map(os.path.exists, [manifest, *inputs])):
        return False
    return os.path.getmtime(manifest) >= max(map(os.path.getmtime, inputs))


@functools.cache
def trained(run):
    return is_trained(RUNS[run].folder("results", PLAN.name))


def before_training(run, manifest):
    """What comes before a run's training, but is no part of what it is; that it was made again must not retrain the run.

    `ancient` alone would be wrong: below a job that runs, Snakemake doesn't look for other reasons, so that a run whose
    own file has changed would not be trained in the same call.
    """
    return ancient(manifest) if trained(run) else manifest


def preflight_of(run):
    """That of the image too, where there is one."""
    return [before_training(run, path) for path in SHARED.preflights]


def preflight_of_index(name):
    """No index is made for runs that Bridge refuses, and none is made again because preflight ran again."""
    manifest = f"{RESULTS}/data/indexes/{name}.json"
    inputs = [*SHARED.index_inputs(name), planned_file(f"specs/indexes/{name}.json")]
    preflight = f"{RESULTS}/preflight.json"
    return ancient(preflight) if is_newer(manifest, inputs) else preflight


def image_of(run):
    """None where ranks run in this Python. What is trained knows its image by the digest, not by the time stamp; only an
    image that this call makes may turn out to be another one."""
    return [
        (before_training(run, path) if is_made(path) else path)
        for path in SHARED.image_manifest
    ]


def image_of_conversion(manifest):
    """As `image_of`: what was converted in this very image isn't converted again because that was made once more."""
    return [
        ancient(path) if is_made(path) and is_made_in(manifest, path) else path
        for path in SHARED.image_manifest
    ]


def is_made_in(manifest, image):
    """Whether a conversion is there and took place in the image of this manifest; older ones don't say."""
    if not os.path.exists(manifest):
        return False
    return read_json(manifest).get("image") == list(read(Image, image).marks)


def import_proof_of(run):
    return [before_training(run, path) for path in SHARED.import_proof(RUNS[run])]


def index_of(run):
    """Other than preflight not every run has one."""
    return [before_training(run, path) for path in SHARED.index_manifest(RUNS[run])]


wildcard_constraints:
    run="[^/]+",
    model="[^/]+",
    corpus="[^/]+",
    tokenizer="[^/]+",
    index="[0-9a-f]+",
