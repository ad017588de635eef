rule evaluate:
    input:
        SHARED.evaluations,


rule evaluate_model:
    input:
        export=f"{RESULTS}/runs/{{run}}/export.json",
        proof=f"{RESULTS}/runs/{{run}}/proof.json",
        spec=planned("specs/evaluate.json"),
    output:
        f"{RESULTS}/runs/{{run}}/evaluation.json",
    log:
        f"{RESULTS}/logs/evaluate/{{run}}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    resources:
        **ASKED.evaluation(),
        mem_mb=lambda wildcards: SHARED.conversion_mb(
            RUNS[wildcards.run].model, copies=2.5
        ),
    params:
        scripts=SCRIPTS,
        store=PLAN.experiment.store,
    shell:
        "python {params.scripts:q}/megaboa evaluate --spec {input.spec} --export {input.export} --store {params.store:q}"
        " --out {output} 2>&1 | tee {log}"
