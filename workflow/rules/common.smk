# Shared by all rules: the plan, with its names, inputs and resources.
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake.settings.types import Quietness
from snakemake_interface_executor_plugins.settings import ExecMode

from megaboa.calls import beginning, configuration, defaults, dry_run
from megaboa.calls import ending, job_commands, lock, plan_files
from megaboa.config import command_line, load, nested
from megaboa.errors import one_sentence
from megaboa.plan import device, make_plan, restarts
from megaboa.plan.rule_inputs import Inputs, Planned
from megaboa.plan.resources import JobResources
from megaboa.plan.shared import Shared
from megaboa.run import submitted

SUBMITS = workflow.exec_mode == ExecMode.DEFAULT  # otherwise Snakemake runs in a job
LOOKS = configuration.looks_only(workflow.output_settings.dryrun, sys.argv)
beginning.prepare_process(workflow.output_settings.dryrun)
if workflow.output_settings.dryrun:
    dry_run.with_or_without_writing()
JobScheduler.exit_gracefully = beginning.in_a_thread(JobScheduler.exit_gracefully)
# To an exception Snakemake would add a file and a line of this code, as if it were to blame.
with one_sentence():
    if SUBMITS:
        defaults.use_this_machine(workflow.resource_settings, workflow.global_resources)
    CONFIG_FILES, GIVEN = configuration.files_and_values(workflow, config)
    GIVEN, RESTART = restarts.split(GIVEN)
    LOADED = load(CONFIG_FILES, command_line(GIVEN), os.environ, contents=SUBMITS)
    PROFILE = defaults.profile_resources(workflow.resource_settings.default_resources)
    LOADED = device.settle(
        LOADED,
        defaults.partition(PROFILE),
        None if SUBMITS else CONFIG_FILES[0],
        LOOKS,
    )
    target = configuration.own_target(() if IS_MODULE or not SUBMITS else sys.argv)
    COMMAND = configuration.call_again(workflow.configfiles, GIVEN, target)
    if target:
        CONFIG_FILES, LOADED = configuration.own_experiment(workflow, LOADED, target)
        GIVEN = {}
    # A job of a run only needs the plan of that run.
    PLAN = make_plan(
        LOADED, only=() if SUBMITS else configuration.runs_of_job(sys.argv)
    )
    SHARED = Shared(PLAN, profile=PROFILE)
    LEFT = configuration.left_to_jobs(SHARED, sys.argv)
    RESTARTED = restarts.check(PLAN, "results", RESTART, LEFT) if SUBMITS else []
    ASKED = JobResources(SHARED, SUBMITS)

RESULTS = str(SHARED.folder)
RUNS = SHARED.runs
REPORT = job_commands.report_command(SCRIPTS, CAPTIONS, RESULTS, CONFIG_FILES, COMMAND)
PREVIEW = {}  # in a dry run: the files that a call would change, and where they are now

if SUBMITS:  # jobs read these files and never write them
    with one_sentence(RESULTS):
        MINE = lock.claim_experiment(RESULTS, LOOKS)
        PREVIEW, CALL_CONFIG = plan_files.write_plan(
            PLAN, SHARED, CONFIG_FILES, LOOKS, MINE, COMMAND, RESTARTED
        )
    if CALL_CONFIG:
        submitted.submit_from(CALL_CONFIG[0])
    if CALL_CONFIG and not IS_MODULE:
        # Read by Snakemake in the jobs, whenever they start.
        workflow.config_settings.configfiles = CALL_CONFIG
    if workflow.output_settings.dryrun and not MINE and not lock.is_elsewhere():
        dry_run.of_an_archive()
    if workflow.output_settings.dryrun and not IS_MODULE:
        quiet = {Quietness.RULES, Quietness.PROGRESS}
        dry_run.end_with_one_screen(workflow, ASKED, RESTARTED, quiet)
    else:
        beginning.introduce(PLAN, SHARED.on_cluster)
elif not IS_MODULE:  # jobs of a module inherit the variable from the call
    submitted.submit_from(CONFIG_FILES[0])

planned = Planned(RESULTS, PREVIEW)
INPUTS = Inputs(SHARED, planned.file, ancient)
# Conversions run where ranks run: in the experiment's image, if it has one.
PYTHON, IMAGE, CONVERT = job_commands.conversion_commands(SCRIPTS, SHARED)


pathvars:
    experiment=RESULTS,


wildcard_constraints:
    run="[^/]+",
    model="[^/]+",
    corpus="[^/]+",
    tokenizer="[^/]+",
    index="[0-9a-f]+",
