rule plan:
    input:
        order=f"{RESULTS}/specs/runs.json",
        runs=expand(f"{RESULTS}/runs/{{run}}/run.json", run=RUNS),
    output:
        f"{RESULTS}/plan.tsv",
    log:
        f"{RESULTS}/logs/plan.log",
    conda:
        "../../envs/pipeline.yaml"
    localrule: True
    shell:
        "python {SCRIPTS}/plan_table.py {RESULTS} --out {output} > {log} 2>&1"
