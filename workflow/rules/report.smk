rule report:
    input:
        # ancient: all that the report shows of the plan is identity or in its settings, not jobs' wall times or sizes.
        ancient(planned.unchanged("plan.tsv")),
        SHARED.reported,
        # Preflight reads all runs. Below it Snakemake overlooks other reasons where it is `ancient`, for trained runs.
        SHARED.preflights,
        SHARED.analyses,
        SHARED.import_proofs,
        SHARED.export_proofs,
        SHARED.evaluations,
        SHARED.along,
        SHARED.tensors,
        SHARED.baselines,
        settings=planned("specs/report.json"),
        captions=CAPTIONS,
    output:
        page=report(
            "<experiment>/report/index.html",
            caption="../report/page.rst",
            category="Experiment",
            labels={"experiment": PLAN.name, "what": "report"},
        ),
        checks=report(
            "<experiment>/report/checks.json",
            caption="../report/checks.rst",
            category="Experiment",
            labels={"experiment": PLAN.name, "what": "checks"},
        ),
    log:
        "<experiment>/logs/report.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        command=lambda wildcards: REPORT,  # a function: Snakemake takes braces of other values for wildcards
    shell:
        "{params.command} 2>&1 | tee -i {log}"
