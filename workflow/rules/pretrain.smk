rule pretrain:
    input:
        expand("<experiment>/runs/{run}/train.json", run=RUNS),


# The launch settings (launch.json) are not an input: a longer wall time retrains nothing.
rule train:
    input:
        lambda wildcards: INPUTS.before_training(wildcards.run),
        run=planned("runs/{run}/run.json"),
    output:
        "<experiment>/runs/{run}/train.json",
    log:
        "<experiment>/logs/runs/{run}.log",
    retries: 0
    conda:
        "../../envs/runtime-cpu.yaml"
    threads: lambda wildcards: ASKED.cores(wildcards.run)
    resources:
        **ASKED.training(RULE_NAME("train"), spares=True),
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/megaboa pretrain {input.run} 2>&1 | tee -i -a {log}"
