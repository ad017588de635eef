rule report:
    input:
        f"{RESULTS}/plan.tsv",
        f"{RESULTS}/image.json",
        expand(f"{RESULTS}/runs/{{run}}/metrics/summary.json", run=RUNS),
        SHARED.import_proofs,
        SHARED.export_proofs,
        settings=f"{RESULTS}/specs/report.json",
        captions=f"{workflow.basedir}/workflow/report/captions.yaml",
    output:
        f"{RESULTS}/report/index.html",
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        "../../envs/pipeline.yaml"
    localrule: True
    shell:
        "python {SCRIPTS}/report.py --results {RESULTS} --settings {input.settings} --captions {input.captions}"
        " --config-file {CONFIG_FILES} --out {output} 2>&1 | tee {log}"
