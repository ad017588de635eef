# From one YAML file to one report.
# Stages: snakemake image|data|import|preflight|pretrain|profile|metrics|export|evaluate|report|bundle|prove|tune|calibrate
from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/library.smk"
include: "workflow/rules/common.smk"
include: "workflow/rules/plan.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/import.smk"
include: "workflow/rules/image.smk"
include: "workflow/rules/preflight.smk"
include: "workflow/rules/pretrain.smk"
include: "workflow/rules/profile.smk"
include: "workflow/rules/metrics.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/bundle.smk"
include: "workflow/rules/prove.smk"
include: "workflow/rules/tune.smk"


rule all:
    default_target: True
    input:
        planned.unchanged("plan.tsv"),
        "<experiment>/report/index.html",
        # Named here too, because Snakemake doesn't make a missing input for a newer output.
        lambda wildcards: SHARED.manifests,
        SHARED.metrics,
        SHARED.analyses,
        SHARED.export_proofs,
        SHARED.evaluations,
        SHARED.along,
        SHARED.tensors,


onstart:
    beginning.begin(
        ASKED,
        LOADED,
        workflow,
        train=RULE_NAME("train"),
        others=[*map(RULE_NAME, ("capture", "try_settings", "measure_machine"))],
        restarted=RESTARTED,
    )


onerror:
    if SUBMITS:
        ending.print_failures(
            RESULTS, ending.trained_runs(workflow.dag, RULE_NAME("train"))
        )
        ending.report_after_failure(
            RESULTS, RULE_NAME("report"), REPORT, SHARED.reported, workflow.dag
        )


if SUBMITS:
    ending.note_interrupts()
    # Snakemake ignores the hooks of modules.
    hooks = (globals()["onstart"], globals()["onerror"]) if IS_MODULE else ()
    workflow.execute = ending.concluding(workflow, RESULTS, RULE_NAME("report"), *hooks)
