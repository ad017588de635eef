# Bridge's own configuration of every run, built and validated without a GPU.
rule preflight:
    input:
        SHARED.preflight_inputs,
        order=f"{RESULTS}/specs/runs.json",
        costs=ancient(f"{RESULTS}/specs/costs.json"),
        runs=expand(f"{RESULTS}/runs/{{run}}/run.json", run=RUNS),
    output:
        f"{RESULTS}/preflight.json",
    log:
        f"{RESULTS}/logs/preflight.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/preflight.py {input.order} --out {output} 2>&1 | tee {log}"
