rule metrics:
    input:
        expand(f"{RESULTS}/runs/{{run}}/metrics/summary.json", run=RUNS),


rule summarize:
    input:
        f"{RESULTS}/runs/{{run}}/train.json",
    output:
        steps=f"{RESULTS}/runs/{{run}}/metrics/steps.parquet",
        summary=f"{RESULTS}/runs/{{run}}/metrics/summary.json",
    log:
        f"{RESULTS}/logs/metrics/{{run}}.log",
    conda:
        "../../envs/pipeline.yaml"
    localrule: True
    shell:
        "python {SCRIPTS}/metrics.py --run {RESULTS}/runs/{wildcards.run} --train {input}"
        " --steps {output.steps} --summary {output.summary} > {log} 2>&1"
