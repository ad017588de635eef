rule report:
    input:
        # What the report shows of it is identity, or in its settings; wall times and sizes of jobs change nothing there.
        ancient(f"{RESULTS}/plan.tsv"),
        f"{RESULTS}/image.json",
        METRICS,
        DATA,
        INDEXES,
        ANALYSES,
        SHARED.import_proofs,
        SHARED.export_proofs,
        SHARED.evaluations,
        settings=planned("specs/report.json"),
        captions=os.path.relpath(f"{workflow.basedir}/workflow/report/captions.yaml"),
    output:
        page=report(
            f"{RESULTS}/report/index.html",
            caption="../report/page.rst",
            category="Experiment",
            labels={"experiment": PLAN.name, "what": "report"},
        ),
        checks=report(
            f"{RESULTS}/report/checks.json",
            caption="../report/checks.rst",
            category="Experiment",
            labels={"experiment": PLAN.name, "what": "checks"},
        ),
    log:
        f"{RESULTS}/logs/report.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
        config=[os.path.relpath(path) for path in CONFIG_FILES],
        command=COMMAND,
    shell:
        "python {params.scripts:q}/report.py --settings {input.settings} --captions {input.captions:q}"
        " --config-file {params.config:q} --command {params.command:q} --out {output.page} 2>&1 | tee {log}"


# The report of what is there at the moment, also beside a call that trains. It has no inputs and no outputs, so that it
# makes nothing else, runs every time, and is never taken for the report itself.
rule interim:
    log:
        f"{RESULTS}/logs/interim.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
        results=RESULTS,
        captions=os.path.relpath(f"{workflow.basedir}/workflow/report/captions.yaml"),
        config=[os.path.relpath(path) for path in CONFIG_FILES],
        command=COMMAND,
    shell:
        "python {params.scripts:q}/report.py --interim --settings {params.results}/specs/report.json"
        " --captions {params.captions:q} --config-file {params.config:q} --command {params.command:q}"
        " --out {params.results}/interim/index.html 2>&1 | tee {log}"
