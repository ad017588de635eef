rule evaluate:
    input:
        SHARED.evaluations,


rule evaluate_model:
    input:
        export="<experiment>/runs/{run}/export.json",
        proof="<experiment>/runs/{run}/proof.json",
        spec=planned("specs/evaluate.json"),
        files=lambda wildcards: SHARED.evaluation_inputs,
    output:
        "<experiment>/runs/{run}/evaluation.json",
    log:
        "<experiment>/logs/evaluate/{run}.log",
    conda:
        "../../envs/runtime-cpu.yaml"
    resources:
        **ASKED.evaluation(),
        mem_mb=lambda wildcards: SHARED.conversion_mb(
            RUNS[wildcards.run].model, copies=2.5
        ),
    params:
        scripts=SCRIPTS,
        store=lambda wildcards: PLAN.experiment.store,
    shell:
        "python {params.scripts:q}/megaboa evaluate --spec {input.spec} --export {input.export} --store {params.store:q}"
        " --out {output} 2>&1 | tee -i {log}"
