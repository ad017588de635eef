rule profile:
    input:
        ANALYSES,


rule capture:
    input:
        lambda wildcards: SHARED.run_inputs(RUNS[wildcards.run]),
        run=planned("runs/{run}/run.json"),
        settings=planned("runs/{run}/profile.json"),
        image=lambda wildcards: image_of(wildcards.run),
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
        **ALLOCATION,
        **PLACES,
        slurm_extra=lambda wildcards: sbatch_options(wildcards.run, "capture"),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/profile_run.py {input.run} --out {output} 2>&1 | tee {log}"


rule analyze:
    input:
        trace=f"{RESULTS}/runs/{{run}}/trace.json",
        run=planned("runs/{run}/run.json"),
    output:
        f"{RESULTS}/runs/{{run}}/analysis.json",
    log:
        f"{RESULTS}/logs/profiles/{{run}}.analysis.log",
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa analyze-profile --trace {input.trace} --run {input.run}"
        " --out {output} > {log} 2>&1"
