rule export:
    input:
        SHARED.export_proofs,


rule export_model:
    input:
        train=f"{RESULTS}/runs/{{run}}/train.json",
        source=lambda wildcards: f"{RESULTS}/models/{RUNS[wildcards.run].model}/source.json",
    output:
        f"{RESULTS}/runs/{{run}}/export.json",
    log:
        f"{RESULTS}/logs/export/{{run}}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/export_model.py --train {input.train} --source {input.source} --out {output} 2>&1 | tee {log}"


rule prove_export:
    input:
        export=f"{RESULTS}/runs/{{run}}/export.json",
        source=lambda wildcards: f"{RESULTS}/models/{RUNS[wildcards.run].model}/source.json",
    output:
        f"{RESULTS}/runs/{{run}}/proof.json",
    log:
        f"{RESULTS}/logs/export/{{run}}.proof.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    params:
        scripts=SCRIPTS,
    shell:
        "python {params.scripts:q}/prove_export.py --export {input.export} --source {input.source} --out {output} 2>&1 | tee {log}"
