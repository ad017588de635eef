rule metrics:
    input:
        SHARED.metrics,


rule summarize:
    input:
        "<experiment>/runs/{run}/train.json",
    output:
        steps="<experiment>/runs/{run}/metrics/steps.parquet",
        summary=report(
            "<experiment>/runs/{run}/metrics/summary.json",
            caption="../report/summary.rst",
            category="Runs",
            labels={"run": "{run}", "what": "summary"},
        ),
        goodput=report(
            "<experiment>/runs/{run}/metrics/goodput.json",
            caption="../report/goodput.rst",
            category="Runs",
            labels={"run": "{run}", "what": "where the time went"},
        ),
    log:
        "<experiment>/logs/metrics/{run}.log",
    localrule: True
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
        peak=lambda wildcards: (
            f"--peak-tflops={ASKED.of(wildcards.run).peak_tflops}"
            if ASKED.of(wildcards.run).peak_tflops
            else ""
        ),
    shell:
        "python {params.scripts:q}/megaboa summarize --train {input}"
        " --steps {output.steps} --summary {output.summary} --goodput {output.goodput} {params.peak} > {log} 2>&1"
