rule profile:
    input:
        expand(f"{RESULTS}/runs/{{run}}/trace.json", run=SHARED.profiled_runs),


rule capture:
    input:
        lambda wildcards: SHARED.run_inputs(RUNS[wildcards.run]),
        run=f"{RESULTS}/runs/{{run}}/run.json",
        settings=f"{RESULTS}/runs/{{run}}/profile.json",
        preflight=lambda wildcards: preflight_of(wildcards.run),
    output:
        f"{RESULTS}/runs/{{run}}/trace.json",
    log:
        f"{RESULTS}/logs/profiles/{{run}}.log",
    retries: 0
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: cores(wildcards.run)
    resources:
        **PLACES,
        runtime=lambda wildcards: asked(wildcards.run).runtime,
        mem_mb=lambda wildcards: asked(wildcards.run).mem_mb_per_rank
        * asked(wildcards.run).gpus_per_node,
        slurm_extra=lambda wildcards: gpu_request(wildcards.run),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/profile_run.py {input.run} --out {output} 2>&1 | tee {log}"
