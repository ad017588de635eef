rule metrics:
    input:
        METRICS,


rule summarize:
    input:
        f"{RESULTS}/runs/{{run}}/train.json",
    output:
        steps=f"{RESULTS}/runs/{{run}}/metrics/steps.parquet",
        summary=f"{RESULTS}/runs/{{run}}/metrics/summary.json",
    log:
        f"{RESULTS}/logs/metrics/{{run}}.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/metrics.py --train {input}"
        " --steps {output.steps} --summary {output.summary} > {log} 2>&1"
