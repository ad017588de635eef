rule plan:
    input:
        order=f"{RESULTS}/specs/runs.json",
        runs=expand(f"{RESULTS}/runs/{{run}}/run.json", run=RUNS),
    output:
        f"{RESULTS}/plan.tsv",
    log:
        f"{RESULTS}/logs/plan.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts}/plan_table.py {input.order} --out {output} > {log} 2>&1"
