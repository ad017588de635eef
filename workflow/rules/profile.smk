rule profile:
    input:
        SHARED.analyses,


rule capture:
    input:
        lambda wildcards: SHARED.run_inputs(RUNS[wildcards.run]),
        run=planned("runs/{run}/run.json"),
        settings=planned("runs/{run}/profile.json"),
        image=lambda wildcards: INPUTS.image(wildcards.run),
        preflight=lambda wildcards: INPUTS.preflight(wildcards.run),
        index=lambda wildcards: INPUTS.index_of_capture(wildcards.run),
    output:
        "<experiment>/runs/{run}/trace.json",
    log:
        "<experiment>/logs/profiles/{run}.log",
    retries: 0
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.cores(wildcards.run)
    resources:
        **ASKED.training(RULE_NAME("capture")),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa capture {input.run} --out {output} 2>&1 | tee -i {log}"


rule analyze:
    input:
        trace="<experiment>/runs/{run}/trace.json",
        run=planned("runs/{run}/run.json"),
    output:
        "<experiment>/runs/{run}/analysis.json",
    log:
        "<experiment>/logs/profiles/{run}.analysis.log",
    conda:
        "../../envs/pipeline.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa analyze-profile --trace {input.trace} --run {input.run}"
        " --out {output} > {log} 2>&1"
