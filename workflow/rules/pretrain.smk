rule pretrain:
    input:
        expand(f"{RESULTS}/runs/{{run}}/train.json", run=RUNS),


# Where and how a run is launched (launch.json) is no input: a longer wall time retrains nothing.
rule train:
    input:
        lambda wildcards: SHARED.run_inputs(RUNS[wildcards.run]),
        run=planned("runs/{run}/run.json"),
        image=lambda wildcards: image_of(wildcards.run),
        preflight=lambda wildcards: preflight_of(wildcards.run),
        index=lambda wildcards: index_of(wildcards.run),
        proof=lambda wildcards: import_proof_of(wildcards.run),
    output:
        f"{RESULTS}/runs/{{run}}/train.json",
    log:
        f"{RESULTS}/logs/runs/{{run}}.log",
    retries: 0
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: cores(wildcards.run)
    resources:
        **ALLOCATION,
        **PLACES,
        slurm_extra=lambda wildcards: sbatch_options(wildcards.run, "train"),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/pretrain.py {input.run} 2>&1 | tee -a {log}"
