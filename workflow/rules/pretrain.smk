rule pretrain:
    input:
        expand(f"{RESULTS}/runs/{{run}}/train.json", run=RUNS),


# Where and how a run is launched (launch.json) is no input: a longer wall time retrains nothing. Neither is the result
# of preflight, which covers all runs of the experiment: a change of one must not retrain the others.
rule train:
    input:
        lambda wildcards: SHARED.run_inputs(RUNS[wildcards.run]),
        run=f"{RESULTS}/runs/{{run}}/run.json",
        preflight=ancient(f"{RESULTS}/preflight.json"),
    output:
        f"{RESULTS}/runs/{{run}}/train.json",
    log:
        f"{RESULTS}/logs/runs/{{run}}.log",
    retries: 0
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: cores(wildcards.run)
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts}/pretrain.py {input.run} 2>&1 | tee {log}"
